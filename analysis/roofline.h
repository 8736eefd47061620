#pragma once

// Time of a decode step from the bytes it moves.

#include <cstdint>
#include <span>

#include "analysis/traffic.h"

namespace replayssm {

/// A machine as the model sees it.
struct Roofline {
  double bandwidth = 4520e9;    ///< bytes/s that a kernel reads; the default is what an H200 was measured to do
  double launch = 0;            ///< seconds that a step of a layer takes beside its bytes
  double replay_launch = 0;     ///< seconds more where L > 1: cursors, and the work on the ring that bytes do not show
  double activation_bytes = 2;  ///< of one input or output
  std::int64_t longest = 64;    ///< largest L that is considered
};

/// Seconds of one step of `rows` sequences through all SSM layers, one after the other, on the mean over a cycle:
///
///     sum over layers of rows (LayerTraffic::mean().total() + activation_bytes()) / bandwidth + launch
///
/// Layers that the policy does not name run exact, as in state_cost().
double step_seconds(std::span<const LayerInfo> layers, const Policy& policy, std::int64_t rows,
                    const Roofline& roofline);

/// The eager policy in `format`, on the layers that `policy` names.
Policy eager_beside(const Policy& policy, const Format& format);

/// `policy` with another L; of an eager one the shared replay in the same format. L = 1 is the eager schedule, but for
/// a split state, which then rewrites both copies at every step.
Policy with_length(const Policy& policy, std::int64_t length);

/// The L in 1 .. roofline.longest with the least step_seconds(), the smallest of them.
std::int64_t best_length(std::span<const LayerInfo> layers, const Policy& policy, std::int64_t rows,
                         const Roofline& roofline);

/// The fastest schedule of a state in the format of `policy`: itself with the best L, or the eager one.
Policy choose(std::span<const LayerInfo> layers, const Policy& policy, std::int64_t rows, const Roofline& roofline);

}  // namespace replayssm
