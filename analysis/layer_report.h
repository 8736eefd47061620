#pragma once

#include <string>

#include "analysis/layer_study.h"
#include "analysis/layer_trace.h"
#include "analysis/report.h"

namespace replayssm {

/// A layer study for people: a table of layers for each policy, then which layers and heads its KL comes from.
std::string layers_table(const LayerStudy& study);

/// The same as JSON text, with the curves over tokens and heads.
std::string layers_json(const Model& model, const RunFacts& facts, const LayerStudy& study);

/// Writes /run and, for every policy and layer, /layers/NN/policy_K with its errors and curves to an HDF5 file; and
/// what was traced, where it is given.
void write_layers(const std::string& path, const Model& model, const RunFacts& facts, const Tokens& all_tokens,
                  const LayerStudy& study, const LayerTrace* trace = nullptr);

}  // namespace replayssm
