// Speculative steps on inputs by which the state spells out the tokens that it holds: a wrong rollback is a wrong bit.

#include "core/speculative.h"

#include <gtest/gtest.h>

#include <cmath>
#include <initializer_list>
#include <limits>

#include "core/error.h"
#include "core/speculative_pool.h"
#include "tests/core/tags.h"

namespace replayssm {
namespace {

constexpr std::size_t kTags = 13;

const std::vector<std::string>& Policies() {
  static const std::vector<std::string> all = [] {
    std::vector<std::string> out = {"eager(state=fp32)", "replay(L=1, anchor=fp32, read=fp32)", "exact",
                                    "eager(state=fp32:ef=fp32)"};
    for (const char* states : {"state=fp32", "anchor=fp32, read=fp32"}) {
      for (const char* rest : {"", ", ring=bf16", ", order=sequential", ", order=sequential, ring=bf16", ", loop=open",
                               ", loop=open, order=sequential, ring=bf16"}) {
        out.push_back(std::string("replay(L=9, ") + states + rest + ")");
      }
    }
    return out;
  }();
  return all;
}

/// One sequence that is fed tags by their exponents.
template <class Kind>
struct Tagged {
  using Real = Kind::Real;

  Tagged(const std::string& policy, const Speculation& room)
      : state(TagShape<Kind>(kTags), parse_policy(policy), room) {}

  static LayerInputs<Real> inputs(std::initializer_list<std::size_t> tags) {
    std::vector<Token<Real>> chosen;
    for (const std::size_t t : tags) chosen.push_back(Tags<Kind>(kTags)[t]);
    return Inputs(OneHead(chosen), 0, chosen.size());
  }
  std::vector<Real> verify(std::initializer_list<std::size_t> tags) {
    std::vector<Real> y(tags.size());
    state.verify(inputs(tags), y.data());
    return y;
  }
  /// A step without drafts; its output.
  Real plain(std::size_t tag) {
    const Real y = verify({tag})[0];
    state.accept(1);
    return y;
  }
  Real held() { return Sum(state.effective(0)); }

