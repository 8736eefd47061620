#include "core/format_file.h"

#include "core/error.h"

#ifdef REPLAYSSM_HAVE_TOML

#define TOML_HEADER_ONLY 1
#define TOML_ENABLE_FORMATTERS 0
#include <toml++/toml.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string_view>
#include <utility>

#include "core/own_format.h"

namespace replayssm {
namespace {

/// A table of the file, whose keys become the text of a format one after the other: the key at which that is refused is
/// the one to name.
class Definition {
 public:
  Definition(const std::string& path, std::string_view name, const toml::table& table)
      : path_(path), name_(name), table_(table) {}

  Format read() {
    check_keys();
    read_element();
    const bool scaled = read_scale();
    read_flag("asymmetric", ":asym");
    read_word("rule", {{"amax", ""}, {"floor", ":floor"}, {"ceil", ":ceil"}});
    read_cap();
    read_rounding();
    read_flag("hadamard", ":hadamard");
    if (!scaled && needs_scale_) wrong(table_, "'scale' is missing: an integer element needs one");
    return parse_format(text_);
  }

 private:
  template <class... Parts>
  [[noreturn]] void wrong(const toml::node& at, const Parts&... parts) const {
    fail(path_, ": line ", at.source().begin.line, ": format '", name_, "': ", parts...);
  }

  void check_keys() const {
    constexpr std::string_view known[] = {"element",    "scale",    "rule",        "cap",
                                          "asymmetric", "rounding", "random_bits", "hadamard"};
    for (const auto& [key, value] : table_) {
      if (std::ranges::find(known, key.str()) != std::end(known)) continue;
      wrong(value, "unknown key '", key.str(),
            "', expected element, scale, rule, cap, asymmetric, rounding, random_bits or hadamard");
    }
  }

  /// Adds to the text what a key says, and tries it: with a scale where one is still to come.
  void add(std::string_view key, const toml::node& at, const std::string& text) {
    text_ += text;
    const std::size_t name_end =
        text_.starts_with("custom(") ? text_.find(')') + 1 : std::min(text_.find(':'), text_.size());
    std::string tried = text_;
    if (needs_scale_ && !scale_given_) tried.insert(name_end, ":row");
    try {
      parse_format(tried);
    } catch (const Error& error) {
      wrong(at, "'", key, "': ", error.what());
    }
  }

  std::optional<std::string> string_of(std::string_view key) const {
    const toml::node* node = table_.get(key);
    if (!node) return {};
    const auto value = node->value_exact<std::string>();
    if (!value) wrong(*node, "'", key, "': expected a string");
    return value;
  }

  void read_element() {
    const toml::node* node = table_.get("element");
    if (!node) wrong(table_, "'element' is missing: expected the name of one, or {e = E, m = M}");
    if (const toml::table* fields = node->as_table()) return read_custom(*fields);
    const auto name = node->value_exact<std::string>();
    if (!name) wrong(*node, "'element': expected the name of one, or {e = E, m = M}");
    const Element* element = find_element(*name);
    if (!element) wrong(*node, "'element': there is none named '", *name, "'");
    needs_scale_ = element->integer;
    add("element", *node, *name);
  }

  void read_custom(const toml::table& fields) {
    std::string text;
    for (const auto& [key, value] : fields) {
      text += (text.empty() ? "" : ",") + std::string(key.str()) + "=";
      if (const auto number = value.value_exact<std::int64_t>()) {
        text += std::to_string(*number);
      } else if (const auto word = value.value_exact<std::string>()) {
        text += *word;
      } else {
        wrong(value, "'element.", key.str(), "': expected a whole number or a string");
      }
    }
    needs_scale_ = fields.get("e") && fields.get("e")->value_exact<std::int64_t>() == 0;
    add("element", fields, "custom(" + text + ")");
  }

  bool read_scale() {
    const auto scale = string_of("scale");
    if (!scale || *scale == "none") return false;
    const auto counted = [&](std::string_view stem) {
      return scale->size() > stem.size() && scale->starts_with(stem) &&
             std::ranges::all_of(scale->substr(stem.size()), [](char c) { return c >= '0' && c <= '9'; });
    };
    const toml::node& at = *table_.get("scale");
    if (*scale != "row" && *scale != "head" && *scale != "tensor" && !counted("group") && !counted("tile")) {
      wrong(at, "'scale': expected none, row, groupN, tileR, head or tensor, found '", *scale, "'");
    }
    scale_given_ = true;
    add("scale", at, ":" + *scale);
    return true;
  }

