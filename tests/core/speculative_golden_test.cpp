// Speculative steps of published serving kernels, 10 windows of 4 tokens for 2 sequences, computed on a GPU: see
// tests/data/README.md. Cursors and flushes have to be theirs exactly; outputs and checkpoints up to the roundings that
// those kernels make, which an emulation in binary64 makes too and then comes down to their arithmetic's error.

#include <gtest/gtest.h>

#include <cmath>

#include "core/delta_rule.h"
#include "core/format.h"
#include "core/mamba2.h"
#include "core/speculative.h"
#include "tests/support/goldens.h"

namespace replayssm {
namespace {

using Vec = std::vector<double>;

constexpr std::int64_t kRounds = 10, kSequences = 2, kWindow = 4, kHeads = 4;
std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

double Bf16(double x) { return round_to(parse_format("bf16").element, static_cast<float>(x)); }

/// One kernel's file: what was accepted, cursors, flushes.
struct File {
  SafetensorsFile plain, spec;
  Vec meta = ReadAs<double>(spec, "meta"), accepted = ReadAs<double>(spec, "accepted"),
      cursor_flush = ReadAs<double>(spec, "cursor_flush"), y = ReadAs<double>(spec, "y"),
      checkpoint = ReadAs<double>(spec, "checkpoint"), state0 = ReadAs<double>(plain, "state0"),
      dt_bias = ReadAs<double>(plain, "dt_bias");

  explicit File(const std::string& name)
      : plain(std::string(REPLAYSSM_TEST_DATA "/kernels/") + name + ".safetensors"),
        spec(std::string(REPLAYSSM_TEST_DATA "/kernels/") + name + "_spec.safetensors") {}
  std::int64_t taken(std::int64_t round, std::int64_t sequence) const {
    return static_cast<std::int64_t>(accepted[size(round * kSequences + sequence)]);
  }
  /// The field, 0: cursor before the window, 1: whether it flushed.
  std::int64_t cursor(std::int64_t round, std::int64_t field, std::int64_t sequence) const {
    return static_cast<std::int64_t>(cursor_flush[size((round * 2 + field) * kSequences + sequence)]);
  }
};

struct Decoded {
  Vec y, checkpoint;
};

/// Runs all windows; `inputs(round, sequence)` are those of one, `D x` is added to what is read where there is one.
template <class InputsOf>
Decoded Decode(const File& file, const RecurrenceShape& shape, const char* policy, InputsOf&& inputs) {
  const std::int64_t width = shape.heads * shape.head_dim, state = width * shape.state_dim;
  const Speculation room{.window = static_cast<std::int64_t>(file.meta[0]),
                         .committed = static_cast<std::int64_t>(file.meta[1]),
                         .slots = static_cast<std::int64_t>(file.meta[3])};
  Decoded out{Vec(size(kRounds * kSequences * kWindow * width)), {}};
  for (std::int64_t r = 0; r < kSequences; ++r) {
    SpeculativeState<double> s(shape, parse_policy(policy), room);
    s.set(file.state0.data() + r * state);
    for (std::int64_t round = 0; round < kRounds; ++round) {
      EXPECT_EQ(s.status().held, file.cursor(round, 0, r)) << "round " << round << ", sequence " << r;
      const std::int64_t flushes = s.status().flushes;
      s.verify(inputs(round, r), out.y.data() + (round * kSequences + r) * kWindow * width);
      EXPECT_EQ(s.status().flushes - flushes, file.cursor(round, 1, r)) << "round " << round << ", sequence " << r;
      s.accept(file.taken(round, r));
    }
    for (std::int64_t h = 0; h < shape.heads; ++h) {
      out.checkpoint.insert(out.checkpoint.end(), s.checkpoint(h).begin(), s.checkpoint(h).end());
    }
  }
  return out;
}

// ---- Mamba-2: 4 heads, 64 x 128, 2 groups ---------------------------------------------------------------------------

struct MambaFile : File {
  RecurrenceShape shape{Recurrence::mamba2, kHeads, 2, 64, 128};
  Vec x = ReadAs<double>(spec, "x"), B = ReadAs<double>(spec, "B"), C = ReadAs<double>(spec, "C"),
      dt = ReadAs<double>(spec, "dt"), A = ReadAs<double>(plain, "A"), D = ReadAs<double>(plain, "D"), A_log;

