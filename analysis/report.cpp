#include "analysis/report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>

#include "analysis/report_json.h"
#include "analysis/table.h"
#include "core/error.h"
#include "core/own_format.h"
#include "core/replace_file.h"
#include "core/trace.h"
#include "core/version.h"

namespace replayssm {
namespace {

std::string note(const PolicyResult& result) {
  std::string text;
  if (const auto event = result.first_non_finite()) {
    text = "not finite from token " + std::to_string(event->first.step) + ", layer " + std::to_string(event->second) +
           ", head " + std::to_string(event->first.head);
  } else if (result.divergence.non_finite > 0) {
    text = std::to_string(result.divergence.non_finite) + " positions not finite";
  } else if (result.overflows() > 0) {
    text = std::to_string(result.overflows()) + " overflows";
  } else if (result.saturations() > 0) {
    text = std::to_string(result.saturations()) + " saturated";
  }
  if (result.divergence.kl.infinite > 0) {
    text += (text.empty() ? "" : "; ") + std::to_string(result.divergence.kl.infinite) + " infinite";
  }
  return text;
}

Json statistics_json(const DivergenceStatistics& s) {
  return {{"mean", s.mean}, {"sem", s.sem}, {"p50", s.p50},          {"p90", s.p90},
          {"p99", s.p99},   {"max", s.max}, {"infinite", s.infinite}};
}

Json count_json(std::int64_t count, bool counted) { return counted ? Json(count) : Json(nullptr); }

Json event_json(const std::optional<std::pair<RangeEvents::Event, std::int64_t>>& event) {
  if (!event) return nullptr;
  return {{"token", event->first.step}, {"layer", event->second}, {"head", event->first.head}};
}

Json error_json(const LayerError& e) { return {{"local", e.local}, {"propagated", e.propagated}}; }

}  // namespace

std::string kl_table(const std::vector<PolicyResult>& results) {
  std::vector<std::vector<std::string>> rows = {
      {"policy", "mean KL", "+-", "p99", "max", "top-1 %", "dNLL", "stored", "moved/token", ""}};
  for (const PolicyResult& r : results) {
    const DivergenceSummary& d = r.divergence;
    rows.push_back({r.policy.text(), number_text("%.3e", d.kl.mean), number_text("%.0e", d.kl.sem),
                    number_text("%.3e", d.kl.p99), number_text("%.3e", d.kl.max),
                    number_text("%.2f", 100 * d.top1_agreement), number_text("%+.6f", d.nll_delta),
                    bytes_text(r.cost.bytes_stored_per_sequence), bytes_text(r.cost.bytes_moved_per_token), note(r)});
  }
  return aligned(rows);
}

Json result_json(const PolicyResult& result) {
  const DivergenceSummary& d = result.divergence;
  Json layers = Json::array();
  for (const LayerResult& layer : result.layers) {
    layers.push_back({{"layer", layer.layer},
                      {"kind", layer.kind},
                      {"y_rel_l2", error_json(layer.y_rel_l2)},
                      {"state_rel_l2", error_json(layer.state_rel_l2)},
                      {"overflows", count_json(layer.events.overflows, layer.events.overflows_counted)},
                      {"saturations", count_json(layer.events.saturations, layer.events.overflows_counted)}});
  }
  return {{"policy", result.policy.text()},
          {"control", result.policy.exact()},
          {"kl", statistics_json(d.kl)},
          {"kl_reverse", statistics_json(d.kl_reverse)},
          {"top1_agreement", d.top1_agreement},
          {"top1_ties", d.top1_ties},
          {"delta_p", {{"rms", d.delta_p.rms}, {"p1", d.delta_p.p1}, {"p99", d.delta_p.p99}}},
          {"overflows", count_json(result.overflows(), result.overflows_counted())},
          {"saturations", count_json(result.saturations(), result.overflows_counted())},
          {"first_non_finite", event_json(result.first_non_finite())},
          {"non_finite", d.non_finite},
          {"nll", d.nll},
          {"nll_reference", d.nll_reference},
          {"nll_delta", d.nll_delta},
          {"state",
           {{"bytes_stored_per_sequence", result.cost.bytes_stored_per_sequence},
            {"bytes_moved_per_token", result.cost.bytes_moved_per_token},
            {"flushes", result.cost.flushes},
            {"rounded_reads", result.cost.rounded_reads}}},
          {"layers", layers}};
}

std::string recurrence_text(const RunFacts& facts) {
  if (facts.activations.empty()) return "";
  return "; recurrences of policies in fp32 by the kernels of " + facts.device + ", activations " + facts.activations +
         ", exact rings in fp32, overflows not counted";
}

Json run_json(const Model& model, const RunFacts& facts) {
  Json recurrence = nullptr;  // the reference's
  if (!facts.activations.empty()) {
    recurrence = {{"arithmetic", "fp32"}, {"activations", facts.activations}, {"exact_ring", "fp32"}};
  }
  Json formats = Json::object();
  for (const auto& [name, definition] : defined_formats()) formats[name] = definition;
  return {
      {"command", facts.command},
      {"version", version()},
      {"model",
       {{"path", facts.model_path},
        {"type", model.type()},
        {"layers", model.layers().size()},
        {"ssm_layers", model.ssm_layers()},
        {"sha256", facts.model_sha256}}},
      {"tokens_file", facts.tokens_path},
      {"tokens", facts.tokens},
      {"sequences", facts.sequences},
      {"reference", "exact"},
      {"device", facts.device},
      {"precision", facts.precision},
      {"kernels", recurrence},
      {"formats", formats},
      {"seconds", facts.seconds},
      {"provenance",
       {{"git", git_revision()}, {"build", build_description()}, {"threads", facts.threads}, {"seed", facts.seed}}}};
}

std::string kl_json(const Model& model, const RunFacts& facts, const std::vector<PolicyResult>& results) {
  Json out = run_json(model, facts);
  out["results"] = Json::array();
  for (const PolicyResult& result : results) out["results"].push_back(result_json(result));
  return out.dump(2) + "\n";
}

void write_run(TraceWriter& file, const Model& model, const RunFacts& facts, const Tokens& tokens) {
  file.attribute("/run", "command", facts.command);
  file.attribute("/run", "version", std::string(version()));
  file.attribute("/run", "build", std::string(build_description()));
  file.attribute("/run", "git", std::string(git_revision()));
  file.attribute("/run", "model", facts.model_path);
  file.attribute("/run", "model_type", model.type());
  file.attribute("/run", "model_sha256", facts.model_sha256);
  file.attribute("/run", "tokens_file", facts.tokens_path);
  file.attribute("/run", "tokens", tokens.length);
  file.attribute("/run", "sequences", tokens.sequences);
  file.attribute("/run", "device", facts.device);
  file.attribute("/run", "precision", facts.precision);
  if (!facts.activations.empty()) file.attribute("/run", "activations", facts.activations);
  file.attribute("/run", "reference", std::string("exact"));
  file.attribute("/run", "units", std::string("KL and NLL in nats, errors relative L2, lengths in tokens"));
  file.attribute("/run", "threads", std::int64_t{facts.threads});
  file.attribute("/run", "seed", std::to_string(facts.seed));  // up to 2^64 - 1, which an integer of a trace is not
  file.attribute("/run", "seconds", facts.seconds);
  file.dataset("/run/input_ids", tokens.ids, {tokens.sequences, tokens.length},
               {"token id", "the tokens, [sequences, length]"});
}

void write_text(const std::string& path, const std::string& text) {
  if (path == "-") {
    std::cout << text << std::flush;
    return;
  }
  const std::string part = path + ".part";
  std::ofstream out(part, std::ios::binary | std::ios::trunc);
  out << text;
  out.close();
  if (!out) {
    std::remove(part.c_str());
    fail(path, ": cannot be written");
  }
  replace_file(part, path);
}

void check_writable(const std::string& path) {
  if (path.empty() || path == "-") return;
  const std::string part = path + ".part";
  if (std::filesystem::is_directory(path) || !std::ofstream(part)) fail(path, ": cannot be written");
  std::remove(part.c_str());
}

void write_policy(TraceWriter& file, std::size_t i, const PolicyResult& result, const TraceShape& shape) {
  const std::string group = "/policies/" + std::to_string(i), at = group + "/";
  file.attribute(group, "policy", result.policy.text());
  file.attribute("/run", "policy_" + std::to_string(i), result.policy.text());
  const auto per_token = [&](const char* name, const char* units, const char* description, auto field) {
    std::vector<double> values;
    for (const TokenDivergence& token : result.tokens) values.push_back(field(token));
    file.dataset(at + name, values, shape, {units, description});
  };
  per_token("kl", "nats", "KL(reference || run)", [](const auto& t) { return t.kl; });
  per_token("kl_reverse", "nats", "KL(run || reference)", [](const auto& t) { return t.kl_reverse; });
  per_token("nll", "nats", "-log p of the next token under the run", [](const auto& t) { return t.nll; });
  per_token("nll_reference", "nats", "-log p of the next token under the reference",
            [](const auto& t) { return t.reference_nll; });
  per_token("delta_p", "probability", "p of the next token, run - reference", [](const auto& t) { return t.delta_p; });
  std::vector<std::uint8_t> agrees;
  for (const TokenDivergence& token : result.tokens) agrees.push_back(token.top1_agrees);
  file.dataset(at + "top1_agrees", agrees, shape, {"", "1 where the most probable token is the same"});

  std::vector<std::int64_t> index, overflows, saturations;
  std::vector<double> y, y_local, state, state_local;
  for (const LayerResult& layer : result.layers) {
    index.push_back(layer.layer);
    overflows.push_back(layer.events.overflows_counted ? layer.events.overflows : -1);
    saturations.push_back(layer.events.overflows_counted ? layer.events.saturations : -1);
    y.push_back(layer.y_rel_l2.propagated);
    y_local.push_back(layer.y_rel_l2.local);
    state.push_back(layer.state_rel_l2.propagated);
    state_local.push_back(layer.state_rel_l2.local);
  }
  const TraceShape layers = {std::ssize(index)};
  file.dataset(at + "layers/index", index, layers, {"", "model layer of each SSM layer"});
  const char* y_text = "y = S C before D x, all tokens and heads; NaN: not measured";
  const char* state_text = "state after the last token; NaN: not measured";
  file.dataset(at + "layers/y_rel_l2_propagated", y, layers, {"relative L2", y_text});
  file.dataset(at + "layers/y_rel_l2_local", y_local, layers, {"relative L2", y_text});
  file.dataset(at + "layers/state_rel_l2_propagated", state, layers, {"relative L2", state_text});
  file.dataset(at + "layers/state_rel_l2_local", state_local, layers, {"relative L2", state_text});
  file.dataset(at + "layers/overflows", overflows, layers,
               {"elements", "finite values that became Inf or NaN; -1: not counted"});
  file.dataset(at + "layers/saturations", saturations, layers,
               {"elements", "finite values beyond the format's range, stored as its largest; -1: not counted"});
  const DivergenceSummary& d = result.divergence;
  file.attribute(group, "kl_mean", d.kl.mean);
  file.attribute(group, "kl_sem", d.kl.sem);
  file.attribute(group, "kl_p99", d.kl.p99);
  file.attribute(group, "kl_max", d.kl.max);
  file.attribute(group, "kl_infinite", d.kl.infinite);
  file.attribute(group, "top1_agreement", d.top1_agreement);
  file.attribute(group, "nll_delta", d.nll_delta);
  file.attribute(group, "bytes_stored_per_sequence", result.cost.bytes_stored_per_sequence);
  file.attribute(group, "bytes_moved_per_token", result.cost.bytes_moved_per_token);
  file.attribute(group, "flushes", result.cost.flushes);
}

void write_kl(const std::string& path, const Model& model, const RunFacts& facts, const Tokens& tokens,
              const std::vector<PolicyResult>& results) {
  TraceWriter file(path);
  write_run(file, model, facts, tokens);
  for (std::size_t i = 0; i < results.size(); ++i) {
    write_policy(file, i, results[i], {tokens.sequences, tokens.length});
  }
  file.finish();
}

}  // namespace replayssm
