// Arithmetic in many digits and the literal recurrence, against exact fractions and constants of 62 digits, which came
// from another arithmetic (decimal).

#include "core/big_real.h"

#include <cmath>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "core/delta_rule.h"
#include "core/literal.h"
#include "core/mamba2.h"
#include "tests/core/big_numbers.h"

namespace replayssm {
namespace {

/// One token of one head.
template <class Real>
struct Step {
  std::vector<Real> v, w, c, log_decay;
  Real gain;
};

template <class Kind>
class BigReal : public BigNumbers<Kind> {
 protected:
  using typename BigNumbers<Kind>::Number;
  using BigNumbers<Kind>::unit;

  /// Whether x is the number that `text` gives to 62 digits, up to so many roundings. Reading the text is one more.
  static void expect_near(const Number& x, const char* text, double roundings) {
    const Number right(text);
    const Number allowed = abs(right) * (Number(roundings + 1) * unit() + Number("1e-61"));
    EXPECT_LE(abs(x - right), allowed) << text << "\n" << x;
    EXPECT_LT(allowed, abs(right) * Number("1e-25")) << "a test of digits that double does not have";
  }

  /// Runs the tokens from the state s; y of the last one.
  static std::vector<Number> run(Recurrence recurrence, const std::vector<Step<Number>>& tokens,
                                 std::vector<Number>& s) {
    const auto P = static_cast<std::int64_t>(tokens[0].v.size()), N = static_cast<std::int64_t>(tokens[0].w.size());
    const RecurrenceShape shape{recurrence, 1, 1, P, N};
    std::vector<Number> y(tokens[0].v.size());
    if (s.empty()) s.assign(static_cast<std::size_t>(P * N), Number(0));
    for (const Step<Number>& x : tokens) {
      std::vector<Number> decay;
      for (const Number& g : x.log_decay) decay.push_back(exp(g));
      literal_step(shape, Record<Number>{x.v.data(), x.w.data(), x.log_decay.data(), x.gain}, decay.data(), x.c.data(),
                   P, s.data(), y.data());
    }
    return y;
  }

