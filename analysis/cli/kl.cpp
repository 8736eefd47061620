#include <iostream>

#include "analysis/cli/study_session.h"

namespace replayssm::cli {
namespace {

struct Options : StudyArguments {
  bool local = false;
};

int run(const Options& options) {
  StudyInput input(options, "kl", default_policies());
  StudySession session(options, input, {{"local", options.local ? "yes" : "no"}});
  StudyOptions study = session.study_options();
  study.local = options.local;
  std::vector<PolicyResult> results;
  session.run([&] { results = run_study(*input.model, *input.backend, input.tokens, input.policies, study); });

  if (options.json != "-") {
    std::cout << options.model << " (" << input.model->type() << "), " << input.tokens.sequences << " x "
              << input.tokens.length << " tokens, " << input.facts.precision << recurrence_text(input.facts)
              << ", reference NLL " << results.front().divergence.nll_reference << " nats/token, KL in nats\n"
              << kl_table(results);
  }
  session.finish([&](const std::string& path) { write_kl(path, *input.model, input.facts, input.tokens, results); },
                 [&] { return kl_json(*input.model, input.facts, results); });
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
