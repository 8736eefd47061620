#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <utility>

#include "analysis/cli/interrupt.h"
#include "analysis/cli/study_arguments.h"
#include "analysis/speculation_report.h"
#include "core/error.h"

namespace replayssm::cli {
namespace {

struct Options : StudyArguments {
  SpeculationOptions spec{.prompt_tokens = 64};
  std::int64_t prompts = 8, ring = 0, ngram = 3;
  std::string draft, accept;
  TrafficQuestion cost{.batches = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512}};

  std::int64_t tokens_of_sequence() const { return spec.prompt_tokens + (spec.teacher_forced ? spec.new_tokens : 0); }
};

std::vector<Policy> default_spec_policies() {
  return {parse_policy("replay(L=16, state=exact)"), parse_policy("replay(L=16, state=fp32)"),
          parse_policy("replay(L=16, anchor=fp32, read=int8:row)")};
}

/// Where the drafts come from, and how reports say it.
struct Drafts {
  DraftSources sources;
  std::string text;
};

/// Of --accept: drafts that are right but for those that are made wrong.
Drafts synthetic(const Options& options, const StudyInput& input) {
  const Model& model = *input.model;
  const auto right = [&options, &input](std::int64_t i) {
    const Tokens& tokens = input.tokens;
    const auto first = tokens.ids.begin() + i * tokens.length;
    if (options.spec.teacher_forced) return known_text({first, first + tokens.length});
    return model_drafts(*input.model, *input.backend, options.spec.window - 1);
  };
  const std::string of = options.spec.teacher_forced ? "the text" : "the model with an exact state";
  const char *begin = options.accept.data(), *end = begin + options.accept.size();
  double rate = 0;
  if (const auto [rest, error] = std::from_chars(begin, end, rate); error == std::errc() && rest == end) {
    if (!(rate >= 0 && rate <= 1)) fail("--accept ", options.accept, ": expected a rate in 0..1, or a file of counts");
    return {[=, &model, seed = options.seed](std::int64_t i) {
              return corrupted(right(i), rate, seed, i, model.vocabulary());
            },
            of + ", each right with probability " + options.accept};
  }
  const std::vector<std::int64_t> counts = read_accept_counts(options.accept, options.spec.window);
  return {[=, &model](std::int64_t i) { return counted(right(i), counts, model.vocabulary()); },
          of + ", accept counts of " + options.accept};
}

Drafts drafts_of(const Options& options, const StudyInput& input, const std::unique_ptr<Model>& drafting) {
  if (!options.accept.empty()) return synthetic(options, input);
  if (!drafting) {
    return {[n = options.ngram](std::int64_t) { return prompt_lookup(n); },
            "prompt lookup of " + std::to_string(options.ngram) + "-grams"};
  }
  return {[&, most = options.spec.window - 1](std::int64_t) { return model_drafts(*drafting, *input.backend, most); },
          options.draft};
}

int run(Options options) {
  note_interrupts();
  refuse_nan("--bandwidth", options.cost.bandwidth);
  options.sequences = options.prompts;
  options.sequences_option = "--prompts";
  options.max_tokens = options.tokens_of_sequence();
  options.machine.products = Products::one_token;
  const std::vector<std::string> texts = std::exchange(options.policy_texts, {});
  StudyInput input(options, "spec", {});
  for (const std::string& text : texts) input.policies.push_back(parse_policy(text));
  if (input.policies.empty()) input.policies = default_spec_policies();
  if (input.tokens.length < options.max_tokens) {
    fail(options.tokens_name(), ": --prompts ", options.prompts, " leaves ", input.tokens.length,
         " tokens to each, expected ", options.max_tokens, " at least: ", options.spec.prompt_tokens, " of the prompt",
         options.spec.teacher_forced ? " and the new ones" : "");
  }
  std::unique_ptr<Model> drafting;
  if (!options.draft.empty()) {
    drafting = open_model(options.draft);
    if (drafting->vocabulary() != input.model->vocabulary()) {
      fail("--draft ", options.draft, ": has a vocabulary of ", drafting->vocabulary(), ", ", options.model, " one of ",
           input.model->vocabulary());
    }
  }
  const Drafts drafts = drafts_of(options, input, drafting);
  const auto of_policy = [&](const Policy& policy) {
    SpeculationOptions spec = options.spec;
    spec.ring = options.ring > 0 ? options.ring : std::max(policy.as_replay().length, spec.window);
    return spec;
  };
  for (const Policy& policy : input.policies) check_speculation(*input.model, input.tokens, policy, of_policy(policy));
  check_writable(options.json);

  const bool text = options.json != "-";
  if (text) {
    std::printf("%s (%s), %lld x %lld tokens%s behind prompts of %lld, window 1 + %lld, %s\ndrafts: %s\n",
                options.model.c_str(), input.model->type().c_str(), static_cast<long long>(input.tokens.sequences),
                static_cast<long long>(options.spec.new_tokens), options.spec.teacher_forced ? " of the text" : "",
                static_cast<long long>(options.spec.prompt_tokens), static_cast<long long>(options.spec.window - 1),
                input.facts.precision.c_str(), drafts.text.c_str());
    std::fflush(stdout);
  }
  const auto start = std::chrono::steady_clock::now();
  std::vector<SpeculationResult> results;
  const Progress bar = progress_bar();
  for (const Policy& policy : input.policies) {
    SpeculationOptions spec = of_policy(policy);
    spec.threads = options.machine.threads;
    spec.seed = options.seed;
    spec.interrupted = interrupted;
    if (bar) {
      spec.progress = [&, before = std::ssize(results)](std::int64_t done, std::int64_t all) {
        bar(before * all + done, std::ssize(input.policies) * all);
      };
    }
    results.push_back(speculate(*input.model, *input.backend, input.tokens, policy, drafts.sources, spec));
    if (text) std::cout << "\n" << speculation_text(*input.model, results.back(), options.cost) << std::flush;
  }
  input.facts.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!options.json.empty()) {
    write_text(options.json,
               speculation_json(*input.model, input.facts, options.spec, drafts.text, results, options.cost));
  }
  return std::ranges::all_of(results, &SpeculationResult::passed) ? 0 : 1;
}

}  // namespace

