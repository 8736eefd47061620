#include "analysis/traffic_report.h"

#include <nlohmann/json.hpp>

#include "analysis/study.h"
#include "core/error.h"
#include "core/version.h"

namespace replayssm {

std::vector<Policy> default_traffic_policies() {
  std::vector<Policy> policies;
  for (const char* text : {"eager(state=fp32)", "eager(state=bf16)", "replay(L=16, state=fp32)",
                           "replay(L=16, state=bf16)", "replay(L=16, state=e4m3:row)", "replay(L=16, state=int8:row)",
                           "replay(L=16, anchor=fp32, read=bf16)", "replay(L=16, anchor=fp32, read=int8:row)"}) {
    policies.push_back(parse_policy(text));
  }
  return policies;
}

Roofline TrafficQuestion::roofline() const {
  const auto within = [](const char* name, double value, double least, double most) {
    if (!(value >= least && value <= most)) fail(name, ": expected a number in ", least, "..", most, ", found ", value);
  };
  within("bandwidth", bandwidth, 1e-3, 1e9);
  within("launch", launch, 0, 1e6);
  within("replay launch", replay_launch, 0, 1e6);
  within("longest", static_cast<double>(longest), 1, 1 << 20);
  for (const std::int64_t batch : batches) within("batch", static_cast<double>(batch), 1, 0x80000000);
  if (activations != "bf16" && activations != "fp16" && activations != "fp32") {
    fail("activations: expected bf16, fp16 or fp32, found '", activations, "'");
  }
  return {.bandwidth = 1e9 * bandwidth,
          .launch = 1e-6 * launch,
          .replay_launch = 1e-6 * replay_launch,
          .activation_bytes = activations == "fp32" ? 4.0 : 2.0,
          .longest = longest};
}

PolicyCost policy_cost(std::span<const LayerInfo> layers, const Policy& policy, const TrafficQuestion& question) {
  const Roofline roofline = question.roofline();
  check_policy_layers(layers, policy);
  PolicyCost out;
  out.policy = policy;
  const Policy exact = exact_policy();
  double count = 0;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (!layers[i].recurrence) continue;
    const LayerTraffic layer(*layers[i].recurrence, policy.covers(static_cast<std::int64_t>(i)) ? policy : exact);
    out.stored += layer.stored();
    out.step += layer.mean();
    out.activations += activation_bytes(*layers[i].recurrence, roofline.activation_bytes);
    ++count;
  }
  for (double* sum : {&out.step.state_read, &out.step.state_write, &out.step.scales, &out.step.ring_read,
                      &out.step.ring_append, &out.step.residuals, &out.activations}) {
    *sum /= count;
  }
  for (const std::int64_t batch : question.batches) {
    const auto seconds = [&](const Policy& p) { return step_seconds(layers, p, batch, roofline); };
    const double own = seconds(policy);
    const std::int64_t length = best_length(layers, policy, batch, roofline);
    out.batches.push_back({.batch = batch,
                           .best_length = length,
                           .seconds = own,
                           .best_seconds = seconds(with_length(policy, length)),
                           .over_eager = seconds(eager_beside(policy, policy.as_replay().anchor)) / own,
                           .over_eager_fp32 = seconds(eager_beside(policy, parse_format("fp32"))) / own,
                           .best = choose(layers, policy, batch, roofline)});
  }
  return out;
}

std::string traffic_json(const std::vector<PolicyCost>& costs, const std::string& model_path,
                         const std::vector<std::string>& shapes, std::int64_t ssm_layers,
                         const TrafficQuestion& question) {
  using Json = nlohmann::ordered_json;
  Json results = Json::array();
  for (const PolicyCost& c : costs) {
    Json batches = Json::array();
    for (const AtBatch& b : c.batches) {
      batches.push_back({{"batch", b.batch},
                         {"step_us", 1e6 * b.seconds},
                         {"eager_over_step", b.over_eager},
                         {"eager_fp32_over_step", b.over_eager_fp32},
                         {"best_length", b.best_length},
                         {"best_step_us", 1e6 * b.best_seconds},
                         {"fastest", b.best.text()}});
    }
    results.push_back({{"policy", c.policy.text()},
                       {"bytes_stored_per_sequence", c.stored},
                       {"bytes_per_token_and_layer",
                        {{"state_read", c.step.state_read},
                         {"state_write", c.step.state_write},
                         {"scales", c.step.scales},
                         {"residuals", c.step.residuals},
                         {"ring_read", c.step.ring_read},
                         {"ring_append", c.step.ring_append},
                         {"activations", c.activations},
                         {"total", c.step.total() + c.activations}}},
                       {"batches", batches}});
  }
  Json out = {{"command", "traffic"}, {"version", version()}};
  if (model_path.empty()) {
    out["shapes"] = shapes;
  } else {
    out["model"] = {{"path", model_path}};
  }
  out["ssm_layers"] = ssm_layers;
  out["bandwidth_gb_per_s"] = question.bandwidth;
  out["launch_us"] = question.launch;
  out["replay_launch_us"] = question.replay_launch;
  out["results"] = results;
  return out.dump(2) + "\n";
}

}  // namespace replayssm
