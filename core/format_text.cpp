// The text of formats, read and written.

#include <algorithm>
#include <charconv>
#include <optional>
#include <string>

#include "core/error.h"
#include "core/format.h"

namespace replayssm {

namespace {

Format in_blocks(const Element& element, std::int64_t extent, ScaleRule rule) {
  return {element, Scale::group, rule, extent};
}

// Named in the project's vocabulary, to be told from a typing error.
constexpr std::string_view kLaterModifiers[] = {"tensor", "hadamard"};
constexpr std::string_view kLaterStems[] = {"ef="};

bool known_later(std::string_view modifier) {
  return std::ranges::find(kLaterModifiers, modifier) != std::end(kLaterModifiers) ||
         std::ranges::any_of(kLaterStems, [&](std::string_view stem) {
           return modifier.size() > stem.size() && modifier.starts_with(stem);
         });
}

/// The number at the end of a modifier such as group32; none where it is no number.
template <class Number>
std::optional<Number> number_behind(std::string_view stem, std::string_view modifier) {
  if (!modifier.starts_with(stem)) return {};
  Number number = 0;
  const char* end = modifier.data() + modifier.size();
  const auto [stop, error] = std::from_chars(modifier.data() + stem.size(), end, number);
  if (error != std::errc{} || stop != end) return {};
  return number;
}

/// The fewest digits that read back as x.
std::string shortest(double x) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, x).ptr};
}

