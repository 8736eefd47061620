// States whose right value is known: a state that stalls, decays of every size, an expanding map, and what is reported
// when numbers leave their range.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/core/state_helpers.h"

namespace replayssm {
namespace {

using Event = RangeEvents::Event;

/// A token with P = N = 1 and c = 1.
template <class Real>
Token<Real> Scalar(Real v, Real w, Real log_decay, Real gain) {
  return {{v}, {w}, {Real(1)}, {log_decay}, gain, {}};
}

template <class Real>
std::vector<Token<Real>> Repeat(const Token<Real>& token, std::size_t count) {
  return std::vector<Token<Real>>(count, token);
}

/// The state of one head run exactly, step by step.
template <class Real>
std::vector<Wide> Exact(Recurrence recurrence, const std::vector<Token<Real>>& tokens) {
  std::vector<Wide> s(tokens[0].v.size() * tokens[0].w.size(), Wide(0));
  for (const auto& token : tokens) {
    const auto x = token.template as<Wide>();
    oracle::update(s, x, oracle::form_u(is_delta_rule(recurrence), s, x));
  }
  return s;
}

std::string Replays(int length, const std::string& state, const std::string& order) {
  return "replay(L=" + std::to_string(length) + ", state=" + state + ", order=" + order + ")";
}

// ---- how often a state is rounded
// ------------------------------------------------------------------------------------

/// To 8 significant bits, nearest even, for values far inside the range of bf16.
Wide ToBf16(const Wide& x) {
  if (x == 0) return x;
  int exponent = 0;
  const Wide scaled = ldexp(frexp(x, &exponent), 8);
  Wide whole = floor(scaled);
  const Wide rest = scaled - whole;
  if (rest > Wide(0.5) || (rest == Wide(0.5) && fmod(whole, Wide(2)) != 0)) whole += 1;
  return ldexp(whole, exponent - 8);
}

// S <- e^(-1/512) S + 1/512 over 2000 steps; bf16 stalls where a step moves it by less than half an ulp. 2000 is no
// multiple of 64, so what that replay would rebuild has not been rounded since step 1984.
TEST(StateNumerics, RoundingCadence) {
  const std::vector<Token<double>> tokens = Repeat(Scalar(1.0, 1.0, -1.0 / 512, 1.0 / 512), 2000);
  const RecurrenceShape shape{Recurrence::mamba2, 1, 1, 1, 1};
  const Wide decay = exp(Wide(-1) / 512);
  const auto simulate = [&](int length) {
    Wide s = 0;
    for (int t = 1; t <= 2000; ++t) {
      s = decay * s + Wide(1) / 512;
      if (t % length == 0) s = ToBf16(s);
    }
    return s;
  };
  const auto run = [&](const std::string& text) {
    State<double> state(shape, parse_policy(text));
    Advance(state, OneHead(tokens), 0, tokens.size());
    return state.effective(0)[0];
  };
  EXPECT_EQ(run("eager(state=bf16)"), 0.5);
  EXPECT_EQ(simulate(1), 0.5);
  for (const auto& [length, right] : {std::pair{1, 0.5}, {4, 0.75}, {16, 0.9375}}) {
    for (const char* order : {"closed", "sequential"}) EXPECT_EQ(run(Replays(length, "bf16", order)), right) << length;
    EXPECT_EQ(simulate(length), right);
  }
  // Every step adds at most three roundings (decay, product, sum) of values below 1, which the decay then shrinks, so
  // after n steps the error is below 3 n half-ulps of 1.
  constexpr double kUlp = std::numeric_limits<double>::epsilon();
  const auto near = [&](double found, const Wide& right, int steps) {
    EXPECT_LE(abs(Wide(found) - right), 1.5 * steps * kUlp) << found;
  };
  for (const char* order : {"closed", "sequential"}) near(run(Replays(64, "bf16", order)), simulate(64), 16);
  near(run("exact"), simulate(2001), 2000);
  // The published digits, half a unit in their last place.
  EXPECT_NEAR(static_cast<double>(simulate(64)), 0.98110, 0.5e-5);
  EXPECT_NEAR(static_cast<double>(simulate(2001)), 0.98084, 0.5e-5);
}

// A decay of e^(-0.16) over 100 steps is e^-16 of what was there. Each step rounds the decay (exp: 1 ulp) and the
// product, so at most 2 ulps a step.
TEST(StateNumerics, DecayOfManySteps) {
  State<double> state({Recurrence::mamba2, 1, 1, 1, 1}, exact_policy());
  const auto tokens = Repeat(Scalar(0.0, 1.0, -0.16, 0.01), 100);
  const double one = 1;
  state.set(&one);
  Advance(state, OneHead(tokens), 0, 100);
  const Wide right = exp(100 * Wide(-0.16));
  EXPECT_LE(abs(Wide(state.checkpoint(0)[0]) - right), 200 * std::numeric_limits<double>::epsilon() * right);
}

// ---- decays of every size ------------------------------------------------------------------------------------------

template <class Kind>
class StateDecays : public testing::Test {
 protected:
  using Scalars = typename Kind::Real;

