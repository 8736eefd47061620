#pragma once

// Values of published serving kernels, see tests/data/README.md, and how far others are from them.

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <vector>

#include "core/safetensors.h"

namespace replayssm {

inline const double kHalfUlp = std::ldexp(1.0, -8);  // of bf16, relative
// An emulation in binary64 rounds another way where the kernel's fp32 value was within its error, say 4 roundings, of a
// midpoint: of a share of 4 2^-24 / 2^-8 of the elements, by a whole ulp, against the 1/sqrt(12) ulp of an element that
// the kernel rounds and the emulation does not.
inline const double kExplained = std::sqrt(12 * 4 * std::ldexp(1.0, -16));

/// All values of a tensor, widened.
template <class Real>
std::vector<Real> ReadAs(const SafetensorsFile& file, const char* name) {
  const TensorView& tensor = file.at(name);
  std::vector<Real> x(static_cast<std::size_t>(tensor.elements()));
  widen(tensor, 0, x.size(), x.data());
  return x;
}

/// Part i of so many.
template <class Real>
std::vector<Real> Part(const std::vector<Real>& x, std::size_t i, std::size_t parts) {
  const auto n = static_cast<std::ptrdiff_t>(x.size() / parts);
  return {x.begin() + static_cast<std::ptrdiff_t>(i) * n, x.begin() + static_cast<std::ptrdiff_t>(i + 1) * n};
}

template <class A, class B>
double Distance(const A& a, const B& b) {
  EXPECT_EQ(a.size(), b.size());
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum = std::hypot(sum, double{a[i]} - double{b[i]});
  return sum;
}
template <class A>
double Norm(const A& a) {
  return Distance(a, std::vector<double>(a.size(), 0));
}

}  // namespace replayssm
