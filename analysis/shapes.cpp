#include "analysis/shapes.h"

#include <charconv>
#include <map>
#include <sstream>

#include "core/error.h"

namespace replayssm {
namespace {

constexpr std::int64_t most = std::int64_t{1} << 20;  // keeps every product of three of them below 2^63

}  // namespace

ShapeArgument parse_shape(const std::string& text, const char* what) {
  const auto wrong = [&](const auto&... parts) { fail(what, " '", text, "': ", parts...); };
  ShapeArgument out;
  const std::string kind = text.substr(0, text.find(':'));
  if (kind == "mamba2") {
    out.shape.recurrence = Recurrence::mamba2;
  } else if (kind == "gdn" || kind == name(Recurrence::gated_delta)) {
    out.shape.recurrence = Recurrence::gated_delta;
  } else if (kind == "kda") {
    out.shape.recurrence = Recurrence::kda;
  } else {
    wrong("expected mamba2:, gdn: or kda: and the dimensions, found '", kind, "'");
  }
  std::map<std::string, std::int64_t*> missing = {{"heads", &out.shape.heads},
                                                  {"groups", &out.shape.groups},
                                                  {"head_dim", &out.shape.head_dim},
                                                  {"state_dim", &out.shape.state_dim},
                                                  {"layers", &out.layers}};
  std::istringstream words(text.substr(std::min(text.size(), kind.size() + 1)));
  for (std::string word; std::getline(words, word, ',');) {
    const auto equals = word.find('=');
    const std::string key = word.substr(0, equals), value = equals == word.npos ? "" : word.substr(equals + 1);
    const auto found = missing.find(key);
    if (found == missing.end()) {
      wrong("expected heads, head_dim, state_dim, groups and layers, each once, found '", word, "'");
    }
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), *found->second);
    if (error != std::errc{} || end != value.data() + value.size() || *found->second < 1 || *found->second > most) {
      wrong(key, " must be a whole number in 1..", most, ", found '", value, "'");
    }
    missing.erase(found);
  }
  missing.erase("layers");
  if (!missing.empty()) wrong("'", missing.begin()->first, "=NUMBER' is missing");
  if (out.shape.heads % out.shape.groups != 0) {
    wrong("heads must be a multiple of groups, found ", out.shape.heads, " and ", out.shape.groups);
  }
  return out;
}

std::vector<LayerInfo> layers_of_shapes(const std::vector<std::string>& texts, const char* what) {
  std::vector<LayerInfo> layers;
  for (const std::string& text : texts) {
    const ShapeArgument argument = parse_shape(text, what);
    const LayerInfo layer{.kind = std::string(name(argument.shape.recurrence)), .recurrence = argument.shape};
    layers.insert(layers.end(), static_cast<std::size_t>(argument.layers), layer);
  }
  return layers;
}

std::string shape_text(const RecurrenceShape& shape) {
  std::ostringstream text;
  text << (shape.recurrence == Recurrence::gated_delta ? "gdn" : name(shape.recurrence)) << ":heads=" << shape.heads
       << ",head_dim=" << shape.head_dim << ",state_dim=" << shape.state_dim << ",groups=" << shape.groups;
  return text.str();
}

}  // namespace replayssm
