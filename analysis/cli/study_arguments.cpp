#include "analysis/cli/study_arguments.h"

#include <algorithm>

#include "core/error.h"

namespace replayssm::cli {
namespace {

/// The tokens to run: `sequences` rows of at most max_tokens each. A single row is cut into consecutive sequences.
Tokens select(const Tokens& all, const StudyArguments& arguments) {
  Tokens out = all;
  if (arguments.sequences > 1 && all.sequences == 1) {
    out.sequences = arguments.sequences;
    out.length = all.length / arguments.sequences;
    if (arguments.max_tokens > 0) out.length = std::min(out.length, arguments.max_tokens);
    if (out.length == 0) {
      fail(arguments.tokens_name(), ": ", all.length, " tokens are too few for ", arguments.sequences_option, " ",
           arguments.sequences);
    }
    out.ids.resize(static_cast<std::size_t>(out.sequences * out.length));
    return out;
  }
  if (arguments.sequences > all.sequences) {
    fail(arguments.tokens_name(), ": holds ", all.sequences, " sequences, ", arguments.sequences_option, " asks for ",
         arguments.sequences);
  }
  if (arguments.sequences > 0) out.sequences = arguments.sequences;
  if (arguments.max_tokens > 0) out.length = std::min(all.length, arguments.max_tokens);
  out.ids.clear();
  for (std::int64_t b = 0; b < out.sequences; ++b) {
    const auto row = all.ids.begin() + b * all.length;
    out.ids.insert(out.ids.end(), row, row + out.length);
  }
  return out;
}

/// What would otherwise come out after the files are made.
void check_vocabulary(const Tokens& tokens, const Model& model, const std::string& file) {
  for (std::int64_t i = 0; i < std::ssize(tokens.ids); ++i) {
    const std::int32_t id = tokens.ids[static_cast<std::size_t>(i)];
    if (id < model.vocabulary()) continue;
    fail(file, ": token ", id, " at [", i / tokens.length, ", ", i % tokens.length, "] is not in the vocabulary of ",
         model.vocabulary());
  }
}

}  // namespace

void StudyArguments::add_model_and_tokens(CLI::App& app) {
  app.add_option("MODEL", model, "Hugging Face folder")->required();
  app.add_option("--tokens", tokens_file, "Token ids: .safetensors with input_ids, .npy, or text")->required();
  app.add_option("--tokens-source", tokens_source,
                 "What reports call the tokens, where their file is not the original");
}

void StudyArguments::add_policies(CLI::App& app) {
  app.add_option("-p,--policy", policy_texts,
                 "Policy such as 'replay(L=16, anchor=fp32, read=int8:row)'; may be given again")
      ->allow_extra_args(false);
  add_format_files(app);
}

void StudyArguments::add_to(CLI::App& app) {
  add_model_and_tokens(app);
  app.add_option("--max-tokens", max_tokens, "At most so many tokens of each sequence")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 31));
  app.add_option("--sequences", sequences, "So many sequences of the file; a file of one sequence is cut into so many")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 31));
  add_policies(app);
  app.add_option("--seed", seed, "Of stochastic rounding (formats with sr); 0 where not given");
  app.add_option("--json", json, "Write the report as JSON to a file, or to standard output with -");
  app.add_option("--output", output, "Write all per-token and per-layer data to an HDF5 file");
  app.add_flag("--resume", resume, "Go on with an interrupted run of the same command from FILE.parts beside its file");
  machine.add_to(app);
  machine.add_activations(app);
}

StudyInput::StudyInput(const StudyArguments& arguments, const std::string& command,
                       std::vector<Policy> default_policies) {
  for (const std::string& text : arguments.policy_texts) policies.push_back(parse_policy(text));
  if (policies.empty()) policies = std::move(default_policies);
  tokens = select(read_tokens(arguments.tokens_file), arguments);
  model = open_model(arguments.model);
  backend = arguments.machine.backend(*model, policies);
  check_vocabulary(tokens, *model, arguments.tokens_name());
  for (const Policy& policy : policies) check_policy(*model, policy, tokens.length);
  const bool report = !arguments.json.empty() || !arguments.output.empty();
  facts = {.command = command,
           .model_path = arguments.model,
           .model_sha256 = report ? model->sha256() : "",
           .tokens_path = arguments.tokens_name(),
           .tokens = tokens.length,
           .sequences = tokens.sequences,
           .device = arguments.machine.device,
           .precision = arguments.machine.precision,
           .activations = arguments.machine.fed(),
           .seed = arguments.seed,
           .threads = arguments.machine.threads,
           .seconds = 0};
}

}  // namespace replayssm::cli
