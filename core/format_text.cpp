// The text of formats, read and written.

#include <algorithm>
#include <charconv>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/own_format.h"

namespace replayssm {

namespace {

Format in_blocks(const Element& element, std::int64_t extent, ScaleRule rule) {
  return {element, Scale::group, rule, extent};
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

constexpr std::pair<std::string_view, Specials> kSpecials[] = {{"none", Specials::none},
                                                               {"nan", Specials::nan},
                                                               {"inf", Specials::infinity_and_nan},
                                                               {"fnuz", Specials::nan_for_minus_zero}};
constexpr std::pair<std::string_view, Overflow> kOverflows[] = {
    {"saturate", Overflow::saturate}, {"inf", Overflow::infinity}, {"nan", Overflow::nan}};
constexpr std::string_view kCustom = "custom";

template <class Table, class Value>
std::string name_in(const Table& table, Value value) {
  for (const auto& [name, meaning] : table) {
    if (meaning == value) return std::string(name);
  }
  return {};
}

constexpr int usual_bias(int exponent_bits) { return (1 << (exponent_bits - 1)) - 1; }

std::string element_text(const Element& e) {
  if (e.name != kCustom) return std::string(e.name);
  std::string text = "custom(e=" + std::to_string(e.exponent_bits) + ",m=" + std::to_string(e.mantissa_bits);
  if (!e.integer && 1 - e.emin != usual_bias(e.exponent_bits)) text += ",bias=" + std::to_string(1 - e.emin);
  if (e.specials != Specials::none) text += ",specials=" + name_in(kSpecials, e.specials);
  if (e.overflow != Overflow::saturate) text += ",overflow=" + name_in(kOverflows, e.overflow);
  return text + ")";
}

/// Element and scales.
std::string scaled_text(const Format& f) {
  for (const NamedFormat& named : named_formats()) {
    const bool ceil = f.rule == ScaleRule::ceil && named.format.rule == ScaleRule::floor;
    if (Format{f.element, f.scale, ceil ? ScaleRule::floor : f.rule, f.extent} != named.format) continue;
    return std::string(named.name) + (ceil ? ":ceil" : "");
  }
  std::string text = element_text(f.element);
  if (f.scale == Scale::row) text += ":row";
  if (f.scale == Scale::head) text += ":head";
  if (f.scale == Scale::tensor) text += ":tensor";
  if (f.scale == Scale::group) text += ":group" + std::to_string(f.extent);
  if (f.scale == Scale::tile) text += ":tile" + std::to_string(f.extent);
  if (f.asymmetric) text += ":asym";
  if (f.rule == ScaleRule::floor) text += ":floor";
  if (f.rule == ScaleRule::ceil) text += ":ceil";
  return text;
}

/// A residual that is named without parentheses is scaled as the format itself, if it is an integer or of 8 bits or
/// less; the scales of nvfp4 are of no other element.
Format scaled_like(const Format& format, Format residual) {
  const Element& e = residual.element;
  const bool plain = residual.scale == Scale::none && !residual.own && residual.given_name.empty();
  if (!plain || !(e.integer || e.bits() <= 8)) return residual;
  residual.scale = format.scale;
  residual.extent = format.extent;
  residual.rule = format.rule == ScaleRule::nvfp4 ? ScaleRule::amax : format.rule;
  return residual;
}

std::string residual_text(const Format& format) {
  const Format& residual = *format.residual;
  Format bare = residual;
  bare.scale = Scale::none;
  bare.extent = 0;
  bare.rule = ScaleRule::amax;
  for (const Format& name : {residual, bare}) {
    const std::string text = name.text();
    if (text.find(':') == text.npos && scaled_like(format, name) == residual) return text;
  }
  return "(" + residual.text() + ")";
}

/// The first ':' from `begin` on that is in no parentheses, or the end.
std::size_t next_colon(std::string_view text, std::size_t begin) {
  int depth = 0;
  for (std::size_t i = begin; i < text.size(); ++i) {
    depth += (text[i] == '(') - (text[i] == ')');
    if (text[i] == ':' && depth <= 0) return i;
  }
  return text.size();
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Format parse() {
    read_plain();
    check();
    // Behind all else: what the residual is scaled as may be named after it.
    if (!residual_.empty()) read_residual();
    return format_;
  }

  /// An element that its scale is still to be given: all but the checks.
  Format parse_unscaled() {
    read_plain();
    if (!residual_.empty()) wrong("a residual has no error feedback of its own");
    return format_;
  }

 private:
  template <class... Parts>
  [[noreturn]] void wrong(const Parts&... parts) const {
    fail("format '", text_, "': ", parts...);
  }

  void read_plain() {
    const std::size_t colon = next_colon(text_, 0);
    const std::string_view name = text_.substr(0, colon);
    name.starts_with("custom(") ? read_custom(name) : read_name(name);
    for (std::size_t begin = colon; begin < text_.size();) {
      const std::size_t end = next_colon(text_, begin + 1);
      read_modifier(text_.substr(begin + 1, end - begin - 1));
      begin = end;
    }
  }

  void read_residual() {
    const bool parentheses = residual_.front() == '(' && residual_.back() == ')';
    const std::string_view inside = parentheses ? residual_.substr(1, residual_.size() - 2) : residual_;
    try {
      const Format residual =
          parentheses ? parse_format(inside) : scaled_like(format_, Parser(inside).parse_unscaled());
      if (residual.element.integer && residual.scale == Scale::none && !residual.own) {
        wrong("the residual ", inside, " needs a scale: expected ef=(", inside, ":row) or another");
      }
      format_ = with_residual(format_, residual);
    } catch (const Error& error) {
      wrong("ef=", residual_, ": ", error.what());
    }
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
    if (const Format* own = find_own_format(name)) {
      format_ = *own;
      named_ = true;
      return;
    }
    std::string known(kExact.name);
    for (const Element& element : kElements) known.append(", ").append(element.name);
    for (const NamedFormat& named : named_formats()) known.append(", ").append(named.name);
    wrong("unknown name '", name, "', expected custom(...) or one of ", known);
  }

  void read_custom(std::string_view name) {
    if (name.back() != ')') wrong("expected ')' behind custom(..., found '", name, "'");
    CustomElement custom;
    std::string_view rest = name.substr(7, name.size() - 8);
    std::vector<std::string_view> seen;
    while (!rest.empty()) {
      const std::size_t comma = std::min(rest.find(','), rest.size());
      std::string_view item = rest.substr(0, comma);
      rest.remove_prefix(std::min(comma + 1, rest.size()));
      item.remove_prefix(std::min(item.find_first_not_of(' '), item.size()));
      const std::string_view key = item.substr(0, item.find('='));
      if (key.size() == item.size()) wrong("custom(...): expected key=value, found '", item, "'");
      if (std::ranges::find(seen, key) != seen.end()) wrong("custom(...): '", key, "' is given twice");
      seen.push_back(key);
      const std::string_view value = item.substr(key.size() + 1);
      if (key == "specials") {
        custom.specials = named_value(kSpecials, key, value);
      } else if (key == "overflow") {
        custom.overflow = named_value(kOverflows, key, value);
      } else if (key == "e" || key == "m" || key == "bias") {
        const auto number = number_behind<int>("", value);
        if (!number) wrong("custom(...): expected a whole number for '", key, "', found '", value, "'");
        if (key == "e") custom.exponent_bits = *number;
        if (key == "m") custom.mantissa_bits = *number;
        if (key == "bias") custom.bias = *number;
      } else {
        wrong("custom(...): unknown key '", key, "', expected e, m, bias, specials or overflow");
      }
    }
    for (const char* key : {"e", "m"}) {
      if (std::ranges::find(seen, key) == seen.end()) wrong("custom(...): '", key, "=' is missing");
    }
    try {
      format_.element = custom_element(custom);
    } catch (const Error& error) {
      wrong(error.what());
    }
  }

  template <class Value, std::size_t size>
  Value named_value(const std::pair<std::string_view, Value> (&table)[size], std::string_view key,
                    std::string_view value) const {
    std::string known;
    for (const auto& [name, meaning] : table) {
      if (name == value) return meaning;
      known.append(known.empty() ? "" : ", ").append(name);
    }
    wrong("custom(...): '", key, "' is one of ", known, ", found '", value, "'");
  }

  void read_modifier(std::string_view modifier) {
    const bool feedback = modifier.starts_with("ef=");
    if (format_.own && modifier != "hadamard" && !feedback) {
      wrong("a function takes no modifier but hadamard and ef=F, found '", modifier, "'");
    }
    const bool stochastic = modifier == "sr" || modifier.starts_with("sr=");
    if (!format_.given_name.empty() && !feedback && !stochastic && modifier != "rz" && modifier != "hadamard") {
      wrong("'", format_.given_name, "' takes no modifier but rz, sr, sr=B, hadamard and ef=F, found '", modifier, "'");
    }
    const auto group = number_behind<std::int64_t>("group", modifier);
    const auto tile = number_behind<std::int64_t>("tile", modifier);
    if (format_.exact()) wrong("exact takes no modifiers, nothing of it is rounded");
    if (modifier == "row" || modifier == "head" || modifier == "tensor" || group || tile) {
      if (named_) wrong("its name says what shares a scale, found '", modifier, "' beside it");
      if (format_.scale != Scale::none) wrong("'", modifier, "' is given twice, or beside another scale");
      format_.scale = group                  ? Scale::group
                      : tile                 ? Scale::tile
                      : modifier == "head"   ? Scale::head
                      : modifier == "tensor" ? Scale::tensor
                                             : Scale::row;
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
    } else if (modifier == "hadamard") {
      if (format_.hadamard) wrong("'hadamard' is given twice");
      format_.hadamard = true;
    } else if (modifier == "asym" || modifier == "asymmetric") {
      if (format_.asymmetric) wrong("'asym' is given twice");
      format_.asymmetric = true;
    } else if (feedback) {
      if (!residual_.empty()) wrong("'ef' is given twice");
      residual_ = modifier.substr(3);
      if (residual_.empty()) wrong("expected the format of the residual behind 'ef='");
    } else if (modifier == "floor" || modifier == "ceil") {
      if (rule_given_) wrong("'", modifier, "' is given twice, or beside another rule");
      if (format_.rule == ScaleRule::nvfp4) wrong("the scales of nvfp4 are no powers of two, found '", modifier, "'");
      rule_given_ = true;
      format_.rule = modifier == "floor" ? ScaleRule::floor : ScaleRule::ceil;
    } else {
      wrong("unknown modifier '", modifier,
            "', expected row, head, tensor, groupN, tileN, asym, floor, ceil, cap=X, rz, sr, sr=B, hadamard or ef=F");
    }
  }

  void check() {
    const Element& element = format_.element;
    if (format_.exact() || format_.own || !format_.given_name.empty()) return;
    if (format_.cap > 0 && (format_.scale == Scale::none || format_.rule != ScaleRule::amax)) {
      wrong("a cap for fp32 scales, but none of these: expected row, head, tensor, groupN or tileN beside it");
    }
    if (format_.asymmetric && (!element.integer || format_.scale == Scale::none || format_.rule != ScaleRule::amax ||
                               format_.cap > 0 || element.mantissa_bits > 20)) {
      wrong("asym is for integers of at most 21 bits with fp32 scales and no cap: expected int8:row:asym or the like");
    }
    if (format_.cap == decode<double>(element, element.max_code)) format_.cap = 0;
    if (format_.scale == Scale::none) {
      if (element.integer)
        wrong(element_text(element), " needs a scale, expected ", element_text(element), ":row or another");
      if (rule_given_) wrong("a rule for scales, but no scales: expected row, head, tensor, groupN or tileN beside it");
      return;
    }
    // Values near 1 would get a subnormal scale, whose rounding pushes the largest element of a row out of range.
    if (element.mantissa_bits == 23) wrong("fp32 takes no scale, it has the range of the scale itself");
  }

  static constexpr std::int64_t kLongest = std::int64_t{1} << 20;
  std::string_view text_, residual_;
  Format format_;
  bool named_ = false, rule_given_ = false;
};

}  // namespace

Element custom_element(const CustomElement& custom) {
  const int e = custom.exponent_bits, m = custom.mantissa_bits;
  const auto expect = [](bool right, const auto&... what) {
    if (!right) fail("custom(...): ", what...);
  };
  expect(e >= 0 && e <= 8, "'e' is 0 to 8, found ", e);
  expect(m >= 1 && m <= 23, "'m' is 1 to 23, found ", m);
  const int bits = 1 + e + m, storage = bits <= 8 ? bits : bits <= 16 ? 16 : 32;
  if (e == 0) {
    expect(!custom.bias && custom.specials == Specials::none && custom.overflow == Overflow::saturate,
           "an integer type (e=0) has no 'bias', no 'specials' and saturates");
    return {kCustom, 0, m, m, (1U << m) - 1, storage, Specials::none, true, Overflow::saturate};
  }
  const int emin = 1 - custom.bias.value_or(usual_bias(e));
  std::uint32_t max_code = (1U << (e + m)) - 1;
  if (custom.specials == Specials::nan) max_code -= 1;
  if (custom.specials == Specials::infinity_and_nan) max_code -= 1U << m;
  expect(custom.specials != Specials::infinity_and_nan || e >= 2, "'specials=inf' needs 'e' of 2 or more, found ", e);
  const int emax = static_cast<int>(max_code >> m) + emin - 1;
  expect(emin >= -126 && emax <= 127, "'bias' ", 1 - emin, " gives exponents ", emin, " to ", emax,
         ", expected those of a float, -126 to 127");
  expect(custom.overflow != Overflow::infinity || custom.specials == Specials::infinity_and_nan,
         "'overflow=inf' needs 'specials=inf'");
  expect(custom.overflow != Overflow::nan || custom.specials != Specials::none, "'overflow=nan' needs 'specials'");
  return {kCustom, e, m, emin, max_code, storage, custom.specials, false, custom.overflow};
}

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
  std::string text;
  Format inner = *this;  // what stands behind its name
  if (given_name.empty()) {
    text = scaled_text(*this);
  } else {
    text = given_name;
    const Format& given = *find_own_format(given_name);
    if (given.rounding != Rounding::nearest) inner.rounding = Rounding::nearest;
    if (given.hadamard) inner.hadamard = false;
    inner.cap = 0;
  }
  if (inner.cap > 0) text += ":cap=" + shortest(cap);
  if (inner.rounding == Rounding::toward_zero) text += ":rz";
  if (inner.rounding == Rounding::stochastic) text += random_bits == 32 ? ":sr" : ":sr=" + std::to_string(random_bits);
  if (inner.hadamard) text += ":hadamard";
  if (residual) text += ":ef=" + residual_text(*this);
  return text;
}

Format parse_format(std::string_view text) { return Parser(text).parse(); }

}  // namespace replayssm
