#include <cstdio>

#include "analysis/cli/cli.h"
#include "analysis/inspection.h"
#include "analysis/report.h"

namespace replayssm::cli {
namespace {

struct Options {
  std::string model, json;
};

void print(const Model& model, const std::string& path) {
  std::printf("%s: %s, %zu layers (%lld with recurrent state), hidden %lld, vocabulary %lld\n", path.c_str(),
              model.type().c_str(), model.layers().size(), static_cast<long long>(model.ssm_layers()),
              static_cast<long long>(model.hidden()), static_cast<long long>(model.vocabulary()));
  std::printf("layer  kind         heads groups  head_dim  state_dim  state fp32  half-lives of the heads, tokens\n");
  double total = 0;
  for (std::size_t i = 0; i < model.layers().size(); ++i) {
    const LayerInfo& layer = model.layers()[i];
    std::printf("%5zu  %-11s", i, layer.kind.c_str());
    if (layer.recurrence) {
      const RecurrenceShape& shape = *layer.recurrence;
      total += state_bytes_fp32(shape);
      std::printf(" %6lld %6lld %9lld %10lld %7.0f KiB ", static_cast<long long>(shape.heads),
                  static_cast<long long>(shape.groups), static_cast<long long>(shape.head_dim),
                  static_cast<long long>(shape.state_dim), state_bytes_fp32(shape) / 1024);
      for (const double life : half_lives(layer)) std::printf(" %.3g", life);
    }
    std::printf("\n");
  }
  std::printf("state of one sequence: %.2f MiB in fp32\n", total / (1 << 20));
}

int run(const Options& options) {
  const auto model = open_model(options.model);
  if (options.json != "-") print(*model, options.model);
  if (!options.json.empty()) write_text(options.json, inspect_json(*model, options.model));
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
