// The cost of a policy against a count that walks the tokens one by one.

#include "analysis/traffic.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <string>

#include "core/model.h"

namespace replayssm {
namespace {

/// A policy in the terms of the count: its text for state_cost(), and literal bytes of a row of n elements.
struct Case {
  std::string text;
  std::int64_t L;
  std::function<double(double)> anchor, read;  // read empty: shared
  bool anchor_rounded, read_rounded;
  /// Bytes of a record's fields: x, B, v, k, u of n elements, gates of one.
  std::map<std::string, std::function<double(double)>> ring = {};
  bool open = false;
};

double exact_state(double n) { return 8 * n; }
double bytes4(double n) { return 4 * n; }
double bytes2(double n) { return 2 * n; }
double scaled_byte(double n) { return n + 4; }
double scaled_nibble(double n) { return std::ceil(n / 2) + 4; }
double mx_nibble(double n) { return std::ceil(n / 2) + std::ceil(n / 32); }
double grouped_byte(double n) { return n + 4 * std::ceil(n / 32); }

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"exact", 1, exact_state, {}, false, false},
      {"eager(state=bf16)", 1, bytes2, {}, true, true},
      {"eager(state=int4:row)", 1, scaled_nibble, {}, true, true},
      {"eager(state=mxfp4)", 1, mx_nibble, {}, true, true},
      {"replay(L=16, anchor=int8:group32, read=mxfp4:ceil)", 16, grouped_byte, mx_nibble, true, true},
      {"replay(L=1, state=e4m3:row)", 1, scaled_byte, {}, true, true},
      {"replay(L=2, state=fp32)", 2, bytes4, {}, true, true},
      {"replay(L=16, state=exact)", 16, exact_state, {}, false, false},
      {"replay(L=16, state=exact, order=sequential)", 16, exact_state, {}, false, false},
      {"replay(L=16, state=int8:row)", 16, scaled_byte, {}, true, true},
      {"replay(L=16, state=bf16, loop=open)", 16, bytes2, {}, true, true, {}, true},
      {"replay(L=16, anchor=fp32, read=e4m3:row)", 16, bytes4, scaled_byte, true, true},
      {"replay(L=16, anchor=exact, read=int4:row)", 16, exact_state, scaled_nibble, false, true},
      {"replay(L=16, anchor=bf16, read=exact)", 16, bytes2, exact_state, true, false},
      {"replay(L=1, anchor=fp32, read=bf16)", 1, bytes4, bytes2, true, true},
      // A ring that is named: activations in its format, gates in fp32, unless they are named themselves.
      {"replay(L=16, anchor=fp32, read=bf16, ring=bf16)", 16, bytes4, bytes2, true, true},
      {"replay(L=5, state=bf16, ring=e4m3:row)",
       5,
       bytes2,
       {},
       true,
       true,
       {{"x", scaled_byte}, {"B", scaled_byte}, {"v", scaled_byte}, {"k", scaled_byte}, {"u", scaled_byte}}},
      {"replay(L=16, anchor=fp32, read=bf16, ring=fp32, ring.B=int4:row, ring.k=e4m3, ring.dt=bf16, ring.g=bf16, "
       "ring.beta=fp16, loop=open)",
       16,
       bytes4,
       bytes2,
       true,
       true,
       {{"x", bytes4},
        {"B", scaled_nibble},
        {"v", bytes4},
        {"u", bytes4},
        {"k", [](double n) { return n; }},
        {"dt", bytes2},
        {"g", bytes2},
        {"beta", bytes2}},
       true}};
  return all;
}

enum class Use { append, output, flush };

