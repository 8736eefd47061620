#pragma once

#include <cstdint>
#include <span>

#include "core/model.h"
#include "core/policy.h"

namespace replayssm {

/// What a policy stores and moves for the recurrent state of one sequence, all SSM layers together, from the schedule
/// alone: state reads and writes with their scales, ring reads and appends. Activations of an exact ring are counted
/// as bf16, gates as fp32; an exact state as fp64; projections and outputs are not counted.
struct StateCost {
  double bytes_stored_per_sequence = 0;
  double bytes_moved_per_token = 0;
  std::int64_t flushes = 0;          ///< checkpoint writes of a layer in one sequence
  std::int64_t rounded_reads = 0;    ///< steps of a layer in one sequence that read a state that was rounded
  std::int64_t read_copy_reads = 0;  ///< of these, from the read copy of a split state
  std::int64_t ring_reads = 0;       ///< records read from the ring of a layer in one sequence
};

/// Cost of `tokens` steps from the zero state.
StateCost state_cost(std::span<const LayerInfo> layers, const Policy& policy, std::int64_t tokens);

}  // namespace replayssm
