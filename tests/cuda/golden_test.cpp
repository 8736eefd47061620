// Outputs and states of published serving kernels, computed on a GPU: see tests/data/README.md. Where those kernels
// round in places of their own, an emulation in binary64 does the same and comes down to their arithmetic's error.

#include <algorithm>
#include <cmath>

#include "tests/cuda/layer.h"
#include "tests/support/goldens.h"

namespace replayssm::cuda::tests {
namespace {

using Vec = std::vector<double>;

constexpr int kTokens = 40, kLength = 8;
constexpr std::int64_t kRows = 2;

/// Half an ulp of fp32 of every value.
template <class A>
double Rounding(const A& a) {
  return std::ldexp(Norm(a), -24);
}

double Bf16(double x) { return round_to(format_of(Scalar::bf16).element, static_cast<float>(x)); }

/// y of all tokens and the states of all rows.
struct Decoded {
  std::vector<float> y, states;
};

Decoded Decode(Layer& layer, const std::vector<float>& from, const std::vector<TokenInputs>& tokens) {
  for (std::size_t r = 0; r < kRows; ++r) layer.set_state(layer.slot.here[r], Part(from, r, kRows));
  Decoded run;
  for (const TokenInputs& in : tokens) {
    const auto y = layer.step(in);
    run.y.insert(run.y.end(), y.begin(), y.end());
  }
  for (std::size_t r = 0; r < kRows; ++r) {
    const auto state = layer.state(layer.slot.here[r]);
    run.states.insert(run.states.end(), state.begin(), state.end());
  }
  return run;
}

/// Each is the other rounded to bf16, up to the error of fp32 sums of some hundred terms.
void ExpectRounded(const std::vector<float>& y, const std::vector<float>& golden) {
  ASSERT_EQ(y.size(), golden.size());
  float largest = 0;
  for (const float value : y) largest = std::max(largest, std::abs(value));
  int wrong = 0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    wrong += !(std::abs(double{y[i]} - double{golden[i]}) <=
               kHalfUlp * std::abs(double{y[i]}) + std::ldexp(double{largest}, -18));
  }
  EXPECT_EQ(wrong, 0) << "outputs beyond the rounding to bf16, of " << y.size();
}

class Golden : public OnMachine {};
INSTANTIATE_TEST_SUITE_P(, Golden, testing::ValuesIn(machine_names()));

// ---- Mamba-2: 4 heads, 64 x 128, 2 groups ---------------------------------------------------------------------------

struct MambaFile {
  SafetensorsFile file{REPLAYSSM_TEST_DATA "/kernels/mamba2.safetensors"};
  Case setup{.shape = {Recurrence::mamba2, 4, 2, 64, 128}, .ring = Scalar::bf16, .input = Scalar::bf16, .rows = kRows};
  Parameters parameters{{}, ReadAs<float>(file, "dt_bias"), ReadAs<float>(file, "D")};
  std::vector<float> x = ReadAs<float>(file, "x"), B = ReadAs<float>(file, "B"), C = ReadAs<float>(file, "C"),
                     dt = ReadAs<float>(file, "dt"), A = ReadAs<float>(file, "A"),
                     state0 = ReadAs<float>(file, "state0");

