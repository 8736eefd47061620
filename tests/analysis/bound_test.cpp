// The bound of local errors against sums over every rounding error, each carried by hand from its store to its readout.

#include "analysis/bound.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "core/state.h"

namespace replayssm {
namespace {

using Vec = std::vector<double>;

constexpr double u = std::numeric_limits<double>::epsilon() / 2;

TEST(AddRoundingErrors, OfZeroPointsIsHalfAStepAndOfATensorNotKnown) {
  const double row[] = {-55, 200, 3.25};  // 255 steps of 1
  double errors[3] = {}, cut[3] = {}, tensor[3] = {};
  add_rounding_errors(parse_format("int8:row:asym"), row, 1, 3, errors);
  add_rounding_errors(parse_format("int8:row:asym:rz"), row, 1, 3, cut);
  add_rounding_errors(parse_format("int8:tensor"), row, 1, 3, tensor);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(errors[i], 0.25);
    EXPECT_EQ(cut[i], 1);
    EXPECT_TRUE(std::isnan(tensor[i]));
  }
}

TEST(RoundingErrors, AreHalfASpacingSquared) {
  const double rows[] = {1.0, 1.75, -4.0, 0.0, 1.0, 0.5, 0x1p-130, 255.0};
  Vec out(4, 1.0);  // what is there stays
  add_rounding_errors(parse_format("bf16"), rows, 2, 4, out.data());
  // Spacings 2^-7 at 1 and 1.75, 2^-8 at 0.5, 2^-5 at 4, 2^0 at 255 and 2^-133 at 0 and among subnormals: exact sums.
  EXPECT_EQ(out, (Vec{1 + 2 * 0x1p-16, 1 + 0x1p-16 + 0x1p-18, 1 + 0x1p-12 + 0x1p-268, 1 + 0x1p-268 + 0x1p-2}));
  // int8 per row: every element to a multiple of float(4 / 127).
  out.assign(4, 0.0);
  add_rounding_errors(parse_format("int8:row"), rows, 1, 4, out.data());
  const double half = static_cast<double>(static_cast<float>(4.0 / 127)) / 2;
  EXPECT_EQ(out, Vec(4, half * half));
  add_rounding_errors(parse_format("exact"), rows, 1, 4, out.data());
  EXPECT_EQ(out, Vec(4, half * half));
}

TEST(RoundingErrors, OfBlocksAreThoseUnderTheirScalesOrWhatSaturates) {
  // Scale 1: steps of 32 at 300, of 2^-3 at 1 and of 2^-9 at 0; 500 saturates at 448. Then a block with scale 1/2.
  Vec row(34, 0.0), out(34, 0.0);
  row[0] = 500, row[1] = -300, row[2] = 1, row[32] = -224, row[33] = 0.5;
  add_rounding_errors(parse_format("mxfp8_e4m3"), row.data(), 1, 34, out.data());
  EXPECT_EQ(out[0], 52.0 * 52);
  EXPECT_EQ(out[1], 16.0 * 16);
  EXPECT_EQ(out[2], 0x1p-8);
  EXPECT_EQ(out[3], 0x1p-20);
  EXPECT_EQ(out[32], 8.0 * 8);  // the step at 448, which is 32, by half the scale
  EXPECT_EQ(out[33], 0x1p-10);  // 1 in its scale
  // Rounding up scales the first block by 2: a step of 32 at 250.
  out.assign(34, 0.0);
  add_rounding_errors(parse_format("mxfp8_e4m3:ceil"), row.data(), 1, 34, out.data());
  EXPECT_EQ(out[0], 16.0 * 16);
  // The scale of the head is 2^-4, those of its blocks 448 and 224 or so.
  Vec head(32, 0.0), errors(32, 0.0);
  head[0] = 168, head[16] = -84;
  add_rounding_errors(parse_format("nvfp4"), head.data(), 1, 32, errors.data());
  EXPECT_EQ(errors[0], 28.0 * 28);  // 6 times 28: a step of 2
  EXPECT_EQ(errors[1], 7.0 * 7);    // a step of 0.5
  EXPECT_EQ(errors[16], 14.0 * 14);
}

/// Random steps of one head, and the reference's state along them by the recurrence as it is written.
struct Steps {
  RecurrenceShape shape;
  std::int64_t P, N;
  std::vector<Vec> v, w, c, log_decay, decay, states;
  Vec gain;

