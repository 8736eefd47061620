// Trained models: the local error of every layer lies under its first-order bound and within two decades of it, and the
// propagated one where other implementations found it.

#include <gtest/gtest.h>

#include <algorithm>

#include "analysis/layer_study.h"
#include "core/tokens.h"
#include "tests/support/model_files.h"

namespace replayssm {
namespace {

using Json = nlohmann::json;

class TrainedLayers : public testing::TestWithParam<const char*> {};

TEST_P(TrainedLayers, LocalErrorsLieUnderTheirBoundAndWithinTwoDecades) {
  const auto model = Model::open(std::string(REPLAYSSM_DATA "/") + GetParam());
  const auto backend = reference_backend(Precision::fp64, 2);
  Tokens tokens = read_tokens(REPLAYSSM_DATA "/sherlock.safetensors");
  tokens.length = 2048;
  tokens.ids.resize(2048);
  std::vector<Policy> policies;
  for (const std::string format : {"e4m3:row", "int8:row"}) {
    policies.push_back(parse_policy("eager(state=" + format + ")"));
    for (const std::string length : {"4", "16", "64"}) {
      policies.push_back(parse_policy("replay(L=" + length + ", state=" + format + ")"));
      policies.push_back(parse_policy("replay(L=" + length + ", anchor=fp32, read=" + format + ")"));
    }
  }
  const LayerStudy study =
      run_layer_study(*model, *backend, tokens, policies, {.threads = 2, .chunk_tokens = 128}, false);
  const Json golden = Json::parse(read_text(fs::path(REPLAYSSM_TEST_DATA) / "kl_expected.json"))[GetParam()];
  int compared = 0;
  for (const PolicyLayers& policy : study.policies) {
    const auto row =
        std::ranges::find(golden, policy.result.policy.text(), [](const Json& r) { return r["policy"].get<string>(); });
    for (std::size_t i = 0; row != golden.end() && i < policy.layers.size(); ++i) {
      const double expected = (*row)["layer_rel_y"][i];
      EXPECT_NEAR(policy.layers[i].y_propagated.rel_l2(), expected, 0.01 * expected)  // as the makers of the file state
          << policy.result.policy.text() << ", layer " << policy.layers[i].layer;
      ++compared;
    }
    for (const LayerErrors& e : policy.layers) {
      EXPECT_LE(e.y_local.rel_l2(), e.bound) << policy.result.policy.text() << ", layer " << e.layer;
      EXPECT_GE(100 * e.y_local.rel_l2(), e.bound) << policy.result.policy.text() << ", layer " << e.layer;
    }
  }
  EXPECT_EQ(compared, 4 * std::ssize(study.policies[0].layers));  // policies here that the golden file has
}

INSTANTIATE_TEST_SUITE_P(Models, TrainedLayers, testing::Values("mamba2-5m", "gdn-hybrid-8m"));

}  // namespace
}  // namespace replayssm
