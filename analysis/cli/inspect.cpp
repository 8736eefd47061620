#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <numbers>

#include "analysis/cli/cli.h"
#include "analysis/report.h"
#include "core/real.h"

namespace replayssm::cli {
namespace {

struct Options {
  std::string model, json;
};

/// Tokens until half of a head's state is gone when the gate's input is 0: ln 2 / (e^A_log softplus(dt_bias)). Real
/// inputs move the gate up and down from there. With a decay per column, the slowest column of the head.
std::vector<double> half_lives(const LayerInfo& layer) {
  const RecurrenceShape& shape = *layer.recurrence;
  std::vector<double> A_log(static_cast<std::size_t>(layer.A_log->elements()));
  std::vector<double> bias(static_cast<std::size_t>(layer.dt_bias->elements()));
  widen(*layer.A_log, 0, A_log.size(), A_log.data());
  widen(*layer.dt_bias, 0, bias.size(), bias.data());
  std::vector<double> out;
  for (std::int64_t h = 0; h < shape.heads; ++h) {
    const auto columns = bias.begin() + h * shape.decay_dim();
    const double slowest = *std::min_element(columns, columns + shape.decay_dim());
    out.push_back(std::numbers::ln2 / (std::exp(A_log[static_cast<std::size_t>(h)]) * softplus(slowest)));
  }
  return out;
}

double state_bytes(const RecurrenceShape& shape) {  // in fp32, as serving engines keep it
  return 4.0 * static_cast<double>(shape.heads * shape.head_dim * shape.state_dim);
}

int run(const Options& options) {
  using Json = nlohmann::ordered_json;
  const auto model = open_model(options.model);
  if (options.json != "-") {
    std::printf("%s: %s, %zu layers (%lld with recurrent state), hidden %lld, vocabulary %lld\n", options.model.c_str(),
                model->type().c_str(), model->layers().size(), static_cast<long long>(model->ssm_layers()),
                static_cast<long long>(model->hidden()), static_cast<long long>(model->vocabulary()));
    std::printf("layer  kind         heads groups  head_dim  state_dim  state fp32  half-lives of the heads, tokens\n");
  }
  Json layers = Json::array();
  double total = 0;
  for (std::size_t i = 0; i < model->layers().size(); ++i) {
    const LayerInfo& layer = model->layers()[i];
    Json entry = {{"layer", i}, {"kind", layer.kind}};
    if (options.json != "-") std::printf("%5zu  %-11s", i, layer.kind.c_str());
    if (layer.recurrence) {
      const RecurrenceShape& shape = *layer.recurrence;
      const std::vector<double> lives = half_lives(layer);
      total += state_bytes(shape);
      entry.update({{"heads", shape.heads},
                    {"groups", shape.groups},
                    {"head_dim", shape.head_dim},
                    {"state_dim", shape.state_dim},
                    {"state_bytes_fp32", state_bytes(shape)},
                    {"half_lives", lives}});
      if (options.json != "-") {
        std::printf(" %6lld %6lld %9lld %10lld %7.0f KiB ", static_cast<long long>(shape.heads),
                    static_cast<long long>(shape.groups), static_cast<long long>(shape.head_dim),
                    static_cast<long long>(shape.state_dim), state_bytes(shape) / 1024);
        for (const double life : lives) std::printf(" %.3g", life);
      }
    }
    if (options.json != "-") std::printf("\n");
    layers.push_back(entry);
  }
  if (options.json != "-") std::printf("state of one sequence: %.2f MiB in fp32\n", total / (1 << 20));
  if (!options.json.empty()) {
    write_text(options.json, Json{{"command", "inspect"},
                                  {"model",
                                   {{"path", options.model},
                                    {"type", model->type()},
                                    {"layers", model->layers().size()},
                                    {"ssm_layers", model->ssm_layers()},
                                    {"hidden", model->hidden()},
                                    {"vocabulary", model->vocabulary()},
                                    {"sha256", model->sha256()}}},
                                  {"state_bytes_fp32", total},
                                  {"layers", layers}}
                                     .dump(2) +
                                 "\n");
  }
  return 0;
}

}  // namespace

Command add_inspect(CLI::App& app) {
  auto options = std::make_shared<Options>();
  app.add_option("MODEL", options->model, "Hugging Face folder")->required();
  app.add_option("--json", options->json, "Write the result as JSON to a file, or to standard output with -");
  return [options] { return run(*options); };
}

}  // namespace replayssm::cli