  Steps(Recurrence recurrence, int count, std::int64_t rows, std::int64_t columns)
      : shape{recurrence, 1, 1, rows, columns}, P(rows), N(columns) {
    std::mt19937 random(7);
    std::uniform_real_distribution<double> any(-1, 1), positive(0.1, 0.9);
    const auto vector = [&](std::int64_t n, auto& from) {
      Vec x(static_cast<std::size_t>(n));
      for (double& e : x) e = from(random);
      return x;
    };
    Vec s(static_cast<std::size_t>(P * N), 0.0);
    for (int t = 0; t < count; ++t) {
      v.push_back(vector(P, any));
      w.push_back(vector(N, any));
      c.push_back(vector(N, any));
      double norm = 0;
      for (const double x : w.back()) norm += x * x;
      for (double& x : w.back()) x /= std::sqrt(norm);
      gain.push_back(positive(random));
      log_decay.push_back(vector(shape.decay_dim(), positive));
      for (double& g : log_decay.back()) g = -g / 10;
      decay.emplace_back(static_cast<std::size_t>(N));
      for (std::size_t n = 0; n < decay.back().size(); ++n) {
        decay.back()[n] = std::exp(log_decay.back()[shape.decay_dim() > 1 ? n : 0]);
      }
      for (std::int64_t p = 0; p < P; ++p) {
        double readout = 0, *row = s.data() + p * N;
        for (std::int64_t n = 0; n < N; ++n) readout += (row[n] *= decay.back()[n]) * w.back()[n];
        const double update = gain.back() * (v.back()[p] - (is_delta_rule(recurrence) ? readout : 0));
        for (std::int64_t n = 0; n < N; ++n) row[n] += update * w.back()[n];
      }
      states.push_back(s);
    }
  }
  Vec bounds(const std::string& policy) const {
    LocalBound bound(shape, parse_policy(policy), 0);
    Vec out;
    for (std::size_t t = 0; t < v.size(); ++t) {
      const Record<double> record{v[t].data(), w[t].data(), log_decay[t].data(), gain[t]};
      out.push_back(bound.advance({record, decay[t].data(), c[t].data(), states[t].data()}));
    }
    return out;
  }
  /// An error of one row behind one more step; `reads`: an error of the state that u is computed from.
  Vec carried(Vec e, std::size_t t, const Vec& reads) const {
    double readout = 0;
    for (std::size_t n = 0; n < e.size(); ++n) readout += reads[n] * decay[t][n] * w[t][n];
    if (!is_delta_rule(shape.recurrence)) readout = 0;
    for (std::size_t n = 0; n < e.size(); ++n) e[n] = e[n] * decay[t][n] - gain[t] * readout * w[t][n];
    return e;
  }
  Vec carried(const Vec& e, std::size_t t) const { return carried(e, t, e); }
  double readout(const Vec& e, std::size_t t) const {
    double sum = 0;
    for (std::size_t n = 0; n < e.size(); ++n) sum += e[n] * c[t][n];
    return sum;
  }
  /// Half spacings squared that a store behind token t adds to each column.
  Vec stored(const char* format, std::size_t t) const {
    Vec out(static_cast<std::size_t>(N), 0.0);
    add_rounding_errors(parse_format(format), states[t].data(), P, N, out.data());
    return out;
  }
  /// The sum over columns of `squares` times (readout of a unit error, carried by `carry`)^2.
  template <class Carry>
  double readout2(const Vec& squares, std::size_t t, Carry&& carry) const {
    double sum = 0;
    for (std::size_t n = 0; n < squares.size(); ++n) {
      Vec e(squares.size(), 0.0);
      e[n] = 1;
      const double y = readout(carry(e), t);
      sum += squares[n] * y * y;
    }
    return sum;
  }
};

class BoundOf : public testing::TestWithParam<Recurrence> {
 protected:
  const Steps steps_{GetParam(), 8, 3, 5};
  /// No entry of C is above the sum S of what was stored, nor one of what leaks above 4 S; each of 8 steps adds at most
  /// 2 N + 8 roundings of that size to it, and N^2 of them are added with factors |c_i c_j| < 1.
  static void expect_near(double bound, double right2, const Vec& stored) {
    double sum = 0;
    for (const double x : stored) sum += x;
    const auto N = static_cast<double>(stored.size()), tolerance = 4 * 8 * (2 * N + 8) * N * N * u * sum;
    EXPECT_GT(right2, 100 * tolerance) << "a case that says something";
    EXPECT_NEAR(bound * bound, right2, tolerance);
  }
};
INSTANTIATE_TEST_SUITE_P(Recurrences, BoundOf,
                         testing::Values(Recurrence::mamba2, Recurrence::gated_delta, Recurrence::kda),
                         [](const auto& i) { return std::string(name(i.param)); });

// One store behind token 3; its errors reach the readouts of tokens 4 to 7.
TEST_P(BoundOf, OneStoreIsTheSumOverItsErrors) {
  const Vec bounds = steps_.bounds("replay(L=4, state=e4m3:row)"), stored = steps_.stored("e4m3:row", 3);
  for (std::size_t t = 0; t < 4; ++t) EXPECT_EQ(bounds[t], 0);
  for (std::size_t t = 4; t < 8; ++t) {
    const double right2 = steps_.readout2(stored, t, [&](Vec e) {
      for (std::size_t s = 4; s <= t; ++s) e = steps_.carried(e, s);
      return e;
    });
    expect_near(bounds[t], right2, stored);
  }
}

// The copy's errors reach tokens 4 to 6; token 7 flushes and reads the anchor, which is exact in a closed loop. In an
// open one its u come from the copy: an error e of what outputs read leaves u w^T of its own.
TEST_P(BoundOf, ReadCopyReachesTheAnchorInAnOpenLoopOnly) {
  const Vec stored = steps_.stored("int8:row", 3);
  for (const std::string loop : {"closed", "open"}) {
    const Vec bounds = steps_.bounds("replay(L=4, anchor=exact, read=int8:row, loop=" + loop + ")");
    for (std::size_t t = 4; t < 7; ++t) {
      const double right2 = steps_.readout2(stored, t, [&](Vec e) {
        for (std::size_t s = 4; s <= t; ++s) e = steps_.carried(e, s);
        return e;
      });
      expect_near(bounds[t], right2, stored);
    }
    if (loop == "closed" || !is_delta_rule(GetParam())) {
      EXPECT_EQ(bounds[7], 0) << loop;
      continue;
    }
    const double right2 = steps_.readout2(stored, 7, [&](Vec e) {
      Vec anchor(e.size(), 0.0);
      for (std::size_t s = 4; s <= 7; ++s) {
        anchor = steps_.carried(anchor, s, e);
        e = steps_.carried(e, s);
      }
      return anchor;
    });
    expect_near(bounds[7], right2, stored);
  }
}

// A state of one element: errors of the same sign add up, whatever the schedule.
TEST(Bound, AddsErrorsOfSuccessiveStoresAsIfOfTheSameSign) {
  const Steps steps(Recurrence::mamba2, 8, 1, 1);
  const Vec bounds = steps.bounds("eager(state=bf16)");
  double error = 0;
  for (std::size_t t = 0; t < 8; ++t) {
    error *= steps.decay[t][0];
    // Seven roundings a step on either side, of numbers of one sign.
    EXPECT_NEAR(bounds[t], error * std::abs(steps.c[t][0]), 2 * 7 * 8 * u * error) << t;
    error += std::sqrt(steps.stored("bf16", t)[0]);
  }
}

// Decays whose squares are subnormal, and 0: what a store adds to next to nothing is what it adds.
TEST_P(BoundOf, ForgetsWhatADecayForgets) {
  for (const double log_decay : {-360.0, -800.0}) {
    Steps steps = steps_;
    steps.log_decay[4].assign(steps.log_decay[4].size(), log_decay);
    steps.decay[4].assign(5, std::exp(log_decay));
    const Vec bounds = steps.bounds("eager(state=bf16)"), stored = steps.stored("bf16", 4);
    EXPECT_LT(bounds[4] * bounds[4], std::numeric_limits<double>::min());
    expect_near(bounds[5], steps.readout2(stored, 5, [&](const Vec& e) { return steps.carried(e, 5); }), stored);
  }
}

// The errors that a State makes lie below what rounded rings add, and that is not everything there is.
TEST_P(BoundOf, RoundedRecordsLieUnderIt) {
  for (const char* policy : {"replay(L=8, state=exact, ring=e4m3:row)", "replay(L=8, state=exact, ring=bf16)"}) {
    const Vec bounds = steps_.bounds(policy);
    State<double> exact(steps_.shape, exact_policy()), rounded(steps_.shape, parse_policy(policy));
    for (std::size_t t = 0; t < 7; ++t) {
      const LayerInputs<double> in{1,
                                   {{.v = {steps_.v[t].data()},
                                     .w = {steps_.w[t].data()},
                                     .c = {steps_.c[t].data()},
                                     .log_decay = {steps_.log_decay[t].data()},
                                     .gain = {&steps_.gain[t]}}},
                                   {}};
      Vec y(3), right(3);
      exact.advance(in, right.data());
      rounded.advance(in, y.data());
      double error2 = 0;
      for (std::size_t p = 0; p < 3; ++p) error2 += (y[p] - right[p]) * (y[p] - right[p]);
      // Token 0 reads nothing rounded: what is left there is arithmetic, for which these bounds have no term.
      if (t == 0) continue;
      EXPECT_LE(std::sqrt(error2), bounds[t]) << policy << ", token " << t;
      EXPECT_GT(error2, 0);
    }
  }
}

}  // namespace
}  // namespace replayssm
