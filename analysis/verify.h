#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "core/backend.h"
#include "core/model.h"

namespace replayssm {

/// Agreement of one array with a framework's.
struct Agreement {
  std::string name;     ///< the golden tensor
  std::string matches;  ///< what of ours it was compared with
  double rel_l2 = 0, max_abs = 0;
  double argmax_agreement = 0;  ///< share of positions, of logits only
};

/// What the golden file held, compared with the model's own forward pass in the backend's precision.
struct Verification {
  std::int64_t tokens = 0, sequences = 0;
  std::vector<Agreement> logits;  ///< logits_f64 first where it is there
  std::vector<Agreement> hidden;
  std::vector<Agreement> others;  ///< logsumexp and nll
  double worst() const;           ///< largest rel_l2 of any; NaN counts as infinite
};

/// Runs the model over `input_ids` of a safetensors file and compares the arrays that the file holds: logits and
/// logits_f64 ([sequences, T, vocabulary], or the first rows of the only sequence), logsumexp, nll, hidden_i
/// [sequences, T, hidden], which is matched as the input or the output of layer i, whichever is nearer, or as the final
/// norm's output. `interrupted` is asked before every layer, from the calling thread; true ends it with Interrupted.
/// Throws Error if the file has no logits or an array of another shape.
Verification verify(const Model& model, Backend& backend, const std::filesystem::path& golden,
                    const std::function<bool()>& interrupted = {});

/// The same as JSON text; `passed` where worst() is at most `bound`.
std::string verify_json(const Verification& result, const std::string& model_path, const std::string& golden,
                        double bound);

}  // namespace replayssm
