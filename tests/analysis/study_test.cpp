// The study: controls that must be exactly zero, results against a literal computation, what is refused, what breaks.

#include "analysis/study.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/tokens.h"
#include "tests/support/forward.h"
#include "tests/support/model_files.h"
#include "tests/support/study_results.h"

namespace replayssm {
namespace {

using Policies = std::vector<string>;
constexpr double u = std::numeric_limits<double>::epsilon() / 2;  // unit roundoff

std::vector<PolicyResult> study(const Model& model, const Tokens& tokens, const Policies& texts,
                                const StudyOptions& options = {}, Precision precision = Precision::fp64) {
  std::vector<Policy> policies;
  for (const string& text : texts) policies.push_back(parse_policy(text));
  const auto backend = reference_backend(precision, options.threads);
  return run_study(model, *backend, tokens, policies, options);
}

/// Ids without a pattern, for as many tokens as a test wants.
Tokens some_tokens(std::int64_t sequences, std::int64_t length, std::uint32_t vocabulary = 97) {
  Tokens tokens{{}, sequences, length};
  std::uint32_t x = 12345;
  for (std::int64_t i = 0; i < sequences * length; ++i) {
    x = x * 1664525 + 1013904223;
    tokens.ids.push_back(static_cast<std::int32_t>((x >> 8) % vocabulary));
  }
  return tokens;
}

class StudyTest : public testing::TestWithParam<const char*> {
 protected:
  const std::unique_ptr<Model> model_ = Model::open(golden_folder(GetParam()));
};

TEST_P(StudyTest, NullArmsAreExactlyZero) {
  const Tokens tokens = some_tokens(2, 130);  // two full blocks of 64 each: the standard error is a number too
  for (const PolicyResult& r : study(*model_, tokens,
                                     {"exact", "replay(L=16, state=exact, order=sequential)",
                                      "replay(L=3, anchor=exact, read=exact, order=sequential)",
                                      "eager(state=exact, layers=1)", "replay(L=1, state=exact, layers=0-1)"},
                                     {.local = true, .chunk_tokens = 37})) {
    SCOPED_TRACE(r.policy.text());
    for (const TokenDivergence& t : r.tokens) {
      ASSERT_EQ(t.kl, 0);
      ASSERT_EQ(t.kl_reverse, 0);
      ASSERT_TRUE(same_bits(t.nll, t.reference_nll));
      ASSERT_TRUE(t.delta_p == 0 || std::isnan(t.delta_p));
      ASSERT_TRUE(t.top1_agrees);
    }
    for (const DivergenceStatistics& s : {r.divergence.kl, r.divergence.kl_reverse}) {
      EXPECT_EQ(s.mean, 0);
      EXPECT_EQ(s.sem, 0);
      EXPECT_EQ(s.p50, 0);
      EXPECT_EQ(s.p90, 0);
      EXPECT_EQ(s.p99, 0);
      EXPECT_EQ(s.max, 0);
      EXPECT_EQ(s.infinite, 0);
    }
    EXPECT_EQ(r.divergence.top1_agreement, 1);
    EXPECT_EQ(r.divergence.nll_delta, 0);
    EXPECT_EQ(r.divergence.nll, r.divergence.nll_reference);
    EXPECT_EQ(r.divergence.delta_p.rms, 0);
    EXPECT_EQ(r.divergence.delta_p.p1, 0);
    EXPECT_EQ(r.divergence.delta_p.p99, 0);
    EXPECT_EQ(r.divergence.positions, 260);
    EXPECT_EQ(r.divergence.predicted, 258);
    EXPECT_EQ(r.overflows(), 0);
    EXPECT_EQ(r.first_non_finite(), std::nullopt);
    EXPECT_EQ(std::ssize(r.layers), model_->ssm_layers());
    for (const LayerResult& layer : r.layers) {
      for (const LayerError& error : {layer.y_rel_l2, layer.state_rel_l2}) {
        EXPECT_EQ(error.propagated, 0);
        EXPECT_EQ(error.local, 0);
      }
    }
  }
}

TEST_P(StudyTest, ClosedOrderOfExactFormatsDiffersByRoundingOnly) {
  const Tokens tokens = some_tokens(1, 70);
  const Policies closed = {"replay(L=16, state=exact)"};
  const PolicyResult in_fp64 = study(*model_, tokens, closed).front();
  const PolicyResult in_fp32 = study(*model_, tokens, closed, {}, Precision::fp32).front();
  // The true KL is of second order in differences of some 1e-15. What is left is the rounding of its sum
  // p d + (q - p): p and q are each good to 4 u (e^x, the sum, the quotient), and d to the rounding and the last place
  // of both logarithms of the normalising sums, below ln 97 + 1 each.
  const double bound = 2 * 4 * u + 2 * 2 * u * (std::log(97.0) + 1);
  for (const TokenDivergence& t : in_fp64.tokens) {
    EXPECT_LE(std::abs(t.kl), bound);
    EXPECT_LE(std::abs(t.kl_reverse), bound);
  }
  for (std::size_t i = 0; i < in_fp64.layers.size(); ++i) {
    // The order is another one, so something must be there; errors of rounding scale with the precision, 2^-29, and two
    // draws of them differ by less than a factor of two in a norm over thousands of values.
    EXPECT_GT(in_fp64.layers[i].y_rel_l2.propagated, 0);
    EXPECT_GT(in_fp64.layers[i].state_rel_l2.propagated, 0);
    EXPECT_LE(in_fp64.layers[i].y_rel_l2.propagated, 2 * std::ldexp(in_fp32.layers[i].y_rel_l2.propagated, -29));
    EXPECT_LE(in_fp64.layers[i].state_rel_l2.propagated,
              2 * std::ldexp(in_fp32.layers[i].state_rel_l2.propagated, -29));
  }
}

TEST_P(StudyTest, SamePolicyTwiceAndAnyNumberOfThreadsGiveTheSameBits) {
  const Tokens tokens = some_tokens(2, 70);
  const Policies policies = {"eager(state=bf16)", "replay(L=16, anchor=fp32, read=int8:row)", "exact",
                             "eager(state=bf16)", "replay(L=4, state=e4m3:row, ring=bf16, loop=open)"};
  const auto one = study(*model_, tokens, policies, {.local = true});
  expect_identical(one[0], one[3]);
  EXPECT_GT(one[0].divergence.kl.mean, 0);
  for (const int threads : {2, 3}) {
    const auto more = study(*model_, tokens, policies, {.threads = threads, .local = true});
    for (std::size_t i = 0; i < policies.size(); ++i) expect_identical(one[i], more[i]);
  }
  // Neither do results depend on what else is in the study.
  expect_identical(study(*model_, tokens, {policies[4]}, {.local = true}).front(), one[4]);
}

TEST_P(StudyTest, SequencesAreIndependent) {
  const std::int64_t T = 40;
  const Tokens all = some_tokens(3, T);
  const string policy = "eager(state=e4m3:row)";
  const PolicyResult together = study(*model_, all, {policy}).front();
  std::vector<PolicyResult> alone;
  for (std::int64_t b = 0; b < 3; ++b) {
    const auto begin = all.ids.begin() + b * T;
    alone.push_back(study(*model_, Tokens{{begin, begin + T}, 1, T}, {policy}).front());
    for (std::int64_t t = 0; t < T; ++t) {
      const TokenDivergence &x = together.tokens[static_cast<std::size_t>(b * T + t)],
                            &y = alone.back().tokens[static_cast<std::size_t>(t)];
      EXPECT_TRUE(same_bits(x.kl, y.kl) && same_bits(x.nll, y.nll) && same_bits(x.delta_p, y.delta_p)) << b << ' ' << t;
    }
  }
  for (std::size_t i = 0; i < together.layers.size(); ++i) {
    // sqrt(sum of differences / sum of references) lies between the least and the greatest of the parts.
    double least = std::numeric_limits<double>::infinity(), most = 0;
    for (const PolicyResult& r : alone) {
      least = std::min(least, r.layers[i].y_rel_l2.propagated);
      most = std::max(most, r.layers[i].y_rel_l2.propagated);
    }
    EXPECT_GT(together.layers[i].y_rel_l2.propagated, least);
    EXPECT_LT(together.layers[i].y_rel_l2.propagated, most);
  }
}

TEST_P(StudyTest, LayersRestrictAPolicy) {
  const Tokens tokens = some_tokens(1, 40);
  const auto r = study(*model_, tokens,
                       {"eager(state=bf16)", "eager(state=bf16, layers=0)", "eager(state=bf16, layers=1)",
                        "eager(state=bf16, layers=0+1)"});
  // The first layer's inputs are the reference's own, whatever comes behind it.
  EXPECT_EQ(r[0].layers[0].y_rel_l2.propagated, r[1].layers[0].y_rel_l2.propagated);
  EXPECT_EQ(r[0].layers[0].state_rel_l2.propagated, r[3].layers[0].state_rel_l2.propagated);
  EXPECT_GT(r[1].layers[0].y_rel_l2.propagated, 0);
  EXPECT_GT(r[1].layers[1].y_rel_l2.propagated, 0);  // exact itself, but behind a layer that is not
  EXPECT_NE(r[1].layers[1].y_rel_l2.propagated, r[3].layers[1].y_rel_l2.propagated);
  EXPECT_EQ(r[2].layers[0].y_rel_l2.propagated, 0);
  EXPECT_EQ(r[2].layers[0].state_rel_l2.propagated, 0);
  EXPECT_GT(r[2].layers[1].y_rel_l2.propagated, 0);
  EXPECT_EQ(r[0].layers[1].y_rel_l2.propagated, r[3].layers[1].y_rel_l2.propagated);
}

TEST_P(StudyTest, LocalErrorsAreThoseBehindTheReferencesStream) {
  const Tokens tokens = some_tokens(2, 40);
  const string policy = "replay(L=4, anchor=fp32, read=e4m3:row)";
  const auto without = study(*model_, tokens, {policy}).front();
  SquaredError observed;  // of layer 1, over all that observe() is shown
  std::int64_t rows = 0;
  const auto backend = reference_backend(Precision::fp64, 1);
  const auto observe = [&](const LayerChunk& chunk) {
    EXPECT_EQ(chunk.policy, 0u);
    EXPECT_EQ(chunk.first_token % 16, 0);
    if (chunk.layer != 1) return;
    rows += chunk.y_local.rows;
    const Values y = read_all(*backend, chunk.y_local), exact = read_all(*backend, chunk.y_reference);
    for (std::size_t i = 0; i < y.size(); ++i) {
      observed += {(y[i] - exact[i]) * (y[i] - exact[i]), exact[i] * exact[i]};
    }
  };
  const auto with = study(*model_, tokens, {policy}, {.local = true}).front();
  const auto seen = study(*model_, tokens, {policy}, {.local = true, .chunk_tokens = 16, .observe = observe}).front();
  EXPECT_EQ(rows, 80);
  // Two sums of n positive terms, each good to n u and then some.
  const double n =
      80.0 * static_cast<double>(model_->layers()[1].recurrence->heads * model_->layers()[1].recurrence->head_dim);
  EXPECT_NEAR(observed.relative(), seen.layers[1].y_rel_l2.local, 2 * n * u * observed.relative());

  for (std::size_t i = 0; i < with.layers.size(); ++i) {
    EXPECT_TRUE(std::isnan(without.layers[i].y_rel_l2.local));
    EXPECT_TRUE(std::isnan(without.layers[i].state_rel_l2.local));
    EXPECT_EQ(without.layers[i].y_rel_l2.propagated, with.layers[i].y_rel_l2.propagated);
    EXPECT_EQ(without.layers[i].state_rel_l2.propagated, with.layers[i].state_rel_l2.propagated);
    // What the policy does to a layer on the reference's stream is what it does when it holds for this layer alone.
    const string alone = policy.substr(0, policy.size() - 1) + ", layers=" + std::to_string(i) + ")";
    const LayerResult expected = study(*model_, tokens, {alone}).front().layers[i];
    EXPECT_EQ(with.layers[i].y_rel_l2.local, expected.y_rel_l2.propagated) << i;
    EXPECT_EQ(with.layers[i].state_rel_l2.local, expected.state_rel_l2.propagated) << i;
    EXPECT_GT(with.layers[i].y_rel_l2.local, 0);
  }
  EXPECT_EQ(with.layers[0].y_rel_l2.local, with.layers[0].y_rel_l2.propagated);
  EXPECT_NE(with.layers[1].y_rel_l2.local, with.layers[1].y_rel_l2.propagated);
  for (std::size_t t = 0; t < with.tokens.size(); ++t) EXPECT_EQ(with.tokens[t].kl, without.tokens[t].kl) << t;
}

/// KL(p || q) in nats from logits, as its definition says, in long double.
long double literal_kl(const double* p, const double* q, std::size_t n) {
  const auto log_sum = [n](const double* x) {
    const double top = *std::max_element(x, x + n);
    long double sum = 0;
    for (std::size_t i = 0; i < n; ++i) sum += std::exp(static_cast<long double>(x[i]) - top);
    return top + std::log(sum);
  };
  const long double lp = log_sum(p), lq = log_sum(q);
  long double kl = 0;
  for (std::size_t i = 0; i < n; ++i) kl += std::exp(p[i] - lp) * ((p[i] - lp) - (q[i] - lq));
  return kl;
}

TEST_P(StudyTest, FiguresAreThoseOfALiteralRun) {
  const Tokens tokens = some_tokens(1, 50);
  const string text = "replay(L=4, anchor=fp32, read=e4m3:row)";
  const PolicyResult result = study(*model_, tokens, {text}).front();
  const auto backend = reference_backend(Precision::fp64, 1);
  Runner reference(*model_, *backend), run(*model_, *backend, parse_policy(text));
  const Values p = reference.logits(tokens.ids), q = run.logits(tokens.ids);
  double most = 0;  // logits, of which differences are formed
  for (const double x : p) most = std::max(most, std::abs(x));
  for (std::size_t t = 0; t < 50; ++t) {
    const auto kl = static_cast<double>(literal_kl(&p[t * 97], &q[t * 97], 97));
    // d = log p - log q is a difference of shifted logits of at most 2 `most`, each rounded, and of logarithms of sums
    // below ln 97 + 1; p and q are good to 4 u.
    EXPECT_NEAR(result.tokens[t].kl, kl, u * (8 + 4 * 2 * most + 4 * (std::log(97.0) + 1))) << t;
    const long double z = literal_kl(&q[t * 97], &p[t * 97], 97);
    EXPECT_NEAR(result.tokens[t].kl_reverse, static_cast<double>(z), u * (8 + 4 * 2 * most + 4 * (std::log(97.0) + 1)));
  }
  std::size_t at = 0;
  for (std::size_t i = 0; i < model_->layers().size(); ++i) {
    if (!model_->layers()[i].recurrence) continue;
    const LayerResult& layer = result.layers[at++];
    EXPECT_EQ(layer.layer, static_cast<std::int64_t>(i));
    EXPECT_EQ(layer.kind, model_->layers()[i].kind);
    const Values ours = read_all(*backend, run.cache(i).readout),
                 exact = read_all(*backend, reference.cache(i).readout);
    const Values s = run.cache(i).state->effective(), s0 = reference.cache(i).state->effective();
    // Sums of n positive terms, each good to 2 u.
    EXPECT_NEAR(layer.y_rel_l2.propagated, relative_l2(ours, exact),
                static_cast<double>(ours.size()) * 2 * u * layer.y_rel_l2.propagated);
    EXPECT_NEAR(layer.state_rel_l2.propagated, relative_l2(s, s0),
                static_cast<double>(s.size()) * 2 * u * layer.state_rel_l2.propagated);
  }
  EXPECT_EQ(at, result.layers.size());
}

INSTANTIATE_TEST_SUITE_P(Goldens, StudyTest, testing::Values("mamba2", "mamba2_tied", "qwen3_5"),
                         [](const auto& golden) { return string(golden.param); });
}  // namespace
}  // namespace replayssm