  MambaFile() {
    for (const float a : A) parameters.A_log.push_back(std::log(-a));
  }
  std::vector<TokenInputs> tokens() const {
    std::vector<TokenInputs> out;
    for (std::size_t t = 0; t < kTokens; ++t) {
      out.push_back({Part(x, t, kTokens), Part(B, t, kTokens), Part(C, t, kTokens), Part(dt, t, kTokens), {}});
    }
    return out;
  }
  /// The final states in binary64 by flushes of `length` tokens; `rounded`: e^{...} dt B in bf16, as the published
  /// replay has it.
  Vec states(int length, bool rounded) const {
    Vec s(state0.begin(), state0.end());
    for (std::size_t i = 0; i < s.size(); ++i) {
      const std::size_t n = i % 128, head = i / (64 * 128), h = head % 4, r = head / 4;
      for (int end = length; end <= kTokens; end += length) {
        double sum = 0, decays = 0;
        for (int t = end - 1; t >= end - length; --t) {
          const std::size_t at = static_cast<std::size_t>(t) * 2 + r;
          const double z = double{dt[at * 4 + h]} + double{parameters.dt_bias[h]};
          const double step = std::log1p(std::exp(z)),
                       w = std::exp(decays) * step * double{B[(at * 2 + h / 2) * 128 + n]};
          sum += double{x[(at * 4 + h) * 64 + i / 128 % 64]} * (rounded ? Bf16(w) : w);
          decays += double{A[h]} * step;
        }
        s[i] = std::exp(decays) * s[i] + sum;
      }
    }
    return s;
  }
};

TEST_P(Golden, Mamba2) {
  MambaFile golden;
  const Vec truth = golden.states(1, false);
  const auto published = ReadAs<float>(golden.file, "eager_f32_state"),
             replayed = ReadAs<float>(golden.file, "replay_output_only_L8_f32_state");
  const double fair = 2 * Distance(published, truth) + Rounding(truth);
  {
    Layer layer(on(), golden.setup, golden.parameters);
    const Decoded run = Decode(layer, golden.state0, golden.tokens());
    EXPECT_LE(Distance(run.states, truth), fair);
    ExpectRounded(run.y, ReadAs<float>(golden.file, "eager_f32_y"));
  }
  for (const bool split : {false, true}) {
    Case setup = golden.setup;
    setup.length = kLength;
    if (split) setup.read = Storage::fp32;
    Layer layer(on(), setup, golden.parameters);
    const Decoded run = Decode(layer, golden.state0, golden.tokens());
    EXPECT_LE(Distance(run.states, truth), fair) << "a bf16 ring loses nothing of bf16 inputs";
    // The published kernels round the weights of the records to bf16, and y.
    for (const char* name : {"replay_output_only_L8_f32_y", "replay_state_and_output_L8_f32_y"}) {
      EXPECT_LE(Distance(run.y, ReadAs<float>(golden.file, name)), 2 * kHalfUlp * Norm(run.y)) << name;
    }
    EXPECT_LE(Distance(run.states, replayed), kHalfUlp * Norm(truth));
  }
  EXPECT_LE(Distance(replayed, golden.states(kLength, true)), kExplained * Distance(replayed, truth) + fair)
      << "what the published flush does differently is the rounding of its weights";
}

// ---- Gated DeltaNet: 4 heads, 2 key heads, 128 x 128 ----------------------------------------------------------------

struct DeltaFile {
  SafetensorsFile file{REPLAYSSM_TEST_DATA "/kernels/gdn.safetensors"};
  Case setup{.shape = {Recurrence::gated_delta, 4, 2, 128, 128}, .ring = Scalar::bf16, .rows = kRows};
  Parameters parameters{ReadAs<float>(file, "A_log"), ReadAs<float>(file, "dt_bias"), {}};
  std::vector<float> qkv = ReadAs<float>(file, "qkv"), a = ReadAs<float>(file, "a"), b = ReadAs<float>(file, "b"),
                     state0 = ReadAs<float>(file, "state0");

  /// `rounded`: inputs that give sigmoid(b) rounded to bf16.
  std::vector<TokenInputs> tokens(bool rounded) const {
    std::vector<TokenInputs> out;
    for (std::size_t t = 0; t < kTokens; ++t) {
      TokenInputs in;
      for (std::size_t r = 0; r < kRows; ++r) {
        const auto row = Part(qkv, t * kRows + r, kTokens * kRows);
        in.c.insert(in.c.end(), row.begin(), row.begin() + 256);
        in.w.insert(in.w.end(), row.begin() + 256, row.begin() + 512);
        in.v.insert(in.v.end(), row.begin() + 512, row.end());
      }
      in.gate = Part(a, t, kTokens);
      in.beta = Part(b, t, kTokens);
      for (float& z : in.beta) {
        const double beta = Bf16(1 / (1 + std::exp(-double{z})));
        if (rounded) z = static_cast<float>(std::log(beta / (1 - beta)));
      }
      out.push_back(in);
    }
    return out;
  }

