#pragma once

// Private: pulls in Boost.Multiprecision. Scalars with more digits than the hardware has; none of them leaves a .cpp.

// GCC 12 follows shifts by counts that cannot occur in Boost's inlined code and sees them leave an array.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Warray-bounds"
#include <boost/multiprecision/cpp_bin_float.hpp>
#pragma GCC diagnostic pop
#ifdef REPLAYSSM_HAVE_MPFR
#include <boost/multiprecision/mpfr.hpp>
#endif

namespace replayssm {

/// `Digits` decimal digits fixed at compile time; needs nothing but Boost's headers. Exponents of 32 bits: a decay of
/// e^-4e7 is an ordinary number.
template <unsigned Digits>
using FixedReal =
    boost::multiprecision::number<boost::multiprecision::cpp_bin_float<Digits>, boost::multiprecision::et_off>;

/// The 113 bits of IEEE binary128, 33 digits, with the exponents of FixedReal. A library type and not the compiler's
/// __float128, which only some compilers have and only on some processors.
using QuadReal =
    boost::multiprecision::number<boost::multiprecision::cpp_bin_float<113, boost::multiprecision::digit_base_2>,
                                  boost::multiprecision::et_off>;

/// Sets the decimal digits of the numbers of type Big that this thread makes from here on; a number keeps the digits
/// that it was made with. Nothing to set where the type fixes them.
/// Boost 1.74 has one setting for all threads: threads that work at the same time must use the same digits.
template <class Big>
void set_working_digits(int) {}

/// sum += a b.
template <class Real>
void add_product(Real& sum, const Real& a, const Real& b) {
  sum += a * b;
}

#ifdef REPLAYSSM_HAVE_MPFR
/// Digits chosen at run time: MPFR, correctly rounded, practically without limits of exponents.
using RunTimeReal =
    boost::multiprecision::number<boost::multiprecision::mpfr_float_backend<0>, boost::multiprecision::et_off>;

template <>
inline void set_working_digits<RunTimeReal>(int digits) {
  RunTimeReal::default_precision(static_cast<unsigned>(digits));
}

/// With one rounding, and without the temporary of the general version, whose memory takes as long as its digits.
inline void add_product(RunTimeReal& sum, const RunTimeReal& a, const RunTimeReal& b) {
  mpfr_fma(sum.backend().data(), a.backend().data(), b.backend().data(), sum.backend().data(), MPFR_RNDN);
}
#endif

}  // namespace replayssm
