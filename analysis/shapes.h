#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/model.h"

namespace replayssm {

/// Layers of one shape, as a user names them.
struct ShapeArgument {
  RecurrenceShape shape;
  std::int64_t layers = 1;
};

/// What a shape's text looks like, for --help.
inline constexpr const char* shape_help =
    "Shape of a layer such as mamba2:heads=128,head_dim=64,state_dim=128,groups=8 or "
    "gdn:heads=64,head_dim=128,state_dim=128,groups=16 (groups: key heads), also kda:...; layers=K for K of them";

/// Reads such a text. Throws Error that quotes it behind `what` and names the word that is wrong, missing or given
/// twice.
ShapeArgument parse_shape(const std::string& text, const char* what = "shape");

/// Layers of such shapes, one after the other.
std::vector<LayerInfo> layers_of_shapes(const std::vector<std::string>& texts, const char* what = "shape");

/// The text of a shape, without the number of layers.
std::string shape_text(const RecurrenceShape& shape);

}  // namespace replayssm
