#pragma once

// Private: pulls in Boost.Multiprecision. One oracle: the literal recurrence of some heads of a layer in any Real.

#include <algorithm>
#include <limits>
#include <vector>

#include "analysis/head_inputs.h"
#include "core/literal.h"
#include "core/parallel.h"

namespace replayssm {

/// -log10 of the relative L2 error of x [n]; infinite where there is none, -infinite for values that are not finite.
template <class Real, class Value>
double correct_digits(const Value* x, const Real* truth, std::int64_t n) {
  Real difference(0), norm(0);
  for (std::int64_t i = 0; i < n; ++i) {
    Real d(x[i]);
    d -= truth[i];
    add_product(difference, d, d);
    add_product(norm, truth[i], truth[i]);
  }
  constexpr double infinity = std::numeric_limits<double>::infinity();
  if (!isfinite(difference) || (norm == 0 && difference != 0)) return -infinity;
  if (difference == 0) return infinity;
  return static_cast<double>(log10(Real(norm / difference))) / 2;
}

/// The literal recurrence of some heads in Real.
template <class Real>
class LiteralHeads {
 public:
  LiteralHeads(const RecurrenceShape& shape, std::size_t count, int digits)
      : shape_(shape), digits_(digits), y_(count) {
    use_digits();
    states_.assign(count, std::vector<Real>(static_cast<std::size_t>(shape.head_dim * shape.state_dim), Real(0)));
  }

  /// To be called by every thread before it computes with what is in here.
  void use_digits() const { set_working_digits<Real>(digits_); }

  /// All heads by a block of tokens, which threads share head by head and, within a head, by rows of the state.
  void advance(const std::vector<RawHead>& heads, int threads) {
    constexpr std::int64_t task_rows = 8;
    const std::int64_t P = shape_.head_dim, N = shape_.state_dim, D = shape_.decay_dim();
    const std::int64_t tokens = heads.front().tokens, parts = (P + task_rows - 1) / task_rows;
    std::vector<PreparedHead<Real>> prepared(heads.size());
    std::vector<std::vector<Real>> decays(heads.size());
    parallel_for(std::ssize(heads), threads, [&](std::int64_t task) {
      use_digits();
      const auto i = static_cast<std::size_t>(task);
      prepared[i] = PreparedHead<Real>(heads[i]);
      const Real* log_decay = prepared[i].head().log_decay[0];
      for (std::int64_t d = 0; d < tokens * D; ++d) decays[i].push_back(exp(log_decay[d]));
      y_[i].assign(static_cast<std::size_t>(tokens * P), Real(0));
    });
    parallel_for(std::ssize(heads) * parts, threads, [&](std::int64_t task) {
      use_digits();
      const auto i = static_cast<std::size_t>(task / parts);
      const std::int64_t first = task % parts * task_rows, rows = std::min(task_rows, P - first);
      const HeadInputs<Real>& in = prepared[i].head();
      for (std::int64_t t = 0; t < tokens; ++t) {
        Record<Real> record = in.record(t);
        record.v += first;
        literal_step(shape_, record, decays[i].data() + t * D, in.c[t], rows, states_[i].data() + first * N,
                     y_[i].data() + t * P + first);
      }
    });
  }

  /// Of the last call, [tokens, head_dim].
  const std::vector<Real>& y(std::size_t head) const { return y_[head]; }
  const std::vector<Real>& state(std::size_t head) const { return states_[head]; }

 private:
  RecurrenceShape shape_;
  int digits_;
  std::vector<std::vector<Real>> states_, y_;
};

/// An oracle that checks itself: everything is computed again in Check.
template <class Work, class Check>
class CheckedHeads {
 public:
  CheckedHeads(const RecurrenceShape& shape, std::size_t count, int working_digits, int check_digits)
      : work_(shape, count, working_digits),
        check_(shape, count, check_digits),
        agreement_(count, std::numeric_limits<double>::infinity()) {}

  void advance(const std::vector<RawHead>& heads, int threads) {
    // One precision after the other: see set_working_digits().
    work_.advance(heads, threads);
    check_.advance(heads, threads);
    parallel_for(std::ssize(heads), threads, [&](std::int64_t task) {
      check_.use_digits();
      const auto i = static_cast<std::size_t>(task);
      const std::int64_t P = heads[i].shape.head_dim;
      double& least = agreement_[i];
      for (std::int64_t at = 0; at < heads[i].tokens * P; at += P) {
        least = std::min(least, correct_digits(work_.y(i).data() + at, check_.y(i).data() + at, P));
      }
      least =
          std::min(least, correct_digits(work_.state(i).data(), check_.state(i).data(), std::ssize(work_.state(i))));
    });
  }

  /// What the oracle says; compute with it after its use_digits().
  const LiteralHeads<Work>& work() const { return work_; }
  /// The least agreement of the two so far: -log10 of the relative L2 difference of a token's y or of a state.
  double agreement() const { return std::ranges::min(agreement_); }

 private:
  LiteralHeads<Work> work_;
  LiteralHeads<Check> check_;
  std::vector<double> agreement_;
};

}  // namespace replayssm