  void read_flag(std::string_view key, const std::string& text) {
    const toml::node* node = table_.get(key);
    if (!node) return;
    const auto on = node->value_exact<bool>();
    if (!on) wrong(*node, "'", key, "': expected true or false");
    if (*on) add(key, *node, text);
  }

  void read_word(std::string_view key, std::initializer_list<std::pair<std::string_view, std::string>> words) {
    const auto word = string_of(key);
    if (!word) return;
    std::string known;
    for (const auto& [name, text] : words) {
      if (name == *word) return add(key, *table_.get(key), text);
      known.append(known.empty() ? "" : ", ").append(name);
    }
    wrong(*table_.get(key), "'", key, "': expected one of ", known, ", found '", *word, "'");
  }

  void read_cap() {
    const toml::node* node = table_.get("cap");
    if (!node) return;
    const auto cap = node->value<double>();
    if (!cap || node->is_boolean()) wrong(*node, "'cap': expected a number");
    Format capped;  // for the digits of a number as formats write it
    capped.element = *find_element("fp32");
    capped.cap = *cap;
    const std::string text = capped.text();
    add("cap", *node, *cap > 0 ? text.substr(text.find(':')) : ":cap=" + std::to_string(*cap));
  }

  void read_rounding() {
    const toml::node* bits = table_.get("random_bits");
    const auto number = bits ? bits->value_exact<std::int64_t>() : std::nullopt;
    if (bits && !number) wrong(*bits, "'random_bits': expected a whole number");
    if (bits && string_of("rounding") != "stochastic") wrong(*bits, "'random_bits': needs rounding = \"stochastic\"");
    if (bits && (*number < 1 || *number > 32)) wrong(*bits, "'random_bits': expected 1 to 32, found ", *number);
    read_word(
        "rounding",
        {{"nearest", ""}, {"toward_zero", ":rz"}, {"stochastic", number ? ":sr=" + std::to_string(*number) : ":sr"}});
  }

  const std::string& path_;
  const std::string_view name_;
  const toml::table& table_;
  std::string text_;
  bool needs_scale_ = false, scale_given_ = false;
};

toml::table parsed(const std::string& path) {
  if (!std::filesystem::is_regular_file(path)) fail(path, ": there is no such file of formats");
  try {
    return toml::parse_file(path);
  } catch (const toml::parse_error& error) {
    fail(path, ": line ", error.source().begin.line, ": ", error.description());
  }
}

}  // namespace

bool reads_format_files() { return true; }

std::vector<Format> read_formats(const std::string& path) {
  const toml::table file = parsed(path);
  if (file.empty()) fail(path, ": holds no formats, expected tables such as [my8]");
  std::vector<std::pair<std::string, Format>> read;
  for (const auto& [key, value] : file) {
    const std::string name(key.str());
    const auto wrong = [&](const auto&... parts) { fail(path, ": line ", value.source().begin.line, ": ", parts...); };
    if (!value.is_table()) wrong("key '", name, "': expected a table, [", name, "], that describes a format");
    try {
      check_format_name(name);
    } catch (const Error& error) {
      wrong(error.what());
    }
    read.emplace_back(name, Definition(path, name, *value.as_table()).read());
    const Format* there = find_own_format(name);
    if (there && definition_of(*there) != read.back().second)
      wrong("format name '", name, "' is taken by another format");
    if (read.back().second.exact()) wrong("format '", name, "': expected one that rounds");
  }
  std::vector<Format> out;
  for (const auto& [name, format] : read) {
    const Format* there = find_own_format(name);
    out.push_back(there ? *there : define_format(name, format));
  }
  return out;
}

}  // namespace replayssm

#else

namespace replayssm {

bool reads_format_files() { return false; }

std::vector<Format> read_formats(const std::string& path) {
  fail(path, ": this build reads no files of formats: it was made without toml++ (libtomlplusplus-dev)");
}

}  // namespace replayssm

#endif