/// Bytes of one record of a layer, all heads and all groups: what a token appends, what outputs and flushes read.
double layer_record(const Case& c, const RecurrenceShape& s, Use use) {
  const auto field = [&](const char* name, std::int64_t n) {
    const bool gate = std::string(name) == "dt" || std::string(name) == "g" || std::string(name) == "beta";
    const auto found = c.ring.find(name);
    // An exact ring is counted with activations in bf16 and gates in fp32.
    return found != c.ring.end() ? found->second(static_cast<double>(n)) : static_cast<double>(n * (gate ? 4 : 2));
  };
  double bytes = 0;
  for (std::int64_t h = 0; h < s.heads; ++h) {
    if (s.recurrence == Recurrence::mamba2) {
      bytes += field("x", s.head_dim) + field("dt", 1);
    } else {
      bytes += field("g", s.recurrence == Recurrence::kda ? s.state_dim : 1);
      if (c.open || use != Use::flush) bytes += field("u", s.head_dim);
      if (!c.open && use != Use::output) bytes += field("v", s.head_dim) + field("beta", 1);
    }
  }
  for (std::int64_t g = 0; g < s.groups; ++g)
    bytes += field(s.recurrence == Recurrence::mamba2 ? "B" : "k", s.state_dim);
  return bytes;
}

/// Walks the tokens of one layer. The counts per layer of the result are those of this layer.
StateCost walk(const Case& c, const RecurrenceShape& s, std::int64_t tokens) {
  const double rows = static_cast<double>(s.heads * s.head_dim), n = static_cast<double>(s.state_dim);
  const double anchor = rows * c.anchor(n), copy = c.read ? rows * c.read(n) : 0;
  const double record = layer_record(c, s, Use::append);
  StateCost cost;
  cost.bytes_stored_per_sequence = anchor + copy + static_cast<double>(c.L - 1) * record;
  double moved = 0;
  bool written = false;  // before the first write the state is zero, which no format rounds
  for (std::int64_t t = 0, held = 0; t < tokens; ++t) {
    cost.ring_reads += held;
    moved += static_cast<double>(held) * layer_record(c, s, held < c.L - 1 ? Use::output : Use::flush);
    if (held < c.L - 1) {
      moved += (c.read ? copy : anchor) + record;
      cost.rounded_reads += written && (c.read ? c.read_rounded : c.anchor_rounded);
      cost.read_copy_reads += written && c.read && c.read_rounded;
      ++held;
    } else {
      moved += 2 * anchor + copy;
      cost.rounded_reads += written && c.anchor_rounded;
      ++cost.flushes;
      written = true;
      held = 0;
    }
  }
  cost.bytes_moved_per_token = moved / static_cast<double>(tokens);
  return cost;
}

const std::vector<RecurrenceShape> shapes = {
    {Recurrence::mamba2, 6, 2, 16, 24},     {Recurrence::mamba2, 8, 8, 80, 96},
    {Recurrence::mamba2, 4, 1, 3, 5},       {Recurrence::gated_delta, 8, 4, 64, 64},
    {Recurrence::gated_delta, 3, 1, 7, 11}, {Recurrence::kda, 4, 4, 32, 48},
    {Recurrence::kda, 6, 3, 5, 9}};

TEST(Traffic, IsWhatAWalkOverTheTokensCounts) {
  for (const Case& c : cases()) {
    const Policy policy = parse_policy(c.text);
    for (const RecurrenceShape& shape : shapes) {
      const std::vector<LayerInfo> layers = {{"layer", shape}};
      for (const std::int64_t tokens : {1, 2, 4, 5, 6, 15, 16, 17, 31, 32, 33, 100}) {
        const StateCost cost = state_cost(layers, policy, tokens), expected = walk(c, shape, tokens);
        const std::string where = c.text + ", " + std::string(name(shape.recurrence)) + ", " + std::to_string(tokens);
        // Sums of multiples of 1 / 8 below 2^40 are exact; the quotient by the tokens is rounded once, on either side.
        EXPECT_EQ(cost.bytes_stored_per_sequence, expected.bytes_stored_per_sequence) << where;
        EXPECT_EQ(cost.bytes_moved_per_token, expected.bytes_moved_per_token) << where;
        EXPECT_EQ(cost.flushes, expected.flushes) << where;
        EXPECT_EQ(cost.rounded_reads, expected.rounded_reads) << where;
        EXPECT_EQ(cost.read_copy_reads, expected.read_copy_reads) << where;
        EXPECT_EQ(cost.ring_reads, expected.ring_reads) << where;
      }
    }
  }
}

