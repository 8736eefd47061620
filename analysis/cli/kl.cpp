#include <chrono>
#include <iostream>
#include <set>

#include "analysis/cli/cli.h"
#include "analysis/report.h"
#include "core/error.h"

namespace replayssm::cli {
namespace {

struct Options {
  std::string model, tokens, json, output;
  std::int64_t max_tokens = 0, sequences = 0;
  std::vector<std::string> policies;
  bool local = false;
  Machine machine;
};

/// The tokens to run: `sequences` rows of at most max_tokens each. A single row is cut into consecutive sequences.
Tokens select(const Tokens& all, const Options& options) {
  Tokens out = all;
  if (options.sequences > 0 && all.sequences == 1 && options.sequences > 1) {
    out.sequences = options.sequences;
    out.length = all.length / options.sequences;
    if (options.max_tokens > 0) out.length = std::min(out.length, options.max_tokens);
    if (out.length == 0) {
      fail(options.tokens, ": ", all.length, " tokens are too few for --sequences ", options.sequences);
    }
    out.ids.resize(static_cast<std::size_t>(out.sequences * out.length));
    return out;
  }
  if (options.sequences > all.sequences) {
    fail(options.tokens, ": holds ", all.sequences, " sequences, --sequences asks for ", options.sequences);
  }
  if (options.sequences > 0) out.sequences = options.sequences;
  if (options.max_tokens > 0) out.length = std::min(all.length, options.max_tokens);
  out.ids.clear();
  for (std::int64_t b = 0; b < out.sequences; ++b) {
    const auto row = all.ids.begin() + b * all.length;
    out.ids.insert(out.ids.end(), row, row + out.length);
  }
  return out;
}

int run(const Options& options) {
  std::vector<Policy> policies;
  for (const std::string& text : options.policies) policies.push_back(parse_policy(text));
  if (policies.empty()) policies = default_policies();
  const Tokens tokens = select(read_tokens(options.tokens), options);
  const auto model = open_model(options.model);
  const auto backend = options.machine.backend();
  for (const Policy& policy : policies) check_policy(*model, policy, tokens.length);

  RunFacts facts{.command = "kl",
                 .model_path = options.model,
                 .tokens_path = options.tokens,
                 .tokens = tokens.length,
                 .sequences = tokens.sequences,
                 .precision = options.machine.precision,
                 .threads = options.machine.threads};
  std::optional<KlFile> file;
  if (!options.output.empty()) file.emplace(options.output, *model, facts, tokens, policies);
  const auto start = std::chrono::steady_clock::now();
  const auto results =
      run_study(*model, *backend, tokens, policies,
                {.threads = options.machine.threads, .local = options.local, .progress = progress_bar()});
  facts.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

  if (options.json != "-") {
    std::cout << options.model << " (" << model->type() << "), " << tokens.sequences << " x " << tokens.length
              << " tokens, " << facts.precision << ", reference NLL " << results.front().divergence.nll_reference
              << " nats/token, KL in nats\n"
              << kl_table(results);
  }
  if (file) file->finish(facts, results);
  if (!options.json.empty()) write_text(options.json, kl_json(*model, facts, results));
  return 0;
}

}  // namespace

Command add_kl(CLI::App& app) {
  auto options = std::make_shared<Options>();
  app.add_option("MODEL", options->model, "Hugging Face folder")->required();
  app.add_option("--tokens", options->tokens, "Token ids: .safetensors with input_ids, .npy, or text")->required();
  app.add_option("--max-tokens", options->max_tokens, "At most so many tokens of each sequence")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 31));
  app.add_option("--sequences", options->sequences,
                 "So many sequences of the file; a file of one sequence is cut into so many")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 31));
  app.add_option("-p,--policy", options->policies,
                 "Policy such as 'replay(L=16, anchor=fp32, read=int8:row)'; may be given again")
      ->allow_extra_args(false);
  app.add_option("--json", options->json, "Write the report as JSON to a file, or to standard output with -");
  app.add_option("--output", options->output, "Write all per-token and per-layer data to an HDF5 file");
  app.add_flag("--local", options->local,
               "Also the local error of each layer: fed by the reference's stream instead of the policy's own");
  options->machine.add_to(app);
  return [options] { return run(*options); };
}

}  // namespace replayssm::cli
