#include "core/format.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/error.h"
#include "core/own_format.h"
#include "core/scales.h"

namespace replayssm {

namespace {

template <class Real>
using Int = typename Rounder<Real>::Int;

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
        zero_sign_(element.has_minus_zero() ? Rounder<Real>::kSign : 0),
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

// The rounding of single elements in any mode, counting those beyond the range; element i of those that are stored.
template <class Real>
class AnyRounder {
 public:
  AnyRounder(const Format& format, const Draw& draw) : format_(format), draw_(draw), rounder_(format.element) {}

  Real operator()(Real x, std::int64_t i) {
    using R = Rounder<Real>;
    if (format_.rounding == Rounding::nearest) return rounder_.round(x);
    const bool cut = format_.rounding == Rounding::toward_zero;
    const Int<Real> a = R::magnitude_of(x);
    const Int<Real> r = cut ? rounder_.cut(a) : rounder_.drawn(a, word(draw_.first + i), format_.random_bits);
    overflowed_ += (r > rounder_.largest() && a < R::kInfinity) || (a > R::kInfinity && !format_.element.has_nan());
    return rounder_.limited(x, r, cut);
  }
  std::int64_t overflowed() const { return overflowed_; }

 private:
  std::uint32_t word(std::int64_t element) {
    if (element / 4 != quarter_) {
      quarter_ = element / 4;
      words_ = draw_.words(quarter_);
    }
    return words_.word[element % 4];
  }

