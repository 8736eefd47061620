// The layer study on tiny models; on the trained ones, errors between their bound and a hundredth of it.

#include "analysis/layer_study.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "core/tokens.h"

namespace replayssm {
namespace {

struct TinyRun {
  std::unique_ptr<Model> model;
  std::unique_ptr<Backend> backend = reference_backend(Precision::fp64, 2);
  Tokens tokens;
  int threads = 2;

  TinyRun(const std::string& folder, const std::string& tokens_file, std::int64_t length)
      : model(Model::open(folder)), tokens(read_tokens(tokens_file)) {
    tokens.sequences = 1;
    tokens.length = length;
    tokens.ids.resize(static_cast<std::size_t>(length));
  }
  static TinyRun tiny(const std::string& name) {
    const std::string folder = REPLAYSSM_TEST_DATA "/models/" + name;
    return TinyRun(folder, folder + "/golden.safetensors", 40);
  }
  LayerStudy run(const std::vector<std::string>& texts, bool attribute, std::int64_t chunk = 8) {
    std::vector<Policy> policies;
    for (const std::string& text : texts) policies.push_back(parse_policy(text));
    return run_layer_study(*model, *backend, tokens, policies, {.threads = threads, .chunk_tokens = chunk}, attribute);
  }
};

TEST(ErrorMoments, AreThoseOfTheirDefinition) {
  ErrorMoments m;
  m.add(1.5, 1);  // 0.5 is 64 units of 2^-7
  m.add(-3, -4);  // 1 is 32 units of 2^-5
  EXPECT_EQ(m.rel_l2(), std::sqrt(1.25 / 17));
  EXPECT_EQ(m.bias(), 0.75 / std::sqrt(8.5));
  EXPECT_EQ(m.spread(), std::sqrt((0.625 - 0.5625) / 8.5));
  EXPECT_EQ(m.largest, 1);
  EXPECT_EQ(m.mean_ulps(), 48);
  EXPECT_EQ(m.largest_ulps, 64);
}

class LayerStudyOf : public testing::TestWithParam<const char*> {};

TEST_P(LayerStudyOf, DoesNotDependOnThreads) {
  const auto run = [](int threads) {
    TinyRun setup = TinyRun::tiny(GetParam());
    setup.backend = reference_backend(Precision::fp64, threads);
    setup.threads = threads;
    return setup
        .run({GetParam() == std::string("mamba2") ? "eager(state=int8:row:sr)"
                                                  : "replay(L=4, anchor=fp32, read=e4m3:row)"},
             false)
        .policies[0]
        .layers;
  };
  const auto one = run(1), three = run(3);
  for (std::size_t i = 0; i < one.size(); ++i) {
    EXPECT_EQ(one[i].bound_by_head, three[i].bound_by_head);
    EXPECT_EQ(one[i].y_local_by_token, three[i].y_local_by_token);
    EXPECT_EQ(one[i].state_propagated_by_sample, three[i].state_propagated_by_sample);
    for (const auto errors : {&LayerErrors::y_local, &LayerErrors::y_propagated, &LayerErrors::state_local,
                              &LayerErrors::state_propagated, &LayerErrors::read_copy_local}) {
      EXPECT_EQ((one[i].*errors).squares, (three[i].*errors).squares);
      EXPECT_EQ((one[i].*errors).sum, (three[i].*errors).sum);
      EXPECT_EQ((one[i].*errors).ulps, (three[i].*errors).ulps);
    }
  }
}

TEST_P(LayerStudyOf, AgreesWithTheStudyOfOnePolicyAtATime) {
  TinyRun setup = TinyRun::tiny(GetParam());
  const std::string text = "replay(L=4, state=e4m3:row)";
  const LayerStudy study = setup.run({text}, true);
  const PolicyLayers& policy = study.policies.at(0);
  const auto options = StudyOptions{.threads = 1, .local = true, .chunk_tokens = 8};
  const auto plain = run_study(*setup.model, *setup.backend, setup.tokens, {parse_policy(text)}, options);
  ASSERT_EQ(policy.layers.size(), plain[0].layers.size());
  double sum = 0;
  for (std::size_t i = 0; i < policy.layers.size(); ++i) {
    const LayerErrors& e = policy.layers[i];
    // The same squares, added in another order: n roundings of relative size 2^-53 on either side, n < 2^15.
    EXPECT_NEAR(e.y_local.rel_l2() / plain[0].layers[i].y_rel_l2.local, 1, std::ldexp(1.0, -37));
    EXPECT_NEAR(e.y_propagated.rel_l2() / plain[0].layers[i].y_rel_l2.propagated, 1, std::ldexp(1.0, -37));
    EXPECT_EQ(study.sample_tokens.back(), 40);

    Policy alone = parse_policy(text);
    alone.layers = {{e.layer, e.layer}};
    const auto one = run_study(*setup.model, *setup.backend, setup.tokens, {alone}, {.chunk_tokens = 8});
    const auto entry = std::ranges::find(policy.attribution.layers, e.layer, &std::pair<std::int64_t, double>::first);
    ASSERT_NE(entry, policy.attribution.layers.end());
    EXPECT_EQ(entry->second, one[0].divergence.kl.mean);
    sum += entry->second;
  }
  // The same terms, none negative, in another order: a rounding for each but the first on either side.
  const auto sums = static_cast<double>(policy.layers.size() - 1);
  EXPECT_NEAR(policy.attribution.sum, sum, 2 * sums * std::ldexp(sum, -53));
  EXPECT_TRUE(
      std::ranges::is_sorted(policy.attribution.layers, std::greater<>(), &std::pair<std::int64_t, double>::second));
}

// Closed loop: what the read copy rounds never reaches the anchor, bit for bit.
TEST_P(LayerStudyOf, AnchorOfAClosedLoopKnowsNothingOfTheReadCopy) {
  TinyRun setup = TinyRun::tiny(GetParam());
  const LayerStudy study = setup.run({"replay(L=4, anchor=fp32, read=fp32)", "replay(L=4, anchor=fp32, read=int4:row)",
                                      "replay(L=4, anchor=fp32, read=int4:row, loop=open)"},
                                     false);
  for (std::size_t i = 0; i < study.policies[0].layers.size(); ++i) {
    const LayerErrors &fine = study.policies[0].layers[i], &coarse = study.policies[1].layers[i],
                      &open = study.policies[2].layers[i];
    EXPECT_GT(fine.checkpoint_local.squares, 0);
    EXPECT_EQ(coarse.checkpoint_local.squares, fine.checkpoint_local.squares);
    EXPECT_GT(coarse.read_copy_local.squares, fine.read_copy_local.squares);
    const bool delta =
        is_delta_rule(setup.model->layers()[static_cast<std::size_t>(fine.layer)].recurrence->recurrence);
    if (delta) {
      EXPECT_GT(open.checkpoint_local.squares, fine.checkpoint_local.squares);
    } else {
      EXPECT_EQ(open.checkpoint_local.squares, fine.checkpoint_local.squares);
    }
  }
}

TEST_P(LayerStudyOf, LocalErrorsLieUnderTheirBound) {
  TinyRun setup = TinyRun::tiny(GetParam());
  const LayerStudy study =
      setup.run({"exact", "replay(L=4, state=bf16, ring=bf16)", "eager(state=int8:row)", "eager(state=mxfp8_e4m3)",
                 "eager(state=nvfp4)", "eager(state=int8:row:hadamard)", "eager(state=e4m3:row:rz)",
                 "eager(state=e4m3:row:sr)", "replay(L=8, anchor=fp32, read=e4m3:row, loop=open)"},
                false);
  for (const PolicyLayers& policy : study.policies) {
    for (const LayerErrors& e : policy.layers) {
      EXPECT_LE(e.y_local.rel_l2(), e.bound) << policy.result.policy.text() << ", layer " << e.layer;
      EXPECT_GT(e.bound, 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Tiny, LayerStudyOf, testing::Values("mamba2", "mamba2_tied", "qwen3_5"));

}  // namespace
}  // namespace replayssm
