#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "analysis/divergence.h"
#include "analysis/traffic.h"
#include "core/backend.h"
#include "core/model.h"
#include "core/policy.h"
#include "core/tokens.h"

namespace replayssm {

/// Called with work done and work in all, in equal units, from the calling thread.
using Progress = std::function<void(std::int64_t done, std::int64_t all)>;

/// An error of one layer. Propagated: in the policy's own run, whose layer inputs differ from the reference's already.
/// Local: the layer fed by the reference's stream; NaN where the study did not ask for it.
struct LayerError {
  double local = std::numeric_limits<double>::quiet_NaN(), propagated = 0;
};

/// What a policy did to one SSM layer.
struct LayerResult {
  std::int64_t layer = 0;
  std::string kind;
  LayerError y_rel_l2;      ///< relative L2 error of y = S C, before D x, over all tokens and heads
  LayerError state_rel_l2;  ///< the same of the state that a flush would rebuild after the last token
  RangeEvents events;       ///< of the policy's own run
};

/// One chunk of tokens of one SSM layer as two runs saw it.
struct LayerChunk {
  std::int64_t layer, sequence, first_token;
  std::size_t policy;          ///< index among the policies of the study
  const RecurrenceCall& call;  ///< what the reference's layer was fed
  const Tensor &y_reference, &y_propagated, &y_local;
  RecurrentState &reference, &propagated, &local;  ///< states after the chunk
};

class Archive;

/// Where a study keeps what it has done, to go on from there another time.
class StudyCheckpoint {
 public:
  virtual ~StudyCheckpoint() = default;
  /// Gives what was saved last to `take` and returns true; returns false where nothing was saved.
  virtual bool load(const std::function<void(Archive&)>& take) = 0;
  /// Called whenever all tokens are through a layer, or a sequence is compared. Puts what `give` writes in the place of
  /// what was saved before, or leaves that.
  virtual void save(const std::function<void(Archive&)>& give) = 0;
};

/// What a study throws when it was asked to stop. The message says how far it got.
class Interrupted : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// How a study goes about it.
struct StudyOptions {
  int threads = 1;
  /// Also runs every policy on the reference's layer inputs, which doubles the work of the recurrences.
  bool local = false;
  /// Of stochastic rounding, which draws from it, the sequence, the layer, the head and the token.
  std::uint64_t seed = 0;
  /// Tokens that go through a layer together, at least 1.
  std::int64_t chunk_tokens = 512;
  /// Changes the embeddings [tokens, hidden] of each sequence before they enter the first layer; null: as they are.
  std::function<void(std::int64_t sequence, std::span<double> embeddings)> disturb = {};
  Progress progress = {};
  /// Called for every chunk of every SSM layer and policy that covers the layer; needs `local`.
  std::function<void(const LayerChunk&)> observe = {};
  /// Asked before every chunk, from the calling thread; true ends the study, which throws Interrupted.
  std::function<bool()> interrupted = {};
  /// Where to save the hidden states and results so far, and what to go on from; null: nowhere. Whoever saves answers
  /// for it that model, tokens, policies, precision and the options that results depend on are those it was saved with;
  /// then results are the same, bit for bit, as those of a run in one go.
  StudyCheckpoint* checkpoint = nullptr;
  /// Called when all tokens are through a model layer, before that is saved.
  std::function<void(std::int64_t layer)> layer_done = {};
  /// Adds what an observer keeps of the layers that are done to what is saved, or takes it back.
  std::function<void(Archive&)> archive = {};
};

/// One policy against the reference.
struct PolicyResult {
  Policy policy;
  std::vector<TokenDivergence> tokens;  ///< [sequences, length]
  DivergenceSummary divergence;
  std::vector<LayerResult> layers;
  StateCost cost;

  std::int64_t overflows() const;
  std::int64_t saturations() const;
  /// False where some layer keeps no count of either.
  bool overflows_counted() const;
  /// The first Inf or NaN of any layer: the earliest step, and of these the lowest layer.
  std::optional<std::pair<RangeEvents::Event, std::int64_t>> first_non_finite() const;
};

/// Runs the reference and every policy over the same tokens and compares them.
///
/// The reference is the same model with the same projections in the backend's precision and a state that is never
/// rounded. Every step decodes from a zero state, one token after the other. The study is layer-major: one layer's
/// weights are read once and every stream is taken through it, so that memory is one layer and the streams; logits
/// [tokens, vocabulary] exist a block at a time. Results are the same for any number of threads.
/// Throws Error for no tokens, an id outside the vocabulary, chunks of no tokens, a policy that does not fit the model,
/// or one that names a rounded format and would read nothing rounded back in so few tokens; Interrupted when asked to.
std::vector<PolicyResult> run_study(const Model& model, Backend& backend, const Tokens& tokens,
                                    const std::vector<Policy>& policies, const StudyOptions& options);

/// Throws Error, naming the policy and the layer, where it names one that is not there or keeps no recurrent state.
void check_policy_layers(std::span<const LayerInfo> layers, const Policy& policy);

/// Throws Error, naming the policy, if it cannot be studied on this model and number of tokens.
void check_policy(const Model& model, const Policy& policy, std::int64_t tokens);

/// Eager, shared and split at bf16, e4m3:row and int8:row: nine policies.
std::vector<Policy> default_policies();

}  // namespace replayssm
