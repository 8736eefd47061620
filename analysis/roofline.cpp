#include "analysis/roofline.h"

namespace replayssm {

double step_seconds(std::span<const LayerInfo> layers, const Policy& policy, std::int64_t rows,
                    const Roofline& roofline) {
  const Policy exact = exact_policy();
  double seconds = 0;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (!layers[i].recurrence) continue;
    const Policy& own = policy.covers(static_cast<std::int64_t>(i)) ? policy : exact;
    const double bytes = LayerTraffic(*layers[i].recurrence, own).mean().total() +
                         activation_bytes(*layers[i].recurrence, roofline.activation_bytes);
    seconds += static_cast<double>(rows) * bytes / roofline.bandwidth + roofline.launch;
    if (own.as_replay().length > 1) seconds += roofline.replay_launch;
  }
  return seconds;
}

Policy eager_beside(const Policy& policy, const Format& format) {
  Policy eager;
  eager.schedule = Eager{format};
  eager.layers = policy.layers;
  return eager;
}

Policy with_length(const Policy& policy, std::int64_t length) {
  Policy out = policy;
  Replay replay = policy.as_replay();
  replay.length = length;
  out.schedule = replay;
  return out;
}

std::int64_t best_length(std::span<const LayerInfo> layers, const Policy& policy, std::int64_t rows,
                         const Roofline& roofline) {
  std::int64_t best = 1;
  double least = step_seconds(layers, with_length(policy, 1), rows, roofline);
  for (std::int64_t length = 2; length <= roofline.longest; ++length) {
    const double seconds = step_seconds(layers, with_length(policy, length), rows, roofline);
    if (seconds < least) least = seconds, best = length;
  }
  return best;
}

Policy choose(std::span<const LayerInfo> layers, const Policy& policy, std::int64_t rows, const Roofline& roofline) {
  const Policy eager = eager_beside(policy, policy.as_replay().anchor);
  const Policy replay = with_length(policy, best_length(layers, policy, rows, roofline));
  return step_seconds(layers, replay, rows, roofline) < step_seconds(layers, eager, rows, roofline) ? replay : eager;
}

}  // namespace replayssm
