// What has to agree bit for bit.

#include <algorithm>
#include <cstring>

#include "tests/cuda/layer.h"

namespace replayssm::cuda::tests {
namespace {

constexpr Recurrence kRecurrences[] = {Recurrence::mamba2, Recurrence::gated_delta, Recurrence::kda};

/// Cases of every schedule that a server would use.
std::vector<Case> Cases() {
  std::vector<Case> all;
  for (const Recurrence recurrence : kRecurrences) {
    Case setup{.shape = {recurrence, 4, 2, 32, 64}, .state = Storage::bf16, .input = Scalar::bf16, .rows = 5};
    all.push_back(setup);
    setup.length = 4;
    setup.ring = Scalar::bf16;
    setup.staggered = true;
    setup.closed = false;
    all.push_back(setup);
    setup.state = Storage::fp32;
    setup.read = Storage::int8_row;
    all.push_back(setup);
    setup.closed = true;
    all.push_back(setup);
  }
  return all;
}

/// A layer with a random state in every slot.
struct Filled : Layer {
  Filled(Machine& machine, const Case& the_setup, unsigned seed = 3) : Layer(machine, the_setup, seed) {
    fill_states();
  }
};

/// The bytes of a slot and of nothing else.
std::vector<std::uint8_t> OfSlot(const Stored& stored, std::int64_t slots, std::int64_t at) {
  const auto& bytes = stored.bytes.here;
  const auto n = static_cast<std::ptrdiff_t>(bytes.size()) / slots;
  return {bytes.begin() + at * n, bytes.begin() + (at + 1) * n};
}

class Bits : public OnMachine {};
INSTANTIATE_TEST_SUITE_P(, Bits, testing::ValuesIn(machine_names()));

TEST_P(Bits, AreTheSameInEveryRun) {
  int served = 0;
  for (const Case& setup : Cases()) {
    SCOPED_TRACE(setup.text());
    Filled a(on(), setup), b(on(), setup);
    if (!a.served()) continue;
    ++served;
    for (int t = 0; t < 9; ++t) {
      a.step(random_inputs(setup, a.random));
      b.step(random_inputs(setup, b.random));
      ExpectSame(a, b);
    }
  }
  EXPECT_GT(served, 0);
}

TEST_P(Bits, OfARowDoNotDependOnTheOthers) {
  int served = 0;
  for (const Case& setup : Cases()) {
    SCOPED_TRACE(setup.text());
    Filled all(on(), setup);
    if (!all.served()) continue;
    ++served;
    std::mt19937 random(9);
    std::vector<TokenInputs> tokens;
    std::vector<std::vector<float>> y;
    for (int t = 0; t < 6; ++t) {
      tokens.push_back(random_inputs(setup, random));
      y.push_back(all.step(tokens.back()));
    }
    const auto width = static_cast<std::ptrdiff_t>(setup.shape.heads * setup.shape.head_dim);
    for (std::int64_t r = 0; r < setup.rows; r += 2) {
      Filled alone(on(), setup);
      const std::int32_t at = alone.slot.here[static_cast<std::size_t>(r)];
      for (auto& other : alone.slot.here) {
        if (other != at) other = -1;
      }
      alone.slot.write();
      for (std::size_t t = 0; t < tokens.size(); ++t) {
        const auto mine = alone.step(tokens[t]);
        EXPECT_EQ(std::memcmp(&mine[static_cast<std::size_t>(r * width)], &y[t][static_cast<std::size_t>(r * width)],
                              static_cast<std::size_t>(width) * sizeof(float)),
                  0);
      }
      for (const auto field : {&Layer::pool, &Layer::copy, &Layer::v, &Layer::u, &Layer::w, &Layer::gain}) {
        EXPECT_EQ(OfSlot(alone.*field, all.slots, at), OfSlot(all.*field, all.slots, at));
      }
    }
  }
  EXPECT_GT(served, 0);
}

// How a step is cut into tiles depends on its number of rows; what comes out of a row does not.
TEST_P(Bits, OfARowDoNotDependOnTheNumberOfRows) {
  constexpr std::int64_t kFew = 4, kMany = 300;
  int served = 0;
  for (Case setup : Cases()) {
    SCOPED_TRACE(setup.text());
    setup.staggered = false;  // records to begin with would not be the same in both
    setup.rows = kFew;
    Layer few(on(), setup);
    setup.rows = kMany;
    Layer many(on(), setup);
    if (!few.served() || !many.served()) continue;
    ++served;
    std::mt19937 random(9);
    const auto slot_of = [](const Layer& layer, std::int64_t r) {
      return layer.slot.here[static_cast<std::size_t>(r)];
    };
    for (std::int64_t r = 0; r < kFew; ++r) {
      const auto state = random_states(setup, 1, random);
      few.set_state(slot_of(few, r), state);
      many.set_state(slot_of(many, r), state);
    }
    for (int t = 0; t < 9; ++t) {
      const TokenInputs in = random_inputs(setup, random);
      TokenInputs first = in;
      for (auto field : {&TokenInputs::v, &TokenInputs::w, &TokenInputs::c, &TokenInputs::gate, &TokenInputs::beta}) {
        (first.*field).resize((in.*field).size() / kMany * kFew);
      }
      const auto all = many.step(in);
      EXPECT_EQ(few.step(first),
                std::vector<float>(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(all.size() / kMany * kFew)))
          << "token " << t;
    }
    for (std::int64_t r = 0; r < kFew; ++r) {
      EXPECT_EQ(few.state(slot_of(few, r)), many.state(slot_of(many, r))) << "row " << r;
      EXPECT_EQ(few.read_copy(slot_of(few, r)), many.read_copy(slot_of(many, r))) << "row " << r;
    }
  }
  EXPECT_GT(served, 0);
}

// Nothing that comes from the read copy enters the anchor of a closed loop, nor of Mamba-2.
TEST_P(Bits, OfTheAnchorDoNotDependOnTheReadCopy) {
  int served = 0;
  for (const Recurrence recurrence : kRecurrences) {
    Case setup{.shape = {recurrence, 2, 1, 32, 64}, .length = 4, .ring = Scalar::bf16, .rows = 3, .staggered = true};
    std::vector<std::vector<std::uint8_t>> anchors;
    for (const Storage read : {Storage::fp32, Storage::bf16, Storage::e4m3_row, Storage::int8_row}) {
      setup.read = read;
      SCOPED_TRACE(setup.text());
      Filled layer(on(), setup);
      if (!layer.served()) continue;
      ++served;
      std::mt19937 random(9);
      for (int t = 0; t < 13; ++t) layer.step(random_inputs(setup, random));
      anchors.push_back(layer.pool.bytes.here);
      EXPECT_EQ(anchors.back(), anchors.front());
    }
  }
  EXPECT_GT(served, 0);
}

// Where no record is rounded, the generic kernel replays what an eager one does, bit for bit.
TEST_P(Bits, OfAReplayAreThoseOfAnEagerRun) {
  if (GetParam().starts_with("fast")) GTEST_SKIP() << "sums in closed form, in another order";
  for (const Recurrence recurrence : kRecurrences) {
    for (const bool closed : {true, false}) {
      for (const bool split : {true, false}) {
        const Case eager{.shape = {recurrence, 4, 2, 19, 33}, .closed = closed, .rows = 3};
        Case replay = eager;
        replay.length = 5;
        if (split) replay.read = Storage::fp32;
        SCOPED_TRACE(replay.text());
        Filled a(on(), eager), b(on(), replay);
        for (int t = 0; t < 11; ++t) {
          const TokenInputs in = random_inputs(eager, a.random);
          EXPECT_EQ(a.step(in), b.step(in)) << "outputs at token " << t;
          if (t % 5 != 4) continue;
          for (const std::int32_t at : a.slot.here) EXPECT_EQ(a.state(at), b.state(at)) << "state after token " << t;
        }
      }
    }
  }
}

TEST_P(Bits, OfCursors) {
  Array<std::int32_t> slot(on()), held(on());
  slot.write({0, -1, 5, 1 << 30, 3});
  held.write({0, 3, 3, 2, 1});
  for (int step = 0; step < 2; ++step) on().advance_cursors(5, slot.there(), held.there(), 4);
  EXPECT_EQ(held.read(), (std::vector<std::int32_t>{2, 3, 1, 0, 3}));
  on().advance_cursors(0, nullptr, nullptr, 4);
}

}  // namespace
}  // namespace replayssm::cuda::tests
