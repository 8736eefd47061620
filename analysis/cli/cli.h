#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "analysis/study.h"
#include "core/backend.h"
#include "core/model.h"

namespace replayssm::cli {

/// What a command returns to the shell: 0 done, 1 a check failed. Errors are thrown and become 2.
using Command = std::function<int()>;

/// Options that several commands share: where to compute, and in what.
struct Machine {
  int threads = 0;
  std::string device = "cpu", precision = "fp64";
  std::string activations;  ///< of the decode kernels; empty where not given

  void add_to(CLI::App& app);
  // The parts of it, for a command that has not all.
  void add_threads(CLI::App& app);
  void add_device(CLI::App& app);
  void add_activations(CLI::App& app);

  /// What the decode kernels are fed and write y in: fp32 where not given, empty where they are not used.
  std::string fed() const;
  /// The reference on the CPU.
  std::unique_ptr<Backend> reference() const;
  /// The same or, with --device cuda, with the decode kernels for the states of policies. Throws Error for a policy
  /// that they do not know, where there are no kernels, and for activations without them.
  std::unique_ptr<Backend> backend(const Model& model, const std::vector<Policy>& policies) const;
};

/// Opens a model and prints its notices on standard error.
std::unique_ptr<Model> open_model(const std::string& folder);

/// The option --formats, which defines the formats of a file before policies are read.
void add_format_files(CLI::App& app);

/// A bar on standard error where that is a terminal, else nothing.
Progress progress_bar();

// Each adds one command with its options to `app` and returns what runs it.
Command add_kl(CLI::App& app);
Command add_layers(CLI::App& app);
Command add_check(CLI::App& app);
Command add_verify(CLI::App& app);
Command add_inspect(CLI::App& app);
Command add_formats(CLI::App& app);
Command add_oracle(CLI::App& app);
Command add_bench(CLI::App& app);
Command add_traffic(CLI::App& app);

}  // namespace replayssm::cli