/// Element and scales.
std::string scaled_text(const Format& f) {
  for (const NamedFormat& named : named_formats()) {
    const bool ceil = f.rule == ScaleRule::ceil && named.format.rule == ScaleRule::floor;
    if (Format{f.element, f.scale, ceil ? ScaleRule::floor : f.rule, f.extent} != named.format) continue;
    return std::string(named.name) + (ceil ? ":ceil" : "");
  }
  std::string text(f.element.name);
  if (f.scale == Scale::row) text += ":row";
  if (f.scale == Scale::head) text += ":head";
  if (f.scale == Scale::group) text += ":group" + std::to_string(f.extent);
  if (f.scale == Scale::tile) text += ":tile" + std::to_string(f.extent);
  if (f.rule == ScaleRule::floor) text += ":floor";
  if (f.rule == ScaleRule::ceil) text += ":ceil";
  return text;
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Format parse() {
    const std::size_t colon = std::min(text_.find(':'), text_.size());
    read_name(text_.substr(0, colon));
    for (std::size_t begin = colon; begin < text_.size();) {
      const std::size_t end = std::min(text_.find(':', begin + 1), text_.size());
      read_modifier(text_.substr(begin + 1, end - begin - 1));
      begin = end;
    }
    check();
    return format_;
  }

 private:
  template <class... Parts>
  [[noreturn]] void wrong(const Parts&... parts) const {
    fail("format '", text_, "': ", parts...);
  }

  void read_name(std::string_view name) {
    if (name == kExact.name) return;
    if (const Element* element = find_element(name)) {
      format_.element = *element;
      return;
    }
    for (const NamedFormat& named : named_formats()) {
      if (named.name != name) continue;
      format_ = named.format;
      named_ = true;
      return;
    }
    if (name.starts_with("custom(")) wrong("'", name, "' is not supported yet");
    std::string known(kExact.name);
    for (const Element& element : kElements) known.append(", ").append(element.name);
    for (const NamedFormat& named : named_formats()) known.append(", ").append(named.name);
    wrong("unknown name '", name, "', expected one of ", known);
  }

  void read_modifier(std::string_view modifier) {
    if (known_later(modifier)) wrong("modifier '", modifier, "' is not supported yet");
    const auto group = number_behind<std::int64_t>("group", modifier);
    const auto tile = number_behind<std::int64_t>("tile", modifier);
    if (format_.exact()) wrong("exact takes no modifiers, nothing of it is rounded");
    if (modifier == "row" || modifier == "head" || group || tile) {
      if (named_) wrong("its name says what shares a scale, found '", modifier, "' beside it");
      if (format_.scale != Scale::none) wrong("'", modifier, "' is given twice, or beside another scale");
      format_.scale = group ? Scale::group : tile ? Scale::tile : modifier == "head" ? Scale::head : Scale::row;
      format_.extent = group ? *group : tile.value_or(0);
      if ((group || tile) && (format_.extent < 1 || format_.extent > kLongest)) {
        wrong("expected ", group ? "groups of 1.." : "tiles of 1..", kLongest, ", found '", modifier, "'");
      }
    } else if (const auto cap = number_behind<double>("cap=", modifier)) {
      const double max = decode<double>(format_.element, format_.element.max_code);
      if (format_.cap > 0) wrong("'cap' is given twice");
      if (!(*cap > 0 && *cap <= max)) wrong("expected a cap above 0 and at most ", max, ", found '", modifier, "'");
      format_.cap = *cap;
    } else if (const auto bits = number_behind<int>("sr=", modifier); bits || modifier == "sr" || modifier == "rz") {
      if (format_.rounding != Rounding::nearest) wrong("'", modifier, "' is given twice, or beside another rounding");
      if (bits && (*bits < 1 || *bits > 32)) wrong("expected 1 to 32 random bits, found '", modifier, "'");
      format_.rounding = modifier == "rz" ? Rounding::toward_zero : Rounding::stochastic;
      format_.random_bits = modifier == "rz" ? 0 : bits.value_or(32);
    } else if (modifier == "floor" || modifier == "ceil") {
      if (rule_given_) wrong("'", modifier, "' is given twice, or beside another rule");
      if (format_.rule == ScaleRule::nvfp4) wrong("the scales of nvfp4 are no powers of two, found '", modifier, "'");
      rule_given_ = true;
      format_.rule = modifier == "floor" ? ScaleRule::floor : ScaleRule::ceil;
    } else {
      wrong("unknown modifier '", modifier, "', expected row, head, groupN, tileN, floor, ceil, cap=X, rz, sr or sr=B");
    }
  }

  void check() {
    const Element& element = format_.element;
    if (format_.exact()) return;
    if (format_.cap > 0 && (format_.scale == Scale::none || format_.rule != ScaleRule::amax)) {
      wrong("a cap for fp32 scales, but none of these: expected row, head, groupN or tileN beside it");
    }
    if (format_.cap == decode<double>(element, element.max_code)) format_.cap = 0;
    if (format_.scale == Scale::none) {
      if (element.integer) wrong(element.name, " needs a scale, expected ", element.name, ":row or another");
      if (rule_given_) wrong("a rule for scales, but no scales: expected row, head, groupN or tileN beside it");
      return;
    }
    // Values near 1 would get a subnormal scale, whose rounding pushes the largest element of a row out of range.
    if (element.mantissa_bits == 23) wrong("fp32 takes no scale, it has the range of the scale itself");
  }

  static constexpr std::int64_t kLongest = std::int64_t{1} << 20;
  std::string_view text_;
  Format format_;
  bool named_ = false, rule_given_ = false;
};

}  // namespace

std::span<const NamedFormat> named_formats() {
  static const NamedFormat formats[] = {
      {"mxfp8_e4m3", in_blocks(*find_element("e4m3"), 32, ScaleRule::floor)},
      {"mxfp8_e5m2", in_blocks(*find_element("e5m2"), 32, ScaleRule::floor)},
      {"mxfp6_e2m3", in_blocks(*find_element("e2m3"), 32, ScaleRule::floor)},
      {"mxfp6_e3m2", in_blocks(*find_element("e3m2"), 32, ScaleRule::floor)},
      {"mxfp4", in_blocks(*find_element("e2m1"), 32, ScaleRule::floor)},
      {"mxint8", in_blocks(kFixed8, 32, ScaleRule::floor)},
      {"nvfp4", in_blocks(*find_element("e2m1"), 16, ScaleRule::nvfp4)},
  };
  return formats;
}

std::string Format::text() const {
  std::string text = scaled_text(*this);
  if (cap > 0) text += ":cap=" + shortest(cap);
  if (rounding == Rounding::toward_zero) text += ":rz";
  if (rounding == Rounding::stochastic) text += random_bits == 32 ? ":sr" : ":sr=" + std::to_string(random_bits);
  return text;
}

Format parse_format(std::string_view text) { return Parser(text).parse(); }

}  // namespace replayssm
