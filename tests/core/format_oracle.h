#pragma once

// A slow, literal reading of the number formats, written apart from core/format.h: tables of values from the fields of
// their codes, and nearest values found by comparing numbers. Every value and every midpoint is exact in a double.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "core/format.h"

namespace replayssm {

struct Definition {
  std::string name;
  int exponent, mantissa, bias;  // an integer type has exponent == 0
  std::uint32_t max_code;
  double max;
  // What the codes above max_code begin with; nan_for_minus_zero: there are none, the code of -0 is the NaN.
  enum { nothing, nan, infinity, nan_for_minus_zero } above;

  bool integer() const { return exponent == 0; }
  bool has_minus_zero() const { return !integer() && above != nan_for_minus_zero; }
  /// What finite numbers beyond the range become: infinity in fp16 and wider floats.
  bool saturates() const { return integer() || exponent + mantissa < 15; }
};

inline std::ostream& operator<<(std::ostream& out, const Definition& d) { return out << d.name; }

inline const std::vector<Definition>& Definitions() {
  static const std::vector<Definition> definitions = {
      {"fp32", 8, 23, 127, 0x7F7FFFFF, 0x1.fffffep127, Definition::infinity},
      {"tf32", 8, 10, 127, (254 << 10) + 1023, 0x1.ffcp127, Definition::infinity},
      {"fp16", 5, 10, 15, 0x7BFF, 65504, Definition::infinity},
      {"bf16", 8, 7, 127, 0x7F7F, 0x1.fep127, Definition::infinity},
      {"e4m3", 4, 3, 7, 0x7E, 448, Definition::nan},
      {"e5m2", 5, 2, 15, 0x7B, 57344, Definition::infinity},
      {"e4m3fnuz", 4, 3, 8, 0x7F, 240, Definition::nan_for_minus_zero},
      {"e5m2fnuz", 5, 2, 16, 0x7F, 57344, Definition::nan_for_minus_zero},
      {"e3m2", 3, 2, 3, 31, 28, Definition::nothing},
      {"e2m3", 2, 3, 1, 31, 7.5, Definition::nothing},
      {"e2m1", 2, 1, 1, 7, 6, Definition::nothing},
      {"int16", 0, 15, 0, 32767, 32767, Definition::nothing},
      {"int8", 0, 7, 0, 127, 127, Definition::nothing},
      {"int4", 0, 3, 0, 7, 7, Definition::nothing},
  };
  return definitions;
}

inline const Definition& DefinitionOf(const Element& element) {
  return *std::find_if(Definitions().begin(), Definitions().end(),
                       [&](const Definition& d) { return d.name == element.name; });
}

inline Element ElementNamed(const std::string& name) {
  const auto all = elements();
  return *std::find_if(all.begin(), all.end(), [&](const Element& element) { return element.name == name; });
}

/// Value of a code without sign, by the number formula; the codes above max_code as if the numbers went on.
inline double Number(const Definition& d, std::uint32_t code) {
  if (d.exponent == 0) return code;
  const int field = static_cast<int>(code >> d.mantissa);
  const double fraction = std::ldexp(static_cast<double>(code % (1U << d.mantissa)), -d.mantissa);
  return field == 0 ? std::ldexp(fraction, 1 - d.bias) : std::ldexp(1 + fraction, field - d.bias);
}

/// The midpoint above a code without sign; from it on x belongs to code + 1, but for the point itself if code is even.
inline double Midpoint(const Definition& d, std::uint32_t code) {
  return Number(d, code) / 2 + Number(d, code + 1) / 2;  // halves first: the last sum of fp32 would be fine, clearly so
}

/// Code without sign of the nearest number to |x|, max_code + 1 if that is beyond the range. By bisection.
inline std::uint32_t NearestCode(const Definition& d, double x) {
  x = std::fabs(x);
  std::uint32_t low = 0, high = d.max_code + 1;
  while (low < high) {
    const std::uint32_t middle = low + (high - low) / 2;
    const double edge = Midpoint(d, middle);
    if (x > edge || (x == edge && middle % 2 == 1)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

/// The rounded value of a finite x whose element has its default convention: saturating, or infinity beyond fp16 and
/// wider.
inline double Nearest(const Definition& d, double x) {
  const std::uint32_t code = NearestCode(d, x);
  double magnitude = Number(d, code);
  if (code > d.max_code) magnitude = d.saturates() ? d.max : HUGE_VAL;
  return magnitude == 0 && !d.has_minus_zero() ? 0.0 : std::copysign(magnitude, x);
}

inline std::uint64_t Bits(double x) { return __builtin_bit_cast(std::uint64_t, x); }
inline std::uint32_t Bits(float x) { return __builtin_bit_cast(std::uint32_t, x); }
inline float FloatOf(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

}  // namespace replayssm
