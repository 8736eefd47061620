#include "analysis/cli/study_session.h"

#include <chrono>
#include <cstddef>
#include <iostream>
#include <span>

#include "analysis/cli/interrupt.h"
#include "core/error.h"
#include "core/own_format.h"
#include "core/replace_file.h"
#include "core/sha256.h"
#include "core/trace.h"
#include "core/version.h"

namespace replayssm::cli {

StudySession::StudySession(const StudyArguments& arguments, StudyInput& input, const StudyFolder::Identity& settings)
    : arguments_(arguments), input_(input) {
  note_interrupts();
  const std::string& output = arguments.output.empty() && arguments.json != "-" ? arguments.json : arguments.output;
  if (!arguments.output.empty()) check_trace_path(arguments.output);
  check_writable(arguments.json);
  if (output.empty()) {
    if (arguments.resume) fail("--resume: there is nothing to resume without --output or --json FILE");
    return;
  }
  const RunFacts& facts = input.facts;
  StudyFolder::Identity identity = {
      {"program", std::string(version()) + ", " + git_revision() + ", " + build_description()},
      {"command", facts.command},
      {"model", input.model->type() + " " + facts.model_sha256},
      {"sequences", std::to_string(facts.sequences)},
      {"tokens", std::to_string(facts.tokens) + " " + sha256_hex(std::as_bytes(std::span(input.tokens.ids)))},
      {"device", facts.device},
      {"precision", facts.precision},
      {"activations", facts.activations},
      {"seed", std::to_string(facts.seed)},
      {"policies", std::to_string(input.policies.size())}};
  for (std::size_t i = 0; i < input.policies.size(); ++i) {
    identity.emplace_back("policy " + std::to_string(i), input.policies[i].text());
  }
  for (const auto& [name, definition] : defined_formats()) identity.emplace_back("format " + name, definition);
  identity.insert(identity.end(), settings.begin(), settings.end());
  folder_.emplace(output, identity, arguments.resume);
  if (arguments.resume && !folder_->has_state()) {
    std::cerr << "replayssm: note: " << folder_->path().string() << " holds nothing to resume; starting anew\n";
  }
}

StudyOptions StudySession::study_options() {
  return {.threads = arguments_.machine.threads,
          .seed = arguments_.seed,
          .progress = progress_bar(),
          .interrupted = interrupted,
          .checkpoint = folder_ ? &*folder_ : nullptr};
}

void StudySession::run(const std::function<void()>& study) {
  const auto start = std::chrono::steady_clock::now();
  try {
    study();
  } catch (const Interrupted& stop) {
    const std::string what = stop.what();
    if (!folder_ || !folder_->has_state()) throw Interrupted(what + "; nothing is kept");
    throw Interrupted(what + "; what is done is kept in " + folder_->path().string() +
                      ", and the same command with --resume goes on from there");
  }
  input_.facts.seconds =
      folder_ ? folder_->seconds() : std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void StudySession::finish(const std::function<void(const std::string& path)>& write,
                          const std::function<std::string()>& json) {
  if (!arguments_.output.empty()) {
    const std::filesystem::path made = folder() / "output.h5";
    std::filesystem::remove(made);  // of an earlier run that was killed here
    write(made.string());
    replace_file(made, arguments_.output);
  }
  if (!arguments_.json.empty()) write_text(arguments_.json, json());
  if (folder_) folder_->remove();
}

std::filesystem::path StudySession::folder() const {
  if (!folder_) fail("a folder beside the output needs --output");
  return folder_->path();
}

}  // namespace replayssm::cli
