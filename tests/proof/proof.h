#pragma once

// The proof of the element conversions: floats in order beside the sorted code values, compared with their midpoints;
// and that oracle beside rationals. Run whole by prove_formats, in strides by the tests.

#include <algorithm>
#include <boost/multiprecision/cpp_int.hpp>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "core/format.h"
#include "tests/core/format_oracle.h"

namespace replayssm::proof {

/// What was compared, and how much of it was not as it should be.
struct Count {
  std::int64_t compared = 0, wrong = 0;
  Count& operator+=(const Count& other) {
    compared += other.compared;
    wrong += other.wrong;
    return *this;
  }
  void expect(bool right) { ++compared, wrong += !right; }
};

/// What a finite magnitude becomes: a code without sign, which may lie beyond the range.
class Oracle {
 public:
  Oracle(const Definition& d, bool toward_zero) : d_(d), toward_zero_(toward_zero) { move_to(0); }

  /// By bisection, or a step or two up from the last answer: magnitudes come in order.
  std::uint32_t code(double x) {
    if (x < last_) move_to(find(x));
    last_ = x;
    for (int step = 0; passes(code_, edge_, x); ++step) move_to(step == 4 ? find(x) : code_ + 1);
    return code_;
  }
  /// The value stored for the last answer, with the sign of x.
  double value(double x) const { return value_ == 0 && !d_.has_minus_zero() ? 0.0 : std::copysign(value_, x); }
  /// Whether the last answer is also that of x, which is no less.
  bool holds(double x) const { return !passes(code_, edge_, x); }
  double infinite(double x) const { return std::copysign(d_.saturates() ? d_.max : HUGE_VAL, x); }

 private:
  /// Where a code ends, and whether x lies beyond.
  double edge(std::uint32_t code) const { return toward_zero_ ? Number(d_, code + 1) : Midpoint(d_, code); }
  bool passes(std::uint32_t code, double edge, double x) const {
    return code <= d_.max_code && (x > edge || (x == edge && (toward_zero_ || code % 2 == 1)));
  }
  void move_to(std::uint32_t code) {
    code_ = code;
    edge_ = edge(code);
    value_ = code <= d_.max_code ? Number(d_, code) : toward_zero_ || d_.saturates() ? d_.max : HUGE_VAL;
  }
  std::uint32_t find(double x) const {
    std::uint32_t low = 0, high = d_.max_code + 1;
    while (low < high) {
      const std::uint32_t middle = low + (high - low) / 2;
      passes(middle, edge(middle), x) ? low = middle + 1 : high = middle;
    }
    return low;
  }

  const Definition& d_;
  const bool toward_zero_;
  std::uint32_t code_ = 0;
  double edge_ = 0, value_ = 0, last_ = 0;
};

/// Compares floats of bits first, first + stride, ... below last, all of which become `expected`: rounded one by one,
/// and in rows as a state is stored. A NaN that is expected may be any.
class Run {
 public:
  Run(const Element& element, bool toward_zero) : format_{element}, rounder_(element), toward_zero_(toward_zero) {
    if (toward_zero) format_.rounding = Rounding::toward_zero;
  }

  Count compare(std::uint64_t first, std::uint64_t last, std::uint64_t stride, float expected) {
    Count count;
    const std::uint32_t wanted = Bits(expected);
    const bool nan = std::isnan(expected);
    for (std::uint64_t begin = first; begin < last; begin += block * stride) {
      const auto n = static_cast<std::size_t>(std::min<std::uint64_t>(block, (last - begin + stride - 1) / stride));
      for (std::size_t i = 0; i < n; ++i) rows_[i] = x_[i] = FloatOf(static_cast<std::uint32_t>(begin + i * stride));
      round_rows(format_, rows_, 1, static_cast<std::int64_t>(n));
      for (std::size_t i = 0; i < n && !toward_zero_; ++i) x_[i] = rounder_.round(x_[i]);
      std::int64_t wrong = 0;
      for (std::size_t i = 0; i < n; ++i) {
        const bool one = toward_zero_ || (nan ? std::isnan(x_[i]) : Bits(x_[i]) == wanted);
        wrong += !(one && (nan ? std::isnan(rows_[i]) : Bits(rows_[i]) == wanted));
      }
      count += {static_cast<std::int64_t>(n), wrong};
    }
    return count;
  }

