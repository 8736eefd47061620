// From the raw inputs of a layer to records: activations, gates, norms, and which head gets what.

#include "core/recurrence.h"

#include <gtest/gtest.h>

#include <boost/multiprecision/cpp_bin_float.hpp>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/delta_rule.h"
#include "core/mamba2.h"
#include "tests/core/oracle.h"

namespace replayssm {
namespace {

using oracle::Vec;
using oracle::Wide;

template <class Real>
constexpr Real kInf = std::numeric_limits<Real>::infinity();

/// `bound` ulps of the right value.
template <class Real>
void ExpectUlps(Real found, const Wide& right, double bound) {
  EXPECT_LE(abs(Wide(found) - right), bound * Wide(std::numeric_limits<Real>::epsilon()) * abs(right))
      << found << " for " << right;
}

template <class Real>
class Gates : public testing::Test {};
using Reals = testing::Types<float, double>;
TYPED_TEST_SUITE(Gates, Reals);

// exp and log1p are within 1 ulp. For z <= 0, e^z is off by an ulp and log1p never magnifies that; for z > 0 the small
// term is added to z with a rounding. So 3 ulps. The naive log(1 + e^z) would have none left at -20 in float.
TYPED_TEST(Gates, SoftplusKeepsItsDigitsEverywhere) {
  using Real = TypeParam;
  for (const double z :
       {-80.0, -30.0, -20.0, -16.5, -3.0, -1e-3, 0.0, 1e-3, 0.5, 5.0, 16.5, 19.9, 20.1, 25.0, 80.0, 800.0}) {
    const Real x(static_cast<Real>(z));
    ExpectUlps(softplus(x), log(1 + exp(Wide(x))), 3);
  }
  EXPECT_EQ(softplus(Real(1e6)), Real(1e6));
  EXPECT_EQ(softplus(-kInf<Real>), 0);
  EXPECT_EQ(softplus(kInf<Real>), kInf<Real>);
  EXPECT_TRUE(std::isnan(softplus(std::numeric_limits<Real>::quiet_NaN())));
}

// e^z to 1 ulp, 1 + e and the quotient to half an ulp each.
TYPED_TEST(Gates, SigmoidKeepsItsDigitsEverywhere) {
  using Real = TypeParam;
  for (const double z : {-80.0, -20.0, -3.0, -1e-3, 0.0, 1e-3, 3.0, 20.0, 80.0}) {
    const Real x(static_cast<Real>(z));
    ExpectUlps(sigmoid(x), 1 / (1 + exp(-Wide(x))), 3);
  }
  EXPECT_EQ(sigmoid(Real(-800)), 0);
  EXPECT_EQ(sigmoid(Real(800)), 1);
  EXPECT_NEAR(static_cast<double>(sigmoid(Real(3))), 0.952574, 0.5e-6) << "six digits of it; in bf16 0.953125";
}

// With functions within an ulp and sums and quotients within half of one, either side of the first line is off by at
// most 2 ulps of 1, and of the second by 1.
TEST(Gates, InSixtyDigits) {
  const Wide z = Wide(1) / 3;
  const Wide ulp = std::numeric_limits<Wide>::epsilon();
  EXPECT_LE(abs(softplus(z) - log(1 + exp(z))), 4 * ulp);
  EXPECT_LE(abs(sigmoid(-z) - 1 / (1 + exp(z))), 2 * ulp);
}

TYPED_TEST(Gates, NormAddsItsEpsilonToTheSum) {
  using Real = TypeParam;
  // Exact: (3, 4) of norm 5 with an epsilon that is far below half an ulp of 25e6. Half an ulp for the squares, the sum
  // and the epsilon, which the root halves, and for root, quotient and product: 2.25.
  const Real big[] = {3e3, 4e3};
  Real out[128];
  l2_normalize(big, 2, Real(1), out);
  ExpectUlps(out[0], Wide(3000) / sqrt(Wide(25e6) + Wide(1e-6)), 3);
  // 128 entries of 1e-4: the sum is 1.28e-6 and the epsilon counts as much.
  Real small[128];
  std::fill_n(small, 128, Real(1e-4));
  l2_normalize(small, 128, Real(1), out);
  const Wide x = Wide(small[0]), right = x / sqrt(128 * x * x + Wide(1e-6));
  EXPECT_NEAR(static_cast<double>(right), 0.066227, 0.5e-6);
  // Positive terms: each of 128 squares and sums rounds by half an ulp of what it is, the root halves that; a rounding
  // each for epsilon, root and quotient.
  for (const Real& value : out) ExpectUlps(value, right, 128 / 4.0 + 2);
  std::fill_n(small, 128, Real(0));
  l2_normalize(small, 128, Real(1), out);
  for (const Real& value : out) EXPECT_EQ(value, 0) << "a zero key stays zero";
}

/// Raw inputs of a layer with rows that are longer than they need to be, as the slices of a projection are.
template <class Real>
struct Raw {
  Vec<Real> data;
  std::int64_t stride;
  Raw(std::mt19937& random, std::int64_t tokens, std::int64_t width, double low, double high) : stride(width + 3) {
    for (std::int64_t i = 0; i < tokens * stride; ++i) {
      data.push_back(static_cast<Real>(std::uniform_real_distribution<double>(low, high)(random)));
    }
  }
  Rows<Real> rows() const { return {data.data(), stride}; }
  Wide at(std::int64_t t, std::int64_t i) const { return Wide(data[static_cast<std::size_t>(t * stride + i)]); }
  /// Where element i of row t lies.
  const Real* to(std::int64_t t, std::int64_t i) const { return data.data() + t * stride + i; }
};

constexpr std::int64_t kTokens = 5;

struct Groups {
  std::int64_t groups, per_group;
};
constexpr Groups kGroups[] = {{1, 1}, {1, 2}, {1, 3}, {2, 1}, {2, 2}, {2, 3}};

TEST(RecurrenceShape, ConsecutiveHeadsShareAGroup) {
  const RecurrenceShape shape{Recurrence::gated_delta, 6, 2, 4, 8};
  const std::int64_t expected[] = {0, 0, 0, 1, 1, 1};
  for (std::int64_t h = 0; h < 6; ++h) EXPECT_EQ(shape.group(h), expected[h]);
  EXPECT_EQ(shape.decay_dim(), 1);
  EXPECT_EQ((RecurrenceShape{Recurrence::kda, 6, 2, 4, 8}).decay_dim(), 8);
  EXPECT_EQ((RecurrenceShape{Recurrence::mamba2, 6, 2, 4, 8}).decay_dim(), 1);
}

TYPED_TEST(Gates, OfMamba2) {
  using Real = TypeParam;
  for (const auto& [groups, per_group] : kGroups) {
    const std::int64_t heads = groups * per_group, p = 5, n = 7;
    std::mt19937 random(static_cast<unsigned>(10 * groups + per_group));
    const Raw<Real> x(random, kTokens, heads * p, -1, 1), b(random, kTokens, groups * n, -1, 1),
        c(random, kTokens, groups * n, -1, 1), dt(random, kTokens, heads, -6, 3), a_log(random, 1, heads, -1, 3),
        bias(random, 1, heads, -3, 1);
    const Mamba2Inputs<Real> in{.shape = {Recurrence::mamba2, heads, groups, p, n},
                                .tokens = kTokens,
                                .x = x.rows(),
                                .B = b.rows(),
                                .C = c.rows(),
                                .dt = dt.rows(),
                                .A_log = a_log.data.data(),
                                .dt_bias = bias.data.data()};
    const LayerInputs<Real> out = prepare(in);
    ASSERT_EQ(out.tokens, kTokens);
    ASSERT_EQ(out.heads.size(), static_cast<std::size_t>(heads));
    for (std::int64_t h = 0; h < heads; ++h) {
      const HeadInputs<Real>& head = out.heads[static_cast<std::size_t>(h)];
      const std::int64_t group = h / per_group;
      ASSERT_NE(head.rate, nullptr);
      for (std::int64_t t = 0; t < kTokens; ++t) {
        EXPECT_EQ(head.v[t], x.to(t, h * p)) << "the raw values themselves";
        EXPECT_EQ(head.w[t], b.to(t, group * n));
        EXPECT_EQ(head.c[t], c.to(t, group * n));
        // The argument of softplus is a rounded sum, which softplus and e^x magnify by at most the size of the
        // argument: one rounding of a value below 8, relative to the result, is at most 8 half-ulps; then 3 ulps of
        // softplus.
        const Wide step = log(1 + exp(dt.at(t, h) + bias.at(0, h)));
        ExpectUlps(*head.gain[t], step, 4.5 + 3);
        // exp to 1 ulp and a product more.
        ExpectUlps(*head.log_decay[t], -exp(a_log.at(0, h)) * step, 7.5 + 1.5);
        EXPECT_EQ(*head.log_decay[t], *head.rate * *head.gain[t]);
      }
    }
  }
}

TYPED_TEST(Gates, OfMamba2HaveNoLimitThatWasNotSet) {
  using Real = TypeParam;
  const Real rows[] = {static_cast<Real>(std::log(std::expm1(0.7))), Real(1e6), Real(-50)};
  const Real a_log[] = {0}, bias[] = {0}, unused[] = {0};
  Mamba2Inputs<Real> in{.shape = {Recurrence::mamba2, 1, 1, 1, 1},
                        .tokens = 3,
                        .x = {unused, 0},
                        .B = {unused, 0},
                        .C = {unused, 0},
                        .dt = {rows, 1},
                        .A_log = a_log,
                        .dt_bias = bias};
  const auto free = prepare(in);
  // log(expm1(.7)) = 0.0138 is far below 0.7, so its own rounding is nothing next to the 3 ulps of softplus.
  ExpectUlps(*free.heads[0].gain[0], Wide(0.7), 3 + 1);
  EXPECT_EQ(*free.heads[0].gain[1], Real(1e6));
  ExpectUlps(*free.heads[0].gain[2], exp(Wide(-50)), 3);
  in.dt_min = 0.001;
  in.dt_max = 0.1;
  const auto limited = prepare(in);
  EXPECT_EQ(*limited.heads[0].gain[0], Real(0.1));
  EXPECT_EQ(*limited.heads[0].gain[1], Real(0.1));
  EXPECT_EQ(*limited.heads[0].gain[2], Real(0.001));
  EXPECT_EQ(*limited.heads[0].log_decay[1], -Real(0.1)) << "the decay is that of the limited step";
}

// A_log = ln 16 and dt = 0.01: a decay of -0.16 a step, e^-16 over 100.
TEST(Gates, OfSmallParametersAreNotRoundedOnTheWay) {
  const double a_log[] = {std::log(16.0)}, bias[] = {0}, dt[] = {std::log(std::expm1(0.01))}, unused[] = {0};
  const auto out = prepare(Mamba2Inputs<double>{.shape = {Recurrence::mamba2, 1, 1, 1, 1},
                                                .tokens = 1,
                                                .x = {unused, 0},
                                                .B = {unused, 0},
                                                .C = {unused, 0},
                                                .dt = {dt, 1},
                                                .A_log = a_log,
                                                .dt_bias = bias});
  // ln 16 < 4 and ln expm1(.01) > -8 carry rounding and an ulp of the library into exponents: 6 and 12 ulps at most;
  // then some 5 for the operations here. A bf16 A_log is 2^-8 off and fails by 13 digits.
  ExpectUlps(*out.heads[0].log_decay[0], Wide(-16) / 100, 6 + 12 + 5);
}

template <class Real>
void CheckDeltaRule(Recurrence recurrence, double beta_scale) {
  for (const auto& [groups, per_group] : kGroups) {
    const RecurrenceShape shape{recurrence, groups * per_group, groups, 5, 7};
    const std::int64_t heads = shape.heads, p = 5, n = 7, d = shape.decay_dim();
    std::mt19937 random(static_cast<unsigned>(10 * groups + per_group));
    const Raw<Real> q(random, kTokens, groups * n, -1, 1), k(random, kTokens, groups * n, -1, 1),
        v(random, kTokens, heads * p, -1, 1), gate(random, kTokens, heads * d, -6, 3),
        beta(random, kTokens, heads, -4, 4), a_log(random, 1, heads, -1, 3), bias(random, 1, heads * d, -3, 1);
    const DeltaInputs<Real> in{.shape = shape,
                               .tokens = kTokens,
                               .q = q.rows(),
                               .k = k.rows(),
                               .v = v.rows(),
                               .gate = gate.rows(),
                               .beta = beta.rows(),
                               .A_log = a_log.data.data(),
                               .dt_bias = bias.data.data(),
                               .beta_scale = beta_scale};
    const LayerInputs<Real> out = prepare(in);
    ASSERT_EQ(out.tokens, kTokens);
    ASSERT_EQ(out.heads.size(), static_cast<std::size_t>(heads));
    for (std::int64_t h = 0; h < heads; ++h) {
      const HeadInputs<Real>& head = out.heads[static_cast<std::size_t>(h)];
      EXPECT_EQ(head.rate, nullptr) << "the record holds the decay itself";
      const std::int64_t first = h / per_group * n;
      for (std::int64_t t = 0; t < kTokens; ++t) {
        EXPECT_EQ(head.v[t], v.to(t, h * p));
        Wide q_sum(1e-6), k_sum(1e-6);
        for (std::int64_t i = first; i < first + n; ++i) {
          q_sum += q.at(t, i) * q.at(t, i);
          k_sum += k.at(t, i) * k.at(t, i);
        }
        for (std::int64_t i = 0; i < n; ++i) {
          // 7 squares, their sums and epsilon, at most a half-ulp each of the whole, and halved by the root: under 4
          // ulps. Then root, quotient; for q also N^-1/2, which is two roundings, and its product.
          ExpectUlps(head.w[t][i], k.at(t, first + i) / sqrt(k_sum), 4 + 1);
          ExpectUlps(head.c[t][i], q.at(t, first + i) / sqrt(q_sum) / sqrt(Wide(n)), 4 + 2.5);
        }
        for (std::int64_t i = 0; i < d; ++i) {
          // As the log decay of Mamba-2.
          const Wide g = -exp(a_log.at(0, h)) * log(1 + exp(gate.at(t, h * d + i) + bias.at(0, h * d + i)));
          ExpectUlps(head.log_decay[t][i], g, 7.5 + 1.5);
        }
        ExpectUlps(*head.gain[t], beta_scale / (1 + exp(-beta.at(t, h))), 3);
      }
    }
  }
}

TYPED_TEST(Gates, OfGatedDeltaNet) {
  CheckDeltaRule<TypeParam>(Recurrence::gated_delta, 1);
  CheckDeltaRule<TypeParam>(Recurrence::gated_delta, 2);
}

TYPED_TEST(Gates, OfKda) { CheckDeltaRule<TypeParam>(Recurrence::kda, 1); }

TEST(Recurrence, Names) {
  EXPECT_EQ(name(Recurrence::mamba2), "mamba2");
  EXPECT_EQ(name(Recurrence::gated_delta), "gated_delta");
  EXPECT_EQ(name(Recurrence::kda), "kda");
  EXPECT_FALSE(is_delta_rule(Recurrence::mamba2));
  EXPECT_TRUE(is_delta_rule(Recurrence::gated_delta));
  EXPECT_TRUE(is_delta_rule(Recurrence::kda));
}

}  // namespace
}  // namespace replayssm