  /// Every order, loop and length: the last output and the effective state within `bound` ulps of the largest exact
  /// element, and everything finite.
  static void Check(const std::vector<Token<Scalars>>& tokens, double bound) {
    const auto n = static_cast<std::int64_t>(tokens[0].w.size());
    const std::vector<Wide> right = Exact(Kind::recurrence, tokens);
    Wide largest = 0;
    for (const Wide& x : right) largest = std::max(largest, Wide(abs(x)));
    const Wide allowed = bound * Wide(std::numeric_limits<Scalars>::epsilon()) * largest;
    for (const int length : {1, 2, 4, 16, 64}) {
      for (const char* order : {"closed", "sequential", "closed, loop=open"}) {
        const std::string text = Replays(length, "exact", order);
        State<Scalars> state(Kind::shape(1, n), parse_policy(text));
        const std::vector<Scalars> y = Advance(state, OneHead(tokens), 0, tokens.size());
        for (const Scalars& value : y) EXPECT_TRUE(std::isfinite(value)) << text;
        const std::vector<Scalars> found = state.effective(0);
        for (std::size_t i = 0; i < right.size(); ++i) EXPECT_LE(abs(Wide(found[i]) - right[i]), allowed) << text;
        const Wide output = oracle::read(right, oracle::convert<Wide>(tokens.back().c))[0];
        // The readout adds n products, each off by the state's error and a rounding, over weights of at most 1.
        EXPECT_LE(abs(Wide(y.back()) - output), 2 * static_cast<double>(n) * allowed) << text;
        EXPECT_FALSE(state.events().first_non_finite) << text;
      }
    }
  }
};
TYPED_TEST_SUITE(StateDecays, Kinds);

/// The same log decay for every column.
template <class Kind>
std::vector<typename Kind::Real> LogDecay(double g, std::size_t n) {
  return std::vector<typename Kind::Real>(has_column_decay(Kind::recurrence) ? n : 1,
                                          static_cast<typename Kind::Real>(g));
}

// One channel forgets all within a token, its neighbour nothing; with a scalar decay both forget. The map contracts
// (gain |k|^2 = 1/2), so the errors of a step, some 8 roundings, add up to at most 16 ulps in the long run.
TYPED_TEST(StateDecays, OfOneChannelButNotTheOther) {
  using Real = TypeParam::Real;
  const Real k = std::sqrt(Real(0.5));
  Token<Real> token{{1}, {k, k}, {k, k}, LogDecay<TypeParam>(-8, 2), Real(0.5), {}};
  if (has_column_decay(TypeParam::recurrence)) token.g[1] = 0;
  if (!is_delta_rule(TypeParam::recurrence)) token.g[0] = Real(-0.25);  // and stays bounded without the delta rule
  this->Check(Repeat(token, 32), 16);
}

// Four decays of 6.5e-12, whose product is below the smallest float.
TYPED_TEST(StateDecays, WhoseProductUnderflows) {
  using Real = TypeParam::Real;
  const auto token = [](Real v) {
    return Token<Real>{{v}, {Real(0.5)}, {1}, LogDecay<TypeParam>(std::log(6.5e-12), 1), Real(0.5), {}};
  };
  // A step from what is next to nothing: two products and the sum.
  this->Check({token(Real(0.3)), token(Real(-0.7)), token(Real(0.9)), token(Real(0.1))}, 3);
}

// What a token wrote before decays of -0.3 and -0.3 is not touched by the -4e7 that came with it: differences of prefix
// sums would lose the 0.6. Two sums, two exponentials of 1 ulp, two products.
TYPED_TEST(StateDecays, AfterAHugeOne) {
  using Real = TypeParam::Real;
  for (const double huge : {-4e7, -300.0}) {
    const auto token = [](double g, Real v, Real gain) {
      return Token<Real>{{v}, {1}, {1}, LogDecay<TypeParam>(g, 1), gain, {}};
    };
    // A gain of 0 writes nothing, in either recurrence.
    const std::vector<Token<Real>> tokens = {token(-0.1, Real(0.7), 1), token(huge, 1, 1), token(-0.3, 1, 0),
                                             token(-0.3, 1, 0)};
    this->Check(tokens, 6);
    const Wide right = exp(2 * Wide(Real(-0.3)));
    const double ulp = static_cast<double>(std::numeric_limits<Real>::epsilon());
    EXPECT_LE(abs(Exact(TypeParam::recurrence, tokens)[0] - right), ulp) << "the case itself: e^-0.6 of one";
  }
}

// 64 tokens that each forget all, then two of decay exactly 1 that write nothing and leave the state as it was.
TYPED_TEST(StateDecays, OfExactlyOneLeaveTheState) {
  using Real = TypeParam::Real;
  std::vector<Token<Real>> tokens;
  for (int t = 0; t < 66; ++t) {
    const double g = t < 64 ? -4e7 * (1 + t / 64.0) : 0.0;
    tokens.push_back({{Real(0.3 + t)}, {Real(0.7)}, {1}, LogDecay<TypeParam>(g, 1), t < 64 ? Real(0.9) : Real(0), {}});
  }
  // gain v, times w, and nothing else is left.
  this->Check(tokens, 2);
  for (const int length : {1, 4, 16, 64}) {
    for (const char* order : {"closed", "sequential"}) {
      State<Real> state(TypeParam::shape(1, 1), parse_policy(Replays(length, "exact", order)));
      Advance(state, OneHead(tokens), 0, 64);
      const std::vector<Real> before = state.effective(0);
      const std::vector<Real> y = Advance(state, OneHead(tokens), 64, 66);
      EXPECT_TRUE(SameBits(state.effective(0), before));
      EXPECT_EQ(y, (std::vector<Real>{before[0], before[0]}));
    }
  }
}

// ---- an expanding map
// --------------------------------------------------------------------------------------------------

// Keys of norm 3 make S <- -8 S + 3, so S_t = (1 - (-8)^t) / 3.
template <class Kind>
class StateExploding : public testing::Test {};
using DeltaKinds = testing::Types<Kind<Recurrence::gated_delta, float>, Kind<Recurrence::gated_delta, double>,
                                  Kind<Recurrence::kda, float>, Kind<Recurrence::kda, double>>;
TYPED_TEST_SUITE(StateExploding, DeltaKinds);

template <class Real>
Stream<Real> Exploding() {
  return OneHead(Repeat(Scalar<Real>(1, 3, 0, 1), 64));
}

TYPED_TEST(StateExploding, NamesItsFirstStepOutOfRange) {
  using Real = TypeParam::Real;
  constexpr bool narrow = std::is_same_v<Real, float>;
  for (const char* format : {"exact", "fp32", "bf16", "fp16"}) {
    SCOPED_TRACE(format);
    if (std::string(format) == "exact" && !narrow) continue;
    State<Real> state(TypeParam::shape(1, 1), parse_policy(std::string("eager(state=") + format + ")"));
    std::vector<Real> s, y;
    for (std::size_t t = 0; t < 64; ++t) {
      y.push_back(Advance(state, Exploding<Real>(), t, t + 1)[0]);
      s.push_back(state.checkpoint(0)[0]);
    }
    // |S_43| = 2^129 / 3 is within the range of fp32 and bf16 and |S_44| is not; 2^18 / 3 is beyond that of fp16. Float
    // overflows in the step itself, double only when it is stored.
    const bool half = std::string(format) == "fp16", stored = half || !narrow;
    const std::size_t step = half ? 5 : 43;
    EXPECT_TRUE(std::isfinite(s[step - 1]));
    EXPECT_TRUE(std::isinf(s[step]));
    EXPECT_TRUE(std::isnan(s[step + 1]));
    const Event event{static_cast<std::int64_t>(step), 0};
    EXPECT_EQ(state.events().first_non_finite, event);
    EXPECT_EQ(state.events().overflows, stored ? 1 : 0);
    EXPECT_EQ(state.events().first_overflow, stored ? std::optional(event) : std::nullopt);
    // The output is read from the unrounded state: what float has none for is infinite, and not NaN.
    if (narrow && !half) {
      EXPECT_TRUE(std::isinf(y[step]));
    }
    if (half) {
      // S_5 = 10923 is stored to a multiple of 8, and 8 times what that is off by comes out.
      EXPECT_LE(std::abs(std::abs(y[step]) - 87381), 8 * 4);
    }
  }
}

// Beyond the range of float.
template <class Kind>
class StateExplodingInDouble : public testing::Test {};
using DoubleKinds = testing::Types<Kind<Recurrence::gated_delta, double>, Kind<Recurrence::kda, double>>;
TYPED_TEST_SUITE(StateExplodingInDouble, DoubleKinds);

TYPED_TEST(StateExplodingInDouble, AgreesWithExactArithmeticToRounding) {
  using Real = TypeParam::Real;
  const Wide right = (1 - pow(Wide(2), 192)) / 3;
  EXPECT_EQ(Exact(TypeParam::recurrence, Exploding<Real>()[0])[0], right);
  for (const char* order : {"sequential", "closed"}) {
    for (const int length : {1, 16}) {
      State<Real> state(TypeParam::shape(1, 1), parse_policy(Replays(length, "exact", order)));
      const Real y = Advance(state, Exploding<Real>(), 0, 64).back();
      EXPECT_EQ(y, state.checkpoint(0)[0]);
      // Values below 2^53 are whole numbers and exact. Each of the 46 later steps rounds the readout, u and the sum;
      // u = -9 S weighs an error 9/8 of the result, so 4 half-ulps a step. A ring sums the 16 terms of a readout, of
      // alternating sign and together at most 9/7 of it, in place of one: 16 roundings for one.
      EXPECT_LE(abs((Wide(y) - right) / right), 2 * 46 * length * std::numeric_limits<double>::epsilon())
          << order << length;
    }
  }
}

TYPED_TEST(StateExploding, IsSeenWhenItIsStored) {
  using Real = TypeParam::Real;
  // 2^48 / 3 meets fp16 at the first flush, in the anchor or in the read copy.
  for (const char* states : {"state=fp16", "anchor=fp16, read=bf16", "anchor=fp32, read=fp16"}) {
    State<Real> state(TypeParam::shape(1, 1), parse_policy(std::string("replay(L=16, ") + states + ")"));
    Advance(state, Exploding<Real>(), 0, 15);
    EXPECT_EQ(state.events().overflows, 0);
    EXPECT_FALSE(state.events().first_non_finite);
    Advance(state, Exploding<Real>(), 15, 16);
    EXPECT_EQ(state.events().overflows, 1) << states;
    EXPECT_EQ(state.events().first_overflow, (Event{15, 0})) << states;
    EXPECT_EQ(state.events().first_non_finite, (Event{15, 0})) << states;
  }
}

TYPED_TEST(StateExploding, SaturatesAndIsCounted) {
  using Real = TypeParam::Real;
  // 3, -21 -> -20, 163 -> 160, then -1277 and from there on always more than 448.
  State<Real> state(TypeParam::shape(1, 1), parse_policy("eager(state=e4m3)"));
  Advance(state, Exploding<Real>(), 0, 64);
  EXPECT_EQ(state.events().saturations, 61);
  EXPECT_EQ(state.events().overflows, 0);  // what is stored is finite
  EXPECT_FALSE(state.events().first_overflow);
  EXPECT_FALSE(state.events().first_non_finite);
  EXPECT_EQ(std::abs(state.checkpoint(0)[0]), 448);
}

// ---- events
// ------------------------------------------------------------------------------------------------------------

TEST(StateEvents, CountEveryElementAndNameTheFirst) {
  // 40 rows, more than a state works on at once; no decay. Overflows of fp16: head 2 at step 5 in row 1, and head 1 at
  // step 3 in rows 39 and 20 and at step 5 in row 0; the columns are 2, so each row counts twice. The infinity stays
  // and is no second overflow.
  const RecurrenceShape shape{Recurrence::mamba2, 3, 1, 40, 2};
  Token<double> quiet{std::vector<double>(40, 0), {1, -1}, {1, 0}, {0}, 1, {}};
  Stream<double> stream(3, Repeat(quiet, 8));
  stream[2][5].v[1] = 7e4;
  stream[1][3].v[39] = -7e4;
  stream[1][3].v[20] = 7e4;
  stream[1][5].v[0] = 7e4;
  for (const char* text : {"eager(state=fp16)", "replay(L=2, state=fp16)", "replay(L=2, anchor=exact, read=fp16)",
                           "replay(L=2, state=fp16, order=sequential)"}) {
    for (const bool reversed : {false, true}) {
      SCOPED_TRACE(text);
      State<double> state(shape, parse_policy(text));
      std::vector<double> y(8 * 40);
      for (const std::int64_t i : {0, 1, 2}) {
        state.advance_head(reversed ? 2 - i : i, Inputs(stream, 0, 8), y.data(), 40);
      }
      // With a read copy the anchor stays finite, so each later flush overflows again: steps 3, 5, 7 of rows 39 and 20,
      // steps 5, 7 of the others.
      const bool copy = std::string(text).find("read") != std::string::npos;
      EXPECT_EQ(state.events().overflows, copy ? 2 * (3 * 2 + 2 * 2) : 8);
      EXPECT_EQ(state.events().first_overflow, (Event{3, 1}));
      EXPECT_EQ(state.events().first_non_finite, (Event{3, 1}));
    }
  }
}

// An infinity in a token stays where everyone can see it: in its output, in the state, in the events.
TYPED_TEST(StateDecays, KeepAnInfinityOfAToken) {
  using Real = TypeParam::Real;
  const auto shape = TypeParam::shape(2, 3, 2);
  Stream<Real> stream = RandomStream<Real>(shape, 20);
  stream[1][4].v[1] = std::numeric_limits<Real>::infinity();
  for (const std::string& text : PoliciesOfEveryKind()) {
    SCOPED_TRACE(text);
    State<Real> state(shape, parse_policy(text));
    const std::vector<Real> y = Advance(state, stream, 0, 20);
    // What shares a scale with it becomes NaN too: with the scale of a head its other row.
    const bool joined = text.find("nvfp4") != std::string::npos;
    if (text.find("tensor") != std::string::npos) continue;  // the other head becomes NaN too
    for (std::size_t t = 0; t < 20; ++t) {
      EXPECT_TRUE(std::isfinite(y[4 * t]) && std::isfinite(y[4 * t + 1])) << t;
      EXPECT_TRUE(std::isfinite(y[4 * t + 2]) || (joined && t > 4)) << t;
      EXPECT_EQ(std::isfinite(y[4 * t + 3]), t < 4) << t;
    }
    EXPECT_EQ(state.events().first_non_finite, (Event{4, 1}));
    EXPECT_FALSE(std::isfinite(state.effective(1)[3]));
    EXPECT_TRUE(std::isfinite(state.effective(1)[0]) || joined);
  }
}

TEST(StateEvents, MergeKeepsTheEarliest) {
  RangeEvents all;
  all.merge({2, Event{5, 1}, {}});
  all.merge({1, Event{5, 0}, Event{7, 3}});
  all.merge({0, {}, Event{6, 9}});
  EXPECT_EQ(all.overflows, 3);
  EXPECT_EQ(all.first_overflow, (Event{5, 0}));
  EXPECT_EQ(all.first_non_finite, (Event{6, 9}));
  EXPECT_TRUE(all.overflows_counted);
  all.merge({0, {}, {}, true, 7});
  all.merge({0, {}, {}, false, 2});
  EXPECT_EQ(all.saturations, 9);
  EXPECT_FALSE(all.overflows_counted);
  all.merge({});
  EXPECT_FALSE(all.overflows_counted);
}

}  // namespace
}  // namespace replayssm
