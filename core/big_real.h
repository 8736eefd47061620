#pragma once

// Private: pulls in Boost.Multiprecision. Scalars with more digits than the hardware has; none of them leaves a .cpp.

// GCC 12 follows shifts by counts that cannot occur in Boost's inlined code and sees them leave an array.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Warray-bounds"
#include <boost/multiprecision/cpp_bin_float.hpp>
#pragma GCC diagnostic pop
#ifdef REPLAYSSM_HAVE_MPFR
#include <boost/container/small_vector.hpp>
#include <boost/multiprecision/mpfr.hpp>
#endif
#include <algorithm>
#include <bit>
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

/// s = s a + u w, two roundings or fewer.
template <class Real>
void scale_and_add(Real& s, const Real& a, const Real& u, const Real& w) {
  s *= a;
  add_product(s, u, w);
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

constexpr mpfr_exp_t word_bits = GMP_NUMB_BITS;
/// Enough for what a sum needs at 300 digits, without a call for memory; not set to 0.
using Words = boost::container::small_vector<mp_limb_t, 80>;

inline mpfr_srcptr mpfr(const RunTimeReal& x) { return x.backend().data(); }
inline const mp_limb_t* words(const RunTimeReal& x) {
  return static_cast<const mp_limb_t*>(mpfr_custom_get_significand(mpfr(x)));
}
inline mp_size_t word_count(const RunTimeReal& x) { return (mpfr_get_prec(mpfr(x)) + word_bits - 1) / word_bits; }
/// A product is below 2^exponent, and at least a quarter of that.
inline mpfr_exp_t product_exponent(const RunTimeReal& a, const RunTimeReal& b) {
  return mpfr_get_exp(mpfr(a)) + mpfr_get_exp(mpfr(b));
}
inline bool product_sign(const RunTimeReal& a, const RunTimeReal& b) {
  return (mpfr_sgn(mpfr(a)) < 0) != (mpfr_sgn(mpfr(b)) < 0);
}

/// out = the whole number in these words times 2^(exponent - its bits), negative if `minus`, rounded to the digits that
/// `out` has. Overwrites the words.
inline void set_rounded(RunTimeReal& out, mp_limb_t* number, mp_size_t count, mpfr_exp_t exponent, bool minus) {
  for (; count > 0 && number[count - 1] == 0; --count) exponent -= word_bits;
  if (count == 0) {
    mpfr_set_zero(out.backend().data(), 1);
    return;
  }
  const int zeros = std::countl_zero(number[count - 1]);
  if (zeros > 0) mpn_lshift(number, number, count, static_cast<unsigned>(zeros));
  mpfr_t whole;  // the words themselves as a number; owns nothing
  mpfr_custom_init_set(whole, minus ? -MPFR_REGULAR_KIND : MPFR_REGULAR_KIND, exponent - zeros, word_bits * count,
                       number);
  mpfr_set(out.backend().data(), whole, MPFR_RNDN);
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
    top = top ? std::max(*top, product_exponent(x[i], y[i])) : product_exponent(x[i], y[i]);
  }
  return top;
}

}  // namespace detail

// Sums of products in integers, where MPFR would align, round and normalize every term: whole products are added in a
// window that goes on two words below the last place of the largest of them; what lies lower is cut off. Rounded once,
// at the end. A term of a dot product takes four tenths of the time of mpfr_fma(), scale_and_add() seven tenths of that
// of mpfr_fmma().

inline void set_dot(RunTimeReal& out, const RunTimeReal* x, const RunTimeReal* y, std::int64_t n) {
  using namespace detail;
  const std::optional<mpfr_exp_t> top = top_of_products(x, y, n);
  if (!top) {
    out = RunTimeReal(0);
    for (std::int64_t i = 0; i < n; ++i) add_product(out, x[i], y[i]);
    return;
  }
  // A window counts in units of 2^(top - word_bits (width - 1)): its highest word takes the carries of up to
  // 2^word_bits terms.
  const mp_size_t size = word_count(*x), width = size + 3;
  Words memory(static_cast<std::size_t>(2 * width + 2 * size), boost::container::default_init);
  mp_limb_t *positive = memory.data(), *negative = positive + width, *product = negative + width;
  std::fill(positive, product, 0);
  for (std::int64_t i = 0; i < n; ++i) {
    if (mpfr_zero_p(mpfr(x[i])) || mpfr_zero_p(mpfr(y[i]))) continue;
    const mpfr_exp_t below = *top - product_exponent(x[i], y[i]);
    const mp_size_t end = width - 1 - below / word_bits;  // the product's highest word goes below this one
    if (end <= 0) continue;
    mpn_mul_n(product, words(x[i]), words(y[i]), size);
    const mp_size_t count = std::min(2 * size, end);
    mp_limb_t* high = product + 2 * size - count;
    if (below % word_bits != 0) mpn_rshift(high, high, count, static_cast<unsigned>(below % word_bits));
    mp_limb_t* sum = (product_sign(x[i], y[i]) ? negative : positive) + end - count;
    mpn_add(sum, sum, width - (end - count), high, count);
  }
  const bool minus = mpn_cmp(positive, negative, width) < 0;
  mpn_sub_n(positive, minus ? negative : positive, minus ? positive : negative, width);
  set_rounded(out, positive, width, *top + word_bits, minus);
}

inline void scale_and_add(RunTimeReal& s, const RunTimeReal& a, const RunTimeReal& u, const RunTimeReal& w) {
  using namespace detail;
  for (const RunTimeReal* x : {static_cast<const RunTimeReal*>(&s), &a, &u, &w}) {
    if (!mpfr_regular_p(mpfr(*x)) || mpfr_get_prec(mpfr(*x)) != mpfr_get_prec(mpfr(s))) {
      mpfr_fmma(s.backend().data(), mpfr(s), mpfr(a), mpfr(u), mpfr(w), MPFR_RNDN);
      return;
    }
  }
  struct Product {
    mp_limb_t* words;
    mpfr_exp_t exponent;
    bool minus;
  };
  const mp_size_t size = word_count(s), whole = 2 * size + 1;  // with a word for the carry
  Words memory(static_cast<std::size_t>(2 * whole), boost::container::default_init);
  Product large{memory.data(), product_exponent(s, a), product_sign(s, a)};
  Product small{memory.data() + whole, product_exponent(u, w), product_sign(u, w)};
  mpn_mul_n(large.words, words(s), words(a), size);
  mpn_mul_n(small.words, words(u), words(w), size);
  if (large.exponent < small.exponent) std::swap(large, small);
  // Of each so many words from the top.
  const mp_size_t count = std::min(2 * size, size + 2);
  mp_limb_t *sum = large.words + 2 * size - count, *term = small.words + 2 * size - count;
  const mpfr_exp_t below = large.exponent - small.exponent;
  const mp_size_t words_below = below / word_bits;
  sum[count] = 0;
  if (words_below < count) {
    if (below % word_bits != 0) mpn_rshift(term, term, count, static_cast<unsigned>(below % word_bits));
    term += words_below;
    if (large.minus == small.minus) {
      sum[count] = mpn_add(sum, sum, count, term, count - words_below);
    } else if (mpn_sub(sum, sum, count, term, count - words_below) != 0) {  // its exponent was larger, not itself
      mpn_neg(sum, sum, count);
      large.minus = small.minus;
    }
  }
  set_rounded(s, sum, count + 1, large.exponent + word_bits, large.minus);
}
#endif

}  // namespace replayssm
