// Small speculative runs whose right answer is known: tags that a state must hold, what rejected, absent and padded
// tokens must not do, and the window of a convolution.

#include <cmath>

#include "tests/cuda/windows.h"

namespace replayssm::cuda::tests {
namespace {

constexpr Recurrence kRecurrences[] = {Recurrence::mamba2, Recurrence::gated_delta, Recurrence::kda};
constexpr std::int64_t kColumns = 16;  // of a state: keys that tags of the delta rule can have
constexpr float kBig = 1 << 20;        // a key that the epsilon of its norm cannot change

using Counts = std::vector<std::int32_t>;

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }
std::vector<float> Fill(std::int64_t n, float value) { return std::vector<float>(size(n), value); }

/// A layer of one head whose decays are 1 and which adds up tags: token t is 2^t. Mamba-2 adds it to its only column in
/// use, the delta rule to column t, and y is the sum of all.
class Tagged {
 public:
  Tagged(Machine& machine, Recurrence recurrence, bool split, std::int64_t window, std::int64_t committed,
         std::int64_t rows = 1)
      : layer(machine, setup_of(recurrence, split, window, committed, rows),
              {{-100}, Fill(recurrence == Recurrence::kda ? kColumns : 1, 0), {}}),
        delta_(is_delta(layer.setup)) {}

  /// Inputs of a token that brings `value`, for the delta rule to the column of `t`.
  struct Token {
    int t;
    float value;
  };
  static Token Tag(int t) { return {t, std::ldexp(1.0F, t)}; }

  /// A window of the first row; returns y of its tokens.
  std::vector<float> verify(const std::vector<Token>& tokens) { return verify_rows({tokens})[0]; }
  /// One of each row: tokens beyond `counts` are placeholders.
  std::vector<std::vector<float>> verify_rows(const std::vector<std::vector<Token>>& rows, Counts counts = {}) {
    TokenInputs in;
    const std::int64_t T = layer.setup.window;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      if (counts.size() <= r) counts.push_back(static_cast<std::int32_t>(rows[r].size()));
      for (std::size_t i = 0; i < size(T); ++i) append(i < rows[r].size() ? rows[r][i] : Token{0, NAN}, in);
    }
    const std::vector<float> y = layer.verify(in, counts);
    std::vector<std::vector<float>> out;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const auto first = y.begin() + static_cast<std::ptrdiff_t>(r) * T;
      out.emplace_back(first, first + static_cast<std::ptrdiff_t>(rows[r].size()));
      if (!delta_) continue;
      for (float& value : out.back()) value *= kColumns;  // q comes normalised and scaled: 1 / N in every column
    }
    return out;
  }
  /// A window with its commit; returns the last y that was accepted.
  float step(const std::vector<Token>& tokens, std::int32_t accepted) {
    const auto y = verify(tokens);
    EXPECT_EQ(layer.commit({accepted}), 0);
    return accepted > 0 ? y[size(accepted) - 1] : NAN;
  }
  float step(int tag) { return step({Tag(tag)}, 1); }
  float gate = 0, beta = 100;

  Windows layer;

 private:
  static Case setup_of(Recurrence recurrence, bool split, std::int64_t window, std::int64_t committed,
                       std::int64_t rows) {
    Case setup{.shape = {recurrence, 1, 1, 1, kColumns}, .ring = Scalar::bf16, .rows = rows};
    if (split) setup.read = Storage::fp32;
    setup.closed = split;
    setup.dt_min = setup.dt_max = 1;
    setup.window = window;
    setup.committed = committed;
    return setup;
  }
  void append(const Token& token, TokenInputs& in) const {
    std::vector<float> key = Fill(kColumns, 0);
    key[size(delta_ ? token.t : 0)] = delta_ ? kBig : 1;
    in.w.insert(in.w.end(), key.begin(), key.end());
    in.c.insert(in.c.end(), size(kColumns), delta_ ? kBig : 1);
    in.v.push_back(token.value);
    in.gate.insert(in.gate.end(), size(layer.setup.shape.decay_dim()), gate);
    if (delta_) in.beta.push_back(beta);
  }

  bool delta_;
};