 private:
  static constexpr std::size_t block = 1024;
  Format format_;
  const Rounder<float> rounder_;
  const bool toward_zero_;
  float x_[block], rows_[block];
};

/// Compares both signs of the floats whose magnitudes are first, first + stride, ... below last, those that are not
/// finite among them. Elements that are scaled only come by themselves, as under a scale of 1.
inline Count Floats(const Definition& d, bool toward_zero, std::uint64_t first, std::uint64_t last,
                    std::uint64_t stride) {
  constexpr std::uint64_t infinity = 0x7F800000, sign = 0x80000000;
  Oracle oracle(d, toward_zero);
  Run run(ElementNamed(d.name), toward_zero);
  Count count;
  const auto both = [&](std::uint64_t from, std::uint64_t to, float positive, float negative) {
    count += run.compare(from, to, stride, positive);
    count += run.compare(from + sign, to + sign, stride, negative);
  };
  const auto at = [](std::uint64_t bits) { return static_cast<double>(FloatOf(static_cast<std::uint32_t>(bits))); };
  std::uint64_t bits = first;
  while (bits < last && bits < infinity) {
    oracle.code(at(bits));
    // The steps of the stride that stay with this code, by bisection: they are in order.
    std::uint64_t steps = 1, most = (std::min(last, infinity) - bits + stride - 1) / stride;
    while (steps < most) {
      const std::uint64_t middle = steps + (most - steps) / 2;
      oracle.holds(at(bits + middle * stride)) ? steps = middle + 1 : most = middle;
    }
    const std::uint64_t end = std::min(bits + steps * stride, last);
    both(bits, end, static_cast<float>(oracle.value(1)), static_cast<float>(oracle.value(-1)));
    bits += steps * stride;
  }
  if (bits == infinity && bits < last) {
    both(bits, bits + 1, static_cast<float>(oracle.infinite(1)), static_cast<float>(oracle.infinite(-1)));
    bits += stride;
  }
  const float nan = std::numeric_limits<float>::quiet_NaN();
  if (bits < last && d.above != Definition::nothing) both(bits, last, nan, nan);
  // What has no NaN makes 0 of one, with its sign where there is one.
  if (bits < last && d.above == Definition::nothing) both(bits, last, 0.0F, d.has_minus_zero() ? -0.0F : 0.0F);
  return count;
}

inline std::uint32_t Signed(const Definition& d, std::uint32_t code, bool negative) {
  const std::uint32_t sign = 1U << (d.exponent + d.mantissa);
  if (!negative || (code == 0 && !d.has_minus_zero())) return code;
  return d.integer() ? (0U - code) & (2 * sign - 1) : code | sign;
}

/// Doubles at and beside every stride-th value and midpoint, where a rounding by way of float goes wrong, rounded and
/// encoded: both signs.
inline Count Doubles(const Definition& d, bool toward_zero, std::uint32_t stride) {
  const Element element = ElementNamed(d.name);
  Format format{element};
  if (toward_zero) format.rounding = Rounding::toward_zero;
  Oracle oracle(d, toward_zero);
  Count count;
  const auto compare = [&](double magnitude) {
    for (const double x : {magnitude, -magnitude}) {
      double row = x;
      round_rows(format, &row, 1, 1);
      const std::uint32_t code = oracle.code(magnitude);
      const double expected = oracle.value(x);
      // Codes follow from rounded values; in range, for those beyond have codes of their own.
      if (!toward_zero && code <= d.max_code) count.expect(encode(element, x) == Signed(d, code, std::signbit(x)));
      count.expect(Bits(row) == Bits(expected) && (toward_zero || Bits(round_to(element, x)) == Bits(expected)));
    }
  };
  for (std::uint64_t code = 0; code <= d.max_code; code += stride) {
    for (const double x :
         {Number(d, static_cast<std::uint32_t>(code)), Midpoint(d, static_cast<std::uint32_t>(code))}) {
      // The floats beside x, and the doubles half way to them, which float rounds to x or away from it.
      const auto narrow = static_cast<float>(x);
      const auto up = static_cast<double>(std::nextafter(narrow, HUGE_VALF));
      const auto down = static_cast<double>(std::nextafter(narrow, 0.0F));
      const double trap_up = x + (up - x) / 2, trap_down = x - (x - down) / 2;
      for (const double at : {x, up, down, trap_up, trap_down}) {
        if (!std::isfinite(at)) continue;
        compare(at);
        compare(std::nextafter(at, HUGE_VAL));
        if (at > 0) compare(std::nextafter(at, 0));
      }
    }
  }
  return count;
}

using Rational = boost::multiprecision::cpp_rational;

/// 2^exponent.
inline Rational PowerOfTwo(int exponent) {
  const boost::multiprecision::cpp_int power = boost::multiprecision::cpp_int(1) << std::abs(exponent);
  return exponent < 0 ? Rational(1, power) : Rational(power);
}

/// The number of a code without sign as core/element.h gives it, in integers.
inline Rational Exact(const Definition& d, std::uint32_t code) {
  if (d.integer()) return code;
  const std::uint32_t field = code >> d.mantissa, fraction = code & ((1U << d.mantissa) - 1);
  const int step = 1 - d.bias - d.mantissa;
  if (field == 0) return Rational(fraction) * PowerOfTwo(step);
  return Rational(fraction + (1U << d.mantissa)) * PowerOfTwo(step + static_cast<int>(field) - 1);
}

/// The oracle itself against rationals: every stride-th value, midpoint and neighbour of one, in float and in double.
inline Count OracleItself(const Definition& d, std::uint32_t stride) {
  Count count;
  for (const bool toward_zero : {false, true}) {
    Oracle oracle(d, toward_zero);
    for (std::uint64_t c = 0; c <= d.max_code; c += stride) {
      const auto code = static_cast<std::uint32_t>(c);
      const Rational below = Exact(d, code), above = Exact(d, code + 1), middle = (below + above) / 2;
      count.expect(Rational(Number(d, code)) == below);
      count.expect(Rational(Midpoint(d, code)) == middle);
      const double x = Midpoint(d, code);
      const auto narrow = static_cast<float>(x);
      for (const double at : {x, std::nextafter(x, 0), std::nextafter(x, HUGE_VAL), static_cast<double>(narrow),
                              static_cast<double>(std::nextafter(narrow, 0.0F)),
                              static_cast<double>(std::nextafter(narrow, HUGE_VALF)), Number(d, code)}) {
        if (!std::isfinite(at)) continue;
        const Rational exact(at);
        if (exact < below || exact > above) continue;  // a float that lies beyond them, next to those of fp32
        const bool up = toward_zero ? exact == above : exact == middle ? code % 2 == 1 : exact > middle;
        count.expect(oracle.code(at) == code + (up ? 1 : 0));
      }
    }
  }
  return count;
}

}  // namespace replayssm::proof
