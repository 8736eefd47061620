// Speculative steps of published serving kernels, 10 windows of 4 tokens for 2 sequences, computed on a GPU: see
// tests/data/README.md. Cursors and flushes have to be theirs exactly, outputs and checkpoints up to the roundings that
// those kernels make. The checkpoints are also held against binary64, by sums over each flush.

#include "tests/cuda/windows.h"
#include "tests/support/goldens.h"

namespace replayssm::cuda::tests {
namespace {

using Vec = std::vector<double>;

constexpr std::size_t kRounds = 10, kRows = 2, kTokens = 4, kHeads = 4;
/// One kernel's files.
struct File {
  SafetensorsFile plain, spec;
  std::vector<float> meta = ReadAs<float>(spec, "meta"), accepted = ReadAs<float>(spec, "accepted"),
                     cursor_flush = ReadAs<float>(spec, "cursor_flush"), y = ReadAs<float>(spec, "y"),
                     checkpoint = ReadAs<float>(spec, "checkpoint"), state0 = ReadAs<float>(plain, "state0"),
                     dt_bias = ReadAs<float>(plain, "dt_bias");

  explicit File(const std::string& name)
      : plain(std::string(REPLAYSSM_TEST_DATA "/kernels/") + name + ".safetensors"),
        spec(std::string(REPLAYSSM_TEST_DATA "/kernels/") + name + "_spec.safetensors") {}
  int taken(std::size_t round, std::size_t r) const { return static_cast<int>(accepted[round * kRows + r]); }
  int cursor(std::size_t round, std::size_t r) const { return static_cast<int>(cursor_flush[round * 4 + r]); }
  bool flushes(std::size_t round, std::size_t r) const { return cursor_flush[round * 4 + 2 + r] != 0; }
  Case setup(const RecurrenceShape& shape) const {
    Case out{.shape = shape, .ring = Scalar::bf16, .input = Scalar::bf16, .rows = kRows};
    out.window = static_cast<std::int64_t>(meta[0]);
    out.committed = static_cast<std::int64_t>(meta[1]);
    return out;
  }
  /// Runs all windows; y of all tokens and the checkpoints of all rows.
  std::pair<std::vector<float>, std::vector<float>> decode(Machine& machine, const Case& setup,
                                                           const Parameters& parameters,
                                                           const std::vector<TokenInputs>& rounds) const {
    Windows layer(machine, setup, parameters);
    for (std::size_t r = 0; r < kRows; ++r) layer.set_state(layer.slot.here[r], Part(state0, r, kRows));
    std::vector<float> outputs, checkpoints;
    for (std::size_t round = 0; round < kRounds; ++round) {
      std::vector<std::vector<float>> before;
      for (std::size_t r = 0; r < kRows; ++r) {
        EXPECT_EQ(layer.held_by(layer.slot.here[r]), cursor(round, r)) << "round " << round << ", row " << r;
        before.push_back(layer.state(layer.slot.here[r]));
      }
      const auto found = layer.verify(rounds[round], {4, 4});
      outputs.insert(outputs.end(), found.begin(), found.end());
      for (std::size_t r = 0; r < kRows; ++r) {
        EXPECT_EQ(layer.state(layer.slot.here[r]) != before[r], flushes(round, r))
            << "round " << round << ", row " << r;
      }
      EXPECT_EQ(layer.commit({taken(round, 0), taken(round, 1)}), 0);
    }
    for (std::size_t r = 0; r < kRows; ++r) {
      const auto state = layer.state(layer.slot.here[r]);
      checkpoints.insert(checkpoints.end(), state.begin(), state.end());
    }
    return {outputs, checkpoints};
  }
};

class WindowGolden : public OnVerifier {};
INSTANTIATE_TEST_SUITE_P(, WindowGolden, testing::ValuesIn(machine_names()));

TEST_P(WindowGolden, Mamba2) {
  const File file("mamba2");
  const auto x = ReadAs<float>(file.spec, "x"), B = ReadAs<float>(file.spec, "B"), C = ReadAs<float>(file.spec, "C"),
             dt = ReadAs<float>(file.spec, "dt"), A = ReadAs<float>(file.plain, "A");
  Parameters parameters{{}, file.dt_bias, ReadAs<float>(file.plain, "D")};
  for (const float a : A) parameters.A_log.push_back(std::log(-a));
  std::vector<TokenInputs> rounds;
  for (std::size_t i = 0; i < kRounds; ++i) {
    rounds.push_back({Part(x, i, kRounds), Part(B, i, kRounds), Part(C, i, kRounds), Part(dt, i, kRounds), {}});
  }

  Vec truth(file.state0.begin(), file.state0.end());
  for (std::size_t i = 0; i < truth.size(); ++i) {
    const std::size_t n = i % 128, p = i / 128 % 64, head = i / 8192, h = head % kHeads, r = head / kHeads;
    std::vector<std::size_t> tokens;
    for (std::size_t round = 0; round < kRounds; ++round) {
      if (file.flushes(round, r)) {
        double sum = 0, decays = 0;
        for (; !tokens.empty(); tokens.pop_back()) {
          const std::size_t t = tokens.back();
          const double step = std::log1p(std::exp(double{dt[t * 4 + h]} + double{file.dt_bias[h]}));
          sum += double{x[(t * 4 + h) * 64 + p]} * std::exp(decays) * step * double{B[(t * 2 + h / 2) * 128 + n]};
          decays += double{A[h]} * step;
        }
        truth[i] = std::exp(decays) * truth[i] + sum;
      }
      for (int t = 0; t < file.taken(round, r); ++t) {
        tokens.push_back((round * kRows + r) * kTokens + static_cast<std::size_t>(t));
      }
    }
  }

  Case setup = file.setup({Recurrence::mamba2, 4, 2, 64, 128});
  for (const bool split : {false, true}) {
    if (split) setup.read = Storage::fp32;
    const auto [y, checkpoint] = file.decode(on(), setup, parameters, rounds);
    // The published kernel rounds the weights of the records to bf16, and y.
    EXPECT_LE(Distance(y, file.y), 2 * kHalfUlp * Norm(y));
    EXPECT_LE(Distance(checkpoint, file.checkpoint), kHalfUlp * Norm(truth));
    // In roundings: of A_log in fp32, 1, and e^A_log, dt and their products 15 of an exponent; as a share of what is
    // left, whose e^-x x is at most 1/e of it, 6; e^g 5 and a product for each of the 8 records that decay: 48; and of
    // dt, u and the sums 17 at most.
    EXPECT_LE(Distance(checkpoint, truth), (8 * (6 + 5 + 1) + 17) * std::ldexp(Norm(truth), -24));
  }
}

TEST_P(WindowGolden, GatedDeltaNet) {
  const File file("gdn");
  const auto qkv = ReadAs<float>(file.spec, "qkv"), a = ReadAs<float>(file.spec, "a"),
             b = ReadAs<float>(file.spec, "b");
  const Parameters parameters{ReadAs<float>(file.plain, "A_log"), file.dt_bias, {}};
  std::vector<TokenInputs> rounds;
  for (std::size_t i = 0; i < kRounds; ++i) {
    TokenInputs in;
    for (std::size_t t = 0; t < kRows * kTokens; ++t) {
      const auto row = Part(qkv, i * kRows * kTokens + t, kRounds * kRows * kTokens);
      in.c.insert(in.c.end(), row.begin(), row.begin() + 256);
      in.w.insert(in.w.end(), row.begin() + 256, row.begin() + 512);
      in.v.insert(in.v.end(), row.begin() + 512, row.end());
    }
    in.gate = Part(a, i, kRounds);
    in.beta = Part(b, i, kRounds);
    rounds.push_back(in);
  }

  const RecurrenceShape shape{Recurrence::gated_delta, 4, 2, 128, 128};
  for (const bool split : {false, true}) {
    Case setup = file.setup(shape);
    setup.closed = split;
    if (split) setup.read = Storage::fp32;
    const auto [y, checkpoint] = file.decode(on(), setup, parameters, rounds);
    // Roundings to bf16, of which some are ours too: k, u, their weights, the stored state; and y.
    EXPECT_LE(Distance(y, file.y), 5 * kHalfUlp * Norm(y));
    EXPECT_LE(Distance(checkpoint, file.checkpoint), 4 * kHalfUlp * Norm(checkpoint));
  }
  // The published kernel stores states rounded to bf16. With its formats what is left are roundings within a window.
  Case close = file.setup(shape);
  close.closed = false;
  close.state = Storage::bf16;
  const auto [y, checkpoint] = file.decode(on(), close, parameters, rounds);
  EXPECT_LE(Distance(y, file.y), 2 * kHalfUlp * Norm(y));
  EXPECT_LE(Distance(checkpoint, file.checkpoint), kHalfUlp * Norm(checkpoint));
}

}  // namespace
}  // namespace replayssm::cuda::tests
