#include "analysis/divergence.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <boost/multiprecision/cpp_bin_float.hpp>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"

namespace replayssm {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

using Decimal60 =
    boost::multiprecision::number<boost::multiprecision::cpp_bin_float<60>, boost::multiprecision::et_off>;

template <class Real>
TokenDivergence compare_row(const std::vector<Real>& reference, const std::vector<Real>& run, std::int32_t next = -1,
                            OnNonFinite on_non_finite = OnNonFinite::error) {
  const ReferenceBlock<Real> block(reference.data(), 1, static_cast<std::int64_t>(reference.size()));
  TokenDivergence token{};
  compare(block, run.data(), &next, &token, on_non_finite);
  return token;
}

struct Oracle {
  double kl, tolerance;
};

// KL(p || q) of finite logits in 60 digits, and a bound on the error of binary64. Equal pairs of logits are summed once
// with their number.
//
// The bound, u = 2^-53: an exp within 2 ulp (4u) moves log(sum) by at most 4u on either side, 8u in all; the
// normalisations 1 / sum, their products, the logarithm and its argument round once each, 8u more. Per term the
// differences that make d round by at most 3u |d| + u (|s_p| + |s_q|), s the distance from the maximum, the product and
// the sum of a term by u |p d| + 2u |q - p|. Adding the terms, none negative in exact arithmetic, up in at least 8
// (AVX) or 4 (SSE) chains of V / 4 at most rounds by u (V / 4 + 8) KL.
template <class Real>
Oracle oracle(const std::vector<Real>& reference, const std::vector<Real>& run) {
  std::map<std::pair<Real, Real>, int> pairs;
  for (std::size_t v = 0; v < reference.size(); ++v) ++pairs[{reference[v], run[v]}];
  const Decimal60 top_p(*std::max_element(reference.begin(), reference.end()));
  const Decimal60 top_q(*std::max_element(run.begin(), run.end()));
  Decimal60 sum_p = 0, sum_q = 0;
  for (const auto& [logits, count] : pairs) {
    sum_p += count * exp(Decimal60(logits.first) - top_p);
    sum_q += count * exp(Decimal60(logits.second) - top_q);
  }
  const Decimal60 log_ratio = log(sum_q / sum_p);
  Decimal60 kl = 0, units = 16;
  for (const auto& [logits, count] : pairs) {
    const Decimal60 s_p = Decimal60(logits.first) - top_p, s_q = Decimal60(logits.second) - top_q;
    const Decimal60 p = exp(s_p) / sum_p, q = exp(s_q) / sum_q, d = s_p - s_q + log_ratio;
    kl += count * p * d;
    units += count * (p * (4 * abs(d) - s_p - s_q) + 2 * abs(q - p));
  }
  units += (Decimal60(reference.size()) / 4 + 8) * kl;
  return {kl.convert_to<double>(), ldexp(units, -53).convert_to<double>()};
}

template <class Real>
void expect_oracle(const std::vector<Real>& reference, const std::vector<Real>& run) {
  const TokenDivergence token = compare_row(reference, run);
  const Oracle forward = oracle(reference, run), backward = oracle(run, reference);
  EXPECT_NEAR(token.kl, forward.kl, forward.tolerance);
  EXPECT_NEAR(token.kl_reverse, backward.kl, backward.tolerance);
}

// Values of bf16, spread over +-60.
std::vector<float> bf16_logits(std::size_t vocabulary, unsigned seed) {
  std::mt19937 bits(seed);
  std::uniform_real_distribution<float> uniform(-60, 60);
  std::vector<float> logits(vocabulary);
  for (float& x : logits) x = std::bit_cast<float>(std::bit_cast<std::uint32_t>(uniform(bits)) & 0xFFFF0000u);
  return logits;
}

std::vector<float> raise_largest_by_one_bf16_step(std::vector<float> logits) {
  float& top = *std::max_element(logits.begin(), logits.end());
  top = std::bit_cast<float>(std::bit_cast<std::uint32_t>(top) + 0x10000u);
  return logits;
}

std::vector<double> logs(std::vector<double> probabilities) {
  for (double& p : probabilities) p = std::log(p);
  return probabilities;
}

template <class Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

// Printed numbers are good to half of their last digit.

TEST(Divergence, FullVocabularyNotTheTopOfIt) {
  const auto p = logs({0.5, 0.3, 0.15, 0.05}), q = logs({0.4, 0.3, 0.2, 0.1});
  EXPECT_NEAR(compare_row(p, q).kl, 0.0337621, 0.5e-7);
  expect_oracle(p, q);
}

template <class Real>
class DivergenceOf : public ::testing::Test {};
using Reals = ::testing::Types<float, double>;
TYPED_TEST_SUITE(DivergenceOf, Reals);

TYPED_TEST(DivergenceOf, SuppressedTokens) {
  using Row = std::vector<TypeParam>;
  const auto inf = static_cast<TypeParam>(kInf);
  // The same with 90 more tokens that both suppress, so that whole vectors and the rest of a row see them.
  for (std::size_t more : {0, 90}) {
    const auto row = [&](Row head) {
      head.resize(head.size() + more, -inf);
      return head;
    };
    const TokenDivergence both = compare_row(row({0, 1, 2, -inf}), row({TypeParam(0.5), 1, 2, -inf}));
    EXPECT_NEAR(both.kl, 0.01174753, 0.5e-8);
    const Oracle reverse = oracle<double>({0.5, 1, 2}, {0, 1, 2});
    EXPECT_NEAR(both.kl_reverse, reverse.kl, reverse.tolerance);

    const TokenDivergence by_run = compare_row(row({0, 1, 2, 0}), row({0, 1, 2, -inf}));
    EXPECT_EQ(by_run.kl, kInf);
    EXPECT_NEAR(by_run.kl_reverse, 0.08620574, 0.5e-8);  // log of the mass that the other row adds

    const TokenDivergence by_reference = compare_row(row({0, 1, 2, -inf}), row({0, 1, 2, 0}));
    EXPECT_NEAR(by_reference.kl, 0.08620574, 0.5e-8);
    EXPECT_EQ(by_reference.kl_reverse, kInf);

    const TokenDivergence disjoint = compare_row(row({0, -inf}), row({-inf, 0}));
    EXPECT_EQ(disjoint.kl, kInf);
    EXPECT_EQ(disjoint.kl_reverse, kInf);

    const TokenDivergence equal = compare_row(row({0, 1, 2, -inf}), row({0, 1, 2, -inf}));
    EXPECT_EQ(equal.kl, 0);
    EXPECT_EQ(equal.kl_reverse, 0);
  }
}

TYPED_TEST(DivergenceOf, ProbabilitiesThatUnderflow) {
  const auto inf = static_cast<TypeParam>(kInf);
  // e^-1000 is 0 in binary64, and so are the terms that it multiplies ...
  EXPECT_EQ(compare_row<TypeParam>({0, -1000}, {0, -2000}).kl, 0);
  EXPECT_EQ(compare_row<TypeParam>({0, -1000}, {-1000, 0}).kl, 1000);
  // ... but a token that only the run suppresses is still possible under the reference.
  EXPECT_EQ(compare_row<TypeParam>({0, -1000}, {0, -inf}).kl, kInf);
  std::vector<double> low(17, -1000), lowest(17, -1e308);  // a vectorised exp must not leave a subnormal times 1e308
  low[0] = lowest[0] = 0;
  EXPECT_EQ(compare_row(low, lowest).kl, 0);
  const auto most = std::numeric_limits<TypeParam>::max();
  EXPECT_EQ(compare_row<TypeParam>({most, -most / 2}, {most, -most / 2}).kl, 0);
}

TYPED_TEST(DivergenceOf, RowsThatAreNoDistribution) {
  using Row = std::vector<TypeParam>;
  const auto inf = static_cast<TypeParam>(kInf), nan = static_cast<TypeParam>(kNaN);
  const struct {
    Row bad;
    std::string found;
  } cases[] = {{{-inf, -inf, -inf}, "found -Inf for all 3 tokens"},
               {{0, nan, 1}, "found NaN for token 1"},
               {{0, 1, inf}, "found +Inf for token 2"},
               {{nan, -inf, inf}, "found NaN for token 0"},
               {{nan, nan, nan}, "found NaN for token 0"}};
  const Row good{2, 0, 1};
  for (const auto& [bad, found] : cases) {
    Row rows = good;
    rows.insert(rows.end(), bad.begin(), bad.end());
    const std::int32_t next[] = {2, 1};
    TokenDivergence out[2];
    EXPECT_EQ(message_of([&] { ReferenceBlock<TypeParam>(rows.data(), 2, 3, 40); }).find("reference logits, row 41"),
              0);
    EXPECT_NE(message_of([&] { ReferenceBlock<TypeParam>(rows.data(), 2, 3, 40); }).find(found), std::string::npos);

    Row twice = good;
    twice.insert(twice.end(), good.begin(), good.end());
    const ReferenceBlock<TypeParam> reference(twice.data(), 2, 3, 40);
    const std::string message = message_of([&] { compare(reference, rows.data(), next, out); });
    EXPECT_EQ(message.find("run logits, row 41"), 0) << message;
    EXPECT_NE(message.find(found), std::string::npos) << message;

    compare(reference, rows.data(), next, out, OnNonFinite::record);
    EXPECT_EQ(out[0].kl, 0);
    EXPECT_TRUE(out[0].top1_agrees);
    EXPECT_TRUE(std::isnan(out[1].kl) && std::isnan(out[1].kl_reverse) && std::isnan(out[1].nll));
    EXPECT_TRUE(std::isnan(out[1].delta_p));
    EXPECT_FALSE(out[1].top1_agrees);
    // log(e^2 + e^0 + e^1) - 0 to binary64: three exps, two sums and a log, each within an ulp of at most 2^-50.
    EXPECT_NEAR(out[1].reference_nll, 2.40760596444438, 0.5e-14 + std::ldexp(6.0, -50));
  }
}

TYPED_TEST(DivergenceOf, IdenticalLogitsGiveExactlyZero) {
  for (std::size_t vocabulary : {1, 3, 8, 1003, 248320}) {
    const auto bf16 = bf16_logits(vocabulary, 7);
    const std::vector<TypeParam> logits(bf16.begin(), bf16.end());
    const TokenDivergence token = compare_row(logits, logits, 0);
    EXPECT_EQ(token.kl, 0);
    EXPECT_EQ(token.kl_reverse, 0);
    EXPECT_EQ(token.nll, token.reference_nll);
    EXPECT_EQ(token.delta_p, 0);
    EXPECT_TRUE(token.top1_agrees);
  }
}

TYPED_TEST(DivergenceOf, OneStepOfTheLargestLogit) {
  for (std::size_t vocabulary : {2, 5, 64, 1003, 248320}) {
    const auto reference = bf16_logits(vocabulary, 11);
    const auto run = raise_largest_by_one_bf16_step(reference);
    const std::vector<TypeParam> x(reference.begin(), reference.end()), y(run.begin(), run.end());
    const TokenDivergence token = compare_row(x, y);
    const Oracle exact = oracle(x, y);
    EXPECT_GT(token.kl, 0);
    EXPECT_NEAR(token.kl, exact.kl, std::min(exact.tolerance, 1e-6 * exact.kl));
    expect_oracle(x, y);
  }
}

TEST(Divergence, LargeAndSmallDifferences) {
  std::mt19937 bits(3);
  std::normal_distribution<double> normal;
  for (double size : {1e-6, 1e-3, 1.0, 30.0}) {
    std::vector<double> reference(517), run(517);
    for (double& x : reference) x = 5 * normal(bits);
    for (std::size_t v = 0; v < run.size(); ++v) run[v] = reference[v] + size * normal(bits);
    expect_oracle(reference, run);
  }
}

TEST(Divergence, CommonShift) {
  const auto bf16 = bf16_logits(248320, 5);
  const auto raised = raise_largest_by_one_bf16_step(bf16);
  const std::vector<double> reference(bf16.begin(), bf16.end());
  for (const auto& unshifted : {bf16, raised}) {
    std::vector<double> run(unshifted.begin(), unshifted.end());
    const double before = compare_row(reference, run).kl;
    for (double& x : run) x += 1e6;
    expect_oracle(reference, run);  // of the shifted logits as they were rounded
    // Logits moved by at most h = half an ulp of 1e6 move log q by at most 2 h, and with it KL.
    const double moved = std::ldexp(1.0, -33);
    EXPECT_NEAR(compare_row(reference, run).kl, before, moved + 2 * oracle(reference, run).tolerance);
  }
}

TEST(Divergence, TotalsBelowZeroAreKept) {
  // The differences are roundings of 1e-10: the true KL is near 1e-20, what is computed is rounding noise of both
  // signs.
  std::mt19937 bits(17);
  std::normal_distribution<double> normal;
  int below = 0;
  for (int row = 0; row < 200; ++row) {
    std::vector<double> reference(64), run(64);
    for (double& x : reference) x = 3 * normal(bits);
    for (std::size_t v = 0; v < run.size(); ++v) run[v] = reference[v] + 1e6;
    below += compare_row(reference, run).kl < 0;
  }
  EXPECT_GT(below, 0);
}

TEST(Divergence, TheSameBitsWhereverTheBuffersLie) {
  constexpr std::size_t kRows = 3, kVocabulary = 1003;
  const auto reference = bf16_logits(kRows * kVocabulary, 1), run = bf16_logits(kRows * kVocabulary, 2);
  const std::int32_t next[kRows] = {5, 1002, -1};
  const auto at = [&](std::size_t reference_offset, std::size_t run_offset, std::size_t first, std::size_t rows) {
    std::vector<float> a(reference.size() + 16), b(run.size() + 16);
    std::copy(reference.begin(), reference.end(), a.begin() + static_cast<std::ptrdiff_t>(reference_offset));
    std::copy(run.begin(), run.end(), b.begin() + static_cast<std::ptrdiff_t>(run_offset));
    const ReferenceBlock<float> block(a.data() + reference_offset + first * kVocabulary,
                                      static_cast<std::int64_t>(rows), kVocabulary);
    std::vector<TokenDivergence> out(rows);
    compare(block, b.data() + run_offset + first * kVocabulary, next + first, out.data());
    std::vector<std::uint64_t> words;
    for (const auto& t : out) {
      for (double x : {t.kl, t.kl_reverse, t.nll, t.reference_nll, t.delta_p}) {
        words.push_back(std::bit_cast<std::uint64_t>(x));
      }
    }
    return words;
  };
  const auto expected = at(0, 0, 0, kRows);
  for (std::size_t offset = 0; offset < 16; ++offset) EXPECT_EQ(at(offset, 15 - offset, 0, kRows), expected) << offset;
  // Nor does a row depend on the block that it is in.
  const auto last = at(0, 0, 2, 1);
  EXPECT_TRUE(std::equal(last.begin(), last.end(), expected.end() - 5));
}

TEST(Divergence, TopOneAndItsTies) {
  const auto top = [](std::vector<double> reference, std::vector<double> run) {
    const TokenDivergence token = compare_row(reference, run);
    return std::pair(token.top1_agrees, token.top1_tie);
  };
  EXPECT_EQ(top({1, 3, 2}, {0, 9, 8}), std::pair(true, false));
  EXPECT_EQ(top({1, 3, 2}, {0, 8, 9}), std::pair(false, false));
  EXPECT_EQ(top({3, 3, 2}, {0, 9, 8}), std::pair(true, true));  // any of the tied tokens agrees
  EXPECT_EQ(top({3, 3, 2}, {9, 0, 8}), std::pair(true, true));
  EXPECT_EQ(top({3, 3, 2}, {0, 8, 9}), std::pair(false, true));
  EXPECT_EQ(top({1, 3, 2}, {9, 9, 8}), std::pair(false, false));  // the run's own tie goes to the lowest index
  EXPECT_EQ(top({3, 1, 2}, {9, 9, 8}), std::pair(true, false));
  EXPECT_EQ(top({3, std::nextafter(3.0, 0.0), 2}, {0, 9, 8}), std::pair(false, false));  // ties are exact
  EXPECT_EQ(top({-kInf, -5, -5}, {-7, -kInf, -6}), std::pair(true, true));
}

TEST(Divergence, NextToken) {
  // Uniform over 4 against uniform over 2: e^0 is 1, so everything but the logarithms is exact.
  const std::vector<double> reference{7, 7, 7, 7}, run{-2, -kInf, -2, -kInf};
  const TokenDivergence kept = compare_row(reference, run, 2);
  EXPECT_EQ(kept.reference_nll, std::log(4.0));
  EXPECT_EQ(kept.nll, std::log(2.0));
  EXPECT_EQ(kept.delta_p, 0.25);
  EXPECT_EQ(kept.kl, kInf);
  const TokenDivergence lost = compare_row(reference, run, 3);
  EXPECT_EQ(lost.reference_nll, std::log(4.0));
  EXPECT_EQ(lost.nll, kInf);
  EXPECT_EQ(lost.delta_p, -0.25);
  const TokenDivergence none = compare_row(reference, run, -1);
  EXPECT_TRUE(std::isnan(none.nll) && std::isnan(none.reference_nll) && std::isnan(none.delta_p));
  EXPECT_NE(message_of([&] { compare_row(reference, run, 4); }).find("expected -1 or a token below 4, found 4"),
            std::string::npos);
  EXPECT_NE(message_of([&] { compare_row(reference, run, -2); }).find("found -2"), std::string::npos);
  EXPECT_NE(message_of([&] { ReferenceBlock<double>(reference.data(), 1, 0); }).find("found [1, 0]"),
            std::string::npos);
}

}  // namespace
}  // namespace replayssm