Command add_spec(CLI::App& app) {
  auto options = std::make_shared<Options>();
  Options& o = *options;
  const CLI::Range counts(std::int64_t{1}, std::int64_t{1} << 31), sizes(std::int64_t{1}, std::int64_t{1} << 16);
  o.add_model_and_tokens(app);
  app.add_option("--window", o.spec.window, "Tokens that a step verifies: the next one and its drafts")
      ->check(sizes)
      ->capture_default_str();
  app.add_option("--ring", o.ring,
                 "Committed tokens W that the ring holds; a step that meets h and would exceed W folds them into the "
                 "checkpoint first. The larger of L and the window where not given")
      ->check(sizes);
  app.add_option("--prompts", o.prompts, "So many sequences of the file; a file of one sequence is cut into so many")
      ->check(counts)
      ->capture_default_str();
  app.add_option("--prompt-tokens", o.spec.prompt_tokens, "Tokens of a sequence that are its prompt")
      ->check(counts)
      ->capture_default_str();
  app.add_option("--new-tokens", o.spec.new_tokens, "Tokens that are decoded behind each prompt")
      ->check(counts)
      ->capture_default_str();
  app.add_flag("--teacher-forced", o.spec.teacher_forced,
               "Decode the file's own tokens behind each prompt, whatever the model would take");
  CLI::Option* ngram = app.add_option("--ngram", o.ngram, "Drafts by prompt lookup of at most so many tokens")
                           ->check(sizes)
                           ->capture_default_str();
  CLI::Option* draft = app.add_option("--draft", o.draft, "Drafts of a second model with the same vocabulary");
  CLI::Option* accept = app.add_option("--accept", o.accept,
                                       "Right drafts, each made wrong but with this probability (--seed), or in every "
                                       "step so that a file's count of tokens is committed");
  draft->excludes(ngram, accept);
  ngram->excludes(accept);
  o.add_policies(app);
  app.add_option("--seed", o.seed, "Of --accept, and of stochastic rounding (formats with sr); 0 where not given");
  app.add_option("--batch", o.cost.batches, "Sequences of a step whose time is predicted, such as 1,32,256")
      ->delimiter(',')
      ->check(counts)
      ->capture_default_str();
  app.add_option("--bandwidth", o.cost.bandwidth,
                 "What the memory delivers, GB/s (10^9 bytes); an H200 where not given")
      ->check(CLI::Range(1e-3, 1e9))
      ->capture_default_str();
  app.add_option("--json", o.json, "Write the report as JSON to a file, or to standard output with -");
  o.machine.add_threads(app);
  o.machine.add_precision(app);
  return [options] { return run(*options); };
}

}  // namespace replayssm::cli
