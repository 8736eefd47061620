// Sums of products in many digits, against exact fractions.

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "tests/core/big_numbers.h"

namespace replayssm {
namespace {

template <class Kind>
class BigSums : public BigNumbers<Kind> {};
TYPED_TEST_SUITE(BigSums, BigKinds);

// Numbers of every sign and of sizes from 2^-200 to 1, with zeros among them,
// and sums that cancel.
TYPED_TEST(BigSums, Dot) {
  using Real = typename TypeParam::Real;
  std::mt19937 random(3);
  const auto number = [&](int exponents) -> std::pair<Fraction, Real> {
    const int mantissa = static_cast<int>(random() % 2001) - 1000, exponent = -static_cast<int>(random() % exponents);
    const boost::multiprecision::cpp_int power = boost::multiprecision::cpp_int(1) << -exponent;
    return {Fraction(mantissa, power), ldexp(Real(mantissa), exponent)};
  };
  for (const int exponents : {1, 64, 200}) {
    for (const int n : {1, 2, 7, 128}) {
      std::vector<Real> x, y;
      Fraction right(0), absolute(0);
      for (int i = 0; i < n; ++i) {
        const auto [a, a_real] = number(exponents);
        const auto [b, b_real] = number(exponents);
        x.push_back(a_real), y.push_back(b_real);
        right += a * b;
        absolute += abs(Fraction(a * b));
      }
      // What is left of a sum that cancels; its terms are products again.
      x.push_back(this->exact(-right)), y.push_back(Real(1));
      Real sum(5);
      set_dot(sum, x.data(), y.data(), n);
      // A rounding a term of the sum so far and of the terms, and one that writes the fraction down.
      const Real allowed = (2 * n + 1) * this->unit() * this->exact(absolute);
      EXPECT_LE(abs(sum - this->exact(right)), allowed) << n;
      set_dot(sum, x.data(), y.data(), n + 1);
      EXPECT_LE(abs(sum), 2 * allowed) << n;
    }
  }
  const Real infinite = std::numeric_limits<Real>::infinity();
  const std::vector<Real> some = {Real(2), Real(0), Real(3)}, zeros(3, Real(0)), broken = {Real(1), infinite, Real(1)};
  Real sum(5);
  set_dot(sum, some.data(), zeros.data(), 3);
  EXPECT_EQ(sum, 0);
  set_dot(sum, some.data(), broken.data(), 3);
  EXPECT_TRUE(isnan(sum));  // 0 times infinity
  set_dot(sum, some.data(), broken.data(), 1);
  EXPECT_EQ(sum, 2);
}

// Two products of every sign, of sizes up to 2^200 apart, and two that cancel.
TYPED_TEST(BigSums, ScalesAndAdds) {
  using Real = typename TypeParam::Real;
  const auto check = [&](const Fraction& s, const Fraction& a, const Fraction& u, const Fraction& w) {
    Real sum = this->exact(s);
    scale_and_add(sum, this->exact(a), this->exact(u), this->exact(w));
    const Fraction right = s * a + u * w, absolute = abs(Fraction(s * a)) + abs(Fraction(u * w));
    // The roundings of both products and of the sum, and one that writes the fraction down.
    EXPECT_LE(abs(sum - this->exact(right)), 3 * this->unit() * this->exact(absolute)) << right;
    if (right == 0) {
      EXPECT_EQ(sum, 0);
    }
  };
  std::mt19937 random(7);
  const auto number = [&](unsigned exponents) {
    const boost::multiprecision::cpp_int power = boost::multiprecision::cpp_int(1) << random() % exponents;
    return Fraction(static_cast<int>(random() % 2001) - 1000, power);
  };
  for (const unsigned exponents : {1u, 64u, 200u}) {
    for (int i = 0; i < 200; ++i) check(number(exponents), number(exponents), number(exponents), number(exponents));
  }
  const Fraction quarter(1, 4);
  check(3, 5, -15, 1), check(-3, quarter, 3, quarter), check(0, 0, 0, 0), check(0, 5, 3, 7), check(3, 5, 0, 7);
  Real sum(3);
  scale_and_add(sum, Real(std::numeric_limits<Real>::infinity()), Real(1), Real(1));
  EXPECT_TRUE(isinf(sum));
}

#ifdef REPLAYSSM_HAVE_MPFR
// One rounding of the exact sum, which another precision holds, however far apart the terms are.
TEST(RunTimeSums, AreRoundedOnce) {
  const auto in_precision_of = [](const RunTimeReal& found, RunTimeReal right) {
    mpfr_prec_round(right.backend().data(), mpfr_get_prec(found.backend().data()), MPFR_RNDN);
    return right;
  };
  std::mt19937 random(5);
  for (const int digits : {19, 38, 50, 70, 100}) {
    set_working_digits<RunTimeReal>(digits);
    const auto number = [&]() -> RunTimeReal {
      const RunTimeReal mantissa = sin(RunTimeReal(static_cast<int>(random() % 100'000)));
      return ldexp(mantissa, -static_cast<int>(random() % 150));
    };
    std::vector<RunTimeReal> x, y;
    for (int i = 0; i < 128; ++i) x.push_back(number()), y.push_back(number());
    RunTimeReal dot(0);
    set_dot(dot, x.data(), y.data(), 128);
    // Every eighth sum is one that cancels but for the roundings of its first number.
    std::vector<RunTimeReal> first = x;
    for (std::size_t i = 8; i < 128; i += 8) first[i] = -(x[i - 1] * y[i - 2]) / y[i - 1];
    std::vector<RunTimeReal> sums = first;
    for (std::size_t i = 2; i < 128; ++i) scale_and_add(sums[i], y[i - 1], x[i - 1], y[i - 2]);

    set_working_digits<RunTimeReal>(2 * digits + 200);  // products of some 2 digits, 300 bits apart
    RunTimeReal right(0);
    for (std::size_t i = 0; i < 128; ++i) add_product(right, x[i], y[i]);
    EXPECT_EQ(dot, in_precision_of(dot, right)) << digits;
    for (std::size_t i = 2; i < 128; ++i) {
      RunTimeReal other(0);
      add_product(other, x[i - 1], y[i - 2]);
      RunTimeReal sum = other;
      add_product(sum, first[i], y[i - 1]);
      if (i % 8 != 0) {
        EXPECT_EQ(sums[i], in_precision_of(sums[i], sum)) << digits << " " << i;
      } else {
        // What is left begins where a product's digits end; of both so much is cut off, 128 bits lower at most.
        const int bits = static_cast<int>(mpfr_get_prec(sums[i].backend().data()));
        EXPECT_LT(abs(sum), ldexp(abs(other), 2 - bits)) << digits << " " << i;
        EXPECT_LE(abs(sums[i] - sum), ldexp(abs(sum), -bits) + ldexp(abs(other), 2 - bits - 128)) << digits << " " << i;
      }
    }
  }
}
#endif

}  // namespace
}  // namespace replayssm
