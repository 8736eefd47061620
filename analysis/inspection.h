#pragma once

#include <string>
#include <vector>

#include "core/model.h"

namespace replayssm {

/// Tokens until half of a head's state is gone when the gate's input is 0: ln 2 / (e^A_log softplus(dt_bias)), [heads].
/// Real inputs move the gate up and down from there. With a decay per column, the slowest column of the head.
std::vector<double> half_lives(const LayerInfo& layer);

/// Bytes of a layer's state of one sequence in fp32, as serving engines keep it.
double state_bytes_fp32(const RecurrenceShape& shape);

/// Layers, kinds, dimensions, state bytes and half-lives of a model as JSON text.
std::string inspect_json(const Model& model, const std::string& path);

}  // namespace replayssm
