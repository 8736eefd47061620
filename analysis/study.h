#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "analysis/divergence.h"
#include "analysis/traffic.h"
#include "core/backend.h"
#include "core/model.h"
#include "core/policy.h"
#include "core/tokens.h"

namespace replayssm {

/// What a policy did to one SSM layer, in its own run, whose layer inputs already differ from the reference's.
struct LayerResult {
  std::int64_t layer = 0;
  std::string kind;
  double y_rel_l2 = 0;      ///< relative L2 error of y = S C, before D x, over all tokens and heads
  double state_rel_l2 = 0;  ///< the same of the state that a flush would rebuild after the last token
  RangeEvents events;
};

/// One policy against the reference.
struct PolicyResult {
  Policy policy;
  std::vector<TokenDivergence> tokens;  ///< [sequences, length]
  DivergenceSummary divergence;
  std::vector<LayerResult> layers;
  StateCost cost;

  std::int64_t overflows() const;
  /// The first Inf or NaN of any layer: the earliest step, and of these the lowest layer.
  std::optional<std::pair<RangeEvents::Event, std::int64_t>> first_non_finite() const;
};

/// Called with work done and work in all, in equal units, from the calling thread.
using Progress = std::function<void(std::int64_t done, std::int64_t all)>;

/// Runs the reference and every policy over the same tokens and compares them.
///
/// The reference is the same model with the same projections in the backend's precision and a state that is never
/// rounded. Every step decodes from a zero state, one token after the other. The study is layer-major: one layer's
/// weights are read once and every stream is taken through it, so that memory is one layer and the streams; logits
/// [tokens, vocabulary] exist a block at a time. Results are the same for any number of threads.
/// Throws Error for no tokens, an id outside the vocabulary, a policy that does not fit the model, or one that names a
/// rounded format and would read nothing rounded back in so few tokens.
std::vector<PolicyResult> run_study(const Model& model, Backend& backend, const Tokens& tokens,
                                    const std::vector<Policy>& policies, int threads, const Progress& progress);

/// Throws Error, naming the policy, if it cannot be studied on this model and number of tokens.
void check_policy(const Model& model, const Policy& policy, std::int64_t tokens);

/// Eager, shared and split at bf16, e4m3:row and int8:row: nine policies.
std::vector<Policy> default_policies();

}  // namespace replayssm