  MambaFile() : File("mamba2") {
    for (const double a : A) A_log.push_back(std::log(-a));
  }
  LayerInputs<double> inputs(std::int64_t round, std::int64_t r) const {
    const std::int64_t first = (round * kSequences + r) * kWindow;
    return prepare(Mamba2Inputs<double>{shape,
                                        kWindow,
                                        {x.data() + first * 256, 256},
                                        {B.data() + first * 256, 256},
                                        {C.data() + first * 256, 256},
                                        {dt.data() + first * 4, 4},
                                        A_log.data(),
                                        dt_bias.data()});
  }
  /// The checkpoints by the sums of each flush as they are written, e^{...} dt B of a record rounded to bf16 or not.
  Vec checkpoints(bool rounded) const {
    Vec s = state0;
    for (std::size_t i = 0; i < s.size(); ++i) {
      const std::size_t n = i % 128, p = i / 128 % 64, head = i / 8192, h = head % 4;
      const auto r = static_cast<std::int64_t>(head / 4);
      std::vector<std::size_t> tokens;
      for (std::int64_t round = 0; round < kRounds; ++round) {
        if (cursor(round, 1, r) != 0) {
          double sum = 0, decays = 0;
          for (; !tokens.empty(); tokens.pop_back()) {
            const std::size_t t = tokens.back();
            const double step = std::log1p(std::exp(dt[t * 4 + h] + dt_bias[h]));
            const double w = std::exp(decays) * step * B[(t * 2 + h / 2) * 128 + n];
            sum += x[(t * 4 + h) * 64 + p] * (rounded ? Bf16(w) : w);
            decays += A[h] * step;
          }
          s[i] = std::exp(decays) * s[i] + sum;
        }
        for (std::int64_t t = 0; t < taken(round, r); ++t) {
          tokens.push_back(size((round * kSequences + r) * kWindow + t));
        }
      }
    }
    return s;
  }
};

TEST(SpeculativeGolden, Mamba2) {
  const MambaFile file;
  const Vec truth = file.checkpoints(false), emulated = file.checkpoints(true);
  for (const char* policy : {"replay(L=9, state=fp32, ring=bf16)", "replay(L=9, anchor=fp32, read=fp32, ring=bf16)",
                             "replay(L=9, state=fp32, ring=bf16, order=sequential)"}) {
    SCOPED_TRACE(policy);
    Decoded run = Decode(file, file.shape, policy, [&](auto... at) { return file.inputs(at...); });
    for (std::size_t i = 0; i < run.y.size(); ++i) run.y[i] += file.D[i / 64 % 4] * file.x[i];
    // The published kernel rounds the weights of the records to bf16, and y.
    EXPECT_LE(Distance(run.y, file.y), 2 * kHalfUlp * Norm(run.y));
    // Ours alone: three roundings of the checkpoint to fp32.
    EXPECT_LE(Distance(run.checkpoint, truth), 3 * std::ldexp(Norm(truth), -24));
    EXPECT_LE(Distance(run.checkpoint, file.checkpoint), kHalfUlp * Norm(truth));
  }
  // The error of sums of 8 terms and exponentials in fp32.
  const double fp32 = 16 * std::ldexp(Norm(truth), -24);
  EXPECT_LE(Distance(file.checkpoint, emulated), kExplained * Distance(file.checkpoint, truth) + fp32)
      << "what the published flush does differently is the rounding of its weights";
}

// ---- Gated DeltaNet: 4 heads, 2 key heads, 128 x 128 ----------------------------------------------------------------

struct DeltaFile : File {
  RecurrenceShape shape{Recurrence::gated_delta, kHeads, 2, 128, 128};
  Vec qkv = ReadAs<double>(spec, "qkv"), a = ReadAs<double>(spec, "a"), b = ReadAs<double>(spec, "b"),
      A_log = ReadAs<double>(plain, "A_log");

  DeltaFile() : File("gdn") {}
  LayerInputs<double> inputs(std::int64_t round, std::int64_t r) const {
    const std::int64_t first = (round * kSequences + r) * kWindow;
    const double* row = qkv.data() + first * 1024;
    return prepare(DeltaInputs<double>{shape,
                                       kWindow,
                                       {row, 1024},
                                       {row + 256, 1024},
                                       {row + 512, 1024},
                                       {a.data() + first * 4, 4},
                                       {b.data() + first * 4, 4},
                                       A_log.data(),
                                       dt_bias.data()});
  }

