#include "analysis/traffic.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <utility>

#include "analysis/cli/cli.h"
#include "analysis/cli/shapes.h"
#include "analysis/report.h"
#include "analysis/roofline.h"
#include "core/error.h"
#include "core/version.h"

namespace replayssm::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string model, activations = "bf16", json;
  std::vector<std::string> shapes, policies;
  std::vector<std::int64_t> batches = {1, 32, 256};
  double bandwidth = 4520, launch = 0, replay_launch = 0;  // GB/s, us, us
  std::int64_t longest = 64;
};

const std::vector<std::string> default_policies = {"eager(state=fp32)",
                                                   "eager(state=bf16)",
                                                   "replay(L=16, state=fp32)",
                                                   "replay(L=16, state=bf16)",
                                                   "replay(L=16, state=e4m3:row)",
                                                   "replay(L=16, state=int8:row)",
                                                   "replay(L=16, anchor=fp32, read=bf16)",
                                                   "replay(L=16, anchor=fp32, read=int8:row)"};

/// What a policy costs at one batch size.
struct AtBatch {
  std::int64_t batch, best_length;
  double seconds, best_seconds, over_eager, over_eager_fp32;
  Policy best;
};

struct Cost {
  Policy policy;
  double stored = 0;  // bytes of one sequence, all layers
  StepBytes step;     // of one token, the mean over the layers
  double activations = 0;
  std::vector<AtBatch> batches;
};

