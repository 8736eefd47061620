#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "analysis/study.h"
#include "core/model.h"

namespace replayssm {

/// What a report says about the run beside its results.
struct RunFacts {
  std::string command, model_path, model_sha256, tokens_path;
  std::int64_t tokens = 0, sequences = 0;
  std::string device = "cpu", precision = "fp64";
  /// What a device's kernels are fed and write: fp32, fp16 or bf16. Empty where the CPU does everything.
  std::string activations = {};
  std::uint64_t seed = 0;
  int threads = 1;
  double seconds = 0;
};

/// What a heading adds where a device's kernels advance the states; empty where the CPU does.
std::string recurrence_text(const RunFacts& facts);

/// The KL report as a table for people, one row a policy.
std::string kl_table(const std::vector<PolicyResult>& results);

/// The KL report as JSON text. KL and NLL in nats. A value that is not finite (the maximum of a KL that was infinite
/// somewhere, everything of a run that broke) is null; the counts beside it say why.
std::string kl_json(const Model& model, const RunFacts& facts, const std::vector<PolicyResult>& results);

/// Writes text to a file, or to standard output for "-". A file is written whole or not at all.
/// Throws Error naming the file if it cannot be written.
void write_text(const std::string& path, const std::string& text);

/// Throws what write_text() would throw, before the work is done. Nothing to do for "-" and for no path.
void check_writable(const std::string& path);

/// The full data of a KL run as an HDF5 file: /run and /policies/K with per-token values and per-layer errors, units
/// and policy text as attributes. Throws Error as TraceWriter does.
void write_kl(const std::string& path, const Model& model, const RunFacts& facts, const Tokens& tokens,
              const std::vector<PolicyResult>& results);

}  // namespace replayssm
