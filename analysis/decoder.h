#pragma once

// Private to analysis: one sequence of a model, decoded call by call.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/model.h"

namespace replayssm {

/// The caches of all layers of a model for one sequence, from the zero state: plain, or speculative where there is
/// room. Layers that the policy does not name run exact.
class Decoder {
 public:
  /// `place.layer` is not looked at. Model and backend must outlive it.
  Decoder(const Model& model, Backend& backend, const Policy& policy, const std::optional<Speculation>& room = {},
          const StatePlace& place = {});

  /// Reads tokens; those of a speculative one wait for accept().
  void read(std::span<const std::int32_t> ids) { forward(ids); }
  /// The same, and gives the logits [tokens, vocabulary] of what follows each.
  std::vector<double> logits(std::span<const std::int32_t> ids);

  void accept(std::int64_t n) { replayssm::accept(caches_, n); }
  /// A flush after the last token, in the layers that the policy names; of a plain one.
  void fold();

  /// The recurrent state of a layer; null where it has none.
  RecurrentState* state(std::size_t layer) { return caches_[layer].state.get(); }

 private:
  Tensor forward(std::span<const std::int32_t> ids);

  const Model& model_;
  Backend& backend_;
  Policy policy_;
  std::vector<LayerCache> caches_;
};

/// The index of the largest logit, the first of equal ones: what greedy decoding takes.
std::int32_t greedy(std::span<const double> logits);

}  // namespace replayssm
