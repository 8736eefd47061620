// Small inputs whose right answer is known: tags that a state must hold, decays that must not cancel, gates that must
// not be rounded.

#include <cmath>

#include "tests/cuda/layer.h"
#include "tests/cuda/parity.h"

namespace replayssm::cuda::tests {
namespace {

constexpr Recurrence kRecurrences[] = {Recurrence::mamba2, Recurrence::gated_delta, Recurrence::kda};
constexpr float kNoDecay = -100;  // A_log: exp(-e^-100 ...) is 1
constexpr float kBig = 1 << 20;   // a key that the epsilon of its norm cannot change

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

std::vector<float> Fill(std::int64_t n, float value) { return std::vector<float>(size(n), value); }

/// Inputs for one row in which every head and group gets the same.
struct Same {
  std::vector<float> v, w, c, gate;
  float beta = 100;  // a sigmoid of 1

  TokenInputs of(const Case& setup) const {
    TokenInputs in;
    const auto repeat = [](const std::vector<float>& x, std::int64_t times, std::vector<float>& to) {
      for (std::int64_t i = 0; i < times; ++i) to.insert(to.end(), x.begin(), x.end());
    };
    repeat(v, setup.rows * setup.shape.heads, in.v);
    repeat(w, setup.rows * setup.shape.groups, in.w);
    repeat(c, setup.rows * setup.shape.groups, in.c);
    repeat(gate, setup.rows * setup.shape.heads, in.gate);
    if (is_delta(setup)) in.beta = Fill(setup.rows * setup.shape.heads, beta);
    return in;
  }
};

Parameters NoBias(const Case& setup, float A_log) {
  const auto& s = setup.shape;
  return {Fill(s.heads, A_log), Fill(s.heads * s.decay_dim(), 0), {}};
}

/// One rounding of fp32, relative: of sums, products, roots and quotients. expf is off by 5 of them at most and log1pf
/// by 4: 2 and 1 ulps from the rounded result on a GPU, as CUDA states, and less than an ulp in the C library.
constexpr double kRounding = 0x1p-24;

/// The raw value whose softplus is x.
float Raw(double x) { return static_cast<float>(x + std::log(-std::expm1(-x))); }

class Cases : public OnMachine {};
INSTANTIATE_TEST_SUITE_P(, Cases, testing::ValuesIn(machine_names()));

/// Token t: Mamba-2 adds 2^t to column 0 and reads it; the delta rule has key e_t and reads 1 / N of all columns.
Same Tag(const Case& setup, int t) {
  const auto& s = setup.shape;
  Same in{Fill(s.head_dim, std::ldexp(1.0F, t)), Fill(s.state_dim, 0), Fill(s.state_dim, 1), Fill(s.decay_dim(), 0)};
  if (is_delta(setup)) {
    in.w[size(t)] = kBig;
    in.c = Fill(s.state_dim, kBig);
  } else {
    in.w[0] = 1;
  }
  return in;
}

TEST_P(Cases, TagsAreAllHeld) {
  constexpr std::pair<Storage, int> kFits[] = {{Storage::fp32, 24}, {Storage::fp16, 11}, {Storage::bf16, 8}};
  int served = 0;
  for (const Recurrence recurrence : kRecurrences) {
    for (const auto& [storage, count] : kFits) {
      for (const int length : {1, 2, 3, 4, 16}) {
        for (const bool split : {false, true}) {
          for (const bool closed : {false, true}) {
            Case setup{.shape = {recurrence, 2, 1, 16, 64}, .length = length, .ring = Scalar::bf16, .closed = closed};
            setup.state = storage;
            if (split) setup.read = storage;
            setup.input = Scalar::bf16;
            setup.dt_min = setup.dt_max = 1;
            SCOPED_TRACE(setup.text());
            Layer layer(on(), setup, NoBias(setup, kNoDecay));
            if (!layer.served()) continue;
            ++served;
            const float unit = is_delta(setup) ? 1.0F / 64 : 1;
            for (int t = 0; t < count; ++t) {
              const float sum = (std::ldexp(1.0F, t + 1) - 1) * unit;
              EXPECT_EQ(layer.step(Tag(setup, t).of(setup)), Fill(32, sum)) << "token " << t;
            }
          }
        }
      }
    }
  }
  EXPECT_GT(served, 0);
}

// The ring is full of NaN where it is dead. An infinity that a token brings stays in sight.
TEST_P(Cases, AnInfinityOfALiveTokenStays) {
  for (const int length : {1, 4}) {
    Case setup{.shape = {Recurrence::mamba2, 1, 1, 16, 64}, .length = length, .ring = Scalar::bf16};
    setup.dt_min = setup.dt_max = 1;
    Layer layer(on(), setup, NoBias(setup, kNoDecay));
    for (int t = 0; t < 9; ++t) {
      Same in = Tag(setup, t);
      in.w = Fill(64, 1);
      in.c = Fill(64, 1);
      if (t == 2) in.v = Fill(16, INFINITY);
      const float first = 64 * (std::ldexp(1.0F, t + 1) - 1);
      EXPECT_EQ(layer.step(in.of(setup)), Fill(16, t < 2 ? first : INFINITY)) << "token " << t;
    }
  }
}

// One channel, a, forgets in a token what the other, b, keeps for ever. Roundings of (a + b) k, which stays below 1:
//   A readout has at most `length` positive terms, each with two keys (2 each), three products and a decay, which is
//   1 or else at most e^-8 of its term: length + 10. u takes half of that and of a difference, b takes k times u, with
//   the roundings of u k and of a sum up to sqrt(2): 0.36 length + 7. A flush sums `length` terms of each column: 2
//   length once. An error of b comes out of the next step as 1 - k^2 / 2 = 3/4 of it, and a takes another quarter,
//   before it forgets: 4 and 2 times what a step adds, and k times these: 4.3 (0.36 length + 7) + 1.4 length < 3 length
//   + 31. The output is one more readout, scaled by N^-1/2 (3): length + 13.
TEST_P(Cases, DecaysThatDifferWidelyBetweenColumns) {
  int served = 0;
  for (const auto& [P, N] : {std::pair{1, 2}, {16, 64}}) {
    for (const int length : {1, 5, 16, 32}) {
      for (const bool split : {false, true}) {
        Case setup{.shape = {Recurrence::kda, 1, 1, P, N}, .length = length, .closed = split};
        if (split) setup.read = Storage::fp32;
        SCOPED_TRACE(setup.text());
        Layer layer(on(), setup, NoBias(setup, 0));
        if (!layer.served()) continue;
        ++served;
        Same in{Fill(P, 1), Fill(N, 0), Fill(N, 0), Fill(N, -200)};
        in.w[0] = in.w[1] = in.c[0] = in.c[1] = kBig;
        in.gate[0] = Raw(8);
        in.beta = 0;  // a sigmoid of 1/2
        double a = 0, b = 0;
        const double k = std::sqrt(0.5), allowed = (4 * length + 44) * kRounding / std::sqrt(N);
        for (int t = 0; t < 32; ++t) {
          a *= std::exp(-8.0);
          const double u = 0.5 * (1 - (a + b) * k);
          a += u * k;
          b += u * k;
          const double y = (a + b) * k / std::sqrt(double{static_cast<float>(N)});
          for (const float found : layer.step(in.of(setup))) EXPECT_NEAR(found, y, allowed) << "token " << t;
        }
      }
    }
  }
  EXPECT_GT(served, 0);
}

TEST_P(Cases, ATokenOfNoTimeLeavesTheStateAsItIs) {
  // dt in roundings of what is at least 1: its raw value, up to 1.9, which softplus passes on by up to 0.9: 2; log1p of
  // e^-z, at most 0.46 and off by 9: 5; their sum. Nothing else rounds: what was is forgotten, and one column is read.
  constexpr double kAllowed = (2 + 5 + 1) * kRounding;
  for (const int length : {1, 11}) {  // both tokens flush, or one of them
    Case setup{.shape = {Recurrence::mamba2, 1, 1, 16, 64}, .length = length};
    SCOPED_TRACE(setup.text());
    Layer layer(on(), setup, NoBias(setup, std::log(4e7F)));
    Same in{Fill(16, 1), Fill(64, 1), Fill(64, 0), Fill(1, 0)};
    for (int i = 0; i < 64; ++i) {
      const double dt = 1 + i / 64.0;
      in.gate[0] = Raw(dt);
      in.c.assign(64, 0);
      in.c[size(i)] = 1;
      for (const float y : layer.step(in.of(setup))) EXPECT_NEAR(y, dt, kAllowed * dt) << "token " << i;
    }
    const auto before = layer.state(layer.slot.here[0]);
    in.gate[0] = -200;
    for (int i = 0; i < 2; ++i) {
      for (const float y : layer.step(in.of(setup))) EXPECT_NEAR(y, 1 + 63 / 64.0, kAllowed * (1 + 63 / 64.0));
      if (length == 1) {
        EXPECT_EQ(layer.state(layer.slot.here[0]), before);
      }
    }
  }
}

// Differences of prefix sums would lose the small decays that follow a large one.
TEST_P(Cases, DecaysAreSumsOfWhatFollows) {
  int served = 0;
  for (const double large : {4e7, 300.0}) {
    for (const int length : {1, 2, 3, 8}) {
      Case setup{.shape = {Recurrence::mamba2, 1, 1, 16, 64}, .length = length};
      SCOPED_TRACE(setup.text());
      Layer layer(on(), setup, NoBias(setup, 0));
      if (!layer.served()) continue;
      ++served;
      layer.set_state(layer.slot.here[0], Fill(16 * 64, 1));
      Same in{Fill(16, static_cast<float>(1 / large)), Fill(64, 0), Fill(64, 0), {Raw(large)}};
      in.w[0] = in.c[0] = 1;
      layer.step(in.of(setup));
      in.v = Fill(16, 0);
      in.gate[0] = Raw(0.3);
      layer.step(in.of(setup));
      // In roundings: 2 of the product that the state was; of dt the raw value 1, e^z 5, which log1p passes on by 0.9,
      // and its own 4: 10; with e^A_log 5 and the product 1 the exponent is off by 16 times 0.3, and the decay by 5
      // more. Two of them, 20, and two products: 24.
      const double right = std::exp(-0.6);
      for (const float y : layer.step(in.of(setup))) EXPECT_NEAR(y, right, 24 * kRounding * right);
    }
  }
  EXPECT_GT(served, 0);
}

/// The first tokens, counted from 1, whose stored state has an infinity and a NaN.
std::pair<int, int> FirstNonFinite(Machine& machine, Storage storage) {
  Case setup{.shape = {Recurrence::gated_delta, 1, 1, 1, 1}, .state = storage, .beta_scale = 18};
  Layer layer(machine, setup, NoBias(setup, kNoDecay));
  const Same in{{1.0F / 3}, {kBig}, {kBig}, {0}, 0};  // beta = 9: S <- 3 - 8 S
  int infinite = 0, nan = 0;
  for (int t = 1; t <= 64; ++t) {
    layer.step(in.of(setup));
    const float s = layer.state(layer.slot.here[0])[0];
    if (std::isinf(s) && infinite == 0) infinite = t;
    if (std::isnan(s) && nan == 0) nan = t;
  }
  return {infinite, nan};
}

TEST_P(Cases, FirstStepThatIsNotFinite) {
  if (GetParam().starts_with("fast")) GTEST_SKIP() << "no fast kernel for a state of one element";
  EXPECT_EQ(FirstNonFinite(on(), Storage::fp32), (std::pair{44, 45}));
  EXPECT_EQ(FirstNonFinite(on(), Storage::bf16), (std::pair{44, 45}));
  EXPECT_EQ(FirstNonFinite(on(), Storage::fp16), (std::pair{6, 7}));
}

TEST_P(Cases, GatesAreNotRounded) {
  // sigmoid(3), not that of bf16 (0.953125).
  Case delta{.shape = {Recurrence::gated_delta, 1, 1, 16, 64}};
  Layer one(on(), delta, NoBias(delta, kNoDecay));
  Same in{Fill(16, 1), Fill(64, 0), Fill(64, 1), {0}, 3};
  in.w[0] = kBig;
  one.step(in.of(delta));
  // e^-3 is 0.05 of 1 + e^-3: 0.25 of a rounding, then the sum and the quotient.
  const double sigmoid = 1 / (1 + std::exp(-3.0));
  EXPECT_NEAR(one.state(one.slot.here[0])[0], sigmoid, 2.25 * kRounding * sigmoid);

  // A_log = ln 16, dt = 0.01, 100 steps: e^-16; a bf16 A_log would make it 1.117 times as much. In roundings: A_log,
  // above 2, is off by 2 as an exponent, e^A_log by 5, dt and the product by 1: 9 of the exponent 0.16, which makes 1.5
  // of the decay; e^g 5, and the state's product 1, in each of 100 steps.
  Case mamba2{.shape = {Recurrence::mamba2, 1, 1, 16, 64}};
  mamba2.dt_min = mamba2.dt_max = 0.01F;
  Layer two(on(), mamba2, NoBias(mamba2, std::log(16.0F)));
  two.set_state(two.slot.here[0], Fill(16 * 64, 1));
  const Same nothing{Fill(16, 0), Fill(64, 0), Fill(64, 1), {0}};
  for (int t = 0; t < 100; ++t) two.step(nothing.of(mamba2));
  EXPECT_NEAR(two.state(two.slot.here[0])[0], std::exp(-16.0), std::exp(-16.0) * 100 * 7.5 * kRounding);
}

// The epsilon is added to the sum of squares, not to their mean.
TEST_P(Cases, SmallAndZeroKeys) {
  for (const Recurrence recurrence : {Recurrence::gated_delta, Recurrence::kda}) {
    Case setup{.shape = {recurrence, 1, 1, 16, 128}};
    Same in{Fill(16, 1), Fill(128, 1e-4F), Fill(128, 1), Fill(setup.shape.decay_dim(), 0)};
    Layer small(on(), setup, NoBias(setup, kNoDecay));
    small.step(in.of(setup));
    // 128 squares and sums in whatever order, the epsilon, in fp32 itself, and its sum: positive terms, of whose
    // roundings the root halves; root, quotient.
    const double x = 1e-4F, right = x / std::sqrt(128 * x * x + 1e-6);
    for (const float k : small.state(small.slot.here[0])) EXPECT_NEAR(k, right, (130 / 2.0 + 2) * kRounding * right);
    in.w = Fill(128, 0);
    Layer zero(on(), setup, NoBias(setup, kNoDecay));
    EXPECT_EQ(zero.step(in.of(setup)), Fill(16, 0));
    EXPECT_EQ(zero.state(zero.slot.here[0]), Fill(16 * 128, 0));
  }
}

// Rows of a state are the head dimension, columns the state dimension: S c reads along a row.
TEST_P(Cases, LayoutIsHeadDimByStateDim) {
  if (GetParam().starts_with("fast")) GTEST_SKIP() << "no fast kernel for a state of four elements";
  for (const Recurrence recurrence : kRecurrences) {
    for (const int length : {1, 2}) {
      for (const auto& state : {std::vector<float>{1, 2, 3, 4}, {1, 2, 3, 4, 5, 6}}) {
        const auto P = static_cast<std::int64_t>(state.size()) / 2;
        Case setup{.shape = {recurrence, 1, 1, P, 2}, .length = length};
        Layer layer(on(), setup, NoBias(setup, kNoDecay));
        layer.set_state(layer.slot.here[0], state);
        const bool delta = is_delta(setup);
        const Same in{Fill(P, 0), {0, 0}, {delta ? kBig : 1, 0}, Fill(setup.shape.decay_dim(), 0)};
        const float scale = delta ? 1 / std::sqrt(2.0F) : 1;
        const auto y = layer.step(in.of(setup));
        for (std::size_t p = 0; p < y.size(); ++p) EXPECT_FLOAT_EQ(y[p], scale * static_cast<float>(2 * p + 1));
      }
    }
  }
}

TEST_P(Cases, MoreHeadsThanAGridHasAlongY) {
  if (GetParam().starts_with("fast")) GTEST_SKIP() << "no fast kernel for states of 4 x 4";
  EXPECT_TRUE(CheckParity(on(), {.shape = {Recurrence::gated_delta, 64, 16, 4, 4}, .rows = 1024}, 1));
}

}  // namespace
}  // namespace replayssm::cuda::tests
