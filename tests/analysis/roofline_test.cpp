// Times and lengths against numbers that were counted by hand.

#include "analysis/roofline.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

namespace replayssm {
namespace {

const RecurrenceShape nemotron{Recurrence::mamba2, 128, 8, 64, 128}, qwen64{Recurrence::gated_delta, 64, 16, 128, 128},
    qwen32{Recurrence::gated_delta, 32, 16, 128, 128};

std::vector<LayerInfo> one(const RecurrenceShape& shape) { return {{"layer", shape}}; }

double microseconds(const RecurrenceShape& shape, const std::string& policy) {
  return 1e6 * step_seconds(one(shape), parse_policy(policy), 256, {});
}

TEST(Roofline, PublishedFloorsAtBatch256AndTheReadCeilingOfAnH200) {
  EXPECT_EQ(Roofline{}.bandwidth, 4520e9);
  EXPECT_EQ(std::round(microseconds(nemotron, "replay(L=16, state=fp32)")), 264);
  EXPECT_EQ(std::round(microseconds(nemotron, "replay(L=16, state=fp16)")), 137);
  EXPECT_EQ(std::round(microseconds(nemotron, "replay(L=16, state=int8:row)")), 76);
  EXPECT_EQ(std::round(microseconds(qwen64, "replay(L=16, state=fp32)")), 266);
  EXPECT_EQ(std::round(microseconds(qwen64, "replay(L=16, state=bf16)")), 139);
  EXPECT_EQ(std::round(microseconds(qwen32, "replay(L=16, state=fp32)")), 134);
}

TEST(Roofline, CountsByHand) {
  // Mamba-2, 2 heads of 4 x 8 in 1 group, bf16, L = 4. State 2 * 4 * 8 * 2 = 128 bytes; record x 2 * 4 * 2, B 8 * 2,
  // dt 2 * 4: 40 bytes. Steps with 0, 1 and 2 records read the state and those and append one; the flush reads the
  // state and 3 records and writes the state. Inputs x 16, B 16, C 16, dt 4, and y 16: 68 bytes.
  const std::vector<LayerInfo> layers = one({Recurrence::mamba2, 2, 1, 4, 8});
  const Policy policy = parse_policy("replay(L=4, state=bf16)");
  const double cycle = 3 * 128 + (0 + 1 + 2) * 40 + 3 * 40 + (128 + 3 * 40 + 128);
  const Roofline unit{.bandwidth = 1};
  EXPECT_EQ(step_seconds(layers, policy, 1, unit), cycle / 4 + 68);
  EXPECT_EQ(step_seconds(layers, policy, 10, unit), 10 * (cycle / 4 + 68));
  EXPECT_EQ(step_seconds(layers, policy, 1, {.bandwidth = 0.5, .launch = 3, .replay_launch = 4}),
            2 * (cycle / 4 + 68) + 3 + 4);
  EXPECT_EQ(step_seconds(layers, policy, 1, {.bandwidth = 1, .activation_bytes = 4}), cycle / 4 + 2 * 68);
  EXPECT_EQ(step_seconds(layers, eager_beside(policy, parse_format("fp32")), 1, {.bandwidth = 1, .replay_launch = 4}),
            2 * 256 + 68);
}

TEST(Roofline, FieldsOfTheDeltaRule) {
  // 2 heads of 4 x 8 on 1 key head: u and v 2 * 4 elements, k 8, g and beta 2.
  const RecurrenceShape gdn{Recurrence::gated_delta, 2, 1, 4, 8};
  const auto flush_and_output = [&](const std::string& text) {
    const LayerTraffic layer(gdn, parse_policy(text));
    return std::vector<double>{layer.output(1).ring_append, layer.output(1).ring_read, layer.flush().ring_read,
                               layer.stored()};
  };
  using Bytes = std::vector<double>;
  // Open: u 16, k 16, g 8. Closed: v 16 and beta 8 are appended too; a flush reads v, k, g and beta.
  EXPECT_EQ(flush_and_output("replay(L=4, state=bf16, loop=open)"), (Bytes{40, 40, 3 * 40, 128 + 3 * 40}));
  EXPECT_EQ(flush_and_output("replay(L=4, state=bf16)"), (Bytes{64, 40, 3 * 48, 128 + 3 * 64}));
  // u in fp32, as the kernels keep it beside bf16 records: 16 bytes more to append and to read by outputs.
  EXPECT_EQ(flush_and_output("replay(L=4, anchor=fp32, read=int8:row, ring=bf16, ring.u=fp32)"),
            (Bytes{80, 56, 3 * 48, 256 + 8 * (8 + 4) + 3 * 80}));
  // KDA has a g for each of the 8 columns: 64 bytes in place of 8.
  const LayerTraffic kda({Recurrence::kda, 2, 1, 4, 8}, parse_policy("replay(L=4, state=bf16, loop=open)"));
  EXPECT_EQ(kda.output(0).ring_append, 96);
}

TEST(Roofline, SplitStateAndScales) {
  const LayerTraffic layer({Recurrence::mamba2, 2, 1, 4, 8}, parse_policy("replay(L=4, anchor=fp32, read=int8:row)"));
  const StepBytes output = layer.output(2), flush = layer.flush(), mean = layer.mean();
  EXPECT_EQ(output.state_read, 64);  // the copy's codes
  EXPECT_EQ(output.scales, 32);      // of its 8 rows
  EXPECT_EQ(output.state_write, 0);
  EXPECT_EQ(flush.state_read, 256);
  EXPECT_EQ(flush.state_write, 256 + 64);
  EXPECT_EQ(flush.scales, 32);
  EXPECT_EQ(flush.ring_append, 0);
  EXPECT_EQ(mean.state_read, (3 * 64 + 256) / 4.0);
  EXPECT_EQ(mean.ring_read, (0 + 1 + 2 + 3) * 40 / 4.0);
  EXPECT_EQ(mean.ring_append, 3 * 40 / 4.0);
}

TEST(Roofline, BestLength) {
  // A head has a state of s = 32768 bytes and records of r = 148, so a step moves s (1 + 1 / L) + r (L - 1) / 2 +
  // r (1 - 1 / L): least where L = sqrt(2 (s - r) / r) = 20.996, and convex.
  const auto best = [](const std::string& policy, std::int64_t rows, const Roofline& roofline) {
    return best_length(one(nemotron), parse_policy(policy), rows, roofline);
  };
  EXPECT_EQ(best("replay(L=16, state=fp32)", 256, {}), 21);
  EXPECT_EQ(best("eager(state=fp32)", 256, {}), 21);
  EXPECT_EQ(best("replay(L=16, state=fp32)", 256, {.longest = 8}), 8);
  // At batch 1 the bytes that a replay saves, nearly 4 MiB, take about 0.8 us.
  const Roofline dear{.launch = 3e-6, .replay_launch = 1e-6};
  EXPECT_EQ(best("replay(L=16, state=fp32)", 1, dear), 1);
  EXPECT_EQ(choose(one(nemotron), parse_policy("replay(L=16, state=fp32)"), 1, dear).text(), "eager(state=fp32)");
  EXPECT_EQ(choose(one(nemotron), parse_policy("replay(L=16, state=fp32)"), 2, dear).text(),
            "replay(L=21, state=fp32)");
}

TEST(Roofline, LayersThatAreNotNamedRunExactAndOthersCountNothing) {
  const std::vector<LayerInfo> layers = {{"a", nemotron}, {"attention", {}}, {"b", nemotron}};
  const Policy policy = parse_policy("eager(state=bf16, layers=2)");
  const double exact = step_seconds(one(nemotron), exact_policy(), 1, {.bandwidth = 1});
  const double bf16 = step_seconds(one(nemotron), parse_policy("eager(state=bf16)"), 1, {.bandwidth = 1});
  EXPECT_EQ(step_seconds(layers, policy, 1, {.bandwidth = 1}), exact + bf16);
}

}  // namespace
}  // namespace replayssm
