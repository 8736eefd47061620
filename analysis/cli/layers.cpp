#include <chrono>
#include <iostream>

#include "analysis/cli/study_arguments.h"
#include "analysis/layer_report.h"

namespace replayssm::cli {
namespace {

constexpr std::int64_t sample_every = 128;  // tokens between two samples of the states

struct Options : StudyArguments {
  bool no_attribution = false;
};

/// Shared and split at 8 bits, flushed often and seldom.
std::vector<Policy> default_layer_policies() {
  std::vector<Policy> policies;
  for (const char* text :
       {"replay(L=4, state=e4m3:row)", "replay(L=16, state=e4m3:row)", "replay(L=16, anchor=fp32, read=e4m3:row)"}) {
    policies.push_back(parse_policy(text));
  }
  return policies;
}

int run(const Options& options) {
  StudyInput input(options, "layers", default_layer_policies());
  const auto start = std::chrono::steady_clock::now();
  const LayerStudy study =
      run_layer_study(*input.model, *input.backend, input.tokens, input.policies,
                      {.threads = options.machine.threads, .chunk_tokens = sample_every, .progress = progress_bar()},
                      !options.no_attribution);
  input.facts.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (options.json != "-") {
    std::cout << options.model << " (" << input.model->type() << "), " << input.tokens.sequences << " x "
              << input.tokens.length << " tokens, " << input.facts.precision << recurrence_text(input.facts)
              << "; relative L2 errors; KL in nats\n\n"
              << layers_table(study);
  }
  if (!options.output.empty()) write_layers(options.output, *input.model, input.facts, study);
  if (!options.json.empty()) write_text(options.json, layers_json(*input.model, input.facts, study));
  return 0;
}

}  // namespace

Command add_layers(CLI::App& app) {
  auto options = std::make_shared<Options>();
  options->add_to(app);
  app.add_flag("--no-attribution", options->no_attribution, "Do not also run each policy on each layer alone");
  return [options] { return run(*options); };
}

}  // namespace replayssm::cli
