#pragma once

// Private to core and analysis. How the scales of a format follow from the values, and what a stored scale means.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>

#include "core/format.h"

namespace replayssm {

/// body(first, count) for every run of elements that share a scale, in the order in which scales are stored.
/// Always inlined: otherwise GCC reads what the body refers to from memory in every turn of its loops.
template <class Body>
[[gnu::always_inline]] inline void for_each_block(const Format& format, std::int64_t rows, std::int64_t n,
                                                  Body&& body) {
  const std::int64_t block = format.block(rows, n);
  const std::int64_t run = format.scale == Scale::group ? n : block;  // groups end where their row does
  for (std::int64_t first = 0; first < rows * n; first += run) {
    const std::int64_t end = std::min(first + run, rows * n);
    for (std::int64_t i = first; i < end; i += block) body(i, std::min(block, end - i));
  }
}

/// The largest magnitude of n numbers, as Rounder orders them: infinity above every finite value and NaN above both.
/// Two maxima: one would wait for its own last comparison.
template <class Real>
typename Rounder<Real>::Int largest_magnitude(const Real* x, std::int64_t n) {
  typename Rounder<Real>::Int even = 0, odd = 0;
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

template <class Real>
Extremes<Real> extremes_of(const Real* x, std::int64_t n) {
  Extremes<Real> out;
  Real sum = 0;  // of zeros, but for what is not finite
  for (std::int64_t i = 0; i < n; ++i) {
    out.low = std::min(out.low, x[i]);
    out.high = std::max(out.high, x[i]);
    sum += x[i] * Real(0);
  }
  if (sum != 0) out.low = out.high = std::numeric_limits<Real>::quiet_NaN();
  return out;
}

/// r <- what storing left of r as s, n numbers; 0 where s is not finite.
template <class Real>
void keep_error(const Real* s, std::int64_t n, Real* r) {
  for (std::int64_t i = 0; i < n; ++i) r[i] = std::isfinite(s[i]) ? r[i] - s[i] : Real(0);
}

/// The format of what has been multiplied by H.
inline Format unrotated(Format format) {
  format.hadamard = false;
  return format;
}

/// A scale with its zero point.
struct AffineScale {
  std::uint32_t code;
  std::int32_t zero;
};

/// The scales of the elements of one head under a format that has some. A scale is stored as a code: the bits of a
/// float, a byte of E8M0 or a byte of e4m3, see ScaleRule.
template <class Real>
class Scaler {
 public:
  using Int = typename Rounder<Real>::Int;

  /// For codes whose scale of the head is known.
  Scaler(const Format& format, float head_scale)
      : rule_(format.rule),
        max_(format.cap > 0 ? static_cast<Real>(format.cap) : decode<Real>(format.element, format.element.max_code)),
        wide_max_(__builtin_bit_cast(std::int64_t, static_cast<double>(max_))),
        steps_(std::ldexp(Real(2), format.element.mantissa_bits) - 1),
        head_scale_(head_scale) {}

  /// For the n elements of a head; `tensor` as in round_rows().
  Scaler(const Format& format, const Real* head, std::int64_t n, const Extremes<Real>* tensor = nullptr)
      : Scaler(format, 1.0F) {
    if (rule_ == ScaleRule::nvfp4) head_scale_ = amax_scale(largest_magnitude(head, n), 448 * max_);
    if (format.scale == Scale::tensor && tensor) tensor_ = *tensor;
  }

  float head_scale() const { return head_scale_; }

  /// The code of the scale of elements whose largest magnitude is `largest`.
  std::uint32_t code(Int largest) const {
    if (tensor_) largest = Rounder<Real>::magnitude_of(std::max(-tensor_->low, tensor_->high));
    switch (rule_) {
      case ScaleRule::amax:
        return __builtin_bit_cast(std::uint32_t, amax_scale(largest, max_));
      case ScaleRule::nvfp4: {
        const Real amax = Rounder<Real>::value(largest);
        const std::uint32_t b = encode(kBlockScale, amax / max_ / static_cast<Real>(head_scale_));
        return b == 0 ? encode(kBlockScale, Real(1)) : b;
      }
      default:
        return power_code(largest);
    }
  }

  /// Scale and zero point of elements with these extremes, see Format::asymmetric.
  AffineScale affine(const Extremes<Real>& own) const {
    const Extremes<Real>& x = tensor_ ? *tensor_ : own;
    const auto scale = [&] {
      const auto s = static_cast<float>((x.high - x.low) / steps_);
      return s == 0 ? 1.0F : std::isfinite(s) ? s : std::numeric_limits<float>::quiet_NaN();
    }();
    const Real lowest = -(steps_ + 1) / 2;
    const Real zero = lowest - x.low / static_cast<Real>(scale);
    AffineScale out{__builtin_bit_cast(std::uint32_t, scale), 0};
    // To the nearest by hand: floor and rest are exact.
    const Real down = std::floor(zero), rest = zero - down;
    const bool up = rest > Real(0.5) || (rest == Real(0.5) && std::fmod(down, Real(2)) != 0);
    if (std::isfinite(scale)) {
      out.zero = static_cast<std::int32_t>(std::clamp<Real>(down + (up ? 1 : 0), lowest, -lowest - 1));
    }
    return out;
  }

  /// The scale that a code stands for.
  Real value(std::uint32_t code) const {
    switch (rule_) {
      case ScaleRule::amax:
        return static_cast<Real>(__builtin_bit_cast(float, code));
      case ScaleRule::nvfp4:
        return static_cast<Real>(head_scale_) * decode<Real>(kBlockScale, code);
      default:
        return static_cast<Real>(decode_e8m0(code));
    }
  }

 private:
  static constexpr Element kBlockScale = *find_element("e4m3");

  static float amax_scale(Int largest, Real max) {
    if (largest >= Rounder<Real>::kInfinity) return std::numeric_limits<float>::quiet_NaN();
    const auto scale = static_cast<float>(Rounder<Real>::value(largest) / max);
    if (!std::isfinite(scale)) return std::numeric_limits<float>::quiet_NaN();
    return scale == 0 ? 1 : scale;
  }

  std::uint32_t power_code(Int largest) const {
    if (largest >= Rounder<Real>::kInfinity) return 255;
    // As a double, in which no float is subnormal; its own subnormals, of exponent field 0, are below 2^-127 anyway.
    constexpr int mantissa = Rounder<double>::kMantissa;
    const auto amax = __builtin_bit_cast(std::int64_t, static_cast<double>(Rounder<Real>::value(largest)));
    std::int64_t e = (amax >> mantissa) - (wide_max_ >> mantissa);
    constexpr std::int64_t fraction = Rounder<double>::kLeading - 1;
    if (rule_ == ScaleRule::ceil && (amax & fraction) > (wide_max_ & fraction)) ++e;
    return static_cast<std::uint32_t>(std::clamp<std::int64_t>(e, -127, 127) + 127);
  }

  ScaleRule rule_;
  Real max_;               // the largest value of the element, or the cap
  std::int64_t wide_max_;  // its bits as a double
  Real steps_;             // 2^b - 1 of an integer of b bits
  float head_scale_;
  std::optional<Extremes<Real>> tensor_{};
};

/// Every row times the matrix H of Format, in place; its own inverse.
template <class Real>
void hadamard_rows(Real* data, std::int64_t rows, std::int64_t n);

/// The codes of encode_rows() under scales that are given, laid out as there.
template <class Real>
void encode_scaled(const Format& format, const Real* data, std::int64_t rows, std::int64_t n, const void* scales,
                   std::byte* codes, const Draw& draw = {});

}  // namespace replayssm
