#pragma once

// Scalar functions of the recurrences, for every Real: float, double and types with more digits, whose exp, log1p and
// sqrt are found by argument-dependent lookup.

#include <cmath>

namespace replayssm {

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
