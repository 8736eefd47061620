#pragma once

// Speculative decoding of a real model: what is accepted, what it costs, and whether the text is that of plain
// decoding.

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "analysis/drafts.h"
#include "analysis/study.h"
#include "analysis/traffic.h"
#include "core/speculative.h"
#include "core/tokens.h"

namespace replayssm {

/// What is decoded, and how.
struct SpeculationOptions {
  std::int64_t window = 5;         ///< T: tokens of a step, 1 + its drafts
  std::int64_t ring = 16;          ///< W: committed records that the ring holds; a step folds them first if h + T > W
  std::int64_t prompt_tokens = 1;  ///< of each sequence, read before the first step
  std::int64_t new_tokens = 64;    ///< decoded of each sequence; no token ends a text early
  /// The tokens of the sequence itself are what is decoded, whatever the model would take: a draft is accepted where it
  /// is the sequence's next token.
  bool teacher_forced = false;
  int threads = 1;         ///< sequences at a time
  std::uint64_t seed = 0;  ///< of stochastic rounding
  Progress progress = {};
  std::function<bool()> interrupted = {};  ///< as in StudyOptions, but asked from any thread
};

/// How nearly a text has to be that of plain decoding.
enum class Demand { nothing, tokens, bits };

/// The first token in which a text is not that of plain decoding.
struct TextDivergence {
  std::int64_t sequence, position;  ///< 0-based; the position counts the prompt
  std::int32_t token, plain_token;
  double gap;  ///< logit of the plain token less that of the other, in the plain run
  auto operator<=>(const TextDivergence&) const = default;
};

/// Speculative decoding beside plain decoding, token for token. A sequence that is not teacher-forced is compared up to
/// its first divergence, behind which the two read different texts.
struct TextComparison {
  Demand demand = Demand::nothing;
  std::int64_t compared = 0;            ///< positions
  std::int64_t same_tokens = 0;         ///< of them: the greedy token is the same
  std::int64_t same_logits = 0;         ///< of them: all logits are the same bits
  double largest_difference = 0;        ///< of any two logits that were compared, where both are finite
  std::int64_t states = 0;              ///< recurrent states compared at the end of sequences
  std::int64_t same_states = 0;         ///< of them: the same bits
  std::optional<TextDivergence> first;  ///< the first of the first sequence that has one

  void merge(const TextComparison& other);
  bool passed() const;
};

/// What a policy did under speculation, all sequences together; prompts are in none of the counts.
struct SpeculationResult {
  Policy policy;
  Speculation room;
  std::vector<std::vector<std::int32_t>> texts;  ///< of each sequence, the prompt and what was decoded
  std::int64_t tokens = 0;                       ///< decoded
  std::int64_t steps = 0;                        ///< windows verified
  std::int64_t drafts = 0;                       ///< proposed
  std::int64_t accepted = 0;                     ///< of them
  std::int64_t discarded = 0;                    ///< windows of which nothing was to be kept
  std::vector<std::int64_t> committed;           ///< steps that committed i tokens, i = 0 .. T
  std::vector<std::int64_t> rolled_back;         ///< steps that took i tokens of their window back, i = 0 .. T
  std::vector<std::int64_t> held;                ///< steps that met i records in the ring, i = 0 .. W
  /// Flushes by the tokens since the one before, which are the records that they fold.
  std::map<std::int64_t, std::int64_t> spacing;
  /// Bytes of all steps and SSM layers: under this policy; of an engine that keeps a snapshot behind each token, in the
  /// format of the state or anchor.
  StepBytes moved, snapshots;
  std::int64_t window_tokens = 0;  ///< of all steps
  TextComparison same_flushes;     ///< with plain decoding that flushes at the same tokens
  TextComparison own_schedule;     ///< with plain decoding under the policy as it stands, of length L

  std::int64_t rollbacks() const;  ///< steps that took something back
  std::int64_t flushes() const;
  double tokens_per_step() const;
  double acceptance() const;  ///< of the drafts; NaN where there were none
  bool passed() const { return same_flushes.passed() && own_schedule.passed(); }
};

/// Decodes every sequence greedily with drafts, and beside it, token for token, plainly, twice.
///
/// A step verifies T tokens, the next one and its drafts, and commits those up to the first draft that is not what the
/// model takes behind the one before it. The caches of all layers go back to there. The first `prompt_tokens` of each
/// sequence are the prompt; it goes through the same states in windows of T that are committed whole, but for its last
/// token, which opens the first step. W and T take the place of the policy's L.
///
/// Plain decoding with the same flushes must give the same tokens, and the same bits in all logits and in the states at
/// the end: `backend` has to compute a token alone (Products::one_token). Plain decoding under the policy's own L
/// flushes elsewhere, which shows where the state is rounded; a policy that rounds nothing must give the same tokens,
/// and in sequential order the same bits. Results do not depend on threads. Throws Error for a T, W or number of tokens
/// out of range, sequences that are too short, a policy that does not fit the model, and one that rounds but might not
/// read a rounded value in so few tokens; Interrupted when asked to.
SpeculationResult speculate(const Model& model, Backend& backend, const Tokens& tokens, const Policy& policy,
                            const DraftSources& sources, const SpeculationOptions& options);

/// Throws Error, naming the option and the policy, where speculate() would not start.
void check_speculation(const Model& model, const Tokens& tokens, const Policy& policy,
                       const SpeculationOptions& options);

}  // namespace replayssm
