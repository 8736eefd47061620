#pragma once

// The big numbers of the build, each with the digits that it is tested with.

#include <gtest/gtest.h>

#include <boost/multiprecision/cpp_int.hpp>
#include <limits>

#include "core/big_real.h"

namespace replayssm {

using Fraction = boost::multiprecision::cpp_rational;

template <class Real_, int digits_>
struct BigKind {
  using Real = Real_;
  static constexpr int digits = digits_;
};
using BigKinds = testing::Types<
#ifdef REPLAYSSM_HAVE_MPFR
    BigKind<RunTimeReal, 50>, BigKind<RunTimeReal, 500>,
#endif
    BigKind<QuadReal, 33>, BigKind<FixedReal<70>, 70>, BigKind<FixedReal<140>, 140>>;

template <class Kind>
class BigNumbers : public testing::Test {
 protected:
  using Number = typename Kind::Real;

  BigNumbers() { set_working_digits<Number>(Kind::digits); }

  /// Half the distance from 1 to the next number: the relative error of one rounding.
  static Number unit() {
    if constexpr (std::numeric_limits<Number>::digits > 0) return std::numeric_limits<Number>::epsilon() / 2;
#ifdef REPLAYSSM_HAVE_MPFR
    if constexpr (std::is_same_v<Number, RunTimeReal>) {
      return ldexp(Number(1), -static_cast<int>(mpfr_get_prec(Number(0).backend().data())));
    }
#endif
  }

  /// The number itself, where Number can hold it.
  static Number exact(const Fraction& x) {
    return Number(numerator(x).str().c_str()) / Number(denominator(x).str().c_str());
  }
};

}  // namespace replayssm
