#include "analysis/inspection.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>

#include "core/real.h"

namespace replayssm {

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

double state_bytes_fp32(const RecurrenceShape& shape) {
  return 4.0 * static_cast<double>(shape.heads * shape.head_dim * shape.state_dim);
}

std::string inspect_json(const Model& model, const std::string& path) {
  using Json = nlohmann::ordered_json;
  Json layers = Json::array();
  double total = 0;
  for (std::size_t i = 0; i < model.layers().size(); ++i) {
    const LayerInfo& layer = model.layers()[i];
    Json entry = {{"layer", i}, {"kind", layer.kind}};
    if (layer.recurrence) {
      const RecurrenceShape& shape = *layer.recurrence;
      total += state_bytes_fp32(shape);
      entry.update({{"heads", shape.heads},
                    {"groups", shape.groups},
                    {"head_dim", shape.head_dim},
                    {"state_dim", shape.state_dim},
                    {"state_bytes_fp32", state_bytes_fp32(shape)},
                    {"half_lives", half_lives(layer)}});
    }
    layers.push_back(entry);
  }
  return Json{{"command", "inspect"},
              {"model",
               {{"path", path},
                {"type", model.type()},
                {"layers", model.layers().size()},
                {"ssm_layers", model.ssm_layers()},
                {"hidden", model.hidden()},
                {"vocabulary", model.vocabulary()},
                {"sha256", model.sha256()}}},
              {"state_bytes_fp32", total},
              {"layers", layers}}
             .dump(2) +
         "\n";
}

}  // namespace replayssm
