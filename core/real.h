#pragma once

// Scalar functions of the recurrences, for every Real: float, double and types with more digits, whose exp, log1p and
// sqrt are found by argument-dependent lookup.

#include <bit>
#include <cmath>
#include <cstdint>

namespace replayssm {

/// 2^floor(log2 x) of a positive normal x: its bits without the mantissa. A call of std::ilogb() stops a loop from
/// being vectorized.
constexpr double power_of_two_below(double x) {
  return std::bit_cast<double>(std::bit_cast<std::uint64_t>(x) & 0x7FF0'0000'0000'0000);
}

/// log(1 + e^z), without overflow and without loss for large |z|.
template <class Real>
Real softplus(const Real& z) {
  using std::exp;
  using std::log1p;
  return z > Real(0) ? z + log1p(exp(-z)) : log1p(exp(z));
}

/// 1 / (1 + e^-z), without overflow.
template <class Real>
Real sigmoid(const Real& z) {
  using std::exp;
  if (z >= Real(0)) return Real(1) / (Real(1) + exp(-z));
  const Real e = exp(z);
  return e / (Real(1) + e);
}

}  // namespace replayssm
