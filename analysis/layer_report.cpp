#include "analysis/layer_report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "analysis/report_json.h"
#include "core/trace.h"

namespace replayssm {
namespace {

std::string row(const char* format, auto... values) {
  char text[256];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

std::string heads_text(const std::vector<std::int64_t>& heads) {
  std::string text;
  for (const std::int64_t head : heads) text += (text.empty() ? "" : " ") + std::to_string(head);
  return text;
}

std::size_t worst_head(const std::vector<ErrorMoments>& by_head) {
  const auto worse = [](const ErrorMoments& a, const ErrorMoments& b) { return a.rel_l2() < b.rel_l2(); };
  return static_cast<std::size_t>(std::ranges::max_element(by_head, worse) - by_head.begin());
}

/// Root mean square of a field over the heads.
double rms(const std::vector<Growth>& growth, double Growth::*field) {
  double sum = 0;
  for (const Growth& g : growth) sum += g.*field * g.*field;
  return std::sqrt(sum / static_cast<double>(growth.size()));
}

Json moments_json(const ErrorMoments& m) {
  return {{"rel_l2", m.rel_l2()}, {"bias", m.bias()},           {"spread", m.spread()},
          {"max_abs", m.largest}, {"bf16_ulps", m.mean_ulps()}, {"max_bf16_ulps", m.largest_ulps}};
}

std::vector<double> rel_l2_of(const std::vector<ErrorMoments>& by_head) {
  std::vector<double> out;
  for (const ErrorMoments& m : by_head) out.push_back(m.rel_l2());
  return out;
}

Json growth_json(const std::vector<Growth>& growth) {
  Json out = Json::array();
  for (const Growth& g : growth) {
    out.push_back({{"decay", g.decay},
                   {"half_life", g.half_life},
                   {"sigma", g.sigma},
                   {"predicted", g.predicted},
                   {"measured", g.measured},
                   {"holds", g.holds()},
                   {"still", g.still},
                   {"stalls", g.stalls()}});
  }
  return out;
}

Json layer_json(const LayerErrors& e) {
  return {{"layer", e.layer},
          {"kind", e.kind},
          {"y", {{"local", moments_json(e.y_local)}, {"propagated", moments_json(e.y_propagated)}}},
          {"state", {{"local", moments_json(e.state_local)}, {"propagated", moments_json(e.state_propagated)}}},
          {"checkpoint", {{"local", moments_json(e.checkpoint_local)}}},
          {"read_copy", {{"local", moments_json(e.read_copy_local)}}},
          {"bound", {{"y_local", e.bound}, {"y_local_by_head", e.bound_by_head}}},
          {"growth", growth_json(e.growth)},
          {"lawless_heads", e.lawless()},
          {"stalled_heads", e.stalled()},
          {"y_local_by_head", rel_l2_of(e.y_local_by_head)},
          {"y_propagated_by_head", rel_l2_of(e.y_propagated_by_head)},
          {"state_local_by_head", rel_l2_of(e.state_local_by_head)},
          {"state_local_by_sample", e.state_local_by_sample},
          {"state_propagated_by_sample", e.state_propagated_by_sample}};
}

Json attribution_json(const Attribution& a) {
  Json layers = Json::array(), heads = Json::array();
  for (const auto& [layer, kl] : a.layers) layers.push_back({{"layer", layer}, {"kl_alone", kl}});
  for (const auto& head : a.heads) heads.push_back({{"layer", head.layer}, {"head", head.head}, {"kl", head.share}});
  return {{"whole", a.whole}, {"sum", a.sum}, {"layers", layers}, {"heads", heads}};
}

std::string policy_table(const PolicyLayers& policy) {
  std::string out = policy.result.policy.text() + "   mean KL " + row("%.3e", policy.result.divergence.kl.mean) + "\n";
  out +=
      "layer  kind         y local  bound    y propag.  bias      state local  propag.   read copy  "
      "growth predicted  measured  worst head  off the law, stalled\n";
  for (const LayerErrors& e : policy.layers) {
    const std::size_t worst = worst_head(e.y_local_by_head);
    out += row("%5lld  %-11s %8.2e %8.2e %9.2e %9.1e %12.2e %9.2e ", static_cast<long long>(e.layer), e.kind.c_str(),
               e.y_local.rel_l2(), e.bound, e.y_propagated.rel_l2(), e.y_local.bias(), e.state_local.rel_l2(),
               e.state_propagated.rel_l2());
    out += e.read_copy_local.count > 0 ? row("%10.2e ", e.read_copy_local.rel_l2()) : row("%10s ", "-");
    out += row("%17.2e %9.2e  %4zu %6.0e", rms(e.growth, &Growth::predicted), rms(e.growth, &Growth::measured), worst,
               e.y_local_by_head[worst].rel_l2());
    const std::string stalled = heads_text(e.stalled());
    out += "  " + heads_text(e.lawless()) + (stalled.empty() ? "" : "; stalled " + stalled);
    out.erase(out.find_last_not_of(' ') + 1);
    out += "\n";
  }
  const Attribution& a = policy.attribution;
  if (!a.layers.empty()) {
    out += "mean KL of each layer alone:";
    for (const auto& [layer, kl] : a.layers) out += row("  %lld: %.1e", static_cast<long long>(layer), kl);
    out += row("\n  their sum %.2e is %.2f times the whole; most from head", a.sum, a.sum / a.whole);
    for (std::size_t i = 0; i < std::min<std::size_t>(5, a.heads.size()); ++i) {
      const auto& h = a.heads[i];
      out += row("%s %lld.%lld (%.1e)", i ? "," : "", static_cast<long long>(h.layer), static_cast<long long>(h.head),
                 h.share);
    }
    out += "\n";
  }
  return out;
}

}  // namespace

std::string layers_table(const LayerStudy& study) {
  std::string out;
  for (const PolicyLayers& policy : study.policies) out += (out.empty() ? "" : "\n") + policy_table(policy);
  return out;
}

std::string layers_json(const Model& model, const RunFacts& facts, const LayerStudy& study) {
  Json out = run_json(model, facts);
  out["sample_tokens"] = study.sample_tokens;
  out["results"] = Json::array();
  for (const PolicyLayers& policy : study.policies) {
    Json result = result_json(policy.result);
    result["layers"] = Json::array();
    for (std::size_t i = 0; i < policy.layers.size(); ++i) result["layers"].push_back(layer_json(policy.layers[i]));
    if (!policy.attribution.layers.empty()) result["attribution"] = attribution_json(policy.attribution);
    out["results"].push_back(result);
  }
  return out.dump(2) + "\n";
}

void write_layers(const std::string& path, const Model& model, const RunFacts& facts, const Tokens& all_tokens,
                  const LayerStudy& study, const LayerTrace* trace) {
  TraceWriter file(path);
  write_run(file, model, facts, all_tokens);
  if (trace) trace->copy_to(file);
  for (std::size_t k = 0; k < study.policies.size(); ++k) {
    const PolicyLayers& policy = study.policies[k];
    write_policy(file, k, policy.result, {facts.sequences, facts.tokens});
    for (const LayerErrors& e : policy.layers) {
      const std::string at = policy_group(e.layer, k);
      file.attribute(at, "policy", policy.result.policy.text());
      file.attribute(at, "kind", e.kind);
      file.attribute(at, "bound_y_local", e.bound);
      const TraceShape tokens = {facts.sequences, facts.tokens}, heads = {std::ssize(e.growth)};
      const TraceShape samples = {facts.sequences, std::ssize(e.state_local_by_sample) / facts.sequences};
      const auto by_head = [&](const char* name, const std::vector<ErrorMoments>& moments, const char* text) {
        file.dataset(at + "/" + name, rel_l2_of(moments), heads, {"relative L2", text});
      };
      file.dataset(at + "/y_local_by_token", e.y_local_by_token, tokens, {"relative L2", "over heads, local"});
      file.dataset(at + "/y_propagated_by_token", e.y_propagated_by_token, tokens,
                   {"relative L2", "over heads, propagated"});
      by_head("y_local_by_head", e.y_local_by_head, "over tokens, local");
      by_head("y_propagated_by_head", e.y_propagated_by_head, "over tokens, propagated");
      by_head("state_local_by_head", e.state_local_by_head, "over samples, local");
      const auto of_growth = [&](const char* name, double Growth::*field, const char* units, const char* text) {
        std::vector<double> values;
        for (const Growth& g : e.growth) values.push_back(g.*field);
        file.dataset(at + "/" + name, values, heads, {units, text});
      };
      of_growth("still_by_head", &Growth::still, "1", "share of the state that stands still in a store");
      of_growth("decay_by_head", &Growth::decay, "1", "geometric mean decay per token, a");
      of_growth("half_life_by_head", &Growth::half_life, "tokens", "ln 2 / -ln a");
      of_growth("sigma_by_head", &Growth::sigma, "relative L2", "error of storing the reference's state once");
      of_growth("predicted_by_head", &Growth::predicted, "relative L2", "sigma / sqrt(1 - a^(2 L))");
      of_growth("measured_by_head", &Growth::measured, "relative L2", "of the stored state, local");
      file.attribute(at, "length", policy.result.policy.as_replay().length);
      file.dataset(at + "/state_local_by_sample", e.state_local_by_sample, samples, {"relative L2", "local"});
      file.dataset(at + "/state_propagated_by_sample", e.state_propagated_by_sample, samples,
                   {"relative L2", "propagated"});
    }
  }
  file.dataset("/run/sample_tokens", study.sample_tokens, {std::ssize(study.sample_tokens)},
               {"tokens", "tokens seen at each sample of the states"});
  file.finish();
}

}  // namespace replayssm
