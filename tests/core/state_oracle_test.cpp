// Outputs, stored checkpoints and effective states of every schedule against a literal reading in 60 digits.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/core/state_helpers.h"

namespace replayssm {
namespace {

using oracle::Vec;

/// Errors against the truth, summed as squares. The rule for what is fair: twice the error of the naive version in the
/// same precision.
class Errors {
 public:
  template <class Real>
  void add(const Vec<Real>& code, const Vec<Real>& naive, const Vec<Wide>& truth) {
    code_ = std::hypot(code_, distance(code, truth));
    naive_ = std::hypot(naive_, distance(naive, truth));
  }
  /// What the root of the squares of the code's errors may be, if all of them fell on one value.
  double allowed() const { return 2 * naive_; }
  void check(const char* what) const { EXPECT_LE(code_, allowed()) << what; }

 private:
  template <class Real>
  static double distance(const Vec<Real>& x, const Vec<Wide>& truth) {
    EXPECT_EQ(x.size(), truth.size());
    double sum = 0;
    for (std::size_t i = 0; i < truth.size(); ++i) sum = std::hypot(sum, static_cast<double>(Wide(x[i]) - truth[i]));
    return sum;
  }
  double code_ = 0, naive_ = 0;
};

/// Checks that `stored` is what rounding the state x [rows, n] gives if arithmetic moved x by at most `error`: by the
/// monotony of rounding it lies between the rounded ends. The scale of a row moves with its largest element, by
/// `error` too and by half an ulp of fp32, which is what it is rounded to.
template <class Real>
void CheckStored(const Format& format, const Vec<Real>& stored, const Vec<Wide>& x, std::size_t n, double error) {
  for (std::size_t row = 0; row < x.size(); row += n) {
    double scale = 1, slack = 0;
    if (format.scale == Scale::row) {
      Wide largest = 0;
      for (std::size_t i = row; i < row + n; ++i) largest = std::max(largest, Wide(abs(x[i])));
      const auto max = decode<double>(format.element, format.element.max_code);
      scale = static_cast<float>(static_cast<double>(largest) / max);
      if (scale == 0) scale = 1;
      slack = error + static_cast<double>(largest) * std::ldexp(1.0, -24);
    }
    for (std::size_t i = row; i < row + n; ++i) {
      const auto end = [&](double sign) {
        const auto moved = static_cast<double>(x[i] + Wide(sign * (error + slack)));
        return round_to(format.element, moved / scale) * scale + sign * slack;
      };
      EXPECT_LE(end(-1), stored[i]) << format.text() << " element " << i;
      EXPECT_GE(end(+1), stored[i]) << format.text() << " element " << i;
    }
  }
}

/// One way to write ring formats and what they mean for a record: fields of Record, then u.
struct Ring {
  std::string text;
  const char *v, *w, *g, *gain, *u;
  oracle::RingAs formats() const {
    return {parse_format(v), parse_format(w), parse_format(g), parse_format(gain), parse_format(u)};
  }
};
// dt, g and beta stay fp32 in a rounded ring and exact in an exact one, unless they are named themselves.
const Ring kExactRing = {"", "exact", "exact", "exact", "exact", "exact"};
const Ring kBf16Ring = {", ring=bf16", "bf16", "bf16", "fp32", "fp32", "bf16"};
const Ring kMambaRings[] = {
    {", ring.x=fp16", "fp16", "exact", "exact", "exact", "exact"},
    {", ring.B=e4m3:row", "exact", "e4m3:row", "exact", "exact", "exact"},
    {", ring.dt=bf16", "exact", "exact", "bf16", "bf16", "exact"},
    {", ring=bf16, ring.x=exact, ring.dt=fp16", "exact", "bf16", "fp16", "fp16", "bf16"},
    {", ring.k=bf16, ring.v=bf16, ring.g=bf16, ring.beta=bf16", "exact", "exact", "exact", "exact", "exact"}};
const Ring kDeltaRings[] = {
    {", ring.v=fp16", "fp16", "exact", "exact", "exact", "exact"},
    {", ring.k=int8:row", "exact", "int8:row", "exact", "exact", "exact"},
    {", ring.g=bf16", "exact", "exact", "bf16", "exact", "exact"},
    {", ring.beta=bf16", "exact", "exact", "exact", "bf16", "exact"},
    {", ring.u=bf16", "exact", "exact", "exact", "exact", "bf16"},
    {", ring=e4m3:row, ring.k=exact, ring.g=exact", "e4m3:row", "exact", "exact", "fp32", "e4m3:row"},
    {", ring.x=bf16, ring.B=bf16, ring.dt=bf16", "exact", "exact", "exact", "exact", "exact"}};

/// Runs tokens one by one through a state, the oracle and the naive version. The latter two are put on the state's own
/// stored values at every flush: an element on the edge between two codes may go either way, once.
template <class Real, template <class> class Naive>
void Follow(const RecurrenceShape& shape, const Policy& policy, const Ring& ring, std::size_t tokens) {
  SCOPED_TRACE(policy.text());
  const Stream<Real> stream = RandomStream<Real>(shape, tokens);
  const auto& replay = std::get<Replay>(policy.schedule);
  const bool delta = is_delta_rule(shape.recurrence);
  const auto n = static_cast<std::size_t>(shape.state_dim), size = static_cast<std::size_t>(shape.head_dim) * n;
  const oracle::RingAs formats = ring.formats();
  const oracle::Schedule schedule{delta, static_cast<std::size_t>(replay.length), delta && policy.loop == Loop::open,
                                  formats.u};
  State<Real> state(shape, policy);
  Errors outputs, effective, rebuilt;
  std::vector<std::pair<Vec<Real>, Vec<Wide>>> stored;
  for (std::int64_t h = 0; h < shape.heads; ++h) {
    oracle::Steps<Wide> truth(schedule, size);
    Naive<Real> naive(schedule, size);
    for (std::size_t t = 0; t < tokens; ++t) {
      const Token<Real>& x = stream[static_cast<std::size_t>(h)][t];
      const Token<Real> record = oracle::stored(x, formats);
      Vec<Real> y(x.v.size());
      state.advance_head(h, Inputs(stream, t, t + 1), y.data(), shape.head_dim);
      const Vec<Wide> expected = truth.advance(x.template as<Wide>(), record.template as<Wide>());
      outputs.add(y, naive.advance(x, record), expected);
      if (!truth.flushed()) {
        if (t % 5 == 2) effective.add(state.effective(h), naive.effective(), truth.effective());
        continue;
      }
      const Vec<Real>& checkpoint = state.checkpoint(h);
      stored.emplace_back(checkpoint, truth.effective());
      rebuilt.add(replay.anchor.exact() ? checkpoint : naive.effective(), naive.effective(), truth.effective());
      Vec<Real> copy = checkpoint;
      if (replay.read) round_rows(*replay.read, copy.data(), shape.head_dim, shape.state_dim);
      EXPECT_TRUE(SameBits(state.read_copy(h), copy)) << "the read copy is the rounded anchor";
      truth.adopt(checkpoint, copy);
      naive.adopt(checkpoint, copy);
    }
  }
  outputs.check("outputs");
  effective.check("effective state");
  rebuilt.check("rebuilt state");
  for (const auto& [checkpoint, unrounded] : stored) {
    CheckStored(replay.anchor, checkpoint, unrounded, n, rebuilt.allowed());
  }
}

/// Both orders and both loops of `replay(L=..., states ring)`. A u that is rounded when cached cannot be put on the
/// state's own value, so in fp32, where some u would fall on the other side of an edge, the open loop is left out.
template <class Kind>
void FollowAll(const RecurrenceShape& shape, int length, const std::string& states, const Ring& ring,
               std::size_t tokens) {
  using Real = typename Kind::Real;
  const std::string text = "replay(L=" + std::to_string(length) + ", " + states + ring.text;
  for (const char* loop : {", loop=closed", ", loop=open"}) {
    const Policy closed = parse_policy(text + loop + ")"),
                 sequential = parse_policy(text + loop + ", order=sequential)");
    const bool edges = is_delta_rule(Kind::recurrence) && closed.loop == Loop::open && !ring.formats().u.exact();
    if (std::is_same_v<Real, float> && edges) continue;
    Follow<Real, oracle::Sums>(shape, closed, ring, tokens);
    Follow<Real, oracle::Steps>(shape, sequential, ring, tokens);
  }
}

template <class Kind>
class StateOracle : public testing::Test {};
TYPED_TEST_SUITE(StateOracle, Kinds);

TYPED_TEST(StateOracle, OfEveryPairOfStateFormats) {
  const auto shape = TypeParam::shape(5, 7, 2);
  for (const char* states : {"state=exact", "state=fp32", "state=bf16", "state=e4m3:row", "state=int8:row",
                             "anchor=exact, read=exact", "anchor=fp32, read=int8:row", "anchor=bf16, read=int4:row"}) {
    FollowAll<TypeParam>(shape, 6, states, kExactRing, 40);
    FollowAll<TypeParam>(shape, 6, states, kBf16Ring, 40);
  }
}

TYPED_TEST(StateOracle, OfEveryRingField) {
  const auto shape = TypeParam::shape(5, 7, 2);
  const auto follow = [&](const Ring& ring) {
    for (const char* states : {"state=exact", "anchor=fp32, read=bf16"}) {
      FollowAll<TypeParam>(shape, 6, states, ring, 40);
    }
  };
  if (is_delta_rule(TypeParam::recurrence)) {
    for (const Ring& ring : kDeltaRings) follow(ring);
  } else {
    for (const Ring& ring : kMambaRings) follow(ring);
  }
}

TYPED_TEST(StateOracle, OfEveryLength) {
  for (const int length : {1, 2, 3, 16, 64}) {
    FollowAll<TypeParam>(TypeParam::shape(3, 10), length, "state=exact", kExactRing, 150);
    FollowAll<TypeParam>(TypeParam::shape(3, 10), length, "anchor=fp32, read=e5m2", kBf16Ring, 150);
  }
}

TYPED_TEST(StateOracle, OfOddAndLargeShapes) {
  for (const auto& [p, n] : {std::pair{1, 1}, {1, 192}, {80, 1}, {80, 96}, {19, 33}}) {
    FollowAll<TypeParam>(TypeParam::shape(p, n), 8, "anchor=fp32, read=int8:row", kExactRing, p * n > 1000 ? 12 : 60);
  }
}

}  // namespace
}  // namespace replayssm
