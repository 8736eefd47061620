#pragma once

// Private to core: pulls in the JSON library.

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"

namespace replayssm {

/// A Hugging Face config.json. Every getter throws Error naming file and key: missing, of another type, out of range.
class Config {
 public:
  /// Reads `folder`/config.json. Accepts the bare Infinity and NaN that Python's json module writes.
  static Config open(const std::filesystem::path& folder);
  Config(nlohmann::json values, std::string file) : values_(std::move(values)), file_(std::move(file)) {}

  bool has(const std::string& key) const { return values_.contains(key) && !values_.at(key).is_null(); }
  /// The nested object `key` with the same file name in messages, or this one where there is none.
  Config nested(const std::string& key) const;

  std::string text(const std::string& key) const;
  std::string text(const std::string& key, const std::string& fallback) const {
    return has(key) ? text(key) : fallback;
  }
  /// A whole number of at least 1.
  std::int64_t size(const std::string& key) const;
  std::int64_t size(const std::string& key, std::int64_t fallback) const { return has(key) ? size(key) : fallback; }
  /// Infinity may be spelled as a number, a string or {"__float__": "Infinity"}.
  double number(const std::string& key) const;
  double number(const std::string& key, double fallback) const { return has(key) ? number(key) : fallback; }
  bool flag(const std::string& key, bool fallback) const;
  std::pair<double, double> range(const std::string& key, std::pair<double, double> fallback) const;

  /// What each layer is, from whichever spelling is there: `layer_types` or `layers_block_type` (lists of names), or
  /// `hybrid_override_pattern` (M mamba, * attention, - mlp, E moe). Empty where there is none of them.
  std::vector<std::string> layer_kinds() const;

  template <class... Parts>
  [[noreturn]] void wrong(const Parts&... parts) const {
    fail(file_, ": ", parts...);
  }

 private:
  const nlohmann::json& at(const std::string& key) const;
  double as_number(const nlohmann::json& value, const std::string& key) const;

  nlohmann::json values_;
  std::string file_;
};

}  // namespace replayssm