  /// The final states in binary64. The published kernels round sigmoid(b) to bf16; their replay rebuilds the state at
  /// every token from records of bf16 u and k, with e^{...} u rounded to bf16 once more.
  Vec states(bool bf16_beta, bool replay) const {
    Vec s(state0.begin(), state0.end());
    for (std::size_t head = 0; head < 4 * kRows; ++head) {
      const std::size_t h = head % 4, r = head / 4;
      Vec base(s.begin() + static_cast<std::ptrdiff_t>(head * 16384),
               s.begin() + static_cast<std::ptrdiff_t>((head + 1) * 16384)),
          now = base;
      std::vector<Vec> us, ks;
      Vec gs;
      for (std::size_t t = 0; t < kTokens; ++t) {
        const float* row = &qkv[(t * kRows + r) * 1024];
        const std::size_t at = (t * kRows + r) * 4 + h;
        Vec k(row + 256 + h / 2 * 128, row + 384 + h / 2 * 128), u(128, 0.0);
        double sum = 1e-6;
        for (const double value : k) sum += value * value;
        for (double& value : k) value /= std::sqrt(sum);
        const double sigmoid = 1 / (1 + std::exp(-double{b[at]})), beta = bf16_beta ? Bf16(sigmoid) : sigmoid;
        const double g = -std::exp(double{parameters.A_log[h]}) *
                         std::log1p(std::exp(double{a[at]} + double{parameters.dt_bias[h]}));
        if (replay) now = rebuilt(base, us, ks, gs);
        for (std::size_t i = 0; i < now.size(); ++i) {
          now[i] *= std::exp(g);
          u[i / 128] += now[i] * k[i % 128];
        }
        for (std::size_t p = 0; p < 128; ++p) u[p] = beta * (double{row[512 + h * 128 + p]} - u[p]);
        for (std::size_t i = 0; i < now.size(); ++i) now[i] += u[i / 128] * k[i % 128];
        us.push_back(u);
        ks.push_back(k);
        gs.push_back(g);
        for (double& value : us.back()) value = Bf16(value);
        for (double& value : ks.back()) value = Bf16(value);
        if (us.size() < kLength) continue;
        base = now;
        us.clear();
        ks.clear();
        gs.clear();
      }
      std::copy(now.begin(), now.end(), s.begin() + static_cast<std::ptrdiff_t>(head * 16384));
    }
    return s;
  }

  static Vec rebuilt(const Vec& base, const std::vector<Vec>& us, const std::vector<Vec>& ks, const Vec& gs) {
    Vec s = base;
    double decays = 0;
    std::vector<Vec> weighted(us.size());
    for (std::size_t j = us.size(); j-- > 0;) {
      for (const double value : us[j]) weighted[j].push_back(Bf16(std::exp(decays) * value));
      decays += gs[j];
    }
    for (double& value : s) value *= std::exp(decays);
    for (std::size_t j = 0; j < us.size(); ++j) {
      for (std::size_t i = 0; i < s.size(); ++i) s[i] += weighted[j][i / 128] * ks[j][i % 128];
    }
    return s;
  }
};

TEST_P(Golden, GatedDeltaNet) {
  DeltaFile golden;
  const Vec truth = golden.states(false, false), emulated = golden.states(true, false);
  const auto published = ReadAs<float>(golden.file, "eager_f32_state"),
             replayed = ReadAs<float>(golden.file, "replay_L8_f32_state");
  EXPECT_LE(Distance(published, emulated), kExplained * Distance(published, truth))
      << "what the published kernel does differently is the rounding of sigmoid(b)";
  const double fair = 2 * Distance(published, emulated) + Rounding(truth);
  {
    Layer layer(on(), golden.setup, golden.parameters);
    EXPECT_LE(Distance(Decode(layer, golden.state0, golden.tokens(false)).states, truth), fair);
  }
  {
    // The inputs are logarithms in fp32, which move sigmoid(b) by a rounding or so.
    Layer layer(on(), golden.setup, golden.parameters);
    const Decoded run = Decode(layer, golden.state0, golden.tokens(true));
    EXPECT_LE(Distance(run.states, emulated), fair + 4 * Rounding(truth));
    ExpectRounded(run.y, ReadAs<float>(golden.file, "eager_f32_y"));
  }
  for (const bool split : {false, true}) {
    Case setup = golden.setup;
    setup.length = kLength;
    setup.closed = split;
    if (split) setup.read = Storage::fp32;
    Layer layer(on(), setup, golden.parameters);
    const Decoded run = Decode(layer, golden.state0, golden.tokens(false));
    // Roundings to bf16 that only the published kernel has, or has elsewhere: beta, records, their weights; and y.
    EXPECT_LE(Distance(run.states, replayed), 3 * kHalfUlp * Norm(truth));
    EXPECT_LE(Distance(run.y, ReadAs<float>(golden.file, "replay_L8_f32_y")), 4 * kHalfUlp * Norm(run.y));
  }
  EXPECT_LE(Distance(replayed, golden.states(true, true)), kExplained * Distance(replayed, truth) + fair)
      << "what the published replay does differently is the rounding of beta, u, k and the weights of the records";
}

}  // namespace
}  // namespace replayssm::cuda::tests
