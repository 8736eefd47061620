// Outputs, stored checkpoints and effective states of every schedule against a literal reading in 60 digits.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/core/state_helpers.h"

namespace replayssm {
namespace {

using oracle::Vec;

/// Root of the summed squares of the errors against the truth. The rule for what is fair: twice the error of the
/// naive version in the same precision.
class Errors {
 public:
  template <class Real>
  void add(const Vec<Real>& code, const Vec<Real>& naive, const Vec<Wide>& truth) {
    ASSERT_EQ(code.size(), truth.size());
    for (std::size_t i = 0; i < truth.size(); ++i) {
      code_ = std::hypot(code_, static_cast<double>(Wide(code[i]) - truth[i]));
      const auto error = static_cast<double>(Wide(naive[i]) - truth[i]);
      naive_ = std::hypot(naive_, error);
      largest_ = std::max(largest_, std::abs(error));
    }
  }
  /// What a single value may be off by.
  double allowed() const { return 2 * largest_; }
  void check(const char* what) const { EXPECT_LE(code_, 2 * naive_) << what; }

 private:
  double code_ = 0, naive_ = 0, largest_ = 0;
};

/// Checks that `stored` is what rounding the state x [rows, n] gives if arithmetic moved x by at most `error`: by the
/// monotony of rounding it lies between the rounded ends. The scale of a row moves with its largest element, by
/// `error` too and by half an ulp of fp32, which is what it is rounded to.
template <class Real>
void CheckStored(const Format& format, const Vec<Real>& stored, const Vec<Wide>& x, std::size_t n, double error) {
  for (std::size_t row = 0; row < x.size(); row += n) {
    double scale = 1, slack = 0;
    if (format.scale == Scale::row) {
      Wide largest = 0;
      for (std::size_t i = row; i < row + n; ++i) largest = std::max(largest, Wide(abs(x[i])));
      const auto max = decode<double>(format.element, format.element.max_code);
      scale = static_cast<float>(static_cast<double>(largest) / max);
      if (scale == 0) scale = 1;
      slack = error + static_cast<double>(largest) * std::ldexp(1.0, -24);
    }
    for (std::size_t i = row; i < row + n; ++i) {
      const auto end = [&](double sign) {
        const auto moved = static_cast<double>(x[i] + Wide(sign * (error + slack)));
        return round_to(format.element, moved / scale) * scale + sign * slack;
      };
      EXPECT_LE(end(-1), stored[i]) << format.text() << " element " << i;
      EXPECT_GE(end(+1), stored[i]) << format.text() << " element " << i;
    }
  }
}

/// Runs tokens one by one through a state, the oracle and the naive version. The latter two are put on the state's own
/// stored values at every flush: an element on the edge between two codes may be rounded either way, once.
template <class Real, template <class> class Naive>
void Follow(const RecurrenceShape& shape, const Policy& policy, const oracle::RingAs& ring, std::size_t tokens) {
  const Stream<Real> stream = RandomStream<Real>(shape, tokens);
  const auto& replay = std::get<Replay>(policy.schedule);
  const auto n = static_cast<std::size_t>(shape.state_dim), size = static_cast<std::size_t>(shape.head_dim) * n;
  State<Real> state(shape, policy);
  Errors outputs, states;
  std::vector<std::pair<Vec<Real>, Vec<Wide>>> stored;
  for (std::int64_t h = 0; h < shape.heads; ++h) {
    const oracle::Schedule schedule{is_delta_rule(shape.recurrence), static_cast<std::size_t>(replay.length),
                                    is_delta_rule(shape.recurrence) && policy.loop == Loop::open, ring.u};
    oracle::Steps<Wide> truth(schedule, size);
    Naive<Real> naive(schedule, size);
    for (std::size_t t = 0; t < tokens; ++t) {
      const Token<Real>& x = stream[static_cast<std::size_t>(h)][t];
      const Token<Real> record = oracle::stored(x, ring);
      Vec<Real> y(x.v.size());
      state.advance_head(h, Inputs(stream, t, t + 1), y.data(), shape.head_dim);
      const Vec<Wide> expected = truth.advance(x.template as<Wide>(), record.template as<Wide>());
      outputs.add(y, naive.advance(x, record), expected);
      if (t % 5 == 2 || (truth.flushed() && replay.anchor.exact())) {
        if (!truth.flushed()) states.add(state.effective(h), naive.effective(), truth.effective());
      }
      if (!truth.flushed()) continue;
      const Vec<Real>& checkpoint = state.checkpoint(h);
      if (replay.anchor.exact()) {
        states.add(checkpoint, naive.effective(), truth.effective());
      } else {
        stored.emplace_back(checkpoint, truth.effective());
        Errors at_flush;
      }
      Vec<Real> copy = checkpoint;
      if (replay.read) round_rows(*replay.read, copy.data(), shape.head_dim, shape.state_dim);
      EXPECT_TRUE(SameBits(state.read_copy(h), copy)) << "the read copy is the rounded anchor";
      truth.adopt(checkpoint, copy);
      naive.adopt(checkpoint, copy);
    }
  }
  outputs.check("outputs");
  states.check("states");
  for (const auto& [checkpoint, unrounded] : stored) {
    CheckStored(replay.anchor, checkpoint, unrounded, n, states.allowed());
  }
}

}  // namespace
}  // namespace replayssm
