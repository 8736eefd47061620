#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <iostream>
#include <map>

#include "analysis/cli/cli.h"
#include "core/error.h"
#include "core/format_file.h"
#include "core/version.h"

namespace replayssm::cli {

std::unique_ptr<Model> open_model(const std::string& folder) {
  auto model = Model::open(folder);
  for (const std::string& notice : model->notices()) std::cerr << "replayssm: note: " << notice << "\n";
  return model;
}

void refuse_nan(const char* option, double value) {
  if (std::isnan(value)) fail(option, ": expected a number, found ", value);
}

void add_format_files(CLI::App& app) {
  app.add_option_function<std::vector<std::string>>(
         "--formats",
         [](const std::vector<std::string>& files) {
           for (const std::string& file : files) read_formats(file);
         },
         "TOML file of formats of one's own, which policies may name; may be given again")
      ->allow_extra_args(false);
}

Progress progress_bar() {
  if (!isatty(STDERR_FILENO)) return {};
  const auto start = std::chrono::steady_clock::now();
  return [start, shown = -1](std::int64_t done, std::int64_t all) mutable {
    constexpr int width = 40;
    const int filled = static_cast<int>(done * width / all), percent = static_cast<int>(done * 100 / all);
    if (percent == shown) return;
    shown = percent;
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::fprintf(stderr, "\r[%s%s] %3d %%  %.0f s", std::string(static_cast<std::size_t>(filled), '#').c_str(),
                 std::string(static_cast<std::size_t>(width - filled), ' ').c_str(), percent, seconds);
    if (done == all) std::fprintf(stderr, "\r%*s\r", width + 24, "");
    std::fflush(stderr);
  };
}

namespace {

/// A message quotes what the user gave, line breaks included.
std::string one_line(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c == '\n' || c == '\r'; }, ' ');
  return text;
}

}  // namespace

}  // namespace replayssm::cli

int main(int argc, char** argv) {
  using namespace replayssm;
  CLI::App app("What a state format, a replay length and shared or split precision do to a state-space language model");
  app.set_version_flag("--version", std::string("replayssm ") + version() + " (" + build_description() + ")");
  app.require_subcommand(0, 1);  // with none, an unknown word would be reported as a missing command
  const std::map<CLI::App*, cli::Command> commands = [&] {
    std::map<CLI::App*, cli::Command> all;
    const auto add = [&](const char* name, const char* job, auto fill) {
      CLI::App* command = app.add_subcommand(name, job);
      all[command] = fill(*command);
    };
    add("kl", "KL report: what each policy does to the model's next-token distributions", cli::add_kl);
    add("layers", "Where the error comes from: every layer, local and propagated, and its part in the KL",
        cli::add_layers);
    add("check", "Compare policies and conversions with a stored baseline; exit 1 where something moved too far",
        cli::add_check);
    add("verify", "Compare the model's logits with those of a framework", cli::add_verify);
    add("inspect", "Layers, dimensions, state bytes and decay half-lives of a model", cli::add_inspect);
    add("oracle", "Digits that each schedule and precision keeps: one layer in arbitrary precision", cli::add_oracle);
    add("spec",
        "Speculative decoding: acceptance, rollbacks, ring and bytes; exit 1 where the text is not the plain one",
        cli::add_spec);
    add("traffic", "Bytes that a policy stores and moves, the time they take, and the best replay length",
        cli::add_traffic);
    add("bench", "Speed of the CUDA decode kernels: correctness first, then time and share of the memory's bandwidth",
        cli::add_bench);
    add("formats", "Number formats: range, precision, codes", cli::add_formats);
    return all;
  }();
  try {
    app.parse(argc, argv);
    if (app.get_subcommands().empty()) fail("a command is required (see --help)");
    const int status = commands.at(app.get_subcommands().front())();
    if (std::fflush(stdout) != 0 || std::ferror(stdout) || !std::cout.flush())
      fail("standard output: cannot be written");
    return status;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    std::cerr << "replayssm: " << cli::one_line(error.what()) << " (see --help)\n";
  } catch (const Interrupted& stop) {
    constexpr int ended_by_interrupt = 130;  // what a shell reports of a program that Ctrl-C has killed
    std::cerr << (isatty(STDERR_FILENO) ? "\n" : "") << "replayssm: " << cli::one_line(stop.what()) << "\n";
    return ended_by_interrupt;
  } catch (const std::exception& error) {
    std::cerr << "replayssm: " << cli::one_line(error.what()) << "\n";
  }
  return 2;
}
