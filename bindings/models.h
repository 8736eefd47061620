#pragma once

#include <memory>
#include <string>

#include "core/model.h"

namespace replayssm::python {

/// A model and the folder that it was opened from.
struct OpenModel {
  std::unique_ptr<Model> model;
  std::string path;
};

}  // namespace replayssm::python
