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
#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

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

/// out = the sum of x[i] y[i] over n numbers, from i = 0 upwards, one rounding a term or fewer. `out` is none of them.
template <class Real>
void set_dot(Real& out, const Real* x, const Real* y, std::int64_t n) {
  out = Real(0);
  for (std::int64_t i = 0; i < n; ++i) add_product(out, x[i], y[i]);
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

namespace detail {

inline mpfr_srcptr mpfr(const RunTimeReal& x) { return x.backend().data(); }
inline const mp_limb_t* words(const RunTimeReal& x) {
  return static_cast<const mp_limb_t*>(mpfr_custom_get_significand(mpfr(x)));
}

/// The exponent of the largest product, at most: it is below 2^top. None where not all numbers are finite and of one
/// precision, or all products are 0.
inline std::optional<mpfr_exp_t> top_of_products(const RunTimeReal* x, const RunTimeReal* y, std::int64_t n) {
  std::optional<mpfr_exp_t> top;
  for (std::int64_t i = 0; i < n; ++i) {
    for (const RunTimeReal* z : {x + i, y + i}) {
      if (mpfr_nan_p(mpfr(*z)) || mpfr_inf_p(mpfr(*z)) || mpfr_get_prec(mpfr(*z)) != mpfr_get_prec(mpfr(*x))) return {};
    }
    if (mpfr_zero_p(mpfr(x[i])) || mpfr_zero_p(mpfr(y[i]))) continue;
    const mpfr_exp_t product = mpfr_get_exp(mpfr(x[i])) + mpfr_get_exp(mpfr(y[i]));
    top = top ? std::max(*top, product) : product;
  }
  return top;
}

}  // namespace detail

/// In integers, where MPFR would align, round and normalize every term: whole products are added in a window whose top
/// is above the largest of them and which goes on two words below its last place; what lies lower is cut off. Rounded
/// once, at the end. Takes two thirds of the time.
inline void set_dot(RunTimeReal& out, const RunTimeReal* x, const RunTimeReal* y, std::int64_t n) {
  const std::optional<mpfr_exp_t> top = detail::top_of_products(x, y, n);
  if (!top) {
    out = RunTimeReal(0);
    for (std::int64_t i = 0; i < n; ++i) add_product(out, x[i], y[i]);
    return;
  }
  using detail::mpfr, detail::words;
  // A window counts in units of 2^(top - word (width - 1)): its highest word takes the carries of up to 2^word terms.
  constexpr mpfr_exp_t word = GMP_NUMB_BITS;
  const mp_size_t size = (mpfr_get_prec(mpfr(*x)) + word - 1) / word, width = size + 3;
  thread_local std::vector<mp_limb_t> memory;
  memory.assign(static_cast<std::size_t>(2 * width + 2 * size), 0);
  mp_limb_t *positive = memory.data(), *negative = positive + width, *product = negative + width;
  for (std::int64_t i = 0; i < n; ++i) {
    if (mpfr_zero_p(mpfr(x[i])) || mpfr_zero_p(mpfr(y[i]))) continue;
    const mpfr_exp_t below = *top - (mpfr_get_exp(mpfr(x[i])) + mpfr_get_exp(mpfr(y[i])));
    const mp_size_t end = width - 1 - below / word;  // the product's highest word goes below this one
    if (end <= 0) continue;
    mpn_mul_n(product, words(x[i]), words(y[i]), size);
    const mp_size_t count = std::min(2 * size, end);
    mp_limb_t* high = product + 2 * size - count;
    if (below % word != 0) mpn_rshift(high, high, count, static_cast<unsigned>(below % word));
    const bool minus = (mpfr_sgn(mpfr(x[i])) < 0) != (mpfr_sgn(mpfr(y[i])) < 0);
    mp_limb_t* sum = (minus ? negative : positive) + end - count;
    mpn_add(sum, sum, width - (end - count), high, count);
  }
  const bool minus = mpn_cmp(positive, negative, width) < 0;
  mpn_sub_n(positive, minus ? negative : positive, minus ? positive : negative, width);
  mpz_t sum;
  mpz_roinit_n(sum, positive, minus ? -width : width);
  out = RunTimeReal(0);
  mpfr_set_z_2exp(out.backend().data(), sum, *top - word * (width - 1), MPFR_RNDN);
}
#endif

}  // namespace replayssm
