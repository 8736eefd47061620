// Edges of the study: large vocabularies, policies that are refused, runs that leave the range of their format.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "analysis/study.h"
#include "core/tokens.h"
#include "tests/support/forward.h"
#include "tests/support/model_files.h"

namespace replayssm {
namespace {

constexpr double u = std::numeric_limits<double>::epsilon() / 2;  // unit roundoff

class StudyEdgeTest : public FilesTest {
 protected:
  static std::vector<PolicyResult> study(const Model& model, const Tokens& tokens, const std::vector<string>& texts) {
    std::vector<Policy> policies;
    for (const string& text : texts) policies.push_back(parse_policy(text));
    const auto backend = reference_backend(Precision::fp64, 1);
    return run_study(model, *backend, tokens, policies, {});
  }
  static Tokens golden_tokens(std::int64_t length, const string& golden = "mamba2") {
    Tokens tokens = read_tokens(golden_file(golden));
    tokens.ids.resize(static_cast<std::size_t>(length), 1);
    tokens.length = length;
    return tokens;
  }
};

TEST_F(StudyEdgeTest, LargeVocabularyOverSeveralBlocks) {
  // Logits are compared a block of positions at a time. With this vocabulary the block does not divide the chunk of 512
  // tokens, and the second chunk is a short one. The padding rows of the head are 0, so their logits are exactly 0 and
  // the others are those of the model that is not padded: the KL has a closed form in them.
  const std::size_t vocabulary = 27011, length = 520;
  ModelFiles files("mamba2");
  files.config["vocab_size"] = vocabulary;
  for (const char* name : {"backbone.embeddings.weight", "lm_head.weight"}) {
    files.tensors[name].shape[0] = static_cast<std::int64_t>(vocabulary);
    files.tensors[name].bytes.resize(vocabulary * 48 * 4, 0);
  }
  const auto padded = Model::open(files.write(folder_ / "model"));
  Tokens tokens = golden_tokens(static_cast<std::int64_t>(length));
  for (std::size_t t = 45; t < length; ++t) tokens.ids[t] = static_cast<std::int32_t>(t * t % 97);
  const string policy = "eager(state=e4m3:row)";
  const PolicyResult result = study(*padded, tokens, {policy}).front();

  const auto small = Model::open(golden_folder("mamba2"));
  const auto backend = reference_backend(Precision::fp64, 1);
  const auto logits = [&](const Policy& run_policy) {
    Runner runner(*small, *backend, run_policy);  // in the study's own chunks, for the same bits in front of the head
    Values all = runner.logits({tokens.ids.begin(), tokens.ids.begin() + 512});
    const Values rest = runner.logits({tokens.ids.begin() + 512, tokens.ids.end()});
    all.insert(all.end(), rest.begin(), rest.end());
    return all;
  };
  const Values p = logits(exact_policy()), q = logits(parse_policy(policy));
  // A logit is a sum of 48 products, in one order there and perhaps in another here, each good to 48 u |w| |h|; h comes
  // from a norm, so |h| <= sqrt(48) max |norm weight|.
  double w = 0, h = 0;
  for (const float x : values_of<float>(files.tensors.at("backbone.norm_f.weight")))
    h = std::max(h, std::abs(double{x}));
  const std::vector<float> head = values_of<float>(files.tensors.at("lm_head.weight"));
  for (std::size_t row = 0; row < 97; ++row) {
    double square = 0;
    for (std::size_t i = 0; i < 48; ++i) square += double{head[row * 48 + i]} * double{head[row * 48 + i]};
    w = std::max(w, std::sqrt(square));
  }
  const double logit_error = 2 * 48 * u * w * h * std::sqrt(48.0);
  for (std::size_t t = 0; t < length; ++t) {
    const auto padding = static_cast<long double>(vocabulary - 97);
    long double sum_p = padding, sum_q = padding;  // e^0 each; logits of this model stay below 10
    for (std::size_t v = 0; v < 97; ++v) {
      sum_p += std::exp(static_cast<long double>(p[t * 97 + v]));
      sum_q += std::exp(static_cast<long double>(q[t * 97 + v]));
    }
    const long double shift = std::log(sum_q) - std::log(sum_p);
    long double kl = padding / sum_p * shift;
    for (std::size_t v = 0; v < 97; ++v) {
      const long double x = p[t * 97 + v];
      kl += std::exp(x) / sum_p * (x - q[t * 97 + v] + shift);
    }
    // d = log p - log q has two logits, below 20, and two logarithms, below 11, in it, and these the logits' errors
    // once more; p and q are good to 4 u.
    EXPECT_NEAR(result.tokens[t].kl, static_cast<double>(kl), 4 * logit_error + u * (4 * 20 + 4 * 11 + 8)) << t;
    const long double nll =
        std::log(sum_p) - (t + 1 < length ? p[t * 97 + static_cast<std::size_t>(tokens.ids[t + 1])] : 0);
    if (t + 1 < length) {
      EXPECT_NEAR(result.tokens[t].reference_nll, static_cast<double>(nll), 2 * logit_error + u * (4 * 20 + 4 * 11))
          << t;
    }
  }
}

TEST_F(StudyEdgeTest, RefusesPoliciesThatWouldMeasureNothing) {
  const auto mamba = Model::open(golden_folder("mamba2")), hybrid = Model::open(golden_folder("qwen3_5"));
  const auto refuse = [](const Model& model, std::int64_t tokens, const string& policy, std::vector<string> parts) {
    parts.push_back(parse_policy(policy).text());
    expect_error([&] { study(model, golden_tokens(tokens), {"exact", policy}); }, parts);
  };
  const auto accept = [](const Model& model, std::int64_t tokens, const string& policy) {
    EXPECT_EQ(study(model, golden_tokens(tokens), {policy}).size(), 1u) << policy;
  };
  // The first rounded state is written by the flush at token L - 1 and read by the token after it.
  refuse(*mamba, 16, "replay(L=16, state=bf16)", {"16 tokens"});
  accept(*mamba, 17, "replay(L=16, state=bf16)");
  refuse(*mamba, 1, "eager(state=bf16)", {"1 tokens"});
  accept(*mamba, 2, "eager(state=bf16)");
  refuse(*mamba, 16, "replay(L=16, anchor=fp32, read=bf16)", {"16 tokens"});
  accept(*mamba, 17, "replay(L=16, anchor=fp32, read=bf16)");
  refuse(*mamba, 31, "replay(L=16, anchor=bf16, read=exact)", {"31 tokens"});  // only flushes read the anchor
  accept(*mamba, 32, "replay(L=16, anchor=bf16, read=exact)");
  // A copy that is never read, though the anchor is.
  refuse(*mamba, 40, "replay(L=1, anchor=fp32, read=bf16)", {"read copy"});
  // A rounded ring is read from the second token on.
  refuse(*mamba, 1, "replay(L=16, state=exact, ring=bf16)", {"1 tokens"});
  accept(*mamba, 2, "replay(L=16, state=exact, ring=bf16)");
  refuse(*mamba, 40, "replay(L=1, state=exact, ring=bf16)", {"40 tokens"});  // no records at all
  accept(*mamba, 1, "replay(L=16, state=exact)");                            // a control

  refuse(*mamba, 40, "eager(state=bf16, layers=3)", {"layer 3", "0-2"});
  refuse(*mamba, 40, "eager(state=bf16, layers=1-2147483647)", {"layer 3"});
  refuse(*hybrid, 40, "eager(state=bf16, layers=3)", {"layer 3", "attention"});
  refuse(*hybrid, 40, "eager(state=bf16, layers=0-4)", {"layer 3", "attention"});
  accept(*hybrid, 40, "eager(state=bf16, layers=0-2)");

  for (const string field : {"v", "k", "u", "g", "beta"}) {
    refuse(*mamba, 40, "replay(L=16, state=bf16, ring." + field + "=bf16)", {"'" + field + "'"});
  }
  for (const string field : {"x", "B", "dt", "u"}) {
    refuse(*hybrid, 40, "replay(L=16, state=bf16, ring." + field + "=bf16)", {"'" + field + "'"});
  }
  for (const string field : {"v", "beta"}) {
    refuse(*hybrid, 40, "replay(L=16, state=bf16, ring." + field + "=bf16, loop=open)", {"'" + field + "'"});
  }
  accept(*hybrid, 40, "replay(L=16, state=bf16, ring.u=bf16, ring.k=e4m3:row, ring.g=fp32, loop=open)");
  accept(*mamba, 40, "replay(L=16, state=bf16, ring.x=bf16, ring.B=e4m3:row, ring.dt=fp32)");
}

TEST_F(StudyEdgeTest, RefusesTokensThatDoNotFit) {
  const auto model = Model::open(golden_folder("mamba2"));
  Tokens tokens = golden_tokens(40);
  tokens.ids[7] = 97;
  expect_error([&] { study(*model, tokens, {"eager(state=bf16)"}); }, {"97", "position 7"});
  expect_error([&] { study(*model, Tokens{}, {"exact"}); }, {"token"});
  EXPECT_TRUE(study(*model, golden_tokens(3), {}).empty());
}

TEST_F(StudyEdgeTest, AStateBeyondItsFormatIsReportedWhereItHappens) {
  // The x channels of layer 1 scaled up until the exact state leaves the range of fp16 in the middle of the run.
  ModelFiles files("mamba2");
  StoredTensor& conv = files.tensors.at("backbone.layers.1.mixer.conv1d.weight");
  conv = changed(conv, [](std::size_t i, float v) { return i < 96 * 4 ? v * 0x1p17F : v; });
  const auto model = Model::open(files.write(folder_ / "model"));
  const Tokens tokens = golden_tokens(45);

  // Where that is follows from the exact state: fp16 rounds what is 65520 or more to infinity.
  const auto backend = reference_backend(Precision::fp64, 1);
  Runner exact(*model, *backend);
  const std::size_t per_head = 16 * 24;
  std::int64_t step = -1, head = -1;
  for (std::int64_t t = 0; step < 0 && t < tokens.length; ++t) {
    exact.logits({tokens.ids[static_cast<std::size_t>(t)]});
    const Values state = exact.cache(1).state->effective();
    for (std::size_t h = 0; h < 6 && step < 0; ++h) {
      const auto begin = state.begin() + static_cast<std::ptrdiff_t>(h * per_head);
      const double most = std::abs(
          *std::max_element(begin, begin + per_head, [](double a, double b) { return std::abs(a) < std::abs(b); }));
      if (most >= 65520) {
        step = t;
        head = static_cast<std::int64_t>(h);
      }
      // No rounding to 11 bits on the way here can move a state across the limit.
      ASSERT_TRUE(most < 65520 * 0.98 || most > 65520 * 1.02) << t << ' ' << h << ' ' << most;
    }
  }
  ASSERT_GT(step, 0) << "scale the weights otherwise";

  const auto results = study(*model, tokens, {"eager(state=fp16)", "eager(state=fp16, layers=0)", "eager(state=bf16)"});
  const PolicyResult& broken = results[0];
  const auto event = broken.first_non_finite();
  ASSERT_TRUE(event);
  EXPECT_EQ(event->first.step, step);
  EXPECT_EQ(event->first.head, head);
  EXPECT_EQ(event->second, 1);
  EXPECT_GT(broken.overflows(), 0);
  EXPECT_EQ(broken.layers[0].events.overflows, 0);
  EXPECT_EQ(broken.layers[1].events.first_overflow, event->first);
  // Outputs read the unrounded state, so the step itself is still good and everything after it is not.
  EXPECT_EQ(broken.divergence.non_finite, tokens.length - step - 1);
  for (std::int64_t t = 0; t < tokens.length; ++t) {
    EXPECT_EQ(std::isfinite(broken.tokens[static_cast<std::size_t>(t)].kl), t <= step) << t;
  }
  for (const double figure : {broken.divergence.kl.mean, broken.divergence.kl.max, broken.divergence.kl_reverse.mean,
                              broken.divergence.nll, broken.divergence.nll_delta, broken.divergence.delta_p.rms}) {
    EXPECT_TRUE(std::isnan(figure)) << figure;
  }
  EXPECT_FALSE(std::isfinite(broken.layers[1].y_rel_l2.propagated));
  EXPECT_FALSE(std::isfinite(broken.layers[1].state_rel_l2.propagated));
  for (const std::size_t good : {1, 2}) {  // beside it the others are as good as ever
    EXPECT_EQ(results[good].first_non_finite(), std::nullopt);
    EXPECT_EQ(results[good].divergence.non_finite, 0);
    EXPECT_TRUE(std::isfinite(results[good].divergence.kl.mean));
  }
}

}  // namespace
}  // namespace replayssm
