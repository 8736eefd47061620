#pragma once

#include <functional>
#include <string>
#include <vector>

#include "analysis/hard_values.h"
#include "analysis/study.h"

namespace replayssm {

/// One number that a check compares, and how far a correct build may be from it, see docs/check.md. A value that is not
/// finite is NaN.
struct Figure {
  std::string name;
  double value, margin = 0;
};

/// The SHA-256 of bits that are the same on every machine.
struct Fingerprint {
  std::string name, digest;
};

/// What is known of a policy or a format, by its text.
struct Subject {
  std::string name;
  std::vector<Figure> figures;
  std::vector<Fingerprint> fingerprints;
};

/// Figures of every policy, whose margins are 0: mean and p99 of KL(reference || run) in nats, positions where the most
/// probable token agrees, positions that are not finite, elements that overflowed or saturated, bytes and flushes, and
/// the relative L2 errors of y and of the last state of every SSM layer, fed by the reference (local) and in the
/// policy's own run. `options.local` is set here. Throws as run_study() does.
std::vector<Subject> check_policies(const Model& model, Backend& backend, const Tokens& tokens,
                                    const std::vector<Policy>& policies, StudyOptions options);

/// Gives figures that depend on roundings of the arithmetic their margins: twice the largest change in three runs whose
/// embeddings are disturbed by up to 2^-24 of themselves, each with noise of its own, and of a count at least 1.
/// docs/check.md derives it. Takes three times as long as check_policies().
void set_margins(std::vector<Subject>& subjects, const Model& model, Backend& backend, const Tokens& tokens,
                 const std::vector<Policy>& policies, const StudyOptions& options);

/// Formats that the policies name and that round, those of residuals too, each once, in their order.
std::vector<Format> formats_of(const std::vector<Policy>& policies);

/// What every format makes of the states of a model and of hard_values(): figures (error, overflows and saturations of
/// the states, bits of an element) and fingerprints of the values and, where the format has them, of codes and scales.
/// Everything is converted in double and in float, as of two tokens. Nothing but single operations of IEEE 754 takes
/// part, in a fixed order, so all of it is the same to the last bit on any machine.
std::vector<Subject> check_formats(const std::vector<TrialState>& states, const std::vector<Format>& formats,
                                   std::uint64_t seed);

/// States of a safetensors file: every tensor is one head's, F64 [rows, n], named `layer.I.head.H`. Throws Error naming
/// the file and the tensor for another one, or a value that is not finite.
std::vector<TrialState> read_states(const std::string& file);

/// A figure or fingerprint beside the one that is stored.
struct Finding {
  enum class Verdict { same, within, outside };

  std::string subject, name;
  double stored = 0, margin = 0, found = 0;  // of a figure; NaN: not finite, or not there
  std::string stored_digest, found_digest;   // of a fingerprint, "none" where there is none; of a figure empty
  Verdict verdict = Verdict::same;

  bool is_fingerprint() const { return !stored_digest.empty(); }
};

/// Every figure and fingerprint of what is stored, and of what is found beyond that: `same` with the same bits,
/// `within` the margin of what is stored, or `outside` it, better or worse; so is what only one of the two has.
std::vector<Finding> compare_subjects(const std::vector<Subject>& stored, const std::vector<Subject>& found);

}  // namespace replayssm