TEST(Traffic, LayersThatAreNotNamedRunExact) {
  const Case bf16{"", 16, bytes2, {}, true, true}, exact{"", 1, exact_state, {}, false, false};
  const std::vector<LayerInfo> layers = {{"mamba2", shapes[0]}, {"attention", {}}, {"mamba2", shapes[1]}};
  const StateCost named = state_cost(layers, parse_policy("replay(L=16, state=bf16, layers=2)"), 40);
  const StateCost first = walk(exact, shapes[0], 40), last = walk(bf16, shapes[1], 40);
  EXPECT_EQ(named.bytes_stored_per_sequence, first.bytes_stored_per_sequence + last.bytes_stored_per_sequence);
  // Two quotients and their sum on one side, one quotient on the other: within the 4 ulps of DOUBLE_EQ.
  EXPECT_DOUBLE_EQ(named.bytes_moved_per_token, first.bytes_moved_per_token + last.bytes_moved_per_token);
  EXPECT_EQ(named.flushes, last.flushes);
  EXPECT_EQ(named.rounded_reads, last.rounded_reads);
}

TEST(Traffic, NothingForNoTokens) {
  const std::vector<LayerInfo> layers = {{"mamba2", shapes[0]}};
  EXPECT_EQ(state_cost(layers, parse_policy("eager(state=bf16)"), 0).bytes_moved_per_token, 0);
  EXPECT_EQ(state_cost({}, parse_policy("eager(state=bf16)"), 5).bytes_moved_per_token, 0);
}

TEST(Traffic, KnownNumbers) {
  // One head of a Mamba-2 layer, 64 x 128, long run at L = 16: per token 64 * 128 * 2 bytes read always and written at
  // one step of 16, 7.5 records read on average and 15 / 16 appended, of 2 (64 + 128) + 4 bytes.
  const std::vector<LayerInfo> layers = {{"mamba2", RecurrenceShape{Recurrence::mamba2, 1, 1, 64, 128}}};
  const StateCost cost = state_cost(layers, parse_policy("replay(L=16, state=bf16)"), 16 * 1000);
  EXPECT_EQ(cost.bytes_moved_per_token, 16384 * (1 + 1.0 / 16) + 388 * (7.5 + 15.0 / 16));
  EXPECT_EQ(cost.bytes_stored_per_sequence, 16384 + 15 * 388);
}

// Two heads of 3 rows of 40 elements: 20 bytes of codes a row, three block scales, and one scale a head.
TEST(LayerTraffic, CountsTheScaleOfAHead) {
  const RecurrenceShape shape{Recurrence::mamba2, 2, 1, 3, 40};
  const LayerTraffic layer(shape, parse_policy("eager(state=nvfp4)"));
  EXPECT_EQ(layer.stored(), 2 * (3 * (20 + 3) + 4));
  EXPECT_EQ(layer.flush().state_read, 2 * 3 * 20);
  EXPECT_EQ(layer.flush().scales, 2 * 2 * (3 * 3 + 4));
  // Of the ring, x [3] is one block with a scale of its own, of each head; B [40] is three.
  const LayerTraffic ring(shape, parse_policy("replay(L=2, state=nvfp4, ring=nvfp4)"));
  EXPECT_EQ(ring.output(0).ring_append, 2 * (2 + 1 + 4) + (20 + 3 + 4) + 2 * 4);
}

// Two heads of 3 rows of 40 elements: one scale for all of them, of 4 bytes; or one with a zero point of a byte, or of
// two bytes, for each row.
TEST(LayerTraffic, CountsTheScaleOfATensorOnceAndZeroPoints) {
  const RecurrenceShape shape{Recurrence::mamba2, 2, 1, 3, 40};
  EXPECT_EQ(LayerTraffic(shape, parse_policy("eager(state=int8:tensor)")).stored(), 2 * 3 * 40 + 4);
  EXPECT_EQ(LayerTraffic(shape, parse_policy("eager(state=int8:tensor)")).flush().scales, 2 * 4);
  EXPECT_EQ(LayerTraffic(shape, parse_policy("eager(state=int4:row:asym)")).stored(), 2 * 3 * (20 + 4 + 1));
  EXPECT_EQ(LayerTraffic(shape, parse_policy("eager(state=int16:row:asym)")).stored(), 2 * 3 * (80 + 4 + 2));
}

