// Inputs by which a state spells out the tokens that it holds: token t brings 2^t, nothing decays, and every sum below
// is exact in float.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/core/state_helpers.h"
#include "tests/core/tags.h"

namespace replayssm {
namespace {

template <class Kind>
class StateTags : public testing::Test {};
TYPED_TEST_SUITE(StateTags, Kinds);

TYPED_TEST(StateTags, AreAllHeldByEveryPolicy) {
  using Real = TypeParam::Real;
  const std::pair<const char*, std::size_t> fits[] = {{"exact", 24}, {"fp32", 24}, {"fp16", 11}, {"bf16", 8}};
  for (const auto& [format, count] : fits) {
    const auto stream = OneHead(Tags<TypeParam>(count));
    const std::string f(format);
    for (const std::string& states : {"state=" + f, "anchor=" + f + ", read=" + f}) {
      for (const char* length : {"1", "2", "3", "4", "16", "64"}) {
        for (const char* rest :
             {"", ", order=sequential", ", loop=open", ", order=sequential, loop=open", ", ring=bf16"}) {
          const Policy policy = parse_policy(std::string("replay(L=") + length + ", " + states + rest + ")");
          SCOPED_TRACE(policy.text());
          State<Real> state(TagShape<TypeParam>(count), policy);
          const std::vector<Real> y = Advance(state, stream, 0, count);
          for (std::size_t t = 0; t < count; ++t) EXPECT_EQ(y[t], SumOfTags<Real>(0, t + 1)) << t;
          EXPECT_EQ(Sum(state.effective(0)), SumOfTags<Real>(0, count));
          EXPECT_EQ(state.events().overflows, 0);
          EXPECT_FALSE(state.events().first_non_finite);
        }
      }
    }
    State<Real> eager(TagShape<TypeParam>(count), parse_policy("eager(state=" + f + ")"));
    EXPECT_EQ(Advance(eager, stream, 0, count).back(), SumOfTags<Real>(0, count));
  }
}

TYPED_TEST(StateTags, OfACallOnANonEmptyState) {
  using Real = TypeParam::Real;
  const auto stream = OneHead(Tags<TypeParam>(5));
  for (const std::string& text : PoliciesOfEveryKind()) {
    const auto names = {"int", "e4m3", "fp4"};
    const bool narrow = std::ranges::any_of(names, [&](auto name) { return text.find(name) != std::string::npos; });
    if (narrow) continue;  // tags do not fit
    SCOPED_TRACE(text);
    State<Real> state(TagShape<TypeParam>(5), parse_policy(text));
    EXPECT_EQ(Advance(state, stream, 0, 2), (std::vector<Real>{1, 3}));
    EXPECT_EQ(Advance(state, stream, 2, 5), (std::vector<Real>{7, 15, 31}));
    EXPECT_EQ(Sum(state.effective(0)), 31);
  }
}

// Four sequences of 0, 3, 0 and 2 tokens, each from a state of its own or from none.
TYPED_TEST(StateTags, OfEmptySequences) {
  using Real = TypeParam::Real;
  const auto stream = OneHead(Tags<TypeParam>(5));
  const std::size_t bounds[] = {0, 0, 3, 3, 5};
  for (const bool started : {true, false}) {
    for (std::size_t i = 0; i < 4; ++i) {
      State<Real> state(TagShape<TypeParam>(5), parse_policy("replay(L=4, anchor=fp32, read=fp32)"));
      // The keys of the delta rule are unit vectors: what lies in column 4 stays while key 4 is not seen, and is
      // replaced when it is.
      const bool replaced = is_delta_rule(TypeParam::recurrence) && bounds[i + 1] == 5 && bounds[i] != 5;
      std::vector<Real> start(state.checkpoint(0).size(), Real(0));
      start.back() = started ? std::ldexp(Real(1024), static_cast<int>(i)) : Real(0);
      state.set(start.data());
      Advance(state, stream, bounds[i], bounds[i + 1]);
      EXPECT_EQ(Sum(state.effective(0)), (replaced ? 0 : start.back()) + SumOfTags<Real>(bounds[i], bounds[i + 1]))
          << i;
    }
  }
}

// The ninth tag needs a ninth bit: the output that adds it is right, what is stored is not any more.
TEST(StateTags, ThatDoNotFitAreRoundedAfterTheOutput) {
  using Mamba = Kind<Recurrence::mamba2, float>;
  State<float> state(TagShape<Mamba>(10), parse_policy("eager(state=bf16)"));
  const auto y = Advance(state, OneHead(Tags<Mamba>(10)), 0, 10);
  EXPECT_EQ(y[8], 511);
  EXPECT_EQ(y[9], 512 + 512);
}

// Rows are the head dimension, columns the state dimension: S c reads along a row.
TYPED_TEST(StateTags, LayoutIsHeadDimByStateDim) {
  using Real = TypeParam::Real;
  const auto tokens = [](std::size_t p, std::size_t n) {
    Token<Real> x{
        std::vector<Real>(p, Real(0)), std::vector<Real>(n, Real(0)), std::vector<Real>(n, Real(0)), {}, 1, {}};
    x.c[0] = 1;
    x.g.assign(has_column_decay(TypeParam::recurrence) ? n : 1, Real(0));
    return OneHead<Real>({x, x});
  };
  for (const char* text :
       {"exact", "replay(L=2, state=fp32)", "replay(L=8, anchor=fp32, read=bf16, order=sequential)"}) {
    const Real square[] = {1, 2, 3, 4}, wide[] = {1, 2, 3, 4, 5, 6};
    State<Real> two(TypeParam::shape(2, 2), parse_policy(text)), three(TypeParam::shape(3, 2), parse_policy(text));
    two.set(square);
    three.set(wide);
    EXPECT_EQ(Advance(two, tokens(2, 2), 0, 2), (std::vector<Real>{1, 3, 1, 3})) << text;
    EXPECT_EQ(Advance(three, tokens(3, 2), 0, 2), (std::vector<Real>{1, 3, 5, 1, 3, 5})) << text;
  }
}

}  // namespace
}  // namespace replayssm
