#include "core/policy.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "core/error.h"

namespace replayssm {
namespace {

constexpr std::array<std::string_view, 5> activation_fields = {"x", "B", "k", "v", "u"};
constexpr std::array<std::string_view, 3> gate_fields = {"dt", "g", "beta"};
constexpr std::int64_t longest_replay = std::int64_t{1} << 20;

template <class List>
bool contains(const List& list, std::string_view word) {
  return std::find(list.begin(), list.end(), word) != list.end();
}

std::string_view trim(std::string_view s) {
  const auto first = s.find_first_not_of(" \t\r\n");
  if (first == s.npos) return {};
  return s.substr(first, s.find_last_not_of(" \t\r\n") - first + 1);
}

/// Splits at `separator` outside parentheses, so that a format with arguments stays in one piece.
std::vector<std::string_view> split(std::string_view s, char separator) {
  std::vector<std::string_view> parts;
  int depth = 0;
  std::size_t begin = 0;
  for (std::size_t i = 0; i <= s.size(); ++i) {
    if (i < s.size()) depth += (s[i] == '(') - (s[i] == ')');
    if (i == s.size() || (s[i] == separator && depth == 0)) {
      parts.push_back(trim(s.substr(begin, i - begin)));
      begin = i + 1;
    }
  }
  return parts;
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(trim(text)) {}

  Policy parse() {
    if (text_ == "exact") return exact_policy();
    const auto open = text_.find('(');
    const std::string_view name = trim(text_.substr(0, open));
    if (name == "exact") wrong("exact takes no arguments");
    if (name != "eager" && name != "replay")
      wrong("unknown policy '", name, "'; known: exact, eager(...), replay(...)");
    if (open == text_.npos || text_.back() != ')') wrong("expected ", name, "(...) with its arguments in parentheses");
    read_arguments(text_.substr(open + 1, text_.size() - open - 2));

    Policy policy;
    if (name == "eager") {
      if (!ring_.exact() || !ring_.fields.empty()) wrong("eager keeps no ring, so it takes no ring format");
      policy.schedule = Eager{required("state")};
    } else {
      policy.schedule = replay();
    }
    policy.order = order_;
    policy.loop = loop_;
    policy.layers = layers_;
    for (const auto& [key, format] : formats_) wrong(name, " takes no '", key, "'");
    if (length_) wrong(name, " takes no 'L'");
    return policy;
  }

 private:
  template <class... Parts>
  [[noreturn]] void wrong(const Parts&... parts) const {
    fail("policy '", text_, "': ", parts...);
  }

  Format required(const std::string& key) {
    const auto found = formats_.find(key);
    if (found == formats_.end()) wrong("'", key, "=FORMAT' is missing");
    const Format format = found->second;
    formats_.erase(found);
    return format;
  }

  Replay replay() {
    Replay replay;
    if (length_) replay.length = *length_;
    length_.reset();
    replay.ring = ring_;
    const bool split_state = formats_.count("read") || formats_.count("anchor");
    if (formats_.count("state") && split_state)
      wrong("give either state=F (shared) or anchor=F, read=F (split), not both");
    if (split_state) {
      formats_.try_emplace("anchor", parse_format("fp32"));
      replay.read = required("read");
      replay.anchor = required("anchor");
    } else {
      replay.anchor = required("state");
    }
    return replay;
  }

  void read_arguments(std::string_view inside) {
    if (trim(inside).empty()) return;
    std::vector<std::string> seen;
    for (const std::string_view argument : split(inside, ',')) {
      const auto equals = argument.find('=');
      if (equals == argument.npos) wrong("expected key=value, found '", argument, "'");
      const std::string key(trim(argument.substr(0, equals)));
      const std::string_view value = trim(argument.substr(equals + 1));
      if (value.empty()) wrong("'", key, "' has no value");
      if (contains(seen, key)) wrong("'", key, "' is given twice");
      seen.push_back(key);
      set(key, value);
    }
  }

  void set(const std::string& key, std::string_view value) {
    if (key == "L") {
      length_ = integer(value, "L");
      if (*length_ < 1 || *length_ > longest_replay) wrong("L must be in 1..", longest_replay, ", found ", value);
    } else if (key == "state" || key == "anchor" || key == "read") {
      formats_.emplace(key, format(value, key));
    } else if (key == "ring") {
      ring_.activations = ring_format(value, key);
    } else if (key.rfind("ring.", 0) == 0) {
      const std::string field = key.substr(5);
      if (!contains(activation_fields, field) && !contains(gate_fields, field)) {
        wrong("unknown ring field '", field, "'; known: x, B, dt (Mamba-2), k, v, u, g, beta (delta rule)");
      }
      ring_.fields.emplace(field, ring_format(value, key));
    } else if (key == "order") {
      if (value != "closed" && value != "sequential") wrong("order must be closed or sequential, found '", value, "'");
      order_ = value == "closed" ? Order::closed : Order::sequential;
    } else if (key == "loop") {
      if (value != "closed" && value != "open") wrong("loop must be closed or open, found '", value, "'");
      loop_ = value == "closed" ? Loop::closed : Loop::open;
    } else if (key == "layers") {
      read_layers(value);
    } else {
      wrong("unknown argument '", key, "'; known: L, state, anchor, read, ring, ring.FIELD, order, loop, layers");
    }
  }

  std::int64_t integer(std::string_view value, std::string_view what) const {
    std::int64_t number = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    if (error != std::errc{} || end != value.data() + value.size()) {
      wrong(what, " must be a whole number, found '", value, "'");
    }
    return number;
  }

  Format format(std::string_view value, std::string_view key) const {
    try {
      return parse_format(value);
    } catch (const Error& error) {
      wrong(key, "=", value, ": ", error.what());
    }
  }

  /// Records are rounded head by head, and each but once.
  Format ring_format(std::string_view value, std::string_view key) const {
    const Format read = format(value, key);
    if (read.residual) wrong(key, "=", value, ": a record is stored once, so it takes no error feedback");
    if (read.scale == Scale::tensor)
      wrong(key, "=", value, ": records are stored head by head, expected head, not tensor");
    return read;
  }

  void read_layers(std::string_view value) {
    for (const std::string_view part : split(value, '+')) {
      const auto dash = part.find('-', 1);
      const std::int64_t first = integer(part.substr(0, dash), "a layer");
      const std::int64_t last = dash == part.npos ? first : integer(part.substr(dash + 1), "a layer");
      if (first < 0 || last < first) wrong("layers must be indices or ranges such as 0-3+7, found '", part, "'");
      layers_.emplace_back(first, last);
    }
    std::sort(layers_.begin(), layers_.end());
    std::vector<std::pair<std::int64_t, std::int64_t>> merged;
    for (const auto& range : layers_) {
      if (!merged.empty() && range.first - 1 <= merged.back().second) {
        merged.back().second = std::max(merged.back().second, range.second);
      } else {
        merged.push_back(range);
      }
    }
    layers_ = std::move(merged);
  }

  std::string_view text_;
  std::optional<std::int64_t> length_;
  std::map<std::string, Format> formats_;
  RingFormats ring_;
  Order order_ = Order::closed;
  Loop loop_ = Loop::closed;
  std::vector<std::pair<std::int64_t, std::int64_t>> layers_;
};

}  // namespace

Format RingFormats::of(std::string_view field) const {
  if (const auto found = fields.find(field); found != fields.end()) return found->second;
  if (contains(gate_fields, field)) return parse_format(activations.exact() ? "exact" : "fp32");
  return activations;
}

bool RingFormats::exact() const {
  return activations.exact() &&
         std::all_of(fields.begin(), fields.end(), [](const auto& field) { return field.second.exact(); });
}

bool Policy::covers(std::int64_t layer) const {
  return layers.empty() || std::any_of(layers.begin(), layers.end(), [layer](const auto& range) {
           return range.first <= layer && layer <= range.second;
         });
}

Replay Policy::as_replay() const {
  if (const auto* eager = std::get_if<Eager>(&schedule)) {
    return Replay{.length = 1, .anchor = eager->state, .read = {}, .ring = {}};
  }
  return std::get<Replay>(schedule);
}

bool Policy::exact() const {
  const Replay replay = as_replay();
  return replay.anchor.exact() && (!replay.read || replay.read->exact()) && replay.ring.exact();
}

std::string Policy::text() const {
  if (*this == exact_policy()) return "exact";
  std::string out;
  if (const auto* eager = std::get_if<Eager>(&schedule)) {
    out = "eager(state=" + eager->state.text();
  } else {
    const auto& replay = std::get<Replay>(schedule);
    out = "replay(L=" + std::to_string(replay.length);
    out += (replay.read ? ", anchor=" : ", state=") + replay.anchor.text();
    if (replay.read) out += ", read=" + replay.read->text();
    if (!replay.ring.activations.exact()) out += ", ring=" + replay.ring.activations.text();
    for (const auto& [field, format] : replay.ring.fields) out += ", ring." + field + "=" + format.text();
  }
  if (order == Order::sequential) out += ", order=sequential";
  if (loop == Loop::open) out += ", loop=open";
  if (!layers.empty()) out += ", layers=";
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (i > 0) out += "+";
    out += std::to_string(layers[i].first);
    if (layers[i].second > layers[i].first) out += "-" + std::to_string(layers[i].second);
  }
  return out + ")";
}

Policy exact_policy() {
  Policy policy;
  policy.schedule = Eager{parse_format("exact")};
  return policy;
}

Policy parse_policy(std::string_view text) { return Parser(text).parse(); }

}  // namespace replayssm
