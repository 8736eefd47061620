// What a state promises bit for bit: schedules that must agree, tokens cut into calls, the anchor's independence of the
// read copy, and the contracts of the accessors.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "tests/core/state_helpers.h"

namespace replayssm {
namespace {

/// Runs the whole stream in one call and gives the outputs.
template <class Real>
std::vector<Real> Run(State<Real>& state, const Stream<Real>& stream) {
  return Advance(state, stream, 0, stream[0].size());
}

/// Runs the stream under two policies and checks that outputs, checkpoints, effective states and events agree.
template <class Real>
void ExpectSame(const RecurrenceShape& shape, const Stream<Real>& stream, const std::string& a, const std::string& b) {
  SCOPED_TRACE(a + " and " + b);
  State<Real> first(shape, parse_policy(a)), second(shape, parse_policy(b));
  EXPECT_TRUE(SameBits(Run(first, stream), Run(second, stream)));
  EXPECT_TRUE(SameBits(Shown(first), Shown(second)));
  EXPECT_TRUE(first.events() == second.events());
}

template <class Kind>
class StateBits : public testing::Test {};
TYPED_TEST_SUITE(StateBits, Kinds);

TYPED_TEST(StateBits, ReplayOfLengthOneIsEager) {
  using Real = TypeParam::Real;
  for (const auto& [p, n] : {std::pair{5, 7}, {80, 96}, {1, 1}, {17, 192}}) {
    const auto shape = TypeParam::shape(p, n, 2);
    const Stream<Real> stream = RandomStream<Real>(shape, 20);
    for (const char* format : {"exact", "fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2", "tf32:row", "fp16:row",
                               "bf16:row", "e4m3:row", "e5m2:row", "int8:row", "int4:row"}) {
      for (const char* rest :
           {"", ", order=sequential", ", loop=open", ", order=sequential, loop=open", ", ring=bf16"}) {
        const std::string state = std::string("state=") + format;
        ExpectSame(shape, stream, "eager(" + state + ")", "replay(L=1, " + state + rest + ")");
      }
    }
  }
}

TYPED_TEST(StateBits, SequentialReplayWithExactFormatsIsTheReference) {
  using Real = TypeParam::Real;
  for (const auto& [p, n] : {std::pair{5, 7}, {80, 96}, {1, 1}, {6, 192}}) {
    const auto shape = TypeParam::shape(p, n, 2, 2);
    const Stream<Real> stream = RandomStream<Real>(shape, 70);
    State<Real> reference(shape, exact_policy());
    const std::vector<Real> y = Run(reference, stream);
    for (const char* length : {"1", "2", "3", "16", "64"}) {
      for (const char* states : {"state=exact", "anchor=exact, read=exact"}) {
        for (const char* loop : {"closed", "open"}) {
          const std::string text =
              std::string("replay(L=") + length + ", " + states + ", order=sequential, loop=" + loop + ")";
          State<Real> state(shape, parse_policy(text));
          EXPECT_TRUE(SameBits(Run(state, stream), y)) << text;
          for (std::int64_t h = 0; h < shape.heads; ++h) {
            EXPECT_TRUE(SameBits(state.effective(h), reference.checkpoint(h))) << text;
          }
        }
      }
    }
  }
}

TYPED_TEST(StateBits, DoNotDependOnHowTokensAreCut) {
  using Real = TypeParam::Real;
  const auto shape = TypeParam::shape(19, 10, 3);
  const Stream<Real> stream = RandomStream<Real>(shape, 50);
  const std::vector<std::vector<std::size_t>> cuts = {
      {0, 1, 50}, {0, 20, 50}, {0, 0, 7, 7, 14, 15, 27, 50, 50}, {0, 6, 13, 20, 48, 49, 50}};
  for (const std::string& text : PoliciesOfEveryKind()) {
    SCOPED_TRACE(text);
    State<Real> whole(shape, parse_policy(text));
    const std::vector<Real> y = Run(whole, stream);
    const auto check = [&](State<Real>& state, const std::vector<Real>& pieces) {
      EXPECT_TRUE(SameBits(pieces, y));
      EXPECT_TRUE(SameBits(Shown(state), Shown(whole)));
      EXPECT_TRUE(state.events() == whole.events());
      EXPECT_EQ(state.held(), whole.held());
    };
    for (const auto& cut : cuts) {
      State<Real> state(shape, parse_policy(text));
      std::vector<Real> pieces;
      for (std::size_t i = 0; i + 1 < cut.size(); ++i) {
        const std::vector<Real> piece = Advance(state, stream, cut[i], cut[i + 1]);
        pieces.insert(pieces.end(), piece.begin(), piece.end());
      }
      check(state, pieces);
    }
    if (text.find("tensor") != std::string::npos) continue;  // whose heads advance together
    // Token by token, the heads in an order that changes with the token.
    State<Real> state(shape, parse_policy(text));
    std::vector<Real> pieces(y.size());
    for (std::size_t t = 0; t < 50; ++t) {
      const LayerInputs<Real> inputs = Inputs(stream, t, t + 1);
      for (const std::int64_t i : {2, 0, 1}) {
        const std::int64_t h = (i + static_cast<std::int64_t>(t)) % 3;
        state.advance_head(h, inputs, pieces.data() + 57 * t + 19 * static_cast<std::size_t>(h), 57);
      }
    }
    check(state, pieces);
  }
}

// A prefill of any length, whole or as 20 tokens and the rest, around multiples of the replay length.
TYPED_TEST(StateBits, PrefillOfAnyLength) {
  using Real = TypeParam::Real;
  const auto shape = TypeParam::shape(5, 12, 2);
  for (const std::size_t tokens : {1, 31, 32, 33, 64, 65}) {
    const Stream<Real> stream = RandomStream<Real>(shape, tokens);
    for (const char* text : {"replay(L=32, state=exact)", "replay(L=32, state=exact, order=sequential)"}) {
      State<Real> whole(shape, parse_policy(text)), split(shape, parse_policy(text));
      Run(whole, stream);
      EXPECT_EQ(whole.held(), static_cast<std::int64_t>(tokens % 32));
      const std::size_t first = std::min<std::size_t>(20, tokens);
      Advance(split, stream, 0, first);
      Advance(split, stream, first, tokens);
      EXPECT_TRUE(SameBits(Shown(whole), Shown(split))) << text << ", " << tokens << " tokens";
    }
  }
}

// In a closed loop, and for Mamba-2 in any, the anchor is that of a run whose read copy was not rounded. The second
// read format overflows: its copies hold infinities and its outputs NaN, and still none of it reaches the anchor.
TYPED_TEST(StateBits, NothingOfTheReadCopyReachesTheAnchor) {
  using Real = TypeParam::Real;
  const auto shape = TypeParam::shape(19, 10, 2);
  Stream<Real> stream = RandomStream<Real>(shape, 60);
  for (auto& head : stream) {
    for (auto& token : head) {
      for (Real& v : token.v) v *= Real(1e6);
    }
  }
  for (const char* read : {"int8:row", "fp16"}) {
    for (const char* rest : {"", ", order=sequential", ", ring=bf16", ", order=sequential, ring=bf16"}) {
      for (const char* loop : {", loop=closed)", ", loop=open)"}) {
        const std::string text = std::string(read) + rest + loop;
        SCOPED_TRACE(text);
        State<Real> rounded(shape, parse_policy("replay(L=6, anchor=fp32, read=" + text));
        State<Real> plain(shape, parse_policy(std::string("replay(L=6, anchor=fp32, read=fp32") + rest + loop));
        const bool leaks = is_delta_rule(TypeParam::recurrence) && std::string(loop) == ", loop=open)";
        bool same = true, finite = true;
        for (std::size_t t = 0; t < 60; ++t) {
          const std::vector<Real> y = Advance(rounded, stream, t, t + 1);
          EXPECT_EQ(SameBits(y, Advance(plain, stream, t, t + 1)), t < 6 || (!leaks && t % 6 == 5)) << "output " << t;
          for (const Real& value : y) finite = finite && std::isfinite(value);
          same = same && SameBits(Shown(rounded, false), Shown(plain, false));
        }
        EXPECT_EQ(same, !leaks);
        EXPECT_EQ(finite, std::string(read) != "fp16");
      }
    }
  }
}

TYPED_TEST(StateBits, NoTokensChangeNothing) {
  using Real = TypeParam::Real;
  const auto shape = TypeParam::shape(5, 7, 2);
  const Stream<Real> stream = RandomStream<Real>(shape, 10);
  for (const std::string& text : PoliciesOfEveryKind()) {
    State<Real> state(shape, parse_policy(text));
    Advance(state, stream, 0, 0);
    EXPECT_TRUE(SameBits(Shown(state), std::vector<Real>(2 * 3 * 35, Real(0)))) << text;
    Run(state, stream);
    const std::vector<Real> before = Shown(state);
    const std::int64_t held = state.held();
    EXPECT_TRUE(Advance(state, stream, 5, 5).empty());
    EXPECT_TRUE(SameBits(Shown(state), before)) << text;
    EXPECT_EQ(state.held(), held);
  }
}

// set() after the ring was filled with NaN: the dead records are there, and nothing of them is ever seen.
TYPED_TEST(StateBits, DeadRecordsAreNotRead) {
  using Real = TypeParam::Real;
  constexpr Real kNan = std::numeric_limits<Real>::quiet_NaN();
  const auto shape = TypeParam::shape(5, 7, 2);
  const Stream<Real> stream = RandomStream<Real>(shape, 20);
  Stream<Real> poison = RandomStream<Real>(shape, 6);
  for (auto& head : poison) {
    for (auto& token : head) {
      for (auto* field : {&token.v, &token.w, &token.c, &token.g}) field->assign(field->size(), kNan);
      token.gain = kNan;
    }
  }
  const std::vector<Real> start = RandomStream<Real>(TypeParam::shape(70, 1), 1)[0][0].v;
  for (const std::string& text : PoliciesOfEveryKind()) {
    SCOPED_TRACE(text);
    State<Real> fresh(shape, parse_policy(text)), poisoned(shape, parse_policy(text));
    for (const Real& y : Run(poisoned, poison)) EXPECT_TRUE(std::isnan(y));
    Run(fresh, RandomStream<Real>(shape, 6));  // as many tokens, by which stochastic rounding draws
    fresh.set(start.data());
    poisoned.set(start.data());
    for (std::size_t t = 0; t < 20; ++t) {
      EXPECT_TRUE(SameBits(Advance(fresh, stream, t, t + 1), Advance(poisoned, stream, t, t + 1)));
      EXPECT_TRUE(SameBits(Shown(fresh), Shown(poisoned)));
    }
    for (const Real& value : Shown(poisoned)) EXPECT_TRUE(std::isfinite(value));
  }
}

TYPED_TEST(StateBits, SetStoresWithoutRounding) {
  using Real = TypeParam::Real;
  const auto shape = TypeParam::shape(5, 7, 2);
  const Stream<Real> stream = RandomStream<Real>(shape, 10);
  const std::vector<Real> start = RandomStream<Real>(TypeParam::shape(70, 1), 1)[0][0].v;
  for (const std::string& text : PoliciesOfEveryKind()) {
    SCOPED_TRACE(text);
    State<Real> state(shape, parse_policy(text));
    Run(state, stream);
    state.set(start.data());
    EXPECT_EQ(state.held(), 0);
    for (std::int64_t h = 0; h < 2; ++h) {
      const std::vector<Real> part(start.begin() + 35 * h, start.begin() + 35 * (h + 1));
      EXPECT_TRUE(SameBits(state.checkpoint(h), part));
      EXPECT_TRUE(SameBits(state.read_copy(h), part));
      EXPECT_TRUE(SameBits(state.effective(h), part));
    }
  }
}

// Every format in an eager state: one exact step from what was stored, then one store of the whole head. More rows than
// are advanced together, and columns that no block divides.
TEST(State, StoresEveryFormatAsItsRowsAreRounded) {
  std::vector<std::string> formats;
  for (const Element& element : elements()) {
    const std::string name(element.name);
    if (!element.integer) formats.push_back(name);
    if (name == "fp32") continue;
    for (const char* scale : {":row", ":group16", ":tile5", ":head", ":row:floor", ":group8:ceil"})
      formats.push_back(name + scale);
  }
  for (const NamedFormat& named : named_formats()) formats.emplace_back(named.name);
  const RecurrenceShape shape{Recurrence::gated_delta, 2, 1, 37, 41};
  const auto stream = RandomStream<double>(shape, 4);
  for (const std::string& text : formats) {
    const Format format = parse_format(text);
    State<double> state(shape, parse_policy("eager(state=" + text + ")")), exact(shape, exact_policy());
    std::vector<double> before(2 * 37 * 41, 0.0);
    for (std::size_t t = 0; t < 4; ++t) {
      exact.set(before.data());
      EXPECT_TRUE(SameBits(Advance(state, stream, t, t + 1), Advance(exact, stream, t, t + 1))) << text;
      before.clear();
      for (std::int64_t h = 0; h < 2; ++h) {
        std::vector<double> head = exact.checkpoint(h);
        round_rows(format, head.data(), 37, 41);
        EXPECT_TRUE(SameBits(head, state.checkpoint(h))) << text << " at token " << t;
        before.insert(before.end(), head.begin(), head.end());
      }
    }
  }
}

TEST(State, KeepsACheckpointForEveryFlushAndACopyWhereSplit) {
  const RecurrenceShape shape{Recurrence::gated_delta, 1, 1, 3, 4};
  const auto stream = RandomStream<double>(shape, 9);
  State<double> shared(shape, parse_policy("replay(L=4, state=bf16)"));
  State<double> split(shape, parse_policy("replay(L=4, anchor=fp32, read=bf16)"));
  std::vector<double> before = shared.checkpoint(0);
  for (std::size_t t = 0; t < 9; ++t) {
    Advance(shared, stream, t, t + 1);
    Advance(split, stream, t, t + 1);
    const bool flush = t % 4 == 3;
    EXPECT_EQ(shared.held(), static_cast<std::int64_t>((t + 1) % 4));
    EXPECT_EQ(SameBits(shared.checkpoint(0), before), !flush);
    EXPECT_EQ(&shared.checkpoint(0), &shared.read_copy(0));
    EXPECT_EQ(SameBits(split.checkpoint(0), split.read_copy(0)), t < 3) << "zero until the first flush";
    before = shared.checkpoint(0);
    // What is stored has been rounded, what is rebuilt has not.
    std::vector<double> rounded = before;
    round_rows(parse_format("bf16"), rounded.data(), 3, 4);
    EXPECT_TRUE(SameBits(rounded, before));
    if (!flush) {
      rounded = shared.effective(0);
      round_rows(parse_format("bf16"), rounded.data(), 3, 4);
      EXPECT_FALSE(SameBits(rounded, shared.effective(0)));
    }
  }
}

TEST(State, RefusesShapesThatAreNone) {
  for (const RecurrenceShape& shape : {RecurrenceShape{Recurrence::kda, 0, 1, 2, 2},
                                       {Recurrence::kda, 2, 0, 2, 2},
                                       {Recurrence::kda, 2, 1, 0, 2},
                                       {Recurrence::kda, 2, 1, 2, -1},
                                       {Recurrence::kda, 3, 2, 2, 2},
                                       {}}) {
    try {
      State<float> state(shape, exact_policy());
      FAIL() << "accepted";
    } catch (const Error& error) {
      const std::string found = "state of " + std::to_string(shape.heads) + " heads, " + std::to_string(shape.groups) +
                                " groups, head_dim " + std::to_string(shape.head_dim) + ", state_dim " +
                                std::to_string(shape.state_dim);
      EXPECT_NE(std::string(error.what()).find(found), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace replayssm
