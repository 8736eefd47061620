// The oracle of a layer against one written apart: raw inputs from the model, gates, norms and recurrence in 60 digits.

#include "analysis/oracle.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "tests/analysis/fed.h"
#include "tests/support/forward.h"
#include "tests/support/model_files.h"

namespace replayssm {
namespace {

using oracle::Fed;
using oracle::Token;
using oracle::Vec;
using oracle::Wide;
using oracle::wide_tokens;

std::vector<std::int32_t> SomeTokens(std::size_t count) {
  std::vector<std::int32_t> ids;
  for (std::size_t i = 0; i < count; ++i) ids.push_back(static_cast<std::int32_t>(i * i * 31 % 97));
  return ids;
}

/// A golden model run up to a layer, and what the layer fed its recurrence.
struct Golden {
  std::unique_ptr<Model> model;
  std::unique_ptr<Backend> backend = reference_backend(Precision::fp64, 1);

  explicit Golden(const string& name) : model(Model::open(golden_folder(name))) {}
  OracleResult run(const std::vector<std::int32_t>& ids, OracleOptions options) const {
    return run_oracle(*model, *backend, ids, options);
  }
  RecurrenceCall call(const std::vector<std::int32_t>& ids, std::size_t layer) const {
    Runner runner(*model, *backend);
    runner.logits(ids);
    return *runner.cache(layer).call;
  }
};

/// Every figure of one precision against those of States run here and measured against 60 digits.
template <class Real>
void CheckRuns(const OracleResult& result, const Fed<Real>& in) {
  const LayerInputs<Real> prepared = in.prepared();
  const std::size_t heads = static_cast<std::size_t>(in.shape.heads), P = static_cast<std::size_t>(in.shape.head_dim);
  const bool delta = in.shape.recurrence != Recurrence::mamba2;
  std::vector<State<Real>> states;
  std::vector<std::vector<Real>> ys;
  std::vector<const KeptDigits*> runs;
  for (const KeptDigits& run : result.runs) {
    if ((run.precision == Precision::fp32) != std::is_same_v<Real, float>) continue;
    runs.push_back(&run);
    states.emplace_back(in.shape, run.policy);
    ys.emplace_back(static_cast<std::size_t>(in.tokens) * heads * P);
    states.back().advance(prepared, ys.back().data());
  }
  ASSERT_EQ(runs.size(), 5u);
  for (std::size_t h = 0; h < heads; ++h) {
    const auto tokens = wide_tokens(in, static_cast<std::int64_t>(h));
    oracle::Steps<Wide> truth({delta, 1, false, parse_format("exact")},
                              P * static_cast<std::size_t>(in.shape.state_dim));
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      const Vec<Wide> y = truth.advance(tokens[t], tokens[t]);
      for (std::size_t r = 0; r < runs.size(); ++r) {
        // The two oracles differ from the 45th digit on and the runs from them in the 17th or before: that leaves the
        // roundings of a logarithm near 16 to binary64.
        EXPECT_DOUBLE_EQ(runs[r]->y[t * heads + h], oracle::digits(ys[r].data() + (t * heads + h) * P, y))
            << runs[r]->policy.text() << ", token " << t << ", head " << h;
      }
    }
    for (std::size_t r = 0; r < runs.size(); ++r) {
      const std::vector<Real> s = states[r].effective(static_cast<std::int64_t>(h));
      EXPECT_DOUBLE_EQ(runs[r]->state[heads + h], oracle::digits(s.data(), truth.effective()))
          << runs[r]->policy.text() << ", " << h;
    }
  }
}

class OracleModels : public testing::TestWithParam<std::pair<const char*, std::int64_t>> {};
INSTANTIATE_TEST_SUITE_P(Layers, OracleModels, testing::Values(std::pair{"mamba2", 1}, std::pair{"qwen3_5", 2}),
                         [](const auto& i) { return string(i.param.first); });

TEST_P(OracleModels, MeasureAgainstTheRealInputsOfTheLayer) {
  const Golden golden(GetParam().first);
  const auto ids = SomeTokens(70);  // more than the oracle takes at once
  const std::int64_t layer = GetParam().second;
  const OracleResult result = golden.run(ids, {.layer = layer, .lengths = {4, 16}});
  EXPECT_EQ(result.tokens, 70);
  EXPECT_EQ(result.heads, (std::vector<std::int64_t>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(result.block_ends, (std::vector<std::int64_t>{63, 69}));
  EXPECT_GE(result.confirmed, 50);
  EXPECT_LE(result.confirmed, result.working_digits);
  EXPECT_GE(result.working_digits, 70);
  EXPECT_GE(result.check_digits, 100);
  std::vector<string> names;
  for (const KeptDigits& run : result.runs) names.push_back(run.policy.text());
  const string closed = "replay(L=4, state=exact)", sequential = "replay(L=4, state=exact, order=sequential)";
  ASSERT_EQ(names.size(), 10u);
  EXPECT_EQ(names[0], "exact");
  EXPECT_EQ(names[2], closed);
  EXPECT_EQ(names[4], sequential);

  const RecurrenceCall call = golden.call(ids, static_cast<std::size_t>(layer));
  CheckRuns(result, Fed<double>(*golden.backend, call));
  CheckRuns(result, Fed<float>(*golden.backend, call));
}

/// The least digits that eager Mamba-2 keeps with unit roundoff u, for one token after the other of one head: rounding
/// errors are bounded by their number times u on the sum of absolute values (Higham 2002, section 3.1). In units of u:
/// exp, log and log1p are good to 1 ulp = 2; z = dt_raw + bias rounds |z| of softplus away (whose slope is at most 1)
/// and its parts 7 more; the logarithm of a decay has that error and those of A and the product, 3; the decay |g| times
/// as much, 2 by itself. u v and a S are products, u w + a S at most two roundings; a dot product of N has at most N.
template <class Real>
Vec<double> LeastDigits(const Fed<Real>& in, std::int64_t head, double u) {
  const auto tokens = wide_tokens(in, head);
  const std::size_t N = tokens[0].w.size(), P = tokens[0].v.size();
  Vec<Wide> s(P * N, Wide(0)), absolute(s), error(s);
  Vec<double> out;
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    const Token<Wide>& x = tokens[t];
    const Wide z =
        Wide(in.rows(3)[static_cast<std::int64_t>(t)][head]) + Wide(in.dt_bias[static_cast<std::size_t>(head)]);
    const Wide of_dt = abs(z) / x.gain + 7, a = exp(x.g[0]), of_decay = -x.g[0] * (of_dt + 3) + 2;
    Wide difference(0), norm(0);
    for (std::size_t p = 0; p < P; ++p) {
      Wide y(0), bound(0);
      for (std::size_t n = 0; n < N; ++n) {
        const std::size_t i = p * N + n;
        const Wide term = abs(x.gain * x.v[p] * x.w[n]);
        error[i] = a * (error[i] + (of_decay + 1) * absolute[i]) + (of_dt + 2) * term;
        absolute[i] = a * absolute[i] + term;
        error[i] += absolute[i];
        s[i] = a * s[i] + x.gain * x.v[p] * x.w[n];
        y += s[i] * x.c[n];
        bound += (error[i] + static_cast<double>(N) * absolute[i]) * abs(x.c[n]);
      }
      difference += bound * bound;
      norm += y * y;
    }
    // Terms of second order: less than a thousandth, as no count above times u reaches 1e-3.
    out.push_back(static_cast<double>(-log10(Wide(1.001) * u * sqrt(difference / norm))));
  }
  return out;
}

TEST(Oracle, EagerRunsKeepWhatRoundingAnalysisPromises) {
  const Golden golden("mamba2");
  const auto ids = SomeTokens(45);
  const OracleResult result = golden.run(ids, {.layer = 1});
  const RecurrenceCall call = golden.call(ids, 1);
  const Fed<double> fed(*golden.backend, call);
  const Fed<float> fed32(*golden.backend, call);
  for (std::size_t h = 0; h < 6; ++h) {
    const auto head = static_cast<std::int64_t>(h);
    const Vec<double> least64 = LeastDigits(fed, head, std::ldexp(1.0, -53));
    const Vec<double> least32 = LeastDigits(fed32, head, std::ldexp(1.0, -24));
    for (std::size_t t = 0; t < 45; ++t) {
      EXPECT_GE(result.runs[0].y[t * 6 + h], least64[t]) << t << " " << h;
      EXPECT_GE(result.runs[1].y[t * 6 + h], least32[t]) << t << " " << h;
      EXPECT_GT(least32[t], 2);  // a bound that says something
      // No output is as good as half an ulp of fp32 allows at best and as good as fp64 at the same time.
      EXPECT_LT(result.runs[1].y[t * 6 + h], least64[t]) << t << " " << h;
    }
  }
}

// ---- what the oracle vouches for ------------------------------------------------------------------------------------

TEST(Oracle, NoticesThatItHasFewerDigitsThanItClaims) {
  const Golden golden("mamba2");
  const auto ids = SomeTokens(45);
  // 33 digits out of arithmetic with no more: the roundings of 45 tokens must show. Both kinds of arithmetic have 113
  // or 114 bits then.
  const OracleResult bare = golden.run(ids, {.layer = 1, .digits = 33, .guard = 0});
  EXPECT_EQ(bare.working_digits, 33);
  EXPECT_LT(bare.confirmed, 33);
  Wide least(1000);
  for (std::int64_t h = 0; h < 6; ++h) {
    for (const double d : LeastDigits(Fed<double>(*golden.backend, golden.call(ids, 1)), h, std::ldexp(1.0, -113))) {
      least = std::min(least, Wide(d));
    }
  }
  // What it does confirm it must have: Boost's functions may be worse than MPFR's by some ulps, a digit.
  EXPECT_GE(bare.confirmed, std::floor(static_cast<double>(least)) - 1);
  // Guard digits make it good.
  EXPECT_GE(golden.run(ids, {.layer = 1, .digits = 33, .guard = 10}).confirmed, 33);
}

TEST(Oracle, GivesNoMoreDigitsThanAskedFor) {
  const Golden golden("qwen3_5");
  const auto ids = SomeTokens(20);
  const OracleResult many = golden.run(ids, {.layer = 0}), few = golden.run(ids, {.layer = 0, .digits = 7});
  EXPECT_GE(few.confirmed, 7);
  for (std::size_t r = 0; r < many.runs.size(); ++r) {
    for (std::size_t i = 0; i < many.runs[r].y.size(); ++i) {
      EXPECT_DOUBLE_EQ(few.runs[r].y[i], std::min(many.runs[r].y[i], 7.0));
    }
  }
}

TEST(Oracle, DependsNeitherOnThreadsNorOnTheChoiceOfHeads) {
  for (const auto& [name, layer] : {std::pair{"mamba2", 0}, {"qwen3_5", 1}}) {
    const Golden golden(name);
    const auto ids = SomeTokens(70);
    const OracleResult all = golden.run(ids, {.layer = layer, .digits = 25, .threads = 1});
    const OracleResult some = golden.run(ids, {.layer = layer, .heads = {1, 4, 5}, .digits = 25, .threads = 3});
    EXPECT_EQ(some.heads, (std::vector<std::int64_t>{1, 4, 5}));
    EXPECT_EQ(all.block_ends, (std::vector<std::int64_t>{63, 69}));
    for (std::size_t r = 0; r < all.runs.size(); ++r) {
      for (std::size_t i = 0; i < 3; ++i) {
        const auto head = static_cast<std::size_t>(some.heads[i]);
        for (std::size_t t = 0; t < 70; ++t) EXPECT_EQ(some.runs[r].y[t * 3 + i], all.runs[r].y[t * 6 + head]);
        for (std::size_t b = 0; b < 2; ++b) EXPECT_EQ(some.runs[r].state[b * 3 + i], all.runs[r].state[b * 6 + head]);
      }
    }
  }
}

TEST(Oracle, BlocksOfTokensGoOnWhereTheLastOneEnded) {
  for (const auto& [name, layer] : {std::pair{"mamba2", 2}, {"qwen3_5", 2}}) {
    const Golden golden(name);
    const OracleResult whole = golden.run(SomeTokens(130), {.layer = layer});
    EXPECT_EQ(whole.block_ends, (std::vector<std::int64_t>{63, 127, 129}));
    EXPECT_GE(whole.confirmed, 50);
    ASSERT_EQ(whole.runs[0].state.size(), 18u);
    // A state that was lost between two blocks would leave no digit.
    for (const KeptDigits& run : whole.runs) {
      for (const double digits : run.y) EXPECT_GT(digits, 1);
      for (const double digits : run.state) EXPECT_GT(digits, 1);
    }
    const OracleResult start = golden.run(SomeTokens(64), {.layer = layer});
    for (std::size_t r = 0; r < start.runs.size(); ++r) {
      EXPECT_TRUE(std::equal(start.runs[r].y.begin(), start.runs[r].y.end(), whole.runs[r].y.begin()));
      EXPECT_TRUE(std::equal(start.runs[r].state.begin(), start.runs[r].state.end(), whole.runs[r].state.begin()));
    }
    // Sequential replays are eager runs, bit for bit, and so is a replay of length 1.
    for (std::size_t i = 0; i < 2; ++i) EXPECT_EQ(whole.runs[4 + i].y, whole.runs[i].y);
    const OracleResult one = golden.run(SomeTokens(64), {.layer = layer, .lengths = {1}});
    for (std::size_t i = 0; i < 2; ++i) EXPECT_EQ(one.runs[2 + i].y, one.runs[i].y);
  }
}

TEST(Oracle, LooksAtTheStatesAsOftenAsAskedFor) {
  for (const auto& [name, layer] : {std::pair{"mamba2", 1}, {"qwen3_5", 0}}) {
    const Golden golden(name);
    const auto every = [&, at = layer](std::int64_t tokens) {
      return golden.run(SomeTokens(9), {.layer = at, .digits = 20, .state_every = tokens});
    };
    const OracleResult each = every(1), fourth = every(4), all = every(64);
    EXPECT_EQ(each.block_ends, (std::vector<std::int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8}));
    EXPECT_EQ(fourth.block_ends, (std::vector<std::int64_t>{3, 7, 8}));
    EXPECT_EQ(all.block_ends, std::vector<std::int64_t>{8});
    for (std::size_t r = 0; r < all.runs.size(); ++r) {
      for (const OracleResult* some : {&fourth, &all}) {
        EXPECT_EQ(some->runs[r].y, each.runs[r].y);
        for (std::size_t b = 0; b < some->block_ends.size(); ++b) {
          const auto t = static_cast<std::size_t>(some->block_ends[b]);
          for (std::size_t h = 0; h < 6; ++h) {
            EXPECT_EQ(some->runs[r].state[6 * b + h], each.runs[r].state[6 * t + h]) << r << " " << t << " " << h;
          }
        }
      }
    }
  }
}

TEST(Oracle, MeasuresWhatTheBackendRuns) {
  // The reference as the backend: what it runs in binary64 is what the oracle runs in binary64 by itself, bit for bit.
  for (const auto& [name, layer] : {std::pair{"mamba2", 1}, {"qwen3_5", 2}}) {
    const Golden golden(name);
    OracleOptions options{.layer = layer, .heads = {1, 4}, .lengths = {4}};
    for (const char* policy : {"exact", "replay(L=4, state=exact)", "replay(L=4, state=exact, order=sequential)"}) {
      options.on_backend.push_back(parse_policy(policy));
    }
    const OracleResult found = golden.run(SomeTokens(70), options);
    EXPECT_EQ(found.oracles, 2);
    ASSERT_EQ(found.runs.size(), 9u);
    for (std::size_t p = 0; p < 3; ++p) {
      const KeptDigits &cpu = found.runs[2 * p], &backend = found.runs[6 + p];
      EXPECT_FALSE(cpu.on_backend);
      EXPECT_TRUE(backend.on_backend);
      EXPECT_EQ(backend.precision, Precision::fp64);
      EXPECT_EQ(backend.policy, cpu.policy);
      EXPECT_EQ(backend.y, cpu.y);
      EXPECT_EQ(backend.state, cpu.state);
    }
    // Rounded inputs enter an oracle of their own; this backend computes with others and has the digits of bf16 left.
    options.activations = parse_format("bf16");
    const OracleResult rounded = golden.run(SomeTokens(70), options);
    EXPECT_EQ(rounded.oracles, 3);
    for (std::size_t r = 0; r < 6; ++r) EXPECT_EQ(rounded.runs[r].y, found.runs[r].y);
    for (const double digits : rounded.runs[6].state) {
      EXPECT_GT(digits, 1);
      EXPECT_LT(digits, 5);
    }
  }
}

TEST(Oracle, RefusesWhatTheCommandCannotAskFor) {
  const Golden golden("mamba2");
  const auto refused = [&](const OracleOptions& options, const string& part, std::size_t tokens = 3) {
    try {
      golden.run(SomeTokens(tokens), options);
      ADD_FAILURE() << "no Error with " << part;
    } catch (const Error& error) {
      EXPECT_NE(string(error.what()).find(part), string::npos) << error.what();
    }
  };
  refused({.layer = -1}, "layer -1");
  refused({.heads = {2, 1}}, "head");
  refused({.heads = {2, 2}}, "head");
  refused({.heads = {-1}}, "head -1");
  refused({.digits = 0}, "digits 0");
  refused({.guard = -1}, "guard digits -1");
  refused({.state_every = 0}, "found 0");
  refused({.state_every = 48}, "divisor of 64, found 48");
  refused({.on_backend = {parse_policy("eager(state=bf16, layers=1-2)")}}, "layer 0");
  refused({.activations = parse_format("int8:row")}, "int8:row");
  refused({}, "token", 0);
  const auto fp32 = reference_backend(Precision::fp32, 1);
  EXPECT_THROW(run_oracle(*golden.model, *fp32, SomeTokens(3), {}), Error);
}

}  // namespace
}  // namespace replayssm
