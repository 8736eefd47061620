// What of speculative runs has to agree bit for bit.

#include <bit>
#include <cmath>

#include "tests/cuda/windows.h"

namespace replayssm::cuda::tests {
namespace {

constexpr Recurrence kRecurrences[] = {Recurrence::mamba2, Recurrence::gated_delta, Recurrence::kda};
constexpr std::vector<float> TokenInputs::*kFields[] = {&TokenInputs::v, &TokenInputs::w, &TokenInputs::c,
                                                        &TokenInputs::gate, &TokenInputs::beta};

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

/// Bits of values, as NaN is not equal to itself.
std::vector<std::uint32_t> Bits(const std::vector<float>& values) {
  std::vector<std::uint32_t> out;
  for (const float value : values) out.push_back(std::bit_cast<std::uint32_t>(value));
  return out;
}

/// Parts `which` of [parts, ...].
std::vector<float> Parts(const std::vector<float>& x, std::size_t parts, const std::vector<std::size_t>& which) {
  const auto n = static_cast<std::ptrdiff_t>(x.size() / parts);
  std::vector<float> out;
  for (const std::size_t i : which) {
    const auto first = x.begin() + static_cast<std::ptrdiff_t>(i) * n;
    out.insert(out.end(), first, first + n);
  }
  return out;
}
TokenInputs Tokens(const TokenInputs& in, std::int64_t tokens, const std::vector<std::size_t>& which) {
  TokenInputs out;
  for (const auto field : kFields) out.*field = Parts(in.*field, size(tokens), which);
  return out;
}

/// Shared, split and, of the delta rule, closed kinds of a case.
template <class Body>
void EachKind(Case setup, Body&& body) {
  for (const Recurrence recurrence : kRecurrences) {
    setup.shape.recurrence = recurrence;
    for (const bool split : {false, true}) {
      for (const bool closed : {false, true}) {
        if (closed && !is_delta(setup)) continue;
        setup.closed = closed;
        setup.read = split ? std::optional(Storage::int8_row) : std::nullopt;
        SCOPED_TRACE(setup.text());
        body(setup);
      }
    }
  }
}

Case CaseOf(std::int64_t rows, std::int64_t window, std::int64_t committed) {
  Case setup{.shape = {Recurrence::mamba2, 4, 2, 19, 33}, .ring = Scalar::bf16, .input = Scalar::bf16, .rows = rows};
  setup.window = window;
  setup.committed = committed;
  return setup;
}

/// One window of a run on one row, and how much of it was accepted.
struct Round {
  TokenInputs in;
  std::int32_t count, accepted;
  bool folds;
};

/// Random windows of one row, as its cursor folds them.
std::vector<Round> RandomRounds(const Case& setup, int rounds, std::mt19937& random) {
  std::vector<Round> out;
  std::int64_t held = 0;
  for (int i = 0; i < rounds; ++i) {
    const auto count = static_cast<std::int32_t>(1 + random() % static_cast<unsigned long>(setup.window));
    const auto accepted = static_cast<std::int32_t>(random() % static_cast<unsigned long>(count + 1));
    const bool folds = held + count > setup.committed;
    held = (folds ? 0 : held) + accepted;
    out.push_back({random_inputs(setup, random), count, accepted, folds});
  }
  return out;
}

class WindowBits : public OnVerifier {};
INSTANTIATE_TEST_SUITE_P(, WindowBits, testing::ValuesIn(machine_names()));

// Whatever is rounded: a window, and those of the accepted tokens one by one, folded at the same places.
TEST_P(WindowBits, AreThoseOfSingleTokens) {
  EachKind(CaseOf(1, 5, 7), [&](Case setup) {
    setup.state = Storage::bf16;
    std::mt19937 random(4);
    const auto rounds = RandomRounds(setup, 14, random);
    Windows whole(on(), setup, 3);
    whole.fill_states();
    Case single = setup;
    single.window = 1;
    single.committed = setup.committed + setup.window;  // where it folds is said below
    Windows one(on(), single, 3);
    one.fill_states();
    const std::int64_t at = whole.slot.here[0];
    ASSERT_EQ(one.slot.here[0], at);
    int folds = 0;
    for (const Round& round : rounds) {
      const auto y = whole.verify(round.in, {round.count});
      whole.commit({round.accepted});
      for (std::size_t t = 0; t < size(round.accepted); ++t) {
        // The step that folded left the state behind it also where nothing of its window was accepted.
        one.window.committed = round.folds && t == 0 && one.held_by(at) > 0 ? one.held_by(at) : single.committed;
        EXPECT_EQ(Bits(one.verify(Tokens(round.in, setup.window, {t}), {1})), Bits(Parts(y, size(setup.window), {t})));
        one.commit({1});
      }
      if (round.folds && round.accepted == 0 && one.held_by(at) > 0) {
        one.window.committed = one.held_by(at);
        one.verify(Tokens(round.in, setup.window, {0}), {1});
        one.commit({0});
      }
      folds += round.folds;
      EXPECT_EQ(Bits(whole.state(at)), Bits(one.state(at)));
      EXPECT_EQ(Bits(whole.read_copy(at)), Bits(one.read_copy(at)));
      ASSERT_EQ(whole.held_by(at), one.held_by(at));
    }
    EXPECT_GT(folds, 2);
  });
}

// With rings that lose nothing, checkpoints are those of decode() on the accepted tokens alone, flushed at the same
// places, and outputs are those of decode() from them.
TEST_P(WindowBits, OfCheckpointsAreThoseOfDecode) {
  EachKind(CaseOf(1, 4, 6), [&](Case setup) {
    setup.ring = Scalar::fp32;
    std::mt19937 random(8);
    const auto rounds = RandomRounds(setup, 16, random);
    Windows whole(on(), setup, 3);
    whole.fill_states();
    Case plain = setup;
    plain.window = plain.committed = 0;
    plain.length = setup.committed + 2;
    Layer decoded(on(), plain, 3);
    const std::int64_t at = whole.slot.here[0], here = decoded.slot.here[0];
    decoded.set_state(here, whole.state(at));
    std::vector<TokenInputs> kept;  // since the last fold
    int folds = 0;
    for (const Round& round : rounds) {
      const auto y = whole.verify(round.in, {round.count});
      whole.commit({round.accepted});
      if (round.folds) {
        ++folds;
        auto& step = decoded.common();
        for (std::size_t i = 0; i < kept.size(); ++i) {
          step.length = i + 1 == kept.size() ? static_cast<std::int64_t>(i) + 1 : plain.length;
          decoded.held.write({static_cast<std::int32_t>(i)});
          decoded.step(kept[i]);
        }
        kept.clear();
        // An open loop of a split state takes the last u from the read copy, and so does a fold.
        EXPECT_EQ(Bits(whole.state(at)), Bits(decoded.state(here)));
        EXPECT_EQ(Bits(whole.read_copy(at)), Bits(decoded.read_copy(here)));
      }
      for (std::size_t t = 0; t < size(round.accepted); ++t) {
        kept.push_back(Tokens(round.in, setup.window, {t}));
        decoded.common().length = plain.length;
        decoded.held.write({static_cast<std::int32_t>(kept.size()) - 1});
        EXPECT_EQ(Bits(decoded.step(kept.back())), Bits(Parts(y, size(setup.window), {t})));
      }
    }
    EXPECT_GT(folds, 2);
  });
}

TEST_P(WindowBits, DependNeitherOnTheRunNorOnOtherRows) {
  EachKind(CaseOf(4, 3, 4), [&](const Case& setup) {
    Windows a(on(), setup, 3), b(on(), setup, 3), alone(on(), setup, 3);
    for (Windows* layer : {&a, &b, &alone}) layer->fill_states();
    std::mt19937 random(6);
    for (int i = 0; i < 6; ++i) {
      const TokenInputs in = random_inputs(setup, random);
      const std::vector<std::int32_t> counts = {3, 1, 2, 3}, accepted = {2, 1, 0, 3};
      const auto y = a.verify(in, counts);
      b.verify(in, counts);
      const auto mine = alone.verify(in, {0, 0, 0, 3});
      EXPECT_EQ(Bits(Parts(mine, 4, {3})), Bits(Parts(y, 4, {3})));
      for (Windows* layer : {&a, &b}) EXPECT_EQ(layer->commit(accepted), 0);
      EXPECT_EQ(alone.commit({0, 0, 0, 3}), 0);
      ExpectSame(a, b);
      EXPECT_EQ(Bits(alone.state(alone.slot.here[3])), Bits(a.state(a.slot.here[3])));
    }
  });
}

// Snapshots: a window is so many eager steps, and what is accepted is a slot.
TEST_P(WindowBits, OfSmallSnapshotsAreThoseOfEagerSteps) {
  constexpr std::int64_t kWindow = 2;
  constexpr std::size_t kLive[] = {0, 3};  // rows; the others are padding
  for (const Recurrence recurrence : kRecurrences) {
    for (const Storage storage : {Storage::fp32, Storage::bf16, Storage::int8_row}) {
      Case setup = CaseOf(4, kWindow, kWindow);
      setup.shape.recurrence = recurrence;
      setup.state = storage;
      SCOPED_TRACE(setup.text());
      Windows layer(on(), setup, 3);  // of 6 slots
      Array<std::int32_t> pool(on());
      layer.slot.write({5, -1, 6, 0});
      const Snapshots snapshots{{kWindow, layer.count.there(), nullptr}, pool.write({1, 2, 3, 3, 3, 3, 4, 3})};
      Case eager = setup;
      eager.window = eager.committed = 0;
      eager.rows = 1;
      Layer first(on(), eager, 3), second(on(), eager, 3);
      Layer* const decoded[] = {&first, nullptr, nullptr, &second};
      std::mt19937 random(6);
      for (const std::size_t r : kLive) {
        layer.set_state(layer.slot.here[r], random_states(setup, 1, random));
        decoded[r]->set_state(decoded[r]->slot.here[0], layer.state(layer.slot.here[r]));
      }
      for (const auto& [counts, accepted] :
           std::vector<std::pair<std::vector<std::int32_t>, std::vector<std::int32_t>>>{{{2, 2, 2, 1}, {1, 5, 5, 1}},
                                                                                        {{2, 0, 2, 2}, {0, 0, 0, 2}},
                                                                                        {{1, 1, 1, 0}, {1, 1, 1, 0}},
                                                                                        {{2, 2, 2, 2}, {2, 2, 2, 1}}}) {
        layer.count.write(counts);
        const TokenInputs in = random_inputs(setup, random);
        const auto y = layer.verify_snapshots(in, snapshots);
        const auto before = layer.slot.here, offered = pool.here;
        layer.refused.write({0});
        on().commit(setup.rows, layer.slots, layer.slot.there(), snapshots, layer.accepted.write(accepted),
                    layer.refused.there());
        EXPECT_EQ(layer.refused.read()[0], 0);
        layer.slot.read();
        pool.read();
        for (const std::size_t r : kLive) {
          const std::size_t n = size(accepted[r]), behind = r * kWindow + n - 1;
          EXPECT_EQ(layer.slot.here[r], n == 0 ? before[r] : offered[behind]);
          if (n > 0) {
            EXPECT_EQ(pool.here[behind], before[r]);
          }
          for (std::size_t t = 0; t < n; ++t) {
            const std::size_t token = r * kWindow + t;
            const auto found = Parts(y, size(setup.tokens()), {token});
            EXPECT_EQ(Bits(decoded[r]->step(Tokens(in, setup.tokens(), {token}))), Bits(found));
            EXPECT_EQ(Bits(layer.state(offered[token])), Bits(decoded[r]->state(decoded[r]->slot.here[0])));
          }
          EXPECT_EQ(Bits(layer.state(layer.slot.here[r])), Bits(decoded[r]->state(decoded[r]->slot.here[0])));
        }
      }
      // A count or a snapshot out of range.
      layer.refused.write({0});
      on().commit(setup.rows, layer.slots, layer.slot.there(), snapshots, layer.accepted.write({3, 0, 0, -1}),
                  layer.refused.there());
      EXPECT_EQ(layer.refused.read()[0], 2);
      pool.here[0] = 6;
      pool.write();
      const auto y = layer.verify_snapshots(random_inputs(setup, random), snapshots);
      EXPECT_TRUE(std::isnan(y[0]));
    }
  }
}

}  // namespace
}  // namespace replayssm::cuda::tests