// A residual is read and written by a flush, and by nothing else.
TEST(LayerTraffic, CountsResidualsWhereTheyMove) {
  const RecurrenceShape shape{Recurrence::mamba2, 2, 1, 3, 40};
  const double state = 2 * 3 * (40 + 4), int4 = 2 * 3 * (20 + 4), bf16 = 2 * 3 * 80;
  const LayerTraffic eager(shape, parse_policy("eager(state=int8:row:ef=int4)"));
  EXPECT_EQ(eager.stored(), state + int4);
  EXPECT_EQ(eager.mean().residuals, 2 * int4);
  EXPECT_EQ(eager.mean().total(), 2 * state + 2 * int4);
  const LayerTraffic shared(shape, parse_policy("replay(L=4, state=int8:row:ef=int4)"));
  EXPECT_EQ(shared.output(1).residuals, 0);
  EXPECT_EQ(shared.mean().residuals, 2 * int4 / 4);
  const LayerTraffic split(shape, parse_policy("replay(L=4, anchor=bf16:ef=bf16, read=int8:row:ef=int4)"));
  const double record = 2 * (2 * 3 + 4) + 2 * 40;
  EXPECT_EQ(split.stored(), 2 * bf16 + state + int4 + 3 * record);
  EXPECT_EQ(split.output(1).residuals, 0);
  EXPECT_EQ(split.flush().residuals, 2 * bf16 + 2 * int4);
  const std::vector<LayerInfo> layers = {{"mamba2", shape}};
  EXPECT_EQ(state_cost(layers, parse_policy("eager(state=int8:row:ef=int4)"), 9).bytes_moved_per_token,
            2 * state + 2 * int4);
}

// A speculative step reads one state, and writes it where it flushes; the records of its whole window are appended.
TEST(LayerTraffic, CountsSpeculativeSteps) {
  const RecurrenceShape mamba2{Recurrence::mamba2, 2, 1, 3, 40}, delta{Recurrence::gated_delta, 2, 1, 3, 40};
  const auto expect = [](const StepBytes& step, double read, double write, double scales, double ring, double append,
                         double residuals) {
    EXPECT_EQ(step.state_read, read);
    EXPECT_EQ(step.state_write, write);
    EXPECT_EQ(step.scales, scales);
    EXPECT_EQ(step.ring_read, ring);
    EXPECT_EQ(step.ring_append, append);
    EXPECT_EQ(step.residuals, residuals);
  };
  const double bf16 = 2 * 3 * 80, int8 = 2 * 3 * 40, scales = 2 * 3 * 4, record = 2 * (2 * 3 + 4) + 2 * 40;
  const LayerTraffic shared(mamba2, parse_policy("replay(L=16, state=int8:row:ef=bf16)"));
  expect(shared.verify(7, 5, false), int8, 0, scales, 7 * record, 5 * record, 0);
  expect(shared.verify(13, 5, true), int8, int8, 2 * scales, 13 * record, 5 * record, 2 * bf16);
  expect(shared.snapshots(5), int8, 5 * int8, 6 * scales, 0, 0, 6 * bf16);
  const LayerTraffic split(mamba2, parse_policy("replay(L=16, anchor=bf16, read=int8:row)"));
  expect(split.verify(7, 1, false), int8, 0, scales, 7 * record, record, 0);
  expect(split.verify(16, 1, true), bf16, bf16 + int8, scales, 16 * record, record, 0);
  expect(split.snapshots(1), bf16, bf16, 0, 0, 0, 0);
  // v, u, k, g and beta are appended; outputs read u, k and g, a flush the raw v, k, g and beta.
  const double v = 2 * 3 * 2, k = 40 * 2, gate = 2 * 4;
  const LayerTraffic closed(delta, parse_policy("replay(L=16, state=bf16)"));
  expect(closed.verify(7, 5, false), bf16, 0, 0, 7 * (v + k + gate), 5 * (2 * v + k + 2 * gate), 0);
  expect(closed.verify(13, 5, true), bf16, bf16, 0, 13 * (v + k + 2 * gate), 5 * (2 * v + k + 2 * gate), 0);
  // A state that is rounded at every token has nothing but snapshots to go back to.
  const LayerTraffic eager(mamba2, parse_policy("eager(state=bf16)"));
  expect(eager.verify(3, 5, false), bf16, 5 * bf16, 0, 0, 0, 0);
}

}  // namespace
}  // namespace replayssm
