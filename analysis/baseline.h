#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "analysis/check.h"

namespace replayssm {

/// What `replayssm check` compares with: what was run, and what came of it. Plain data, see docs/check.md.
struct Baseline {
  struct File {
    std::string path;    ///< seen from the folder of the baseline; empty: none
    std::string sha256;  ///< of tokens: of the ids in use, int32, one sequence after the other
  };

  std::string version;  ///< of the program that measured it
  std::string model_type, model_sha256;
  File tokens, states;
  std::int64_t sequences = 0, length = 0;
  std::uint64_t seed = 0;
  std::vector<Subject> policies, formats;
};

/// Throws Error naming the file, and the key in it, for what is no baseline of this layout.
Baseline read_baseline(const std::filesystem::path& path);

/// The text of the file, JSON with one figure or fingerprint a line.
std::string baseline_text(const Baseline& baseline);

/// SHA-256 of ids as Baseline has it.
std::string tokens_sha256(const Tokens& tokens);

/// SHA-256 of a file. Throws Error naming it.
std::string file_sha256(const std::filesystem::path& path);

}  // namespace replayssm
