#include "analysis/traffic.h"

#include <string>
#include <vector>

namespace replayssm {
namespace {

/// Bytes of one record per head. w is shared by the heads of a group.
double record_bytes(const RecurrenceShape& shape, const Replay& replay, Loop loop) {
  const auto vector_bytes = [&](const char* field, std::int64_t n) {
    const Format format = replay.ring.of(field);
    return format.exact() ? 2.0 * static_cast<double>(n) : format.row_bytes(n);
  };
  const auto gate_bytes = [&](const char* field, std::int64_t n) {
    const Format format = replay.ring.of(field);
    return format.exact() ? 4.0 * static_cast<double>(n) : format.row_bytes(n);
  };
  const double sharing = static_cast<double>(shape.groups) / static_cast<double>(shape.heads);
  if (!is_delta_rule(shape.recurrence)) {
    return vector_bytes("x", shape.head_dim) + sharing * vector_bytes("B", shape.state_dim) + gate_bytes("dt", 1);
  }
  const double common = sharing * vector_bytes("k", shape.state_dim) + gate_bytes("g", shape.decay_dim());
  if (loop == Loop::open) return common + vector_bytes("u", shape.head_dim);
  return common + vector_bytes("v", shape.head_dim) + gate_bytes("beta", 1);
}

void add_layer(StateCost& cost, const RecurrenceShape& shape, const Policy& policy, std::int64_t tokens) {
  const Replay replay = policy.as_replay();
  const auto L = replay.length, flushes = tokens / L, outputs = tokens - flushes, rest = tokens % L;
  const auto rows = static_cast<double>(shape.heads * shape.head_dim);
  const double anchor = rows * replay.anchor.row_bytes(shape.state_dim);
  const double copy = replay.read ? rows * replay.read->row_bytes(shape.state_dim) : 0;
  const double record = static_cast<double>(shape.heads) * record_bytes(shape, replay, policy.loop);
  const std::int64_t ring_reads = flushes * (L * (L - 1) / 2) + rest * (rest - 1) / 2;

  cost.bytes_stored_per_sequence += anchor + copy + static_cast<double>(L - 1) * record;
  const double moved = static_cast<double>(outputs) * (replay.read ? copy : anchor) +
                       static_cast<double>(flushes) * (2 * anchor + copy) +
                       static_cast<double>(ring_reads + outputs) * record;
  cost.bytes_moved_per_token += moved / static_cast<double>(tokens);
}

}  // namespace

StateCost state_cost(std::span<const LayerInfo> layers, const Policy& policy, std::int64_t tokens) {
  StateCost cost;
  if (tokens < 1) return cost;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (!layers[i].recurrence) continue;
    const bool covered = policy.covers(static_cast<std::int64_t>(i));
    add_layer(cost, *layers[i].recurrence, covered ? policy : exact_policy(), tokens);
  }
  const Replay replay = policy.as_replay();
  const std::int64_t L = replay.length, rest = tokens % L;
  cost.flushes = tokens / L;
  cost.ring_reads = cost.flushes * (L * (L - 1) / 2) + rest * (rest - 1) / 2;
  if (cost.flushes > 0) {  // steps before the first flush read the zero state
    const std::int64_t later_flushes = cost.flushes - 1, later_outputs = tokens - L - later_flushes;
    if (replay.read && !replay.read->exact()) cost.read_copy_reads = later_outputs;
    const bool outputs_rounded = replay.read ? !replay.read->exact() : !replay.anchor.exact();
    cost.rounded_reads = (outputs_rounded ? later_outputs : 0) + (replay.anchor.exact() ? 0 : later_flushes);
  }
  return cost;
}

}  // namespace replayssm
