// States whose heads share a scale, and error feedback: every store against its definition, step by step.

#include <gtest/gtest.h>

#include <cmath>

#include "core/error.h"
#include "tests/core/state_helpers.h"

namespace replayssm {
namespace {

template <class Real>
using Values = std::vector<Real>;

/// A copy of a state and its residual, [heads, rows, n].
template <class Real>
struct Copy {
  Format format;
  Values<Real> s, r;

  /// The store of Format::residual. One scale of a tensor is that of a head of all rows: heads one below the other.
  void store(Values<Real> x, const RecurrenceShape& shape, std::uint32_t token) {
    if (format.residual) {
      for (std::size_t i = 0; i < x.size(); ++i) x[i] += r[i];
    }
    s = x;
    round(format, s, shape, token);
    if (!format.residual) return;
    for (std::size_t i = 0; i < x.size(); ++i) r[i] = x[i] - s[i];
    round(*format.residual, r, shape, token);
  }
  static void round(const Format& format, Values<Real>& x, const RecurrenceShape& shape, std::uint32_t token) {
    const std::int64_t rows = shape.head_dim, n = shape.state_dim;
    if (format.scale == Scale::tensor) {
      round_rows(format, x.data(), shape.heads * rows, n);
      return;
    }
    for (std::int64_t h = 0; h < shape.heads; ++h) {
      round_rows(format, x.data() + h * rows * n, rows, n, {.token = token, .head = static_cast<std::uint32_t>(h)});
    }
  }
};

template <class Real>
Values<Real> AllHeads(State<Real>& state, bool read) {
  Values<Real> out;
  for (std::int64_t h = 0; h < state.shape().heads; ++h) {
    const auto& s = read ? state.read_copy(h) : state.checkpoint(h);
    out.insert(out.end(), s.begin(), s.end());
  }
  return out;
}

/// `exact` is the same schedule without rounding: run from what was stored, it rebuilds what is to be stored next.
template <class Real>
void Follow(const RecurrenceShape& shape, const std::string& text, int threads) {
  SCOPED_TRACE(text);
  const Policy policy = parse_policy(text);
  Policy unrounded = policy;
  const Replay schedule = policy.as_replay();
  Replay plain{.length = schedule.length, .anchor = Format(), .read = {}, .ring = {}};
  if (schedule.read) plain.read = Format();
  unrounded.schedule = plain;
  State<Real> state(shape, policy), exact(shape, unrounded);
  const auto L = static_cast<std::size_t>(schedule.length);
  const auto stream = RandomStream<Real>(shape, 5 * L + 1);
  const auto size = static_cast<std::size_t>(shape.heads * shape.head_dim * shape.state_dim);
  Copy<Real> anchor{schedule.anchor, Values<Real>(size, 0), Values<Real>(size, 0)}, read = anchor;
  if (schedule.read) read.format = *schedule.read;
  Values<Real> y((5 * L + 1) * static_cast<std::size_t>(shape.heads * shape.head_dim));
  for (std::size_t flush = 0; flush < 5; ++flush) {
    exact.set(anchor.s.data());
    Advance(exact, stream, flush * L, flush * L + L);
    state.advance(Inputs(stream, flush * L, flush * L + L), y.data(), shape.heads * shape.head_dim, threads);
    const auto token = static_cast<std::uint32_t>(flush * L + L - 1);
    anchor.store(AllHeads(exact, false), shape, token);
    EXPECT_TRUE(SameBits(AllHeads(state, false), anchor.s)) << flush;
    if (!schedule.read) continue;
    read.store(anchor.s, shape, token);
    EXPECT_TRUE(SameBits(AllHeads(state, true), read.s)) << flush;
  }
}

template <class Kind>
class StateStores : public testing::Test {};
TYPED_TEST_SUITE(StateStores, Kinds);

TYPED_TEST(StateStores, FeedBackTheirErrorsAndShareScalesOfTensors) {
  const auto shape = TypeParam::shape(19, 8, 2);  // more rows than an eager state takes at once
  for (const std::string format :
       {"int8:row:ef=int4", "int4:row:ef=exact", "bf16:sr:ef=(e4m3:sr)", "mxfp4:ef=mxfp4", "nvfp4:ef=(int4:head)",
        "int4:tile4:hadamard:ef=(int4:tile3)", "int4:row:asym:rz:ef=(int4:row:asym)", "int8:tensor",
        "e4m3:tensor:hadamard", "int4:tensor:asym", "int8:tensor:ef=int4", "int4:row:ef=(int4:tensor)",
        "e2m1:tensor:ceil:ef=bf16"}) {
    Follow<typename TypeParam::Real>(shape, "eager(state=" + format + ")", 1);
    Follow<typename TypeParam::Real>(shape, "replay(L=4, state=" + format + ")", 2);
    Follow<typename TypeParam::Real>(shape, "replay(L=3, anchor=fp32, read=" + format + ")", 3);
    Follow<typename TypeParam::Real>(shape, "replay(L=3, anchor=" + format + ", read=int4:row:ef=int4)", 2);
  }
}

/// C13: A = -1, dt = 2^-9, x = 1 in bf16, which stands still at 1/2.
TEST(StateFeedback, CarriesOnWhereRoundingStandsStill) {
  const double dt = 0x1p-9, a = std::exp(-dt), fixed = dt / (1 - a);
  const Token<double> token{{1}, {1}, {1}, {-dt}, dt, {}};
  const RecurrenceShape shape{Recurrence::mamba2, 1, 1, 1, 1};
  const Stream<double> stream = OneHead(std::vector<Token<double>>(8000, token));
  const auto stored = [&](const char* policy) {
    State<double> state(shape, parse_policy(policy));
    std::vector<double> out;
    for (std::size_t t = 0; t < 8000; ++t) {
      Advance(state, stream, t, t + 1);
      out.push_back(state.checkpoint(0)[0]);
    }
    return out;
  };
  EXPECT_EQ(stored("eager(state=bf16)").back(), 0.5);
  for (const char* policy : {"eager(state=bf16:ef=bf16)", "eager(state=bf16:ef=fp32)", "eager(state=bf16:ef=exact)"}) {
    const std::vector<double> s = stored(policy);
    double mean = 0;
    for (std::size_t t = 4000; t < 8000; ++t) mean += s[t] / 4000;
    // s_t + r_t = a s_{t-1} + dt + r_{t-1}, so the mean of s is off by the change of s + r over the 4000 steps, over
    // 4000 (1 - a). e^-7.8 of the way to the fixed point is left at the first of them; steps near 1 are 2^-7 at most, s
    // moves by one of them and r stays within half of one; a bf16 residual adds its own roundings, 2^-18 a step.
    const double change = std::exp(-7.8) + 0x1p-7 + 0x1p-7;
    EXPECT_NEAR(mean, fixed, change / (4000 * (1 - a)) + 0x1p-18 / (1 - a)) << policy;
  }
}

// What is not finite is not fed back: an infinity stays one.
TEST(StateFeedback, LeavesAnInfinityAsItIs) {
  const RecurrenceShape shape{Recurrence::mamba2, 1, 1, 2, 1};
  Token<double> token{{1, 1}, {1}, {1}, {0}, 1, {}};
  Stream<double> stream = OneHead(std::vector<Token<double>>(4, token));
  stream[0][1].v[0] = 1e6;
  State<double> state(shape, parse_policy("eager(state=fp16:ef=fp16)"));
  Advance(state, stream, 0, 4);
  EXPECT_EQ(state.checkpoint(0), (std::vector<double>{HUGE_VAL, 4}));
  EXPECT_EQ(state.events().overflows, 1);
  EXPECT_EQ(state.events().first_overflow, (RangeEvents::Event{1, 0}));
}

// A tensor of one head that is not finite loses all heads, and each counts its own.
TEST(StateTensors, LoseAllHeadsWithOne) {
  const RecurrenceShape shape{Recurrence::mamba2, 2, 1, 1, 2};
  Token<double> token{{1}, {1, 1}, {1, 1}, {0}, 1, {}};
  Stream<double> stream = {std::vector<Token<double>>(3, token), std::vector<Token<double>>(3, token)};
  stream[1][1].v[0] = HUGE_VAL;
  State<double> state(shape, parse_policy("eager(state=int8:tensor)"));
  Advance(state, stream, 0, 3);
  for (const std::int64_t h : {0, 1})
    EXPECT_TRUE(std::isnan(state.checkpoint(h)[0]) && std::isnan(state.checkpoint(h)[1]));
  EXPECT_EQ(state.events().overflows, 2);  // of the head that was finite
  EXPECT_EQ(state.events().first_overflow, (RangeEvents::Event{1, 0}));
}

TEST(StateTensors, AdvanceNoHeadAlone) {
  const RecurrenceShape shape{Recurrence::mamba2, 2, 1, 2, 2};
  State<double> state(shape, parse_policy("replay(L=2, anchor=fp32, read=int8:tensor)"));
  const auto stream = RandomStream<double>(shape, 1);
  double y[4];
  try {
    state.advance_head(0, Inputs(stream, 0, 1), y, 2);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("int8:tensor"), std::string::npos) << error.what();
  }
}

TEST(StateRings, TakeNeitherFeedbackNorScalesOfTensors) {
  for (const char* ring : {"ring=int8:tensor", "ring.x=int8:row:ef=int4"}) {
    try {
      parse_policy("replay(L=4, state=bf16, " + std::string(ring) + ")");
      ADD_FAILURE() << ring;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(ring), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace replayssm
