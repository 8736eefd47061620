#pragma once

// Private to core and analysis. How the scales of a format follow from the values, and what a stored scale means.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

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
        head_scale_(head_scale) {}

  /// For the n elements of a head.
  Scaler(const Format& format, const Real* head, std::int64_t n) : Scaler(format, 1.0F) {
    if (rule_ == ScaleRule::nvfp4) head_scale_ = amax_scale(largest_magnitude(head, n), 448 * max_);
  }

  float head_scale() const { return head_scale_; }

  /// The code of the scale of elements whose largest magnitude is `largest`.
  std::uint32_t code(Int largest) const {
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
  float head_scale_;
};

/// Every row times the matrix H of Format, in place; its own inverse.
template <class Real>
void hadamard_rows(Real* data, std::int64_t rows, std::int64_t n);

/// The codes of encode_rows() under scales that are given, laid out as there.
template <class Real>
void encode_scaled(const Format& format, const Real* data, std::int64_t rows, std::int64_t n, const void* scales,
                   std::byte* codes, const Draw& draw = {});

}  // namespace replayssm
