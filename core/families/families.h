#pragma once

#include <memory>

#include "core/config.h"
#include "core/model.h"

namespace replayssm {

// One reader a model family, each in a file of its own.
std::unique_ptr<Model> open_mamba2(const Config& config, Weights weights);
std::unique_ptr<Model> open_qwen3_5(const Config& config, Weights weights);

}  // namespace replayssm
