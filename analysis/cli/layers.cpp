#include <cstdio>
#include <iostream>

#include "analysis/cli/study_session.h"
#include "analysis/layer_report.h"
#include "core/error.h"

namespace replayssm::cli {
namespace {

constexpr std::int64_t sample_every = 128;  // tokens between two samples of the states

struct Options : StudyArguments {
  bool no_attribution = false;
  std::string trace, trace_layers;
};

/// The raw trace that was asked for, with its size said up front.
std::unique_ptr<LayerTrace> trace_of(const Options& options, const StudyInput& input, const StudySession& session) {
  if (options.trace.empty()) return nullptr;
  auto trace = std::make_unique<LayerTrace>(*input.model, *input.backend, input.tokens, input.policies,
                                            parse_trace(options.trace, options.trace_layers), sample_every,
                                            options.machine.threads, session.folder());
  char size[32];
  std::snprintf(size, sizeof size, "%.3g MiB", trace->bytes() / (1 << 20));
  std::cerr << "replayssm: note: the trace is " << size << " before compression; twice that while it is put together\n";
  return trace;
}

int run(const Options& options) {
  StudyInput input(options, "layers", default_layer_policies());
  if (options.trace.empty() && !options.trace_layers.empty()) fail("--trace-layers says of which layers, --trace what");
  if (!options.trace.empty() && options.output.empty()) fail("--trace needs --output, the file that it goes to");
  StudySession session(options, input,
                       {{"attribution", options.no_attribution ? "no" : "yes"},
                        {"trace", options.trace},
                        {"trace layers", options.trace_layers}});
  const auto trace = trace_of(options, input, session);
  StudyOptions options_of_study = session.study_options();
  options_of_study.chunk_tokens = sample_every;
  if (trace) {
    options_of_study.observe = [&](const LayerChunk& chunk) { trace->observe(chunk); };
    options_of_study.layer_done = [&](std::int64_t layer) { trace->finish_layer(layer); };
  }
  LayerStudy study;
  session.run([&] {
    study = run_layer_study(*input.model, *input.backend, input.tokens, input.policies, options_of_study,
                            !options.no_attribution);
  });
  if (options.json != "-") {
    std::cout << options.model << " (" << input.model->type() << "), " << input.tokens.sequences << " x "
              << input.tokens.length << " tokens, " << input.facts.precision << recurrence_text(input.facts)
              << "; relative L2 errors; KL in nats\n\n"
              << layers_table(study);
  }
  session.finish(
      [&](const std::string& path) { write_layers(path, *input.model, input.facts, input.tokens, study, trace.get()); },
      [&] { return layers_json(*input.model, input.facts, study); });
  return 0;
}

}  // namespace

Command add_layers(CLI::App& app) {
  auto options = std::make_shared<Options>();
  options->add_to(app);
  app.add_flag("--no-attribution", options->no_attribution, "Do not also run each policy on each layer alone");
  app.add_option("--trace", options->trace,
                 "Raw data of each layer in --output: a list of u, w, decay, y, state, separated by commas");
  app.add_option("--trace-layers", options->trace_layers, "Only of these layers, such as 0-3+7");
  return [options] { return run(*options); };
}

}  // namespace replayssm::cli
