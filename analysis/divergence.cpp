#include "analysis/divergence.h"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"

namespace replayssm {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Below this e^x leaves the normal numbers, and a vectorised exp may return its smallest value instead of 0.
constexpr double kLowestExponent = -708;

using AlignedRow = Eigen::Map<Eigen::ArrayXd, Eigen::Aligned64>;
using AlignedConstRow = Eigen::Map<const Eigen::ArrayXd, Eigen::Aligned64>;

struct Exponentials {
  double top, lowest, sum;
  bool distribution() const { return std::isfinite(top); }
};

// shifted = x - max(x), weight = e^shifted. Every reduction reads the aligned rows: its order is then fixed.
template <class Real, class Target>
Exponentials exponentials(const Real* logits, Target& shifted, Target& weight) {
  shifted = Eigen::Map<const Eigen::Array<Real, Eigen::Dynamic, 1>>(logits, shifted.size()).template cast<double>();
  const double top = shifted.template maxCoeff<Eigen::PropagateNaN>();
  if (!std::isfinite(top)) return {top, kNaN, kNaN};
  shifted -= top;
  weight = shifted.exp();
  const double lowest = shifted.minCoeff();
  if (lowest < kLowestExponent) {
    for (Eigen::Index v = 0; v < shifted.size(); ++v) {
      if (shifted[v] < kLowestExponent) weight[v] = 0;
    }
  }
  return {top, lowest, weight.sum()};
}

template <class Real>
[[noreturn]] void fail_row(const char* whose, std::int64_t row, const Real* logits, std::int64_t vocabulary) {
  const Real* bad =
      std::find_if(logits, logits + vocabulary, [](Real x) { return std::isnan(x) || (std::isinf(x) && x > Real(0)); });
  if (bad == logits + vocabulary) {
    fail(whose, " logits, row ", row, ": expected at least one finite value, found -Inf for all ", vocabulary,
         " tokens");
  }
  fail(whose, " logits, row ", row, ": expected finite values or -Inf, found ", std::isnan(*bad) ? "NaN" : "+Inf",
       " for token ", bad - logits);
}

bool is_infinite(double x) { return std::isinf(x); }

double mean(std::span<const double> values) {
  double sum = 0;
  for (double x : values) sum += x;
  return sum / static_cast<double>(values.size());
}

bool any_nan(std::span<const double> values) {
  return std::ranges::any_of(values, [](double x) { return std::isnan(x); });
}

DivergenceStatistics statistics(std::vector<double> values, std::int64_t sequence_length) {
  const std::int64_t infinite = std::ranges::count_if(values, is_infinite);
  if (any_nan(values)) return {kNaN, kNaN, kNaN, kNaN, kNaN, kNaN, infinite};
  const double sem = infinite > 0 ? kNaN : batch_means_error(values, sequence_length);
  std::vector<double> finite = values;
  std::erase_if(finite, is_infinite);
  std::ranges::sort(values);
  return {mean(finite),  sem,     quantile(values, 0.50), quantile(values, 0.90), quantile(values, 0.99),
          values.back(), infinite};
}

ProbabilityChange probability_change(std::vector<double> values) {
  if (values.empty() || any_nan(values)) return {kNaN, kNaN, kNaN};
  double squares = 0;
  for (double x : values) squares += x * x;
  std::ranges::sort(values);
  return {std::sqrt(squares / static_cast<double>(values.size())), quantile(values, 0.01), quantile(values, 0.99)};
}

}  // namespace

template <class Real>
ReferenceBlock<Real>::ReferenceBlock(const Real* logits, std::int64_t rows, std::int64_t vocabulary,
                                     std::int64_t first_row)
    : vocabulary_(vocabulary), first_row_(first_row), lines_per_row_((vocabulary + 7) / 8) {
  if (rows < 0 || vocabulary < 1) {
    fail("reference logits: expected shape [rows >= 0, vocabulary >= 1], found [", rows, ", ", vocabulary, "]");
  }
  shifted_.resize(static_cast<std::size_t>(rows * lines_per_row_));
  probability_.resize(shifted_.size());
  facts_.reserve(static_cast<std::size_t>(rows));
  for (std::int64_t r = 0; r < rows; ++r) {
    const Real* x = logits + r * vocabulary;
    AlignedRow shifted(shifted_.data()[r * lines_per_row_].value, vocabulary);
    AlignedRow probability(probability_.data()[r * lines_per_row_].value, vocabulary);
    const Exponentials e = exponentials(x, shifted, probability);
    if (!e.distribution()) fail_row("reference", first_row + r, x, vocabulary);
    probability *= 1 / e.sum;
    facts_.push_back({e.sum, e.lowest == -kInf, (shifted == 0.0).count() > 1});
  }
}

template <class Real>
auto ReferenceBlock<Real>::row(std::int64_t r) const -> Row {
  const auto line = static_cast<std::size_t>(r * lines_per_row_);
  const Facts& facts = facts_[static_cast<std::size_t>(r)];
  return {shifted_[line].value, probability_[line].value, facts.sum, facts.suppressed, facts.tie};
}

