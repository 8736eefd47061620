#include "analysis/oracle.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <set>
#include <sstream>

#include "analysis/cli/cli.h"
#include "analysis/report_json.h"
#include "core/error.h"
#include "core/tokens.h"

namespace replayssm::cli {
namespace {

struct Options {
  std::string model, tokens, heads, json;
  std::int64_t max_tokens = 0;
  std::vector<std::string> policy_texts;  // of the kernels
  MachineOptions machine;
  OracleOptions oracle;
};

/// "0,3-5" as 0, 3, 4, 5.
std::vector<std::int64_t> parse_heads(const std::string& text) {
  const auto wrong = [&] { fail("--heads ", text, ": expected heads and ranges such as 0,3-5"); };
  const auto number = [&](const std::string& word) {
    if (word.empty() || word.size() > 9 || word.find_first_not_of("0123456789") != word.npos) wrong();
    return std::int64_t{std::stoi(word)};
  };
  std::set<std::int64_t> heads;
  std::istringstream words(text + ",");
  for (std::string word; std::getline(words, word, ',');) {
    const auto dash = word.find('-');
    const std::int64_t first = number(word.substr(0, dash));
    const std::int64_t last = dash == word.npos ? first : number(word.substr(dash + 1));
    if (last < first || last - first > 100'000) wrong();
    for (std::int64_t h = first; h <= last; ++h) heads.insert(h);
  }
  return {heads.begin(), heads.end()};
}

/// Of the digits [steps, heads] of one run.
struct Summary {
  double least, median;
  std::size_t step, head;  // where the least is
};

Summary summarize(std::vector<double> digits, std::size_t heads) {
  const auto least = std::ranges::min_element(digits);
  const auto at = static_cast<std::size_t>(least - digits.begin());
  Summary out{*least, 0, at / heads, at % heads};
  std::ranges::sort(digits);
  out.median = (digits[(digits.size() - 1) / 2] + digits[digits.size() / 2]) / 2;
  return out;
}

/// What the kernels run where nothing else is asked for: eager, replayed and split, nothing rounded beyond fp32. For
/// Mamba-2 both loops are the same.
std::vector<std::string> kernel_policies(Recurrence recurrence, const std::vector<std::int64_t>& lengths) {
  std::vector<std::string> out = {"eager(state=fp32)"};
  for (const std::int64_t length : lengths) {
    const std::string replay = "replay(L=" + std::to_string(length);
    out.push_back(replay + ", state=fp32)");
    out.push_back(replay + ", anchor=fp32, read=fp32)");
    if (is_delta_rule(recurrence)) out.push_back(replay + ", anchor=fp32, read=fp32, loop=open)");
  }
  return out;
}

/// The policies of the kernels; none without them.
std::vector<Policy> on_device(const Options& options, const Model& model) {
  std::vector<std::string> texts = options.policy_texts;
  if (options.machine.device == "cpu") {
    if (!texts.empty()) fail("--policy ", texts.front(), ": needs --device cuda, whose kernels run it");
    return {};
  }
  const RecurrenceShape& shape = *recurrent_layer(model, options.oracle.layer).recurrence;
  if (texts.empty()) texts = kernel_policies(shape.recurrence, options.oracle.lengths);
  std::vector<Policy> out;
  for (const std::string& text : texts) {
    out.push_back(parse_policy(text));
    if (out.back().as_replay().anchor.exact()) {
      fail("policy '", out.back().text(), "': the kernels compute in fp32 and keep states in fp32 at most");
    }
  }
  return out;
}

const char* name(Precision precision) { return precision == Precision::fp64 ? "fp64" : "fp32"; }

/// Of one oracle with its check.
double oracle_milliseconds(const OracleResult& result) {
  return 1e3 * result.oracle_seconds / static_cast<double>(result.oracles * std::ssize(result.heads) * result.tokens);
}

void print_table(const OracleResult& result, const RunFacts& facts) {
  std::printf("fp32 runs take their inputs rounded once to fp32, and so does the oracle that they are measured with\n");
  if (!facts.activations.empty()) {
    std::printf(
        "%s runs are those of the kernels, in fp32, with inputs rounded once to %s, also for their oracle, and y "
        "written in %s\n",
        facts.device.c_str(), facts.activations.c_str(), facts.activations.c_str());
  }
  std::printf("correct digits: -log10 of the relative L2 error, of y over head_dim, of S over a head's state\n");
  std::vector<const KeptDigits*> runs;
  for (const KeptDigits& run : result.runs) runs.push_back(&run);
  // What is to be compared stands together, whoever ran it.
  std::ranges::stable_sort(runs, {}, [](const KeptDigits* run) { return run->policy.as_replay().length; });
  std::size_t width = 0;
  for (const KeptDigits* run : runs) width = std::max(width, run->policy.text().size());
  const int w = static_cast<int>(width);
  std::printf("%-*s       y: least  median  at token, head   S: least  median  at token, head\n", w, "policy");
  for (const KeptDigits* run : runs) {
    std::printf("%-*s  %s", w, run->policy.text().c_str(),
                run->on_backend ? facts.device.c_str() : name(run->precision));
    const auto print = [&](const Summary& s, std::int64_t token) {
      std::printf(" %9.2f %7.2f %9lld, %4lld", s.least, s.median, static_cast<long long>(token),
                  static_cast<long long>(result.heads[s.head]));
    };
    const Summary y = summarize(run->y, result.heads.size()), s = summarize(run->state, result.heads.size());
    print(y, static_cast<std::int64_t>(y.step));
    std::printf("  ");
    print(s, result.block_ends[s.step]);
    std::printf("\n");
  }
}

Json digits_json(const std::vector<double>& digits, const OracleResult& result, const auto& token_of) {
  const std::size_t heads = result.heads.size();
  const Summary s = summarize(digits, heads);
  Json curve = Json::array(), tokens = Json::array();
  for (std::size_t step = 0; step * heads < digits.size(); ++step) {
    const auto first = digits.begin() + static_cast<std::ptrdiff_t>(step * heads);
    curve.push_back(*std::min_element(first, first + static_cast<std::ptrdiff_t>(heads)));
    tokens.push_back(token_of(step));
  }
  return {{"least", s.least},
          {"median", s.median},
          {"worst", {{"token", token_of(s.step)}, {"head", result.heads[s.head]}}},
          {"tokens", tokens},
          {"least_of_heads", curve}};
}

std::string report(const Model& model, const RunFacts& facts, const Options& options, const OracleResult& result,
                   bool passed) {
  Json out = run_json(model, facts);
  out["reference"] = "oracle";
  out["layer"] = options.oracle.layer;
  out["kind"] = result.layer.kind;
  out["heads"] = result.heads;
  out["oracle"] = {{"arithmetic", result.arithmetic},
                   {"digits", options.oracle.digits},
                   {"working_digits", result.working_digits},
                   {"check_digits", result.check_digits},
                   {"confirmed", result.confirmed},
                   {"passed", passed},
                   {"ms_per_head_and_token", oracle_milliseconds(result)}};
  out["results"] = Json::array();
  for (const KeptDigits& run : result.runs) {
    const auto token = [](std::size_t step) { return step; };
    const auto block_end = [&](std::size_t step) { return result.block_ends[step]; };
    out["results"].push_back({{"policy", run.policy.text()},
                              {"precision", name(run.precision)},
                              {"device", run.on_backend ? facts.device : "cpu"},
                              {"y", digits_json(run.y, result, token)},
                              {"state", digits_json(run.state, result, block_end)}});
  }
  return out.dump(2) + "\n";
}

int run(Options options) {
  if (!options.heads.empty()) options.oracle.heads = parse_heads(options.heads);
  Tokens tokens = read_tokens(options.tokens);
  if (tokens.sequences != 1) {
    fail(options.tokens, ": expected one sequence for the oracle, found ", tokens.sequences);
  }
  if (options.max_tokens > 0) tokens.length = std::min(tokens.length, options.max_tokens);
  tokens.ids.resize(static_cast<std::size_t>(tokens.length));
  check_writable(options.json);
  const auto model = open_model(options.model);
  options.oracle.on_backend = on_device(options, *model);
  const auto backend = options.machine.backend(*model, options.oracle.on_backend);
  options.oracle.threads = options.machine.threads;
  RunFacts facts{.command = "oracle",
                 .model_path = options.model,
                 .model_sha256 = options.json.empty() ? "" : model->sha256(),
                 .tokens_path = options.tokens,
                 .tokens = tokens.length,
                 .sequences = 1,
                 .device = options.machine.device,
                 .activations = options.machine.fed(),
                 .threads = options.oracle.threads};
  if (!facts.activations.empty()) options.oracle.activations = parse_format(facts.activations);
  options.oracle.progress = progress_bar();
  const auto start = std::chrono::steady_clock::now();
  const OracleResult result = run_oracle(*model, *backend, tokens.ids, options.oracle);
  facts.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

  const bool passed = result.confirmed >= options.oracle.digits;
  if (options.json != "-") {
    std::printf("%s (%s), layer %lld (%s), %zu of %lld heads, %lld tokens\n", options.model.c_str(),
                model->type().c_str(), static_cast<long long>(options.oracle.layer), result.layer.kind.c_str(),
                result.heads.size(), static_cast<long long>(result.layer.recurrence->heads),
                static_cast<long long>(result.tokens));
    std::printf("oracle (%s): %d digits %s; computed with %d, agrees with a run of %d digits in %d of %d\n",
                result.arithmetic.c_str(), options.oracle.digits, passed ? "confirmed" : "NOT CONFIRMED",
                result.working_digits, result.check_digits, result.confirmed, result.working_digits);
    std::printf("oracle and check: %.2f ms per head and token on %d thread%s\n", oracle_milliseconds(result),
                options.oracle.threads, options.oracle.threads == 1 ? "" : "s");
    print_table(result, facts);
  }
  if (!options.json.empty()) write_text(options.json, report(*model, facts, options, result, passed));
  return passed ? 0 : 1;
}

}  // namespace

Command add_oracle(CLI::App& app) {
  auto options = std::make_shared<Options>();
  OracleOptions& oracle = options->oracle;
  const CLI::Range count(std::int64_t{0}, std::int64_t{1} << 31), at_least_one(std::int64_t{1}, std::int64_t{1} << 31);
  app.add_option("MODEL", options->model, "Hugging Face folder")->required();
  app.add_option("--layer", oracle.layer, "Layer of the model, from 0; one with a recurrent state")
      ->required()
      ->check(count);
  app.add_option("--tokens", options->tokens, "Token ids: .safetensors with input_ids, .npy, or text")->required();
  app.add_option("--max-tokens", options->max_tokens, "At most so many tokens")->check(at_least_one);
  app.add_option("--digits", oracle.digits, "Decimal digits that the oracle is to vouch for")
      ->check(CLI::Range(1, max_oracle_digits()))
      ->capture_default_str();
  app.add_option("--guard", oracle.guard, "Digits carried beyond these; more, where fewer are confirmed than asked for")
      ->check(CLI::Range(0, max_oracle_digits()))
      ->capture_default_str();
  app.add_option("--heads", options->heads, "Heads of the layer such as 0,3-5; all where not given");
  app.add_option("-L,--length", oracle.lengths, "Replay length; may be given again")
      ->allow_extra_args(false)
      ->capture_default_str();
  app.add_option("--state-every", oracle.state_every, "Tokens between two looks at the states, a divisor of 64")
      ->check(CLI::IsMember({1, 2, 4, 8, 16, 32, 64}))
      ->capture_default_str();
  app.add_option("--json", options->json, "Write the report as JSON to a file, or to standard output with -");
  options->machine.add_threads(app);
  options->machine.add_device(app);
  options->machine.add_activations(app);
  app.add_option("-p,--policy", options->policy_texts,
                 "With --device cuda: what the kernels run, in place of eager, replayed and split states in fp32; may "
                 "be given again")
      ->allow_extra_args(false);
  add_format_files(app);
  return [options] { return run(*options); };
}

}  // namespace replayssm::cli
