#pragma once

#include <string>
#include <vector>

#include "analysis/cli/cli.h"
#include "analysis/report.h"
#include "core/tokens.h"

namespace replayssm::cli {

/// The arguments of every command that runs policies on a model: what to run, on what, where the results go.
struct StudyArguments {
  std::string model, tokens_file, tokens_source, json, output;
  std::int64_t max_tokens = 0, sequences = 0;
  const char* sequences_option = "--sequences";
  std::vector<std::string> policy_texts;
  std::uint64_t seed = 0;
  bool resume = false;
  MachineOptions machine;

  void add_to(CLI::App& app);
  // The parts of it, for a command that has not all.
  void add_model_and_tokens(CLI::App& app);
  void add_policies(CLI::App& app);
  /// What messages and reports call the tokens' file.
  const std::string& tokens_name() const { return tokens_source.empty() ? tokens_file : tokens_source; }
};

/// The same, opened and checked: nothing that follows from the arguments alone fails later.
struct StudyInput {
  std::vector<Policy> policies;
  Tokens tokens;
  std::unique_ptr<Model> model;
  std::unique_ptr<Backend> backend;
  RunFacts facts;

  StudyInput(const StudyArguments& arguments, const std::string& command, std::vector<Policy> default_policies);
};

}  // namespace replayssm::cli
