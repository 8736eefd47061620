#pragma once

// Where the drafts of speculative decoding come from. Each source serves one sequence.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/backend.h"
#include "core/model.h"

namespace replayssm {

/// What a source proposes for one step.
struct Proposal {
  std::vector<std::int32_t> drafts;  ///< guesses at the next tokens, the first one first
  bool discarded = false;            ///< the window is thrown away, whatever comes of it, and tried again
};

class DraftSource {
 public:
  virtual ~DraftSource() = default;
  /// At most `most` guesses at what follows `text`, which is never empty and goes on from the text of the call before.
  virtual Proposal propose(std::span<const std::int32_t> text, std::int64_t most) = 0;
};

/// Makes the source of one sequence, 0-based.
using DraftSources = std::function<std::unique_ptr<DraftSource>(std::int64_t sequence)>;

/// Prompt lookup (Saxena 2023): the tokens that followed the last earlier place where the text's final n-gram stands,
/// for the largest n of `longest` .. 1 that has one; nothing where no token of the end has been seen before.
/// Throws Error for longest < 1.
std::unique_ptr<DraftSource> prompt_lookup(std::int64_t longest);

/// What `model` goes on with, greedily, from an exact state. The model keeps what is certain and reads a step's drafts
/// again for each further one, so that it has nothing to take back. `most` is that of the calls to come. `model` and
/// `backend` must outlive the source.
std::unique_ptr<DraftSource> model_drafts(const Model& model, Backend& backend, std::int64_t most);

/// The tokens of `whole` behind the text, which is its beginning.
std::unique_ptr<DraftSource> known_text(std::vector<std::int32_t> whole);

/// The drafts of `source`, each replaced by another id below `vocabulary` with probability 1 - rate: where the drafts
/// of the source are right, each is accepted with probability `rate` once those before it are. Draws come from Philox
/// with `seed` as the key, counted by sequence, position of the draft and length of the text. Throws Error for a rate
/// outside 0 .. 1 and a vocabulary of fewer than 2 ids.
std::unique_ptr<DraftSource> corrupted(std::unique_ptr<DraftSource> source, double rate, std::uint64_t seed,
                                       std::int64_t sequence, std::int64_t vocabulary);

/// The drafts of `source`, of which step i gets the first counts[i] - 1, and a wrong one behind them where there is
/// room: where the drafts of the source are right, step i accepts counts[i] tokens of its window. 0 discards the
/// window. Behind the last count it starts over. Throws Error for no counts, for none but zeros, and for a negative
/// one.
std::unique_ptr<DraftSource> counted(std::unique_ptr<DraftSource> source, std::vector<std::int64_t> counts,
                                     std::int64_t vocabulary);

/// Reads counts for counted(), decimal and separated by white space, each 0 .. window and one at least not 0. Throws
/// Error that names the file, the position and the value.
std::vector<std::int64_t> read_accept_counts(const std::filesystem::path& path, std::int64_t window);

}  // namespace replayssm
