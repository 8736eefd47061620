#include "core/config.h"

#include <cctype>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>
#include <string_view>

namespace replayssm {
namespace {

/// Python writes Infinity, -Infinity and NaN, which JSON does not have: outside strings they become strings.
std::string quote_non_finite(const std::string& text) {
  std::string out;
  bool inside = false;
  for (std::size_t i = 0; i < text.size();) {
    const char c = text[i];
    if (!inside) {
      bool replaced = false;
      for (const std::string_view word : {"-Infinity", "Infinity", "NaN"}) {
        if (text.compare(i, word.size(), word) == 0) {
          out += '"';
          out += word;
          out += '"';
          i += word.size();
          replaced = true;
          break;
        }
      }
      if (replaced) continue;
    }
    if (inside && c == '\\' && i + 1 < text.size()) {
      out += c;
      ++i;
    } else if (c == '"') {
      inside = !inside;
    }
    out += text[i++];
  }
  return out;
}

}  // namespace

Config Config::open(const std::filesystem::path& folder) {
  if (!std::filesystem::is_directory(folder)) {
    fail(folder.string(), ": not a folder; expected a Hugging Face folder with config.json and *.safetensors");
  }
  const std::string file = (folder / "config.json").string();
  std::ifstream in(file);
  if (!in) fail(file, ": cannot be read");
  std::ostringstream text;
  text << in.rdbuf();
  try {
    auto values = nlohmann::json::parse(quote_non_finite(text.str()));
    if (!values.is_object()) fail(file, ": expected a JSON object, found ", values.type_name());
    return Config(std::move(values), file);
  } catch (const nlohmann::json::exception& error) {
    fail(file, ": not valid JSON: ", error.what());
  }
}

Config Config::nested(const std::string& key) const {
  if (!has(key)) return *this;
  if (!at(key).is_object()) wrong("'", key, "' must be an object");
  return Config(at(key), file_);
}

const nlohmann::json& Config::at(const std::string& key) const {
  if (!has(key)) wrong("'", key, "' is missing");
  return values_.at(key);
}

std::string Config::text(const std::string& key) const {
  if (!at(key).is_string()) wrong("'", key, "' must be a string, found ", at(key).dump());
  return at(key).get<std::string>();
}

std::int64_t Config::size(const std::string& key) const {
  const auto& value = at(key);
  constexpr std::int64_t most = std::int64_t{1} << 31;
  if (!value.is_number_integer() || value.get<std::int64_t>() < 1 || value.get<std::int64_t>() > most) {
    wrong("'", key, "' must be a whole number in 1..2^31, found ", value.dump());
  }
  return value.get<std::int64_t>();
}

double Config::as_number(const nlohmann::json& value, const std::string& key) const {
  if (value.is_number()) return value.get<double>();
  const auto& word = value.is_object() && value.contains("__float__") ? value.at("__float__") : value;
  constexpr double infinity = std::numeric_limits<double>::infinity();
  if (word == "Infinity" || word == "inf") return infinity;
  if (word == "-Infinity" || word == "-inf") return -infinity;
  wrong("'", key, "' must be a number, found ", value.dump());
}

double Config::number(const std::string& key) const { return as_number(at(key), key); }

bool Config::flag(const std::string& key, bool fallback) const {
  if (!has(key)) return fallback;
  if (!at(key).is_boolean()) wrong("'", key, "' must be true or false, found ", at(key).dump());
  return at(key).get<bool>();
}

std::pair<double, double> Config::range(const std::string& key, std::pair<double, double> fallback) const {
  if (!has(key)) return fallback;
  const auto& value = at(key);
  if (!value.is_array() || value.size() != 2) wrong("'", key, "' must be a list of two numbers, found ", value.dump());
  const std::pair<double, double> limits{as_number(value[0], key), as_number(value[1], key)};
  if (!(limits.first <= limits.second)) wrong("'", key, "' must be ascending, found ", value.dump());
  return limits;
}

std::vector<std::string> Config::layer_kinds() const {
  for (const char* key : {"layer_types", "layers_block_type"}) {
    if (!has(key)) continue;
    std::vector<std::string> kinds;
    if (!at(key).is_array()) wrong("'", key, "' must be a list of names");
    for (const auto& kind : at(key)) {
      if (!kind.is_string()) wrong("'", key, "' must be a list of names, found ", kind.dump());
      kinds.push_back(kind.get<std::string>());
    }
    return kinds;
  }
  if (!has("hybrid_override_pattern")) return {};
  static const std::map<char, std::string> names = {{'M', "mamba"}, {'*', "attention"}, {'-', "mlp"}, {'E', "moe"}};
  std::vector<std::string> kinds;
  for (const char c : text("hybrid_override_pattern")) {
    if (c == '|') continue;  // marks pipeline stages
    const auto found = names.find(c);
    if (found == names.end()) wrong("'hybrid_override_pattern' holds '", c, "'; known: M * - E");
    kinds.push_back(found->second);
  }
  return kinds;
}

}  // namespace replayssm