using Token = Tagged::Token;
constexpr auto Tag = &Tagged::Tag;

std::vector<Token> Tags(int first, int last) {
  std::vector<Token> out;
  for (int t = first; t <= last; ++t) out.push_back(Tag(t));
  return out;
}

class WindowCases : public OnVerifier {
 protected:
  /// Every recurrence, shared and split.
  template <class Body>
  void each(Body&& body) {
    for (const Recurrence recurrence : kRecurrences) {
      for (const bool split : {false, true}) {
        SCOPED_TRACE(std::string(name(recurrence)) + (split ? " split" : " shared"));
        body(recurrence, split);
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(, WindowCases, testing::ValuesIn(machine_names()));

TEST_P(WindowCases, AStepWithoutADraftFollowsAllThatWasAccepted) {
  each([&](Recurrence recurrence, bool split) {
    Tagged run(on(), recurrence, split, 3, 4);
    EXPECT_EQ(run.step(Tags(0, 2), 3), 7);
    EXPECT_EQ(run.step(3), 15);
    EXPECT_EQ(run.step(Tags(4, 6), 1), 31);
    EXPECT_EQ(run.step(5), 63);
  });
}

TEST_P(WindowCases, ARejectionCountsOnce) {
  each([&](Recurrence recurrence, bool split) {
    Tagged run(on(), recurrence, split, 3, 16);
    EXPECT_EQ(run.step(Tags(0, 2), 1), 1);
    for (int t = 1; t <= 3; ++t) EXPECT_EQ(run.step(t), std::ldexp(1.0F, t + 1) - 1);
    EXPECT_EQ(run.layer.held_by(run.layer.slot.here[0]), 4);
  });
}

TEST_P(WindowCases, CommittedTokensAreTakenBackDownToTheCheckpoint) {
  each([&](Recurrence recurrence, bool split) {
    Tagged run(on(), recurrence, split, 4, 6);
    EXPECT_EQ(run.step(Tags(0, 3), 4), 15);
    EXPECT_EQ(run.step(4), 31);
    EXPECT_EQ(run.step(5), 63);
    const std::int64_t at = run.layer.slot.here[0];
    for (const std::int32_t far : {7, -1}) {
      EXPECT_EQ(run.layer.roll_back({far}), 1) << far;
      EXPECT_EQ(run.layer.held_by(at), 6);
    }
    EXPECT_EQ(run.layer.roll_back({3}), 0);
    EXPECT_EQ(run.layer.held_by(at), 3);
    EXPECT_EQ(run.step(10), 7 + 1024);
    EXPECT_EQ(run.layer.roll_back({0}), 0);
    // The next window folds: what it left behind is out of reach.
    EXPECT_EQ(run.step(Tags(11, 13), 1), 7 + 1024 + 2048);
    EXPECT_EQ(run.layer.roll_back({2}), 1);
    EXPECT_EQ(run.layer.roll_back({1}), 0);
    EXPECT_EQ(run.step(3), 15 + 1024);
  });
}

// The ring is full of NaN where nobody wrote.
TEST_P(WindowCases, WhatARejectedTokenBringsIsNotThere) {
  each([&](Recurrence recurrence, bool split) {
    for (const bool late : {false, true}) {  // a NaN in the gate, which would be in the decay
      Tagged run(on(), recurrence, split, 3, 4);
      if (late) run.gate = NAN;
      const float bad = late ? 4 : INFINITY;
      run.verify(std::vector{Token{2, bad}});
      EXPECT_EQ(run.layer.commit({0}), 0);
      run.gate = 0;
      const auto y = run.verify({Tag(0), Tag(1), Token{2, INFINITY}});
      EXPECT_EQ(y[0], 1);
      EXPECT_EQ(y[1], 3);
      EXPECT_TRUE(!std::isfinite(y[2]));
      EXPECT_EQ(run.layer.commit({2}), 0);
      EXPECT_EQ(run.step(3), 11);
      EXPECT_EQ(run.step(Tags(4, 5), 2), 11 + 16 + 32);
    }
    Tagged run(on(), recurrence, split, 3, 4);  // accepted, it stays in sight, also behind a fold
    EXPECT_FALSE(std::isfinite(run.step({Tag(0), Token{1, INFINITY}}, 2)));
    for (int t = 2; t < 9; ++t) EXPECT_FALSE(std::isfinite(run.step(t)));
  });
}

TEST_P(WindowCases, PlaceholdersAndPaddingTouchNothing) {
  each([&](Recurrence recurrence, bool split) {
    Tagged run(on(), recurrence, split, 3, 4, 5);
    Windows& layer = run.layer;
    const std::int64_t live[] = {layer.slot.here[0], layer.slot.here[1], layer.slot.here[4]};
    layer.slot.here[2] = -1;
    layer.slot.here[3] = static_cast<std::int32_t>(layer.slots);
    layer.slot.write();
    const auto before = layer.pool.bytes.here;
    const auto y = run.verify_rows(
        {Tags(0, 2), {Tag(0), Token{0, 1024}, Token{0, 1024}}, {Token{0, 4096}}, {Token{0, 4096}}, {Token{0, 4096}}},
        {3, 1, 3, 3, 0});
    EXPECT_EQ(y[0], (std::vector<float>{1, 3, 7}));
    EXPECT_EQ(y[1][0], 1);
    EXPECT_TRUE(std::isnan(y[1][1]) && std::isnan(y[1][2]));
    for (const std::size_t r : {2U, 3U, 4U}) EXPECT_TRUE(std::isnan(y[r][0])) << r;
    EXPECT_EQ(layer.commit({3, 1, 3, 3, 0}), 0);
    EXPECT_EQ(layer.held_by(live[0]), 3);
    EXPECT_EQ(layer.held_by(live[1]), 1);
    EXPECT_EQ(layer.held_by(live[2]), 0);
    EXPECT_EQ(layer.pool.bytes.here, before);
    for (const auto field : {&Layer::v, &Layer::w, &Layer::u}) {  // slots of no row keep their NaN
      const auto& bytes = (layer.*field).bytes.here;
      const auto n = static_cast<std::ptrdiff_t>(bytes.size()) / layer.slots;
      for (std::int64_t at = 0; at < layer.slots; ++at) {
        if (at == live[0] || at == live[1]) continue;
        EXPECT_EQ(std::count(bytes.begin() + at * n, bytes.begin() + (at + 1) * n, 0xFF), n);
      }
    }
  });
}

TEST_P(WindowCases, NothingAcceptedIsNothingDone) {
  each([&](Recurrence recurrence, bool split) {
    for (const std::int32_t accepted : {0, 1}) {
      Tagged run(on(), recurrence, split, 3, 4);
      run.step(Tags(0, 2), accepted);
      EXPECT_EQ(run.step(3), 8 + accepted);
    }
    // Also where the step has folded: of the two calls, commit() alone moves the origin.
    Tagged run(on(), recurrence, split, 3, 4);
    EXPECT_EQ(run.step(Tags(0, 2), 3), 7);
    const std::int64_t at = run.layer.slot.here[0], begin = run.layer.entry(at, 0);
    run.step(Tags(3, 5), 0);
    EXPECT_EQ(run.layer.held_by(at), 0);
    EXPECT_EQ(run.layer.entry(at, 0), (begin + 3) % run.layer.capacity);
    EXPECT_EQ(run.step(Tags(3, 5), 3), 63);
  });
}

TEST_P(WindowCases, TheOriginGoesRound) {
  each([&](Recurrence recurrence, bool split) {
    for (const std::int32_t origin : {0, 1, 5, 6}) {
      Tagged run(on(), recurrence, split, 2, 4);  // rings of 7
      run.layer.origin.here[size(run.layer.slot.here[0])] = origin;
      run.layer.origin.write();
      for (int t = 0; t < 12; ++t) EXPECT_EQ(run.step(t), std::ldexp(1.0F, t + 1) - 1) << t;
      EXPECT_EQ(run.layer.roll_back({2}), 0);
      EXPECT_EQ(run.step(10), 2047);
      EXPECT_EQ(run.step({Tag(11), Tag(0)}, 1), 4095);
    }
  });
}

TEST_P(WindowCases, RowsOfNoTokensStay) {
  each([&](Recurrence recurrence, bool split) {
    Tagged run(on(), recurrence, split, 3, 4, 4);
    Windows& layer = run.layer;
    for (std::size_t r = 0; r < 4; ++r) {
      layer.set_state(layer.slot.here[r], [&] {
        std::vector<float> state = Fill(kColumns, 0);
        state[kColumns - 1] = std::ldexp(1.0F, 10 + static_cast<int>(r));
        if (!is_delta(layer.setup)) state[0] = state[kColumns - 1], state[kColumns - 1] = 0;
        return state;
      }());
    }
    const auto y = run.verify_rows({{}, Tags(0, 2), {}, Tags(3, 4)});
    EXPECT_EQ(y[1], (std::vector<float>{2049, 2051, 2055}));
    EXPECT_EQ(y[3], (std::vector<float>{8200, 8216}));
    EXPECT_EQ(layer.commit({0, 3, 0, 2}), 0);
    const auto next = run.verify_rows({{Token{0, 0}}, {}, {Token{0, 0}}, {}});
    EXPECT_EQ(next[0][0], 1024);
    EXPECT_EQ(next[2][0], 4096);
  });
  Tagged none(on(), Recurrence::mamba2, false, 3, 4);
  none.layer.mamba2.rows = 0;
  on().verify(none.layer.mamba2, none.layer.window);
}

TEST_P(WindowCases, NumbersOutOfRangeAreRefused) {
  each([&](Recurrence recurrence, bool split) {
    Tagged run(on(), recurrence, split, 3, 4, 5);
    Windows& layer = run.layer;
    const std::int64_t odd[] = {layer.slot.here[2], layer.slot.here[3]};
    layer.cursor.here[size(odd[0])] = 5;                                          // more than W
    layer.origin.here[size(odd[1])] = static_cast<std::int32_t>(layer.capacity);  // no entry
    layer.cursor.write();
    layer.origin.write();
    const auto y = run.verify_rows({Tags(0, 2), Tags(0, 2), Tags(0, 2), Tags(0, 2), Tags(0, 2)}, {3, 3, 3, 3, 4});
    EXPECT_EQ(y[0][2], 7);
    for (const std::size_t r : {2U, 3U, 4U}) EXPECT_TRUE(std::isnan(y[r][0])) << r;
    EXPECT_EQ(layer.commit({4, 2, 1, 1, 1}), 4);
    EXPECT_EQ(layer.held_by(layer.slot.here[0]), 0);
    EXPECT_EQ(layer.held_by(layer.slot.here[1]), 2);
    EXPECT_EQ(layer.held_by(odd[0]), 5);
    EXPECT_EQ(layer.commit({-1, 2, 1, 1, 1}), 4);
  });
}

// Tokens of all rows packed one behind the other.
TEST_P(WindowCases, PackedTokens) {
  each([&](Recurrence recurrence, bool split) {
    Tagged run(on(), recurrence, split, 3, 4, 2);
    Array<std::int32_t> first(on());
    run.layer.window.first = first.write({4, 1});
    // In the layout of the layer: tokens 0 to 2 of the first row, then of the second.
    const auto y = run.verify_rows({{Tag(9), Tag(0), Tag(1)}, {Tag(2), Tag(3), Tag(4)}}, {2, 3});
    EXPECT_EQ(y[1], (std::vector<float>{7, 8, 24}));
    EXPECT_TRUE(std::isnan(y[0][0]));
    EXPECT_EQ(y[0][1], 1);
    EXPECT_EQ(y[0][2], 3);
  });
}

// ---- convolution ----------------------------------------------------------------------------------------------------

class SmallConvolution : public OnVerifier {};
INSTANTIATE_TEST_SUITE_P(, SmallConvolution, testing::ValuesIn(machine_names()));

TEST_P(SmallConvolution, OfRejectedTokensRollsBack) {
  constexpr std::int64_t kSlots = 3, kChannels = 2, kInputs = 3, kTokens = 3;
  for (const bool channels_last : {false, true}) {
    for (const std::int32_t taken : {0, 1, 2, 3, 4, -1}) {
      SCOPED_TRACE(taken);
      Array<std::int32_t> slot(on()), count(on()), accepted(on());
      Array<float> memory(on()), x(on());
      slot.write({2, -1, 1, 3});
      ConvolutionWindow window{Scalar::fp32, nullptr, kChannels, kInputs, kChannels * kInputs + 1};
      window.channel_stride = channels_last ? 1 : kInputs;
      window.input_stride = channels_last ? kChannels : 1;
      const auto at = [&](std::int64_t s, std::int64_t c, std::int64_t k) -> float& {
        return memory.here[size(s * window.slot_stride + c * window.channel_stride + k * window.input_stride)];
      };
      memory.here = Fill(kSlots * window.slot_stride, -5);
      for (std::int64_t s = 0; s < kSlots; ++s) {
        for (std::int64_t k = 0; k < kInputs; ++k) at(s, 0, k) = std::ldexp(1.0F, static_cast<int>(k)), at(s, 1, k) = 0;
      }
      window.data = memory.write(std::vector(memory.here));
      std::vector<float> inputs(4 * kTokens * 3, NAN);  // a gap of one behind every token
      for (std::int64_t r : {0, 2}) {
        for (std::int64_t t = 0; t < kTokens; ++t) {
          inputs[size((r * kTokens + t) * 3)] = std::ldexp(1.0F, static_cast<int>(t + 3));
          inputs[size((r * kTokens + t) * 3 + 1)] = static_cast<float>(r + 1);
        }
      }
      const Activations in{Scalar::fp32, x.write(inputs), 3};
      const Drafts drafts{kTokens, count.write({3, 3, 2, 3}), nullptr};
      on().commit_convolution(4, kSlots, slot.there(), drafts, window, in, accepted.write({taken, 3, 1, 3}));
      memory.read();
      // Channel 0 saw 1, 2, 4 and then 8, 16, 32; what does not fit moves out at the front.
      const int n = taken >= 0 && taken <= 3 ? taken : 0;
      for (std::int64_t k = 0; k < kInputs; ++k) {
        EXPECT_EQ(at(2, 0, k), std::ldexp(1.0F, static_cast<int>(k) + n));
        EXPECT_EQ(at(2, 1, k), k + n < kInputs ? 0 : 1);
        EXPECT_EQ(at(1, 0, k), std::ldexp(1.0F, static_cast<int>(k) + 1));
        EXPECT_EQ(at(1, 1, k), k + 1 < kInputs ? 0 : 3);
        EXPECT_EQ(at(0, 0, k), std::ldexp(1.0F, static_cast<int>(k)));  // a slot of no row
      }
      if (taken == 1) {
        EXPECT_EQ(at(2, 0, 0) + at(2, 0, 1) + at(2, 0, 2) + 64, 78);
      }
      for (std::int64_t s = 0; s < kSlots; ++s) EXPECT_EQ(memory.here[size((s + 1) * window.slot_stride - 1)], -5);
    }
  }
}

}  // namespace
}  // namespace replayssm::cuda::tests
