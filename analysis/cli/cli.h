#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "analysis/cli/machine.h"
#include "analysis/study.h"
#include "core/backend.h"
#include "core/model.h"

namespace replayssm::cli {

/// What a command returns to the shell: 0 done, 1 a check failed. Errors are thrown and become 2.
using Command = std::function<int()>;

/// The options of a Machine, as several commands share them.
struct MachineOptions : Machine {
  void add_to(CLI::App& app);
  // The parts of it, for a command that has not all.
  void add_threads(CLI::App& app);
  void add_device(CLI::App& app);
  void add_activations(CLI::App& app);
  void add_precision(CLI::App& app);
};

/// Opens a model and prints its notices on standard error.
std::unique_ptr<Model> open_model(const std::string& folder);

/// The option --formats, which defines the formats of a file before policies are read.
void add_format_files(CLI::App& app);

/// Throws Error that names the option where its value is NaN, which lies in every CLI::Range.
void refuse_nan(const char* option, double value);

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
Command add_spec(CLI::App& app);

}  // namespace replayssm::cli