Cost cost_of(const std::vector<LayerInfo>& layers, const Policy& policy, const Options& options,
             const Roofline& roofline) {
  Cost out;
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
  for (const std::int64_t batch : options.batches) {
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

void print(const std::vector<Cost>& costs, const Options& options) {
  std::size_t width = 0;
  for (const Cost& c : costs) width = std::max(width, c.policy.text().size());
  const int w = static_cast<int>(width);
  std::printf("KiB; stored: of one sequence, all layers; the others: moved for one token and layer\n");
  std::printf("%-*s    stored  state read     write  scales  residuals  ring read  append  in, out     total\n", w,
              "policy");
  for (const Cost& c : costs) {
    const auto kib = [](double bytes) { return bytes / 1024; };
    std::printf("%-*s %9.1f %11.1f %9.1f %7.2f %10.2f %10.2f %7.2f %8.2f %9.1f\n", w, c.policy.text().c_str(),
                kib(c.stored), kib(c.step.state_read), kib(c.step.state_write), kib(c.step.scales),
                kib(c.step.residuals), kib(c.step.ring_read), kib(c.step.ring_append), kib(c.activations),
                kib(c.step.total() + c.activations));
  }
  for (std::size_t i = 0; i < options.batches.size(); ++i) {
    std::printf("\nbatch %lld; x: eager over this, in the format of the state or anchor, and in fp32\n",
                static_cast<long long>(options.batches[i]));
    std::printf("%-*s   step us  x same format  x fp32  best L   step us  fastest with a state in that format\n", w,
                "policy");
    for (const Cost& c : costs) {
      const AtBatch& b = c.batches[i];
      std::printf("%-*s %9.1f %14.2f %7.2f %7lld %9.1f  %s\n", w, c.policy.text().c_str(), 1e6 * b.seconds,
                  b.over_eager, b.over_eager_fp32, static_cast<long long>(b.best_length), 1e6 * b.best_seconds,
                  b.best.text().c_str());
    }
  }
}

Json report(const std::vector<Cost>& costs, const Options& options, std::int64_t layers) {
  Json results = Json::array();
  for (const Cost& c : costs) {
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
  if (options.model.empty()) {
    out["shapes"] = options.shapes;
  } else {
    out["model"] = {{"path", options.model}};
  }
  out["ssm_layers"] = layers;
  out["bandwidth_gb_per_s"] = options.bandwidth;
  out["launch_us"] = options.launch;
  out["replay_launch_us"] = options.replay_launch;
  out["results"] = results;
  return out;
}

std::vector<LayerInfo> layers_of(const Options& options) {
  if (options.model.empty() == options.shapes.empty()) fail("traffic: expected either MODEL or --shape");
  if (!options.model.empty()) return open_model(options.model)->layers();
  std::vector<LayerInfo> layers;
  for (const std::string& text : options.shapes) {
    const ShapeArgument argument = parse_shape(text);
    const LayerInfo layer{.kind = std::string(name(argument.shape.recurrence)), .recurrence = argument.shape};
    layers.insert(layers.end(), static_cast<std::size_t>(argument.layers), layer);
  }
  return layers;
}

int run(const Options& options) {
  for (const auto& [name, value] : {std::pair{"--bandwidth", options.bandwidth},
                                    {"--launch", options.launch},
                                    {"--replay-launch", options.replay_launch}}) {
    if (std::isnan(value)) fail(name, ": expected a number, found ", value);  // NaN is in every CLI::Range
  }
  std::vector<Policy> policies;
  for (const std::string& text : options.policies.empty() ? default_policies : options.policies) {
    policies.push_back(parse_policy(text));
  }
  const std::vector<LayerInfo> layers = layers_of(options);
  const auto count = std::ranges::count_if(layers, [](const LayerInfo& layer) { return layer.recurrence.has_value(); });
  for (const Policy& policy : policies) check_policy_layers(layers, policy);
  check_writable(options.json);
  const Roofline roofline{.bandwidth = 1e9 * options.bandwidth,
                          .launch = 1e-6 * options.launch,
                          .replay_launch = 1e-6 * options.replay_launch,
                          .activation_bytes = options.activations == "fp32" ? 4.0 : 2.0,
                          .longest = options.longest};
  std::vector<Cost> costs;
  for (const Policy& policy : policies) costs.push_back(cost_of(layers, policy, options, roofline));
  if (options.json != "-") {
    std::printf("layers with recurrent state: %lld; %g GB/s, %g us a launch", static_cast<long long>(count),
                options.bandwidth, options.launch);
    if (options.replay_launch > 0) std::printf(", %g us more of a replay", options.replay_launch);
    std::printf("\n");
    print(costs, options);
  }
  if (!options.json.empty()) write_text(options.json, report(costs, options, count).dump(2) + "\n");
  return 0;
}

}  // namespace

Command add_traffic(CLI::App& app) {
  auto options = std::make_shared<Options>();
  Options& o = *options;
  const CLI::Range microseconds(0.0, 1e6);
  app.add_option("MODEL", o.model, "Hugging Face folder; or describe its layers with --shape");
  app.add_option("--shape", o.shapes, std::string(shape_help) + "; may be given again")->allow_extra_args(false);
  app.add_option("-p,--policy", o.policies, "Policy such as 'replay(L=16, state=int8:row)'; may be given again")
      ->allow_extra_args(false);
  add_format_files(app);
  app.add_option("--batch", o.batches, "Sequences of a step, such as 1,32,256")
      ->delimiter(',')
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 31))
      ->capture_default_str();
  app.add_option("--bandwidth", o.bandwidth, "What the memory delivers, GB/s (10^9 bytes); an H200 where not given")
      ->check(CLI::Range(1e-3, 1e9))
      ->capture_default_str();
  app.add_option("--launch", o.launch, "us that a step of a layer takes beside its bytes")
      ->check(microseconds)
      ->capture_default_str();
  app.add_option("--replay-launch", o.replay_launch, "us more for a step of a replay")
      ->check(microseconds)
      ->capture_default_str();
  app.add_option("--longest", o.longest, "Largest L that is considered for the best one")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20))
      ->capture_default_str();
  app.add_option("--activations", o.activations, "Type of inputs and outputs: bf16, fp16 or fp32")
      ->check(CLI::IsMember({"bf16", "fp16", "fp32"}))
      ->capture_default_str();
  app.add_option("--json", o.json, "Write the result as JSON to a file, or to standard output with -");
  return [options] { return run(*options); };
}

}  // namespace replayssm::cli
