#include "analysis/oracle.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <set>
#include <sstream>
#include <thread>

#include "analysis/cli/cli.h"
#include "analysis/report_json.h"
#include "core/error.h"
#include "core/tokens.h"

namespace replayssm::cli {
namespace {

struct Options {
  std::string model, tokens, heads, json;
  std::int64_t max_tokens = 0;
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

const char* name(Precision precision) { return precision == Precision::fp64 ? "fp64" : "fp32"; }

/// Of one oracle with its check; each head has two, on inputs of two precisions.
double oracle_milliseconds(const OracleResult& result) {
  return 1e3 * result.oracle_seconds / static_cast<double>(2 * std::ssize(result.heads) * result.tokens);
}

void print_table(const OracleResult& result) {
  std::printf("fp32 runs take their inputs rounded once to fp32, and so does the oracle that they are measured with\n");
  std::printf("correct digits: -log10 of the relative L2 error, of y over head_dim, of S over a head's state\n");
  std::size_t width = 0;
  for (const KeptDigits& run : result.runs) width = std::max(width, run.policy.text().size());
  const int w = static_cast<int>(width);
  std::printf("%-*s       y: least  median  at token, head   S: least  median  at token, head\n", w, "policy");
  for (const KeptDigits& run : result.runs) {
    std::printf("%-*s  %s", w, run.policy.text().c_str(), name(run.precision));
    const auto print = [&](const Summary& s, std::int64_t token) {
      std::printf(" %9.2f %7.2f %9lld, %4lld", s.least, s.median, static_cast<long long>(token),
                  static_cast<long long>(result.heads[s.head]));
    };
    const Summary y = summarize(run.y, result.heads.size()), s = summarize(run.state, result.heads.size());
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
  const auto backend = reference_backend(Precision::fp64, options.oracle.threads);
  RunFacts facts{.command = "oracle",
                 .model_path = options.model,
                 .model_sha256 = options.json.empty() ? "" : model->sha256(),
                 .tokens_path = options.tokens,
                 .tokens = tokens.length,
                 .sequences = 1,
                 .threads = options.oracle.threads};
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
    print_table(result);
  }
  if (!options.json.empty()) write_text(options.json, report(*model, facts, options, result, passed));
  return passed ? 0 : 1;
}

}  // namespace

Command add_oracle(CLI::App& app) {
  auto options = std::make_shared<Options>();
  OracleOptions& oracle = options->oracle;
  oracle.threads = static_cast<int>(std::thread::hardware_concurrency());
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
  app.add_option("--json", options->json, "Write the report as JSON to a file, or to standard output with -");
  app.add_option("--threads", oracle.threads, "Threads; results do not depend on them")->check(CLI::Range(1, 1024));
  return [options] { return run(*options); };
}

}  // namespace replayssm::cli
