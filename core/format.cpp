#include "core/format.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"

namespace replayssm {

namespace {

// Named in the project's vocabulary, to be told from a typing error.
constexpr std::string_view kLaterNames[] = {"e4m3fnuz", "e5m2fnuz",   "e3m2",       "e2m3",       "e2m1",
                                            "int16",    "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2",
                                            "mxfp4",    "mxint8",     "nvfp4"};
constexpr std::string_view kLaterModifiers[] = {"tensor", "head", "sr", "hadamard", "ceil", "floor"};
constexpr std::string_view kLaterStems[] = {"tile", "group", "ef=", "cap="};

bool contains(std::span<const std::string_view> names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

bool known_later(std::string_view modifier) {
  return contains(kLaterModifiers, modifier) || std::ranges::any_of(kLaterStems, [&](std::string_view stem) {
           return modifier.size() > stem.size() && modifier.starts_with(stem);
         });
}

Element find_element(std::string_view name, std::string_view text) {
  if (name == kExact.name) return kExact;
  for (const Element& element : kElements) {
    if (element.name == name) return element;
  }
  if (contains(kLaterNames, name) || name.starts_with("custom(")) {
    fail("format '", text, "': '", name, "' is not supported yet");
  }
  std::string known(kExact.name);
  for (const Element& element : kElements) known.append(", ").append(element.name);
  fail("format '", text, "': unknown name '", name, "', expected one of ", known);
}

template <class Real>
using Int = typename Rounder<Real>::Int;

// Of the magnitudes as integers, whose order puts infinity above every finite value and NaN above both. Two maxima: one
// would wait for its own last comparison.
template <class Real>
Int<Real> largest_magnitude(const Real* x, std::int64_t n) {
  Int<Real> even = 0, odd = 0;
  constexpr std::int64_t half = 64 / sizeof(Real);
  std::int64_t i = 0;
  for (; i + 2 * half <= n; i += 2 * half) {
    for (std::int64_t k = 0; k < half; ++k) {
      even = std::max(even, Rounder<Real>::magnitude_of(x[i + k]));
      odd = std::max(odd, Rounder<Real>::magnitude_of(x[i + half + k]));
    }
  }
  for (; i < n; ++i) even = std::max(even, Rounder<Real>::magnitude_of(x[i]));
  return std::max(even, odd);
}

// Rounder::round for values in range, by two additions. m = 2^(e + M - m), e the exponent of x but at least the
// element's emin, M and m the mantissa bits of Real and of the element, makes the last bit of |x| + m the last that the
// element has; the hardware rounds the sum to nearest even, and subtracting m is exact. This is half the operations of
// the integer source, of which it gives the same bits in the default rounding mode; the codes themselves are always
// made by that.
template <class Real>
class Adder {
 public:
  explicit Adder(const Element& element)
      : emin_((Int<Real>{element.emin} + bias) << mantissa),
        shift_(Int<Real>{mantissa - element.mantissa_bits} << mantissa),
        zero_sign_(element.integer ? 0 : Rounder<Real>::kSign),
        identity_(mantissa == element.mantissa_bits) {}

  bool identity() const { return identity_; }

  // The largest magnitude whose m is finite.
  Int<Real> most() const { return Rounder<Real>::kInfinity - shift_ - 1; }

  Real round(Real x) const {
    using R = Rounder<Real>;
    const Int<Real> a = R::magnitude_of(x), exponent = a & R::kInfinity;
    const Real m = R::value((exponent > emin_ ? exponent : emin_) + shift_);
    const Real r = (R::value(a) + m) - m;
    return R::value(R::bits(r) | (R::bits(x) & (R::bits(r) > 0 ? R::kSign : zero_sign_)));
  }

 private:
  static constexpr int mantissa = Rounder<Real>::kMantissa;
  static constexpr Int<Real> bias = detail::Binary<Real>::kBias;
  Int<Real> emin_, shift_, zero_sign_;
  bool identity_;
};

// The scale that takes the largest magnitude of a row to the element's largest value; NaN where none does.
template <class Real>
float row_scale(Real max, Int<Real> largest) {
  if (largest >= Rounder<Real>::kInfinity) return std::numeric_limits<float>::quiet_NaN();
  const auto scale = static_cast<float>(Rounder<Real>::value(largest) / max);
  if (!std::isfinite(scale)) return std::numeric_limits<float>::quiet_NaN();
  return scale == 0 ? 1 : scale;
}

template <class Real>
std::int64_t count_finite(const Real* x, std::int64_t n) {
  return std::count_if(x, x + n, [](Real value) { return std::isfinite(value); });
}

template <class Real>
std::int64_t round_row(const Rounder<Real>& rounder, const Adder<Real>& adder, Real* x, std::int64_t n) {
  // Hardly ever is anything out of range; so the loop that nearly all the time goes to need not look.
  const Int<Real> most = std::min(rounder.overflow_above(), adder.most());
  Int<Real> outside = 0;
  for (std::int64_t i = 0; i < n; ++i) outside += Rounder<Real>::magnitude_of(x[i]) > most;
  if (outside == 0) {
    if (adder.identity()) return 0;
    for (std::int64_t i = 0; i < n; ++i) x[i] = adder.round(x[i]);
    return 0;
  }
  std::int64_t overflowed = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const Int<Real> a = Rounder<Real>::magnitude_of(x[i]);
    overflowed += a > rounder.overflow_above() && a < Rounder<Real>::kInfinity;
    x[i] = rounder.round(x[i]);
  }
  return overflowed;
}

template <class Real>
std::int64_t round_scaled_row(const Rounder<Real>& rounder, const Adder<Real>& adder, Real max, Real* x,
                              std::int64_t n) {
  const Int<Real> largest = largest_magnitude(x, n);
  const auto scale = static_cast<Real>(row_scale(max, largest));
  if (std::isnan(scale)) {
    const std::int64_t overflowed = count_finite(x, n);
    std::fill_n(x, n, std::numeric_limits<Real>::quiet_NaN());
    return overflowed;
  }
  // Division and product keep the order, so the largest element speaks for the row. It can be out of range, but only
  // by the rounding of a scale that is subnormal or of a product next to the largest float.
  const Real top = Rounder<Real>::value(largest) / scale;
  if (Rounder<Real>::magnitude_of(top) <= std::min(rounder.overflow_above(), adder.most()) &&
      std::isfinite(max * scale)) {
    for (std::int64_t i = 0; i < n; ++i) x[i] = adder.round(x[i] / scale) * scale;
    return 0;
  }
  std::int64_t overflowed = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const Real quotient = x[i] / scale;
    x[i] = rounder.round(quotient) * scale;
    overflowed += Rounder<Real>::magnitude_of(quotient) > rounder.overflow_above() || !std::isfinite(x[i]);
  }
  return overflowed;
}

void require_codes(const Format& format) {
  if (format.exact()) fail("format 'exact' has no codes: expected one that rounds");
}

void store(std::byte* codes, int storage_bits, std::int64_t i, std::uint32_t code) {
  if (storage_bits == 4) {
    codes[i / 2] |= static_cast<std::byte>(code << (i % 2 * 4));
    return;
  }
  for (int byte = 0; byte < storage_bits / 8; ++byte) {
    codes[i * (storage_bits / 8) + byte] = static_cast<std::byte>(code >> (8 * byte));
  }
}

std::uint32_t load(const std::byte* codes, int storage_bits, std::int64_t i) {
  if (storage_bits == 4) return std::to_integer<std::uint32_t>(codes[i / 2]) >> (i % 2 * 4);
  std::uint32_t code = 0;
  for (int byte = 0; byte < storage_bits / 8; ++byte) {
    code |= std::to_integer<std::uint32_t>(codes[i * (storage_bits / 8) + byte]) << (8 * byte);
  }
  return code;
}

}  // namespace

