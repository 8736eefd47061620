#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "analysis/study.h"

namespace replayssm {

/// Moments of an error x~ - x beside those of x.
struct ErrorMoments {
  double count = 0, sum = 0, squares = 0, reference_squares = 0, largest = 0;
  double ulps = 0, largest_ulps = 0;  ///< |error| in units of the last place of x in bf16, summed and largest

  void add(double value, double reference);
  ErrorMoments& operator+=(const ErrorMoments& other);

  double rel_l2() const;     ///< root mean square error over root mean square of x
  double bias() const;       ///< mean error over root mean square of x
  double spread() const;     ///< standard deviation of the error over root mean square of x
  double mean_ulps() const;  ///< of bf16
};

/// How the error of a head's stored state grew, local run, beside the law
///
///     predicted = sigma / sqrt(1 - a^{2 L}),
///
/// a the geometric mean decay per token of the head, sigma the relative error that storing the reference's state once
/// in this format makes, L the tokens between flushes (1 for eager): errors of independent writes, each fading with the
/// state. Of a split state the law is that of the anchor.
struct Growth {
  double decay = 0, half_life = 0;  ///< a; tokens
  double sigma = 0, predicted = 0, measured = 0;
  double still = 0;  ///< share of the state that stands still in a store though it should have moved, see Standstill
  /// The law holds within a factor of 2, or the head's half-life is under 4 tokens, or nothing is rounded.
  bool holds() const;
  /// Most of the state stands still: its errors are not independent ones, and the memory of the head is more than twice
  /// as long as the model's.
  bool stalls() const { return still > 0.5; }
};

/// One policy in one SSM layer.
struct LayerErrors {
  std::int64_t layer = 0;
  std::string kind;
  // Over all tokens: y = S C before D x. Over the samples, one at the end of each chunk: the state that a flush would
  // rebuild; and, of samples right behind a flush, the stored anchor or checkpoint and what outputs read.
  ErrorMoments y_local, y_propagated, state_local, state_propagated, checkpoint_local, read_copy_local;
  std::vector<ErrorMoments> y_local_by_head, y_propagated_by_head, state_local_by_head;
  std::vector<double> y_local_by_token, y_propagated_by_token;  ///< relative L2 over heads, [sequences, tokens]
  std::vector<double> state_local_by_sample, state_propagated_by_sample;
  std::vector<Growth> growth;  ///< [heads]
  double bound = 0;            ///< of the local relative L2 error of y, see LocalBound; all tokens and heads
  std::vector<double> bound_by_head;

  /// Heads whose growth the law does not describe.
  std::vector<std::int64_t> lawless() const;
  /// Heads whose state stands still for the most part.
  std::vector<std::int64_t> stalled() const;
};

/// What each layer alone contributes to the KL divergence of a policy.
struct Attribution {
  double whole = 0;                                     ///< mean KL of the policy in all its layers
  double sum = 0;                                       ///< of the layers alone
  std::vector<std::pair<std::int64_t, double>> layers;  ///< mean KL with the policy on that layer only, largest first
  struct Head {
    std::int64_t layer, head;
    double share;  ///< KL of the layer times the head's share of its squared local error of y
  };
  std::vector<Head> heads;  ///< largest first
};

/// One policy, layer by layer.
struct PolicyLayers {
  PolicyResult result;
  std::vector<LayerErrors> layers;
  Attribution attribution;  ///< empty where it was not asked for
};

struct LayerStudy {
  std::vector<PolicyLayers> policies;
  std::vector<std::int64_t> sample_tokens;  ///< tokens seen at each sample, of every sequence
};

/// Runs a study that compares every layer of every policy with the reference, fed by its own stream (propagated) and by
/// the reference's (local), in one pass. With `attribute`, each policy also runs on each of its layers alone: as many
/// more streams, which cost nothing before that layer. `options.local` and `archive` are set here; `observe` sees the
/// chunks of the policies, not those of the attribution.
LayerStudy run_layer_study(const Model& model, Backend& backend, const Tokens& tokens,
                           const std::vector<Policy>& policies, StudyOptions options, bool attribute);

/// Shared and split at 8 bits, flushed often and seldom: three policies.
std::vector<Policy> default_layer_policies();

}  // namespace replayssm
