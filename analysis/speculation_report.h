#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "analysis/report.h"
#include "analysis/speculation.h"
#include "analysis/traffic_report.h"

namespace replayssm {

/// Seconds for each decoded token of `batch` sequences, from the bytes alone: the weights once a step, states, rings
/// and the inputs and outputs of recurrences for every sequence, over the bandwidth. Attention caches are not counted,
/// and arithmetic takes no time: for large batches it does, the more the more tokens a step has.
struct DecodeSeconds {
  std::int64_t batch;
  double eager, replay;           ///< plain decoding, in the format of the state or anchor, and under the policy
  double snapshots, speculative;  ///< speculation with a snapshot behind each token, and under the policy
};

/// Of every batch size of the question, for what `result` was measured to accept.
std::vector<DecodeSeconds> decode_seconds(const Model& model, const SpeculationResult& result,
                                          const TrafficQuestion& question);

/// One result as text for people.
std::string speculation_text(const Model& model, const SpeculationResult& result, const TrafficQuestion& question);

/// The results as JSON text; `drafts` says where the drafts came from. A figure that is not finite is null.
std::string speculation_json(const Model& model, const RunFacts& facts, const SpeculationOptions& options,
                             const std::string& drafts, const std::vector<SpeculationResult>& results,
                             const TrafficQuestion& question);

}  // namespace replayssm