std::string Format::text() const { return std::string(element.name) + (scale == Scale::row ? ":row" : ""); }

Format parse_format(std::string_view text) {
  const std::size_t colon = std::min(text.find(':'), text.size());
  Format format{find_element(text.substr(0, colon), text)};
  for (std::size_t begin = colon; begin < text.size();) {
    const std::size_t end = std::min(text.find(':', begin + 1), text.size());
    const std::string_view modifier = text.substr(begin + 1, end - begin - 1);
    begin = end;
    if (known_later(modifier)) fail("format '", text, "': modifier '", modifier, "' is not supported yet");
    if (modifier != "row") fail("format '", text, "': unknown modifier '", modifier, "', expected row");
    if (format.scale == Scale::row) fail("format '", text, "': modifier 'row' is given twice");
    format.scale = Scale::row;
  }
  if (format.scale == Scale::row && format.exact()) {
    fail("format '", text, "': exact takes no scale, nothing of it is rounded");
  }
  // Values near 1 would get a subnormal scale, whose rounding pushes the largest element of a row out of range.
  if (format.scale == Scale::row && format.element.mantissa_bits == 23) {
    fail("format '", text, "': fp32 takes no scale, it has the range of the scale itself");
  }
  if (format.scale == Scale::none && format.element.integer) {
    fail("format '", text, "': ", format.element.name, " needs a scale, expected ", format.element.name, ":row");
  }
  return format;
}

