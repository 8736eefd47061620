#pragma once

// Private. What run_layer_study() gathers of a study as its chunks go by.

#include <map>
#include <utility>
#include <vector>

#include "analysis/bound.h"
#include "analysis/layer_study.h"
#include "analysis/stall.h"
#include "core/state.h"

namespace replayssm {

/// The reference's recurrence of one head, step by step, in binary64.
class HeadTrack {
 public:
  explicit HeadTrack(const RecurrenceShape& shape);

  /// Takes in token t of the head's inputs. What is returned points to them and into the track, up to the next step.
  ReferenceStep step(const HeadInputs<double>& inputs, std::int64_t t);

 private:
  State<double> state_;
  LayerInputs<double> now_;  // one token
  std::vector<double> y_, decay_;
  double state2_ = 0;
};

/// Compares every policy's chunks with the reference's. Threads share heads; sums are added in the order of tokens and
/// heads, whatever their number.
class LayerObserver {
 public:
  LayerObserver(const Model& model, Backend& backend, const Tokens& tokens, const std::vector<Policy>& policies,
                int threads)
      : model_(model), backend_(backend), tokens_(tokens), policies_(policies), threads_(threads) {}

  void operator()(const LayerChunk& chunk);

  /// Adds the layer that is done to those of its policies.
  void finish_layer(std::vector<std::vector<LayerErrors>>& layers);
  std::vector<std::int64_t>& sample_tokens() { return sample_tokens_; }

 private:
  using Key = std::pair<std::int64_t, std::size_t>;  // layer, policy

  /// What is collected of one policy in one layer besides LayerErrors.
  struct Collected {
    std::vector<double> bound2;            // by head: sum of bound^2
    std::vector<Standstill> standstill;    // by head
    std::vector<double> written2, state2;  // by head: of what one store loses, and of the state
    std::vector<double> y_error_by_token[2], y_by_token;
  };

  void start_layer(const Key& key, const RecurrenceShape& shape);
  void start_chunk(const LayerChunk& chunk, const RecurrenceShape& shape);
  void add_readouts(const Tensor& y, const LayerChunk& chunk, const RecurrenceShape& shape, ErrorMoments& all,
                    std::vector<ErrorMoments>& by_head, std::vector<double>& error_by_token,
                    std::vector<double>* by_token);
  void add_states(const LayerChunk& chunk, const RecurrenceShape& shape, LayerErrors& e, Collected& c);
  void finish(LayerErrors& e, const Collected& c, const Policy& policy) const;

  const Model& model_;
  Backend& backend_;
  const Tokens& tokens_;
  const std::vector<Policy>& policies_;
  const int threads_;
  std::map<Key, LayerErrors> errors_;
  std::map<Key, Collected> collected_;
  std::vector<std::int64_t> sample_tokens_;
  // Of the layer and sequence at hand, for all policies:
  std::vector<HeadTrack> tracks_;                // [heads]
  std::vector<std::vector<LocalBound>> bounds_;  // [policy][head], none where the policy does not cover the layer
  std::vector<std::vector<StallTrack>> stalls_;  // the same
  std::vector<double> log_decay_;                // [heads], summed over decays_ tokens of all sequences
  std::int64_t decays_ = 0;
  // Of the chunk at hand:
  std::int64_t chunk_tokens_ = 0;
  std::vector<double> reference_state_, reference_y_;
};

}  // namespace replayssm
