#include <chrono>
#include <iostream>
#include <optional>

#include "analysis/cli/study_arguments.h"

namespace replayssm::cli {
namespace {

struct Options : StudyArguments {
  bool local = false;
};

int run(const Options& options) {
  StudyInput input(options, "kl", default_policies());
  std::optional<KlFile> file;
  if (!options.output.empty()) file.emplace(options.output, *input.model, input.facts, input.tokens, input.policies);
  const auto start = std::chrono::steady_clock::now();
  const auto results =
      run_study(*input.model, *input.backend, input.tokens, input.policies,
                {.threads = options.machine.threads, .local = options.local, .progress = progress_bar()});
  input.facts.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

  if (options.json != "-") {
    std::cout << options.model << " (" << input.model->type() << "), " << input.tokens.sequences << " x "
              << input.tokens.length << " tokens, " << input.facts.precision << recurrence_text(input.facts) << ", reference NLL "
              << results.front().divergence.nll_reference << " nats/token, KL in nats\n"
              << kl_table(results);
  }
  if (file) file->finish(input.facts, results);
  if (!options.json.empty()) write_text(options.json, kl_json(*input.model, input.facts, results));
  return 0;
}

}  // namespace

Command add_kl(CLI::App& app) {
  auto options = std::make_shared<Options>();
  options->add_to(app);
  app.add_flag("--local", options->local,
               "Also the local error of each layer: fed by the reference's stream instead of the policy's own");
  return [options] { return run(*options); };
}

}  // namespace replayssm::cli