  static Step<Number> scalar(double v, double w, const Number& log_decay, const Number& gain) {
    return {{Number(v)}, {Number(w)}, {Number(1)}, {log_decay}, gain};
  }
};
TYPED_TEST_SUITE(BigReal, BigKinds);

TYPED_TEST(BigReal, HoldsDoublesExactlyAndHasTheDigitsAskedFor) {
  using Real = typename TypeParam::Real;
  for (const double x : {0.1, -1e300, std::numeric_limits<double>::denorm_min(), 1 / 3.0}) {
    EXPECT_EQ(static_cast<double>(Real(x)), x);
    EXPECT_NE(Real(x) * (1 + 2 * this->unit()), Real(x));
  }
  EXPECT_LE(this->unit(), pow(Real(10), -TypeParam::digits));
  // Nor far more of them: two decimal digits of reserve and a bit.
  EXPECT_GE(this->unit(), pow(Real(10), -TypeParam::digits - 3));
  EXPECT_EQ(Real(1) + this->unit() / 4, Real(1));
  Real sum(3);
  add_product(sum, Real(5), Real(0.25));
  EXPECT_EQ(sum, Real(4.25));
}

TYPED_TEST(BigReal, ScalarFunctions) {
  using Real = typename TypeParam::Real;
  // Functions of Boost's own types are good to some units; e^z has |z| times the error of z's last place on the way.
  this->expect_near(softplus(Real(0)), "0.69314718055994530941723212145817656807550013436025525412068001", 8);
  this->expect_near(softplus(Real(-30)), "9.3576229688397367793776974246751577216180869198193162492395184e-14",
                    8 + 2 * 30);
  this->expect_near(softplus(Real(40)), "40.000000000000000004248354255291588986304977843631582181877751", 8);
  this->expect_near(sigmoid(Real(3)), "0.95257412682243321912115184822824779861382056757939089928211199", 8 + 2 * 3);
  this->expect_near(1 - sigmoid(Real(-3)), "0.95257412682243321912115184822824779861382056757939089928211199",
                    8 + 2 * 3);
}

// ---- exact fractions ------------------------------------------------------------------------------------------------

TYPED_TEST(BigReal, ConstantDecayIsAGeometricSum) {
  using Real = typename TypeParam::Real;
  // S_T = u w (1 - a^T) / (1 - a) with a = 3/4: 2 T bits after T steps and a few of u w, which all types hold.
  const RecurrenceShape shape{Recurrence::mamba2, 1, 1, 3, 2};
  const std::vector<Real> v = {Real(5), Real(-1), Real(0.5)}, w = {Real(3), Real(-0.25)}, c = {Real(2), Real(1)};
  const Real decay(0.75), log_decay(0), gain(0.125);
  std::vector<Real> s(6, Real(0)), y(3);
  Fraction power(1);
  for (int T = 1; T <= 40; ++T) {
    literal_step(shape, Record<Real>{v.data(), w.data(), &log_decay, gain}, &decay, c.data(), 3, s.data(), y.data());
    power *= Fraction(3, 4);
    const Fraction sum = (1 - power) / (1 - Fraction(3, 4)) / 8;
    const Fraction vs[] = {5, -1, Fraction(1, 2)}, ws[] = {3, Fraction(-1, 4)};
    for (std::size_t p = 0; p < 3; ++p) {
      for (std::size_t n = 0; n < 2; ++n) EXPECT_EQ(s[2 * p + n], this->exact(vs[p] * ws[n] * sum)) << T;
      EXPECT_EQ(y[p], this->exact(vs[p] * (2 * ws[0] + ws[1]) * sum)) << T;
    }
  }
}

TYPED_TEST(BigReal, DeltaRuleIsAProductOfMatrices) {
  using Real = typename TypeParam::Real;
  // S <- S diag(a) (1 - beta k k^T) + beta v k^T, written as matrices in fractions; a step adds at most 8 bits, so that
  // 9 of them fit into every type. Rows are run in two parts, as an oracle with several threads does.
  const Fraction a[] = {Fraction(1, 2), Fraction(3, 4)};
  for (const Recurrence recurrence : {Recurrence::gated_delta, Recurrence::kda}) {
    const bool kda = recurrence == Recurrence::kda;
    const RecurrenceShape shape{recurrence, 1, 1, 3, 2};
    Fraction right[3][2] = {};
    std::vector<Real> s(6, Real(0)), y(3);
    for (int t = 1; t <= 9; ++t) {
      const Fraction k[] = {Fraction(t % 3 - 1, 2), Fraction(1, 2)}, v[] = {t, 2 - t, 1}, q[] = {1, t}, beta(1, 2);
      for (auto& row : right) {
        const std::size_t i = static_cast<std::size_t>(&row - right);
        const Fraction first = row[0] * a[0], second = row[1] * a[kda ? 1 : 0];
        row[0] = first * (1 - beta * k[0] * k[0]) - second * beta * k[1] * k[0] + beta * v[i] * k[0];
        row[1] = second * (1 - beta * k[1] * k[1]) - first * beta * k[0] * k[1] + beta * v[i] * k[1];
      }
      const auto reals = [this](std::span<const Fraction> x) {
        std::vector<Real> out;
        for (const Fraction& f : x) out.push_back(this->exact(f));
        return out;
      };
      const std::vector<Real> v_ = reals(v), k_ = reals(k), q_ = reals(q), decay = reals(a);
      const Real none(0);
      for (const auto& [first, rows] : {std::pair{0, 2}, {2, 1}}) {
        literal_step(shape, Record<Real>{v_.data() + first, k_.data(), &none, Real(0.5)}, decay.data(), q_.data(), rows,
                     s.data() + 2 * first, y.data() + first);
      }
      for (std::size_t p = 0; p < 3; ++p) {
        for (std::size_t n = 0; n < 2; ++n) EXPECT_EQ(s[2 * p + n], this->exact(right[p][n])) << t << name(recurrence);
        EXPECT_EQ(y[p], this->exact(right[p][0] + right[p][1] * t)) << t << name(recurrence);
      }
    }
  }
}

TYPED_TEST(BigReal, TagsSpellOutTheTokens) {
  using Real = typename TypeParam::Real;
  constexpr std::size_t count = 100;  // tags 2^t: more than any hardware type holds at once
  std::vector<Real> s;
  std::vector<Step<Real>> tokens;
  for (std::size_t t = 0; t < count; ++t) {
    tokens.push_back(this->scalar(std::ldexp(1.0, static_cast<int>(t)), 1, Real(0), Real(1)));
  }
  EXPECT_EQ(this->run(Recurrence::mamba2, tokens, s)[0], ldexp(Real(1), static_cast<int>(count)) - 1);
  for (const Recurrence recurrence : {Recurrence::gated_delta, Recurrence::kda}) {
    for (std::size_t t = 0; t < count; ++t) {
      tokens[t].w.assign(count, Real(0));
      tokens[t].w[t] = 1;
      tokens[t].c.assign(count, Real(1));
      tokens[t].log_decay.assign(recurrence == Recurrence::kda ? count : 1, Real(0));
    }
    s.clear();
    EXPECT_EQ(this->run(recurrence, tokens, s)[0], ldexp(Real(1), static_cast<int>(count)) - 1);
    for (std::size_t t = 0; t < count; ++t) EXPECT_EQ(s[t], ldexp(Real(1), static_cast<int>(t)));
  }
}

// ---- states whose right value is known ------------------------------------------------------------------------------

TYPED_TEST(BigReal, SmallStepsOverManyTokens) {
  using Real = typename TypeParam::Real;
  const Real dt = ldexp(Real(1), -9);
  std::vector<Real> s;
  this->run(Recurrence::mamba2, std::vector<Step<Real>>(2000, this->scalar(1, 1, -dt, dt)), s);
  // Per step the decay, the product and the sum round, each decaying with what it is part of: 4 in 1 - a = 2^-9 of
  // the state that they add up to. The decay's own error also counts for the 512 tokens that a state lasts.
  this->expect_near(s[0], "0.98084143563993516198267194694052544451824196723367893568520107", 4 * 512);
}

TYPED_TEST(BigReal, DecaysOfEverySize) {
  using Real = typename TypeParam::Real;
  for (const double strong : {-4e7, -300.0}) {
    std::vector<Real> s = {Real(1)};
    std::vector<Step<Real>> tokens(3, this->scalar(0, 1, Real(-0.3), Real(1)));
    tokens[0].log_decay[0] = strong;
    const Step<Real> first = tokens[0];
    this->run(Recurrence::mamba2, {first}, s);
    EXPECT_GT(s[0], 0);  // however strong
    EXPECT_LE(abs(log(s[0]) - Real(strong)), abs(Real(strong)) * 8 * this->unit());
    s = {Real(0)};
    tokens[0].v[0] = 1;
    this->run(Recurrence::mamba2, tokens, s);
    this->expect_near(s[0], "0.5488116360940264448145252087083831732943176348685161745094268", 2 * 8);
    const Real before = s[0];
    this->run(Recurrence::mamba2, {this->scalar(7, 1, Real(0), Real(0))}, s);  // dt = 0
    EXPECT_EQ(s[0], before);
  }
  // Four tokens whose logarithms sum to -103.
  std::vector<Real> s;
  this->run(Recurrence::gated_delta, std::vector<Step<Real>>(4, this->scalar(1, 1, log(Real(6.5e-12)), Real(0.5))), s);
  this->expect_near(s[0], "0.50000000000162500000000528129304646646309981021175510080656963", 8);
  // One channel of two decays by e^-8 a token.
  const Real k = 1 / sqrt(Real(2));
  s.clear();
  this->run(
      Recurrence::kda,
      std::vector<Step<Real>>(32, Step<Real>{{Real(1)}, {k, k}, {Real(1), Real(0)}, {Real(-8), Real(0)}, Real(0.5)}),
      s);
  // The second channel ends at sqrt(2), four times what a step adds; the first cancels from there to 3e-5 of it.
  this->expect_near(s[1], "1.4140713369018302522728573726199402660263407877133639194914157", 32 * 8);
  this->expect_near(s[0], "0.000047422630801356797125855163855399225795257730935563408455381937", 32 * 8 * 3e4);
}

TYPED_TEST(BigReal, ExpandingDeltaRule) {
  using Real = typename TypeParam::Real;
  std::vector<Real> s;
  this->run(Recurrence::gated_delta, std::vector<Step<Real>>(64, this->scalar(1, 3, Real(0), Real(1))), s);
  const Real right = (1 - pow(Real(2), 192)) / 3;
  if (this->unit() < pow(Real(2), -192)) {
    EXPECT_EQ(s[0], right);  // whole numbers all the way
  } else {
    // u = -9 S / 3 and the sum -8 S: the roundings of the readout (3 S), of u (3 S), each times k = 3, of the product
    // (9 S) and of the sum (8 S) are less than 5 of the result in each step that does not fit.
    EXPECT_LE(abs(s[0] - right), 5 * 64 * this->unit() * abs(right));
  }
}

TYPED_TEST(BigReal, SmallParametersEnterAsTheyAre) {
  using Real = typename TypeParam::Real;
  // A_log = ln 16 and dt = 0.01 in binary64, which softplus has to give back: dt_raw = log(e^dt - 1).
  const Real A_log(std::log(16.0)), dt(0.01), dt_raw = log(exp(dt) - 1), zero(0), one(1);
  const Mamba2Inputs<Real> mamba{
      {Recurrence::mamba2, 1, 1, 1, 1}, 1, {&one, 1}, {&one, 1}, {&one, 1}, {&dt_raw, 1}, &A_log, &zero};
  const LayerInputs<Real> prepared = prepare(mamba);
  const HeadInputs<Real>& head = prepared.heads[0];
  const Real decay = exp(head.log_decay[0][0]);
  Real s(1);
  for (int t = 0; t < 100; ++t) s *= decay;
  // log(e^0.01 - 1) loses 1 / 0.01 of its relative precision, softplus 4.6 of it again; all counts 16 times in e^-16.
  this->expect_near(s, "1.1253517471925924405560912513338215406216834044169525697548792e-7",
                    16 * (100 + 5 * 8) + 3 * 100);

  // Keys of 128 entries 1e-4, and of zeros; a logit of 3.
  const std::vector<Real> small(128, Real(1e-4)), zeros(128, Real(0));
  const Real gate(0), logit(3);
  for (const auto* key : {&small, &zeros}) {
    const DeltaInputs<Real> delta{{Recurrence::gated_delta, 1, 1, 1, 128},
                                  1,
                                  {key->data(), 128},
                                  {key->data(), 128},
                                  {&one, 1},
                                  {&gate, 1},
                                  {&logit, 1},
                                  &zero,
                                  &zero};
    const LayerInputs<Real> in = prepare(delta);
    for (int n = 0; n < 128; ++n) {
      if (key == &zeros) {
        EXPECT_EQ(in.heads[0].w[0][n], 0);
      } else {
        // 128 squares and sums, of which the root halves the error; root, division, product.
        this->expect_near(in.heads[0].w[0][n], "0.066226617853252192375819275121950548492047862220263553354052716",
                          128 + 4);
      }
    }
    this->expect_near(in.heads[0].gain[0][0], "0.95257412682243321912115184822824779861382056757939089928211199",
                      8 + 6);
  }
}

}  // namespace
}  // namespace replayssm