std::span<const Element> elements() { return kElements; }

template <class Real>
std::int64_t round_rows(const Format& format, Real* data, std::int64_t rows, std::int64_t n) {
  if (format.exact()) return 0;
  const Rounder<Real> rounder(format.element);
  const Adder<Real> adder(format.element);
  const Real max = decode<Real>(format.element, format.element.max_code);
  std::int64_t overflowed = 0;
  for (std::int64_t row = 0; row < rows; ++row) {
    Real* x = data + row * n;
    overflowed +=
        format.scale == Scale::row ? round_scaled_row(rounder, adder, max, x, n) : round_row(rounder, adder, x, n);
  }
  return overflowed;
}

template <class Real>
void encode_rows(const Format& format, const Real* data, std::int64_t rows, std::int64_t n, std::byte* codes,
                 float* scales) {
  require_codes(format);
  const Real max = decode<Real>(format.element, format.element.max_code);
  const std::int64_t row_codes = format.code_bytes(n);
  std::fill_n(codes, rows * row_codes, std::byte{0});
  for (std::int64_t row = 0; row < rows; ++row, data += n, codes += row_codes) {
    float scale = 1;
    if (format.scale == Scale::row) {
      scale = scales[row] = row_scale(max, largest_magnitude(data, n));
      if (std::isnan(scale)) continue;
    }
    for (std::int64_t i = 0; i < n; ++i) {
      const Real x = format.scale == Scale::row ? data[i] / static_cast<Real>(scale) : data[i];
      store(codes, format.element.storage_bits, i, encode(format.element, x));
    }
  }
}

template <class Real>
void decode_rows(const Format& format, const std::byte* codes, const float* scales, std::int64_t rows, std::int64_t n,
                 Real* data) {
  require_codes(format);
  for (std::int64_t row = 0; row < rows; ++row, data += n, codes += format.code_bytes(n)) {
    for (std::int64_t i = 0; i < n; ++i) {
      const Real x = decode<Real>(format.element, load(codes, format.element.storage_bits, i));
      data[i] = format.scale == Scale::row ? x * static_cast<Real>(scales[row]) : x;
    }
  }
}

template std::int64_t round_rows(const Format&, float*, std::int64_t, std::int64_t);
template std::int64_t round_rows(const Format&, double*, std::int64_t, std::int64_t);
template void encode_rows(const Format&, const float*, std::int64_t, std::int64_t, std::byte*, float*);
template void encode_rows(const Format&, const double*, std::int64_t, std::int64_t, std::byte*, float*);
template void decode_rows(const Format&, const std::byte*, const float*, std::int64_t, std::int64_t, float*);
template void decode_rows(const Format&, const std::byte*, const float*, std::int64_t, std::int64_t, double*);

}  // namespace replayssm
