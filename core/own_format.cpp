#include "core/own_format.h"

#include <algorithm>
#include <deque>
#include <mutex>
#include <utility>

#include "core/error.h"

namespace replayssm {
namespace {

struct Entry {
  OwnFormat own;
  Format format;
};

// A deque, so that what Format::own points to stays where it is.
struct Registry {
  std::mutex mutex;
  std::deque<Entry> entries;
};

Registry& registry() {
  static Registry all;
  return all;
}

const Format* find(const std::deque<Entry>& entries, std::string_view name) {
  const auto found = std::ranges::find(entries, name, [](const Entry& entry) { return entry.own.name; });
  return found == entries.end() ? nullptr : &found->format;
}

}  // namespace

void check_format_name(std::string_view name) {
  const auto letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); };
  const auto inside = [&](char c) { return letter(c) || (c >= '0' && c <= '9') || c == '_' || c == '-'; };
  if (name.empty() || !letter(name.front()) || !std::ranges::all_of(name, inside)) {
    fail("format name '", name, "': expected letters, digits, '_' and '-' behind a letter");
  }
  const bool built_in = name == kExact.name || name == "custom" || find_element(name) ||
                        std::ranges::any_of(named_formats(), [&](const NamedFormat& f) { return f.name == name; });
  if (built_in) fail("format name '", name, "' is that of a built-in format");
}

Format register_format(std::string_view name, int bits, RoundFunction function) {
  check_format_name(name);
  if (bits < 1 || bits > 32) fail("format '", name, "': expected 1 to 32 bits an element, found ", bits);
  if (!function) fail("format '", name, "': no function is given");
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  if (find(all.entries, name)) fail("format name '", name, "' is taken by another format");
  Entry& entry = all.entries.emplace_back(OwnFormat{std::string(name), std::move(function)}, Format{});
  // Of the element nothing but the name and the size means anything: the function does the rest.
  entry.format.element = {entry.own.name, 0, bits - 1, 0, 1, bits, Specials::none, true, Overflow::saturate};
  entry.format.own = &entry.own;
  return entry.format;
}

Format define_format(std::string_view name, const Format& format) {
  check_format_name(name);
  if (format.exact() || format.own || format.residual || !format.given_name.empty()) {
    fail("format '", name,
         "': expected one that rounds, is no function and has neither error feedback nor a given name");
  }
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  if (find(all.entries, name)) fail("format name '", name, "' is taken by another format");
  Entry& entry = all.entries.emplace_back(OwnFormat{std::string(name), {}}, format);
  entry.format.given_name = entry.own.name;
  return entry.format;
}

Format definition_of(Format format) {
  format.given_name = {};
  return format;
}

std::vector<std::pair<std::string, std::string>> defined_formats() {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  std::vector<std::pair<std::string, std::string>> out;
  for (const Entry& entry : all.entries) {
    if (!entry.format.own) out.emplace_back(entry.own.name, definition_of(entry.format).text());
  }
  return out;
}

const Format* find_own_format(std::string_view name) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  return find(all.entries, name);
}

}  // namespace replayssm