  /// The checkpoints, step by step. `published`: with roundings of that kernel, all to bf16: k, the records' u, their
  /// weights e^{...} u when the state is rebuilt, and the state that a flush stores.
  Vec checkpoints(bool published) const {
    const auto bf16 = [&](double value) { return published ? Bf16(value) : value; };
    Vec all;
    for (std::int64_t r = 0; r < kSequences; ++r) {
      for (std::size_t h = 0; h < size(kHeads); ++h) {
        const auto first = state0.begin() + static_cast<std::ptrdiff_t>((size(r) * 4 + h) * 16384);
        Vec base(first, first + 16384);
        std::vector<Vec> us, ks;
        Vec gs;
        for (std::int64_t round = 0; round < kRounds; ++round) {
          Vec now = base;
          double decays = 0;
          Vec weights;
          for (std::size_t j = us.size(); j-- > 0; decays += gs[j]) weights.insert(weights.begin(), std::exp(decays));
          for (double& value : now) value *= std::exp(decays);
          for (std::size_t j = 0; j < us.size(); ++j) {
            for (std::size_t i = 0; i < now.size(); ++i) now[i] += bf16(weights[j] * us[j][i / 128]) * ks[j][i % 128];
          }
          if (cursor(round, 1, r) != 0) {
            base = now;
            for (double& value : base) value = bf16(value);
            us.clear();
            ks.clear();
            gs.clear();
          }
          for (std::int64_t t = 0; t < taken(round, r); ++t) {
            const std::size_t at = size((round * kSequences + r) * kWindow + t);
            const double* row = &qkv[at * 1024];
            Vec k(row + 256 + h / 2 * 128, row + 384 + h / 2 * 128), u(128, 0.0);
            double sum = 1e-6;
            for (const double value : k) sum += value * value;
            for (double& value : k) value = bf16(value / std::sqrt(sum));
            const double g = -std::exp(A_log[h]) * std::log1p(std::exp(a[at * 4 + h] + dt_bias[h]));
            for (std::size_t i = 0; i < now.size(); ++i) {
              now[i] *= std::exp(g);
              u[i / 128] += now[i] * k[i % 128];
            }
            const double beta = 1 / (1 + std::exp(-b[at * 4 + h]));
            for (std::size_t p = 0; p < 128; ++p) u[p] = beta * (row[512 + h * 128 + p] - u[p]);
            for (std::size_t i = 0; i < now.size(); ++i) now[i] += u[i / 128] * k[i % 128];
            for (double& value : u) value = bf16(value);
            us.push_back(u);
            ks.push_back(k);
            gs.push_back(g);
          }
        }
        all.insert(all.end(), base.begin(), base.end());
      }
    }
    return all;
  }
};

TEST(SpeculativeGolden, GatedDeltaNet) {
  const DeltaFile file;
  const Vec truth = file.checkpoints(false), emulated = file.checkpoints(true);
  for (const char* rest : {"state=fp32", "anchor=fp32, read=fp32", "state=fp32, order=sequential"}) {
    const std::string policy = std::string("replay(L=9, ") + rest + ")";
    SCOPED_TRACE(policy);
    const Decoded run = Decode(file, file.shape, policy.c_str(), [&](auto... at) { return file.inputs(at...); });
    // Roundings to bf16 of the published kernel alone: k, u, their weights, the stored state; and y.
    EXPECT_LE(Distance(run.y, file.y), 5 * kHalfUlp * Norm(run.y));
    EXPECT_LE(Distance(run.checkpoint, truth), 3 * std::ldexp(Norm(truth), -24));
    EXPECT_LE(Distance(run.checkpoint, file.checkpoint), 4 * kHalfUlp * Norm(truth));
  }
  // That kernel stores a state rounded to bf16. With its formats what is left are roundings within a window.
  const Decoded close = Decode(file, file.shape, "replay(L=9, state=bf16, ring=bf16, loop=open)",
                               [&](auto... at) { return file.inputs(at...); });
  EXPECT_LE(Distance(close.checkpoint, file.checkpoint), kHalfUlp * Norm(truth));
  EXPECT_LE(Distance(close.y, file.y), 2 * kHalfUlp * Norm(close.y));
  for (const double value : file.checkpoint) ASSERT_EQ(value, Bf16(value));
  // An error below half an ulp, evenly spread, is 1/sqrt(3) of it in the mean: what the emulation does not know is no
  // more than one rounding of the state.
  EXPECT_LE(Distance(file.checkpoint, emulated), kHalfUlp / std::sqrt(3.0) * Norm(truth));
  EXPECT_LT(Distance(file.checkpoint, emulated), Distance(file.checkpoint, truth));
}

}  // namespace
}  // namespace replayssm
