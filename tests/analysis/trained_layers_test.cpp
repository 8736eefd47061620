// Trained models: the local error of every layer lies under its first-order bound and within two decades of it.

#include <gtest/gtest.h>

#include "analysis/layer_study.h"
#include "core/tokens.h"

namespace replayssm {
namespace {

class TrainedLayers : public testing::TestWithParam<const char*> {};

TEST_P(TrainedLayers, LocalErrorsLieUnderTheirBoundAndWithinTwoDecades) {
  const auto model = Model::open(std::string(REPLAYSSM_DATA "/") + GetParam());
  const auto backend = reference_backend(Precision::fp64, 2);
  Tokens tokens = read_tokens(REPLAYSSM_DATA "/sherlock.safetensors");
  tokens.length = 512;
  tokens.ids.resize(512);
  std::vector<Policy> policies;
  for (const std::string format : {"e4m3:row", "int8:row"}) {
    for (const std::string length : {"4", "16", "64"}) {
      policies.push_back(parse_policy("replay(L=" + length + ", state=" + format + ")"));
      policies.push_back(parse_policy("replay(L=" + length + ", anchor=fp32, read=" + format + ")"));
    }
  }
  const LayerStudy study =
      run_layer_study(*model, *backend, tokens, policies, {.threads = 2, .chunk_tokens = 128}, false);
  for (const PolicyLayers& policy : study.policies) {
    for (const LayerErrors& e : policy.layers) {
      EXPECT_LE(e.y_local.rel_l2(), e.bound) << policy.result.policy.text() << ", layer " << e.layer;
      EXPECT_GE(100 * e.y_local.rel_l2(), e.bound) << policy.result.policy.text() << ", layer " << e.layer;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, TrainedLayers, testing::Values("mamba2-5m", "gdn-hybrid-8m"));

}  // namespace
}  // namespace replayssm
