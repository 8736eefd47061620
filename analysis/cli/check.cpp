#include <chrono>
#include <filesystem>
#include <iostream>

#include "analysis/baseline.h"
#include "analysis/check_report.h"
#include "analysis/cli/interrupt.h"
#include "analysis/cli/study_arguments.h"
#include "analysis/neighbours.h"
#include "core/error.h"
#include "core/version.h"

namespace replayssm::cli {
namespace {

namespace fs = std::filesystem;

struct Options {
  std::string model, baseline, tokens_file, states_file, format, json, junit;
  std::int64_t max_tokens = 0, sequences = 0;
  std::vector<std::string> policy_texts;
  std::uint64_t seed = 0;
  bool update = false;
  MachineOptions machine;
};

/// Eager, shared and split, 16 to 4 bits, every kind of scale and of rounding.
const std::vector<std::string> usual_policies = {"eager(state=bf16)",
                                                 "replay(L=16, state=fp16)",
                                                 "eager(state=e4m3:row)",
                                                 "eager(state=int8:row)",
                                                 "eager(state=int8:row:sr)",
                                                 "replay(L=16, state=bf16)",
                                                 "replay(L=16, state=bf16:sr)",
                                                 "replay(L=16, state=e5m2)",
                                                 "replay(L=16, state=e4m3:row)",
                                                 "replay(L=16, state=e4m3:head)",
                                                 "replay(L=16, state=int8:row)",
                                                 "replay(L=16, state=int8:row:hadamard)",
                                                 "replay(L=16, state=int8:row:ef=int4)",
                                                 "replay(L=16, state=mxfp8_e4m3)",
                                                 "replay(L=16, state=mxfp8_e4m3:ceil)",
                                                 "replay(L=16, state=mxint8)",
                                                 "replay(L=16, state=nvfp4)",
                                                 "replay(L=16, state=mxfp4)",
                                                 "replay(L=16, state=int4:group32)",
                                                 "replay(L=16, anchor=fp32, read=e4m3:row)",
                                                 "replay(L=16, anchor=fp32, read=int8:row, ring=bf16)"};

fs::path beside(const std::string& baseline, const std::string& file) {
  return file.empty() ? fs::path() : fs::path(baseline).parent_path() / file;
}

/// How a baseline names a file: seen from its own folder.
std::string seen_from(const std::string& baseline, const fs::path& file) {
  return fs::absolute(file)
      .lexically_normal()
      .lexically_relative(fs::absolute(baseline).lexically_normal().parent_path())
      .generic_string();
}

/// What a run of the check needs: of the baseline, or with --update of the options.
struct Plan {
  StudyArguments arguments;
  std::string states_file;  // empty: none
};

Plan plan_of(const Options& options, const std::optional<Baseline>& stored) {
  Plan plan;
  StudyArguments& a = plan.arguments;
  a.model = options.model;
  a.machine = options.machine;
  a.json = options.json;
  if (stored) {
    a.tokens_file = beside(options.baseline, stored->tokens.path).string();
    a.max_tokens = stored->length;
    a.sequences = stored->sequences;
    a.seed = stored->seed;
    for (const Subject& subject : stored->policies) a.policy_texts.push_back(subject.name);
    plan.states_file = beside(options.baseline, stored->states.path).string();
  } else {
    a.policy_texts = usual_policies;
  }
  if (!options.tokens_file.empty()) a.tokens_file = options.tokens_file;
  if (options.max_tokens > 0) a.max_tokens = options.max_tokens;
  if (options.sequences > 0) a.sequences = options.sequences;
  if (!options.policy_texts.empty()) a.policy_texts = options.policy_texts;
  if (!options.states_file.empty()) plan.states_file = options.states_file;
  if (options.seed != 0) a.seed = options.seed;
  if (a.tokens_file.empty()) fail("--tokens: a new baseline needs the file of its tokens");
  return plan;
}

void expect_same(const std::string& baseline, const char* what, const std::string& expected, const std::string& found) {
  if (expected != found) fail(baseline, ": was made with ", what, " of SHA-256 ", expected, ", found ", found);
}

/// What was run, of which the results are still to come.
Baseline facts_of(const Options& options, const Plan& plan, const StudyInput& input) {
  Baseline out;
  out.version = version();
  out.model_type = input.model->type();
  out.model_sha256 = input.model->sha256();
  out.tokens = {seen_from(options.baseline, plan.arguments.tokens_file), tokens_sha256(input.tokens)};
  if (!plan.states_file.empty()) {
    out.states = {seen_from(options.baseline, plan.states_file), file_sha256(plan.states_file)};
  }
  out.sequences = input.tokens.sequences;
  out.length = input.tokens.length;
  out.seed = plan.arguments.seed;
  return out;
}

void check_options(const Options& options) {
  if (options.update && !options.format.empty())
    fail("--format judges a format and changes no baseline: not with --update");
  if (!options.format.empty() && !options.junit.empty()) fail("--format judges a format, no check for --junit");
  if (options.json == "-" && options.junit == "-") fail("--json - and --junit -: only one of them");
  if (options.update) return;
  const auto refuse = [](const char* name, bool given) {
    if (given) fail(name, ": the baseline says that; only --update changes it");
  };
  refuse("--max-tokens", options.max_tokens > 0 && options.format.empty());
  refuse("--sequences", options.sequences > 0 && options.format.empty());
  refuse("--policy", !options.policy_texts.empty());
  refuse("--seed", options.seed != 0);
  refuse("--states", !options.states_file.empty());
}

int run(const Options& options) {
  check_options(options);
  note_interrupts();
  std::optional<Baseline> stored;
  if (fs::exists(options.baseline)) {
    stored = read_baseline(options.baseline);
  } else if (!options.update) {
    fail(options.baseline, ": no such file; --update makes a baseline");
  }
  for (const std::string& file : {options.json, options.junit}) check_writable(file);
  if (options.update) check_writable(options.baseline);
  const Plan plan = plan_of(options, stored);
  StudyInput input(plan.arguments, "check", {});
  Baseline now = facts_of(options, plan, input);
  if (!options.update) {
    expect_same(options.baseline, "a model", stored->model_sha256, now.model_sha256);
    expect_same(options.baseline, "states", stored->states.sha256, now.states.sha256);
  }
  if (!options.update && options.format.empty()) {
    if (now.length != stored->length || now.sequences != stored->sequences) {
      fail(options.baseline, ": was made with ", stored->sequences, " x ", stored->length, " tokens, ",
           plan.arguments.tokens_file, " holds ", now.sequences, " x ", now.length);
    }
    expect_same(options.baseline, "tokens", stored->tokens.sha256, now.tokens.sha256);
  }
  const std::vector<TrialState> states =
      plan.states_file.empty() ? std::vector<TrialState>() : read_states(plan.states_file);

  const StudyOptions study{.threads = options.machine.threads,
                           .seed = plan.arguments.seed,
                           .progress = progress_bar(),
                           .interrupted = interrupted};
  const auto start = std::chrono::steady_clock::now();
  const auto done = [&] {
    input.facts.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  if (!options.format.empty()) {
    const auto comparisons = compare_neighbours(*input.model, *input.backend, input.tokens,
                                                parse_format(options.format), input.policies, states, study);
    done();
    if (options.json != "-") std::cout << neighbours_table(comparisons);
    if (!options.json.empty()) write_text(options.json, neighbours_json(*input.model, input.facts, comparisons));
    return 0;
  }
  now.policies = check_policies(*input.model, *input.backend, input.tokens, input.policies, study);
  now.formats = check_formats(states, formats_of(input.policies), plan.arguments.seed);
  const Baseline empty;
  const Baseline& before = stored ? *stored : empty;
  std::vector<Finding> findings = compare_subjects(before.policies, now.policies);
  const std::vector<Finding> of_formats = compare_subjects(before.formats, now.formats);
  findings.insert(findings.end(), of_formats.begin(), of_formats.end());
  if (options.update) set_margins(now.policies, *input.model, *input.backend, input.tokens, input.policies, study);
  done();

  const bool table = options.json != "-" && options.junit != "-";
  if (table && stored) std::cout << check_table(findings);
  if (!options.json.empty())
    write_text(options.json, check_json(*input.model, input.facts, options.baseline, findings));
  if (!options.junit.empty()) write_text(options.junit, check_junit("replayssm check " + options.baseline, findings));
  if (!options.update) return count_verdicts(findings).outside == 0 ? 0 : 1;
  write_text(options.baseline, baseline_text(now));
  if (table) std::cout << options.baseline << ": written\n";
  return 0;
}

}  // namespace

Command add_check(CLI::App& app) {
  auto options = std::make_shared<Options>();
  Options& o = *options;
  const CLI::Range counts(std::int64_t{1}, std::int64_t{1} << 31);
  app.add_option("MODEL", o.model, "Hugging Face folder")->required();
  app.add_option("--baseline", o.baseline, "What to compare with: JSON that --update has written")->required();
  app.add_option("--format", o.format, "Judge this format beside those of the baseline that store as many bytes");
  app.add_flag("--update", o.update, "Write the baseline anew, with what was found now; says what moved");
  app.add_option("--tokens", o.tokens_file, "Token ids, where not the file that the baseline names");
  app.add_option("--states", o.states_file, "With --update: stored states that conversions are tried on, .safetensors");
  app.add_option("--max-tokens", o.max_tokens, "With --update or --format: at most so many tokens of each sequence")
      ->check(counts);
  app.add_option("--sequences", o.sequences, "With --update or --format: so many sequences of the tokens")
      ->check(counts);
  app.add_option("-p,--policy", o.policy_texts, "With --update: a policy of the new baseline; may be given again")
      ->allow_extra_args(false);
  app.add_option("--seed", o.seed, "With --update: of stochastic rounding");
  app.add_option("--json", o.json, "Write the report as JSON to a file, or to standard output with -");
  app.add_option("--junit", o.junit, "Write the result as JUnit XML to a file, or to standard output with -");
  add_format_files(app);
  o.machine.add_threads(app);
  return [options] { return run(*options); };
}

}  // namespace replayssm::cli