  SpeculativeState<Real> state;
};

template <class Use>
std::string Refusal(Use&& use) {
  try {
    use();
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

template <class Kind>
class Speculative : public testing::Test {
 protected:
  template <class Body>
  static void of_every_policy(const Speculation& room, Body&& body) {
    for (const std::string& policy : Policies()) {
      SCOPED_TRACE(policy);
      for (const std::int64_t origin : {std::int64_t{0}, room.window + room.committed - 1}) {
        Speculation moved = room;
        moved.origin = origin;
        Tagged<Kind> tagged(policy, moved);
        body(tagged);
      }
    }
  }
};
TYPED_TEST_SUITE(Speculative, Kinds);

TYPED_TEST(Speculative, StepWithoutDraftsAfterManyAccepted) {
  using Reals = std::vector<typename TypeParam::Real>;
  this->of_every_policy({.window = 3, .committed = 4}, [](auto& s) {
    EXPECT_EQ(s.verify({0, 1, 2}), (Reals{1, 3, 7}));
    s.state.accept(3);
    EXPECT_EQ(s.held(), 7);
    EXPECT_EQ(s.plain(3), 15);
    EXPECT_EQ(s.verify({4, 5, 6}), (Reals{31, 63, 127}));
    s.state.accept(1);
    EXPECT_EQ(s.held(), 31);
    EXPECT_EQ(s.state.status().flushes, 1);
  });
}

TYPED_TEST(Speculative, RejectionIsConsumedOnce) {
  this->of_every_policy({.window = 3, .committed = 4}, [](auto& s) {
    s.verify({0, 1, 2});
    EXPECT_EQ(s.state.status().pending, 3);
    s.state.accept(1);
    EXPECT_EQ(s.state.status().pending, 0);
    s.state.accept(0);
    EXPECT_EQ(Refusal([&] { s.state.accept(1); }), "accept: 1 tokens of the 0 that wait for it");
    EXPECT_EQ(s.held(), 1);
    EXPECT_EQ(s.plain(1), 3);
    EXPECT_EQ(s.plain(2), 7);
    EXPECT_EQ(s.plain(3), 15);
    EXPECT_EQ(s.held(), 15);
  });
}

TYPED_TEST(Speculative, CommittedTokensAreTakenBackDownToTheCheckpoint) {
  this->of_every_policy({.window = 4, .committed = 6}, [](auto& s) {
    s.verify({0, 1, 2, 3});
    s.state.accept(4);
    s.plain(4);
    s.plain(5);
    const auto before = s.state.save();
    EXPECT_EQ(Refusal([&] { s.state.rollback(7); }),
              "rollback: 7 tokens of the 6 committed since the checkpoint, at token 0");
    EXPECT_EQ(Refusal([&] { s.state.effective(0, 7); }),
              "effective: 7 tokens back of the 6 committed since the checkpoint, at token 0");
    EXPECT_EQ(s.state.save(), before);
    for (std::int64_t back = 0; back <= 6; ++back) {
      EXPECT_EQ(Sum(s.state.effective(0, back)), (1 << (6 - back)) - 1) << back;
    }
    s.state.rollback(3);
    EXPECT_EQ(s.held(), 7);
    EXPECT_EQ(s.plain(3), 15);
    s.verify({4, 5, 6});
    EXPECT_EQ(s.state.status().flushes, 1);
    s.state.accept(0);
    EXPECT_EQ(Refusal([&] { s.state.rollback(1); }),
              "rollback: 1 tokens of the 0 committed since the checkpoint, at token 4");
    EXPECT_EQ(s.held(), 15);
  });
}

TYPED_TEST(Speculative, DeadEntriesAreNeverRead) {
  using Real = TypeParam::Real;
  for (const std::string& policy : Policies()) {
    SCOPED_TRACE(policy);
    for (const bool odd_gain : {false, true}) {
      for (const bool accepted : {false, true}) {
        Tagged<TypeParam> s(policy, {.window = 3, .committed = 4});
        auto third = Tags<TypeParam>(kTags)[2];
        third.v[0] = std::numeric_limits<Real>::infinity();
        if (odd_gain) third.gain = std::numeric_limits<Real>::quiet_NaN();
        const auto tags = Tags<TypeParam>(kTags);
        const std::vector<Token<Real>> window = {tags[0], tags[1], third};
        std::vector<Real> y(3);
        s.state.verify(Inputs(OneHead(window), 0, 3), y.data());
        EXPECT_FALSE(s.state.events().first_non_finite) << "of a token that does not count yet";
        s.state.accept(accepted ? 3 : 2);
        EXPECT_EQ(s.state.events().first_non_finite.has_value(), accepted);
        if (accepted) {
          EXPECT_FALSE(std::isfinite(s.held())) << "what is not finite is not clamped away";
          s.state.rollback(1);
          EXPECT_FALSE(s.state.events().first_non_finite);
        }
        EXPECT_EQ(s.held(), 3);
        EXPECT_EQ(s.plain(3), 11);
        EXPECT_EQ(s.held(), 11);
        s.verify({4, 5, 6});  // folds
        s.state.accept(0);
        EXPECT_EQ(s.held(), 11);
      }
    }
  }
}

TYPED_TEST(Speculative, NothingAcceptedAndSavedWhileWindowsGoOn) {
  this->of_every_policy({.window = 3, .committed = 4}, [](auto& s) {
    s.verify({0, 1, 2});
    EXPECT_EQ(Refusal([&] { s.state.save(); }), "save: 3 tokens of a window wait for accept()");
    EXPECT_EQ(Refusal([&] { s.state.rollback(0); }), "rollback: 3 tokens of a window wait for accept()");
    EXPECT_EQ(Refusal([&] { s.plain(3); }), "verify: 3 tokens of the window before wait for accept()");
    s.state.accept(1);
    Tagged<TypeParam> loaded(s.state.policy().text(), {.window = 3, .committed = 4});
    loaded.state.restore(s.state.save());
    EXPECT_EQ(s.plain(3), 9);
    EXPECT_EQ(loaded.plain(3), 9);
    EXPECT_EQ(loaded.state.save(), s.state.save());
    EXPECT_EQ(loaded.held(), 9);

    s.state.clear();
    EXPECT_EQ(s.state.status().tokens, 0);
    s.verify({0, 1, 2});
    s.state.accept(0);
    EXPECT_EQ(s.plain(3), 8);
    EXPECT_EQ(s.held(), 8);
  });
}

// The ring of 6 slots wraps in the middle of windows and of what is held, and after tokens were taken back.
TYPED_TEST(Speculative, PositionsWrapAtTheSlots) {
  for (const std::string& policy : Policies()) {
    SCOPED_TRACE(policy);
    for (std::int64_t origin = 0; origin < 6; ++origin) {
      Tagged<TypeParam> s(policy, {.window = 2, .committed = 4, .slots = 6, .origin = origin});
      for (std::size_t t = 0; t < 12; ++t) EXPECT_EQ(s.plain(t), (1 << (t + 1)) - 1) << origin;
      EXPECT_EQ(s.held(), 4095);
      EXPECT_EQ(s.state.status().held, 4);
      for (int round = 0; round < 3; ++round) {
        s.state.rollback(2);
        EXPECT_EQ(s.held(), 1023);
        EXPECT_EQ(s.plain(10), 2047);
        EXPECT_EQ(s.plain(11), 4095);
      }
      EXPECT_EQ(s.held(), 4095);
    }
  }
}

TYPED_TEST(Speculative, RoomIsChecked) {
  const auto made = [](const Speculation& room) {
    return Refusal([&] { Tagged<TypeParam>("replay(L=9, state=fp32)", room); });
  };
  EXPECT_EQ(made({.window = 0, .committed = 4}), "speculation: the window must be at least 1 token, found 0");
  EXPECT_EQ(made({.window = 3, .committed = 2}),
            "speculation: the ring must hold at least a window of 3 committed tokens, found 2");
  EXPECT_EQ(made({.window = 3, .committed = 4, .slots = 6}),
            "speculation: a ring of 4 committed tokens and a window of 3 needs at least 7 slots, found 6");
  EXPECT_EQ(made({.window = 3, .committed = 4, .slots = 7, .origin = 7}),
            "speculation: the origin must be one of the 7 slots from 0 on, found 7");
  Tagged<TypeParam> s("replay(L=9, state=fp32)", {.window = 3, .committed = 4});
  EXPECT_EQ(Refusal([&] { s.verify({0, 1, 2, 3}); }), "verify: a window of 4 tokens, of at most 3");
  s.verify({});
  s.state.accept(0);
  EXPECT_EQ(s.held(), 0);
}

TYPED_TEST(Speculative, OtherStatesAreNotRestored) {
  Tagged<TypeParam> s("replay(L=9, state=fp32)", {.window = 3, .committed = 4});
  s.plain(0);
  auto bytes = s.state.save();
  const auto restore = [](const auto& from, const char* policy, const Speculation& room) {
    Tagged<TypeParam> other(policy, room);
    other.plain(5);
    const auto before = other.state.save();
    const std::string refusal = Refusal([&] { other.state.restore(from); });
    EXPECT_EQ(other.state.save() == before, refusal != "accepted");
    return refusal;
  };
  const auto same = [&](const auto& from) { return restore(from, "replay(L=9, state=fp32)", {3, 4, 0, 2}); };
  EXPECT_EQ(same(bytes), "accepted");
  EXPECT_NE(restore(bytes, "replay(L=9, state=bf16)", {3, 4}).find("found one of fp"), std::string::npos);
  EXPECT_NE(restore(bytes, "replay(L=9, state=fp32)", {3, 5}).find("committed 5"), std::string::npos);
  bytes.push_back(std::byte{0});
  EXPECT_EQ(same(bytes), "restore: 1 bytes too many");
  bytes.resize(bytes.size() - 3);
  EXPECT_EQ(same(bytes), "restore: the bytes end 2 early: they have been cut");
  bytes.resize(40);
  EXPECT_NE(same(bytes), "accepted");
  EXPECT_EQ(same(std::vector<std::byte>(4)), "restore: the bytes are no saved speculative state");
}

TYPED_TEST(Speculative, PoolKeepsPaddingOut) {
  using Real = TypeParam::Real;
  for (const std::string& policy : Policies()) {
    SCOPED_TRACE(policy);
    SpeculativePool<Real> pool(TagShape<TypeParam>(kTags), parse_policy(policy), {.window = 3, .committed = 4}, 2);
    EXPECT_EQ(pool.allocate(), 0);
    EXPECT_EQ(pool.allocate(), 1);
    EXPECT_EQ(Refusal([&] { pool.allocate(); }), "all 2 slots of the pool are allocated");
    const auto three = Tagged<TypeParam>::inputs({0, 1, 2}), one = Tagged<TypeParam>::inputs({0});
    using Row = SpeculativePool<Real>::Row;
    Real y[3] = {}, z[3] = {-1, -1, -1};
    const std::int64_t slots[] = {1, 0, -1}, counts[] = {3, 1, 9};
    EXPECT_EQ(Refusal([&] {
                pool.verify(std::vector<Row>{{1, &three, y}, {2, &one, z}});
              }),
              "slot 2 is not in the pool of 2");
    EXPECT_EQ(Refusal([&] {
                pool.verify(std::vector<Row>{{1, &three, y}, {1, &one, z}});
              }),
              "slot 1 of the pool is named twice in a batch");
    EXPECT_EQ(pool.at(1).status().pending, 0) << "a refused batch changes nothing";
    pool.verify(std::vector<Row>{{1, &three, y}, {0, &one, z}, {-1, nullptr, nullptr}});
    EXPECT_EQ(Refusal([&] {
                pool.accept(slots, std::vector<std::int64_t>{3, 2, 0});
              }),
              "accept: 2 tokens of the 1 that wait for it");
    EXPECT_EQ(pool.at(1).status().pending, 3);
    pool.accept(slots, counts);
    EXPECT_EQ(Sum(pool.at(0).effective(0)), 1);
    EXPECT_EQ(Sum(pool.at(1).effective(0)), 7);
    EXPECT_EQ((std::vector<Real>{z[0], z[1], z[2]}), (std::vector<Real>{1, -1, -1}));

    pool.copy(1, 0);
    EXPECT_EQ(pool.at(0).save(), pool.at(1).save());
    pool.free(1);
    EXPECT_EQ(Refusal([&] { pool.at(1); }), "slot 1 of the pool is not allocated");
    EXPECT_EQ(pool.allocate(), 1);
    EXPECT_EQ(pool.at(1).status(), SpeculationStatus());
    EXPECT_EQ(Sum(pool.at(1).effective(0)), 0);
    EXPECT_EQ(Sum(pool.at(0).effective(0)), 7);
    EXPECT_EQ(pool.allocated(), 2);
  }
}

}  // namespace
}  // namespace replayssm