  const Format& format_;
  const Draw& draw_;
  const Rounder<Real> rounder_;
  std::int64_t overflowed_ = 0, quarter_ = -1;
  Words4 words_ = {};
};

template <class Real>
std::int64_t count_finite(const Real* x, std::int64_t n) {
  return std::count_if(x, x + n, [](Real value) { return std::isfinite(value); });
}

template <class Real>
std::int64_t round_row(const Element& element, const Rounder<Real>& rounder, const Adder<Real>& adder, Real* x,
                       std::int64_t n) {
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
    overflowed += (a > rounder.overflow_above() && a < Rounder<Real>::kInfinity) ||
                  (a > Rounder<Real>::kInfinity && !element.has_nan());
    x[i] = rounder.round(x[i]);
  }
  return overflowed;
}

// Elements that share a scale.
template <class Real>
std::int64_t round_block(const Rounder<Real>& rounder, const Adder<Real>& adder, Real max, const Scaler<Real>& scaler,
                         Real* x, std::int64_t n) {
  const Int<Real> largest = largest_magnitude(x, n);
  const Real scale = scaler.value(scaler.code(largest));
  if (std::isnan(scale)) {
    const std::int64_t overflowed = count_finite(x, n);
    std::fill_n(x, n, std::numeric_limits<Real>::quiet_NaN());
    return overflowed;
  }
  // Division and product keep the order, so the largest element speaks for all. With an amax scale it can be out of
  // range, but only by the rounding of a scale that is subnormal or of a product next to the largest float.
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

// The format of what has been multiplied by H.
Format rotated(Format format) {
  format.hadamard = false;
  return format;
}

void require_codes(const Format& format) {
  if (format.exact()) fail("format 'exact' has no codes: expected one that rounds");
  if (format.own) fail("format '", format.own->name, "' is a function and has no codes");
}

void store(std::byte* codes, int storage_bits, std::int64_t i, std::uint32_t code) {
  if (storage_bits < 8) {
    const std::int64_t bit = i * storage_bits, shift = bit % 8;
    codes[bit / 8] |= static_cast<std::byte>(code << shift);
    if (shift + storage_bits > 8) codes[bit / 8 + 1] |= static_cast<std::byte>(code >> (8 - shift));
    return;
  }
  for (int byte = 0; byte < storage_bits / 8; ++byte) {
    codes[i * (storage_bits / 8) + byte] = static_cast<std::byte>(code >> (8 * byte));
  }
}

std::uint32_t load(const std::byte* codes, int storage_bits, std::int64_t i) {
  std::uint32_t code = 0;
  if (storage_bits < 8) {
    const std::int64_t bit = i * storage_bits, shift = bit % 8;
    code = std::to_integer<std::uint32_t>(codes[bit / 8]) >> shift;
    if (shift + storage_bits > 8) code |= std::to_integer<std::uint32_t>(codes[bit / 8 + 1]) << (8 - shift);
    return code;
  }
  for (int byte = 0; byte < storage_bits / 8; ++byte) {
    code |= std::to_integer<std::uint32_t>(codes[i * (storage_bits / 8) + byte]) << (8 * byte);
  }
  return code;
}

// Scales where encode_rows() leaves them: that of the head, then `width` bytes each.
class StoredScales {
 public:
  StoredScales(const Format& format, const void* scales)
      : scales_(static_cast<const std::byte*>(scales)),
        width_(format.scale_width()),
        head_(format.head_scale_width()) {}

  float head() const { return head_ == 0 ? 1 : __builtin_bit_cast(float, get(0, head_)); }
  std::uint32_t code(std::int64_t i) const { return get(head_ + i * width_, width_); }

  static void put_head(const Format& format, void* scales, float scale) {
    if (format.head_scale_width() > 0) std::memcpy(scales, &scale, sizeof scale);
  }
  static void put(const Format& format, void* scales, std::int64_t i, std::uint32_t code) {
    const std::int64_t width = format.scale_width();
    std::memcpy(static_cast<std::byte*>(scales) + format.head_scale_width() + i * width, &code,
                static_cast<std::size_t>(width));
  }

 private:
  std::uint32_t get(std::int64_t at, std::int64_t width) const {
    std::uint32_t code = 0;
    std::memcpy(&code, scales_ + at, static_cast<std::size_t>(width));
    return code;
  }

  const std::byte* scales_;
  std::int64_t width_, head_;
};

/// each(first, count, scale) for every block of the rows of a head, with the scale that is stored for it.
template <class Real, class Each>
void for_each_stored_block(const Format& format, const void* scales, std::int64_t rows, std::int64_t n, Each&& each) {
  const StoredScales stored(format, scales);
  const Scaler<Real> scaler(format, stored.head());
  std::int64_t next = 0;
  for_each_block(format, rows, n, [&](std::int64_t first, std::int64_t count) {
    each(first, count, scaler.value(stored.code(next++)));
  });
}

// round_rows() in another mode than to nearest: element by element.
template <class Real>
std::int64_t round_otherwise(const Format& format, Real* data, std::int64_t rows, std::int64_t n, const Draw& draw) {
  AnyRounder<Real> round(format, draw);
  if (format.scale == Scale::none) {
    for (std::int64_t i = 0; i < rows * n; ++i) data[i] = round(data[i], i);
    return round.overflowed();
  }
  const Scaler<Real> scaler(format, data, rows * n);
  std::int64_t lost = 0;
  for_each_block(format, rows, n, [&](std::int64_t first, std::int64_t count) {
    const Real scale = scaler.value(scaler.code(largest_magnitude(data + first, count)));
    if (std::isnan(scale)) {
      lost += count_finite(data + first, count);
      std::fill_n(data + first, count, std::numeric_limits<Real>::quiet_NaN());
      return;
    }
    for (std::int64_t i = first; i < first + count; ++i) {
      const std::int64_t before = round.overflowed();
      data[i] = round(data[i] / scale, i) * scale;
      lost += round.overflowed() == before && !std::isfinite(data[i]);
    }
  });
  return lost + round.overflowed();
}

template <class Real>
std::int64_t round_by_function(const RoundFunction& function, Real* data, std::int64_t rows, std::int64_t n,
                               const Draw& draw) {
  std::vector<double> wide(data, data + rows * n);
  function(wide.data(), rows, n, draw);
  std::int64_t lost = 0;
  for (std::int64_t i = 0; i < rows * n; ++i) {
    const Real before = data[i];
    data[i] = static_cast<Real>(wide[static_cast<std::size_t>(i)]);
    lost += std::isfinite(before) && !std::isfinite(data[i]);
  }
  return lost;
}

}  // namespace

std::int64_t Format::scales(std::int64_t rows, std::int64_t n) const {
  switch (scale) {
    case Scale::none:
      return 0;
    case Scale::row:
      return rows;
    case Scale::group:
      return rows * ((n + extent - 1) / extent);
    case Scale::tile:
      return (rows + extent - 1) / extent;
    case Scale::head:
      return 1;
  }
  return 0;
}

std::int64_t Format::scale_width() const {
  if (scale == Scale::none) return 0;
  return rule == ScaleRule::amax ? 4 : 1;
}

std::int64_t Format::scale_bytes(std::int64_t rows, std::int64_t n) const {
  return head_scale_width() + scales(rows, n) * scale_width();
}

std::span<const Element> elements() { return kElements; }

template <class Real>
void hadamard_rows(Real* data, std::int64_t rows, std::int64_t n) {
  const std::int64_t size = n & -n;  // the largest power of two in n
  const Real factor = 1 / std::sqrt(static_cast<Real>(size));
  for (Real* x = data; x < data + rows * n; x += size) {
    for (std::int64_t half = 1; half < size; half *= 2) {
      for (std::int64_t first = 0; first < size; first += 2 * half) {
        for (std::int64_t i = first; i < first + half; ++i) {
          const Real a = x[i], b = x[i + half];
          x[i] = a + b;
          x[i + half] = a - b;
        }
      }
    }
    for (std::int64_t i = 0; i < size; ++i) x[i] *= factor;
  }
}

template <class Real>
std::int64_t round_rows(const Format& format, Real* data, std::int64_t rows, std::int64_t n, const Draw& draw) {
  if (format.exact()) return 0;
  if (format.hadamard) {
    hadamard_rows(data, rows, n);
    const std::int64_t overflowed = round_rows(rotated(format), data, rows, n, draw);
    hadamard_rows(data, rows, n);
    return overflowed;
  }
  if (format.own) return round_by_function(format.own->function, data, rows, n, draw);
  if (format.rounding != Rounding::nearest) return round_otherwise(format, data, rows, n, draw);
  const Rounder<Real> rounder(format.element);
  const Adder<Real> adder(format.element);
  std::int64_t overflowed = 0;
  if (format.scale == Scale::none) {
    for (std::int64_t row = 0; row < rows; ++row)
      overflowed += round_row(format.element, rounder, adder, data + row * n, n);
    return overflowed;
  }
  const Scaler<Real> scaler(format, data, rows * n);
  const Real max = decode<Real>(format.element, format.element.max_code);
  for_each_block(format, rows, n, [&](std::int64_t first, std::int64_t count) {
    overflowed += round_block(rounder, adder, max, scaler, data + first, count);
  });
  return overflowed;
}

template <class Real>
void encode_scaled(const Format& format, const Real* data, std::int64_t rows, std::int64_t n, const void* scales,
                   std::byte* codes, const Draw& draw) {
  const std::int64_t row_codes = format.code_bytes(n);
  std::fill_n(codes, rows * row_codes, std::byte{0});
  AnyRounder<Real> round(format, draw);
  const auto put = [&](std::int64_t i, Real x) {
    store(codes + i / n * row_codes, format.element.storage_bits, i % n, encode(format.element, round(x, i)));
  };
  if (format.scale == Scale::none) {
    for (std::int64_t i = 0; i < rows * n; ++i) put(i, data[i]);
    return;
  }
  for_each_stored_block<Real>(format, scales, rows, n, [&](std::int64_t first, std::int64_t count, Real scale) {
    if (std::isnan(scale)) return;
    for (std::int64_t i = first; i < first + count; ++i) put(i, data[i] / scale);
  });
}

template <class Real>
void encode_rows(const Format& format, const Real* data, std::int64_t rows, std::int64_t n, std::byte* codes,
                 void* scales, const Draw& draw) {
  require_codes(format);
  if (format.hadamard) {
    std::vector<Real> turned(data, data + rows * n);
    hadamard_rows(turned.data(), rows, n);
    return encode_rows(rotated(format), turned.data(), rows, n, codes, scales, draw);
  }
  if (format.scale != Scale::none) {
    const Scaler<Real> scaler(format, data, rows * n);
    StoredScales::put_head(format, scales, scaler.head_scale());
    std::int64_t next = 0;
    for_each_block(format, rows, n, [&](std::int64_t first, std::int64_t count) {
      StoredScales::put(format, scales, next++, scaler.code(largest_magnitude(data + first, count)));
    });
  }
  encode_scaled(format, data, rows, n, scales, codes, draw);
}

template <class Real>
void decode_rows(const Format& format, const std::byte* codes, const void* scales, std::int64_t rows, std::int64_t n,
                 Real* data) {
  require_codes(format);
  if (format.hadamard) {
    decode_rows(rotated(format), codes, scales, rows, n, data);
    return hadamard_rows(data, rows, n);
  }
  const std::int64_t row_codes = format.code_bytes(n);
  const auto get = [&](std::int64_t i) {
    return decode<Real>(format.element, load(codes + i / n * row_codes, format.element.storage_bits, i % n));
  };
  if (format.scale == Scale::none) {
    for (std::int64_t i = 0; i < rows * n; ++i) data[i] = get(i);
    return;
  }
  for_each_stored_block<Real>(format, scales, rows, n, [&](std::int64_t first, std::int64_t count, Real scale) {
    for (std::int64_t i = first; i < first + count; ++i) data[i] = get(i) * scale;
  });
}

template void hadamard_rows(float*, std::int64_t, std::int64_t);
template void hadamard_rows(double*, std::int64_t, std::int64_t);
template std::int64_t round_rows(const Format&, float*, std::int64_t, std::int64_t, const Draw&);
template std::int64_t round_rows(const Format&, double*, std::int64_t, std::int64_t, const Draw&);
template void encode_rows(const Format&, const float*, std::int64_t, std::int64_t, std::byte*, void*, const Draw&);
template void encode_rows(const Format&, const double*, std::int64_t, std::int64_t, std::byte*, void*, const Draw&);
template void encode_scaled(const Format&, const float*, std::int64_t, std::int64_t, const void*, std::byte*,
                            const Draw&);
template void encode_scaled(const Format&, const double*, std::int64_t, std::int64_t, const void*, std::byte*,
                            const Draw&);
template void decode_rows(const Format&, const std::byte*, const void*, std::int64_t, std::int64_t, float*);
template void decode_rows(const Format&, const std::byte*, const void*, std::int64_t, std::int64_t, double*);

}  // namespace replayssm