template <class Real>
void compare(const ReferenceBlock<Real>& reference, const Real* run_logits, const std::int32_t* next_token,
             TokenDivergence* out, OnNonFinite on_non_finite) {
  const std::int64_t vocabulary = reference.vocabulary();
  Eigen::ArrayXd shifted(vocabulary), q(vocabulary);
  for (std::int64_t r = 0; r < reference.rows(); ++r) {
    const auto ref = reference.row(r);
    const AlignedConstRow p(ref.probability, vocabulary);
    const Real* x = run_logits + r * vocabulary;
    const std::int64_t next = next_token[r];
    if (next < -1 || next >= vocabulary) {
      fail("next token of row ", reference.first_row() + r, ": expected -1 or a token below ", vocabulary, ", found ",
           next);
    }
    TokenDivergence& token = out[r];
    token = {kNaN, kNaN, kNaN, next < 0 ? kNaN : std::log(ref.sum) - ref.shifted[next], kNaN, false, ref.tie};

    const Exponentials e = exponentials(x, shifted, q);
    if (!e.distribution()) {
      if (on_non_finite == OnNonFinite::error) fail_row("run", reference.first_row() + r, x, vocabulary);
      continue;
    }
    q *= 1 / e.sum;
    // A difference of doubles is 0 only between equals, so a shifted value of 0 marks exactly the maxima.
    token.top1_agrees = ref.shifted[std::find(shifted.begin(), shifted.end(), 0.0) - shifted.begin()] == 0;
    if (next >= 0) {
      token.nll = std::log(e.sum) - shifted[next];
      token.delta_p = q[next] - p[next];
    }

    // d = log p - log q. The two logarithms of the sums are taken as one: subtracting them would leave their roundings.
    auto& d = shifted;
    d = AlignedConstRow(ref.shifted, vocabulary) - shifted + std::log(e.sum / ref.sum);
    bool run_suppresses = false, reference_suppresses = false;
    if (ref.suppressed || e.lowest == -kInf) {
      for (double& x_d : d) {
        if (std::isfinite(x_d)) continue;
        run_suppresses |= x_d > 0;
        reference_suppresses |= x_d < 0;
        x_d = 0;
      }
    }
    token.kl = run_suppresses ? kInf : (p * d + (q - p)).sum();
    token.kl_reverse = reference_suppresses ? kInf : ((p - q) - q * d).sum();
  }
}

double quantile(std::span<const double> ascending, double q) {
  if (ascending.empty()) return kNaN;
  const double position = q * static_cast<double>(ascending.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  const double fraction = position - static_cast<double>(below);
  const double low = ascending[below];
  if (fraction == 0 || ascending[below + 1] == low) return low;  // also keeps Inf - Inf and 0 Inf out
  return low + fraction * (ascending[below + 1] - low);
}

double batch_means_error(std::span<const double> values, std::int64_t sequence_length) {
  constexpr std::size_t kBlock = 64;
  const auto length = static_cast<std::size_t>(sequence_length);
  const std::size_t full_blocks = values.size() / length * (length / kBlock);
  std::vector<double> means;
  for (std::size_t start = 0; start < values.size(); start += length) {
    for (std::size_t t = 0; t < length; t += kBlock) {
      const std::size_t size = std::min(kBlock, length - t);
      if (size == kBlock || full_blocks < 2) means.push_back(mean(values.subspan(start + t, size)));
    }
  }
  if (means.size() < 2) return kNaN;
  const double center = mean(means);
  double squares = 0;
  for (double m : means) squares += (m - center) * (m - center);
  const auto n = static_cast<double>(means.size());
  return std::sqrt(squares / (n * (n - 1)));
}

DivergenceSummary summarize(std::span<const TokenDivergence> tokens, std::int64_t sequence_length) {
  const auto positions = static_cast<std::int64_t>(tokens.size());
  if (sequence_length < 1 || positions < 1 || positions % sequence_length != 0) {
    fail("divergence summary: expected a positive multiple of the sequence length ", sequence_length, ", found ",
         positions, " positions");
  }
  DivergenceSummary summary{};
  summary.positions = positions;
  std::vector<double> kl, kl_reverse, nll, nll_reference, nll_delta, delta_p;
  std::int64_t agreeing = 0;
  for (const TokenDivergence& token : tokens) {
    kl.push_back(token.kl);
    kl_reverse.push_back(token.kl_reverse);
    summary.non_finite += std::isnan(token.kl);
    summary.top1_ties += token.top1_tie;
    agreeing += token.top1_agrees;
    if (std::isnan(token.reference_nll)) continue;  // nothing to predict
    nll.push_back(token.nll);
    nll_reference.push_back(token.reference_nll);
    nll_delta.push_back(token.nll - token.reference_nll);
    delta_p.push_back(token.delta_p);
  }
  summary.kl = statistics(std::move(kl), sequence_length);
  summary.kl_reverse = statistics(std::move(kl_reverse), sequence_length);
  summary.top1_agreement = static_cast<double>(agreeing) / static_cast<double>(positions);
  summary.predicted = static_cast<std::int64_t>(nll.size());
  const bool broken = summary.non_finite > 0;
  summary.nll = broken ? kNaN : mean(nll);
  summary.nll_reference = mean(nll_reference);
  summary.nll_delta = broken ? kNaN : mean(nll_delta);
  summary.delta_p = broken ? ProbabilityChange{kNaN, kNaN, kNaN} : probability_change(std::move(delta_p));
  return summary;
}

template class ReferenceBlock<float>;
template class ReferenceBlock<double>;
template void compare(const ReferenceBlock<float>&, const float*, const std::int32_t*, TokenDivergence*, OnNonFinite);
template void compare(const ReferenceBlock<double>&, const double*, const std::int32_t*, TokenDivergence*, OnNonFinite);

}  // namespace replayssm
