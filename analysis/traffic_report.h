#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "analysis/roofline.h"
#include "analysis/traffic.h"

namespace replayssm {

/// What costs are asked for: batch sizes, and the machine in the units of a data sheet.
struct TrafficQuestion {
  std::vector<std::int64_t> batches = {1, 32, 256};  ///< sequences of a step
  double bandwidth = 4520;                           ///< GB/s (10^9 bytes) that a kernel reads; as in Roofline
  double launch = 0, replay_launch = 0;              ///< us of a step of a layer, and more of a replay's
  std::string activations = "bf16";                  ///< type of inputs and outputs: bf16, fp16 or fp32
  std::int64_t longest = 64;                         ///< largest L that is considered for the best one

  /// The same in seconds and bytes. Throws Error for a value that is not a number or out of range.
  Roofline roofline() const;
};

/// What a policy costs at one batch size.
struct AtBatch {
  std::int64_t batch, best_length;
  double seconds, best_seconds;        ///< of a step of all layers, with the policy's L and with the best one
  double over_eager, over_eager_fp32;  ///< time of eager, in the format of the state or anchor and in fp32, over it
  Policy best;                         ///< the fastest with a state in that format
};

/// What a policy costs: bytes, and the time that follows from them.
struct PolicyCost {
  Policy policy;
  double stored = 0;       ///< bytes of one sequence, all layers
  StepBytes step;          ///< of one token, the mean over the layers
  double activations = 0;  ///< the same of inputs and outputs
  std::vector<AtBatch> batches;
};

/// The cost of `policy` on the layers that have a state, at every batch size. Layers that it does not name run exact.
/// Throws Error where it names one that is not there or keeps no state.
PolicyCost policy_cost(std::span<const LayerInfo> layers, const Policy& policy, const TrafficQuestion& question);

/// Policies that span formats and schedules: what `traffic` compares where it is told none.
std::vector<Policy> default_traffic_policies();

/// The costs as JSON text. Either `model_path` or `shapes` says what the layers are.
std::string traffic_json(const std::vector<PolicyCost>& costs, const std::string& model_path,
                         const std::vector<std::string>& shapes, std::int64_t ssm_layers,
                         const TrafficQuestion& question);

}  // namespace replayssm
