#include <algorithm>
#include <cstdio>

#include "analysis/cli/cli.h"
#include "analysis/report.h"
#include "analysis/shapes.h"
#include "analysis/traffic_report.h"
#include "core/error.h"

namespace replayssm::cli {
namespace {

struct Options : TrafficQuestion {
  std::string model, json;
  std::vector<std::string> shapes, policies;
};

void print(const std::vector<PolicyCost>& costs, const Options& options) {
  std::size_t width = 0;
  for (const PolicyCost& c : costs) width = std::max(width, c.policy.text().size());
  const int w = static_cast<int>(width);
  std::printf("KiB; stored: of one sequence, all layers; the others: moved for one token and layer\n");
  std::printf("%-*s    stored  state read     write  scales  residuals  ring read  append  in, out     total\n", w,
              "policy");
  for (const PolicyCost& c : costs) {
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
    for (const PolicyCost& c : costs) {
      const AtBatch& b = c.batches[i];
      std::printf("%-*s %9.1f %14.2f %7.2f %7lld %9.1f  %s\n", w, c.policy.text().c_str(), 1e6 * b.seconds,
                  b.over_eager, b.over_eager_fp32, static_cast<long long>(b.best_length), 1e6 * b.best_seconds,
                  b.best.text().c_str());
    }
  }
}

std::vector<LayerInfo> layers_of(const Options& options) {
  if (options.model.empty() == options.shapes.empty()) fail("traffic: expected either MODEL or --shape");
  if (!options.model.empty()) return open_model(options.model)->layers();
  return layers_of_shapes(options.shapes, "--shape");
}

int run(const Options& options) {
  refuse_nan("--bandwidth", options.bandwidth);
  refuse_nan("--launch", options.launch);
  refuse_nan("--replay-launch", options.replay_launch);
  std::vector<Policy> policies;
  for (const std::string& text : options.policies) policies.push_back(parse_policy(text));
  if (policies.empty()) policies = default_traffic_policies();
  const std::vector<LayerInfo> layers = layers_of(options);
  const auto count = std::ranges::count_if(layers, [](const LayerInfo& layer) { return layer.recurrence.has_value(); });
  for (const Policy& policy : policies) check_policy_layers(layers, policy);
  check_writable(options.json);
  std::vector<PolicyCost> costs;
  for (const Policy& policy : policies) costs.push_back(policy_cost(layers, policy, options));
  if (options.json != "-") {
    std::printf("layers with recurrent state: %lld; %g GB/s, %g us a launch", static_cast<long long>(count),
                options.bandwidth, options.launch);
    if (options.replay_launch > 0) std::printf(", %g us more of a replay", options.replay_launch);
    std::printf("\n");
    print(costs, options);
  }
  if (!options.json.empty())
    write_text(options.json, traffic_json(costs, options.model, options.shapes, count, options));
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
