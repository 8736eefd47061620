// Speculative decoding of the two trained models: a part of what docs/spec.md measures.

#include <gtest/gtest.h>

#include "analysis/speculation.h"
#include "tests/support/model_files.h"

namespace replayssm {
namespace {

class TrainedSpeculationTest : public testing::TestWithParam<const char*> {
 protected:
  static constexpr int threads = 2;
  const std::unique_ptr<Model> model_ = Model::open(fs::path(REPLAYSSM_DATA) / GetParam());
  const std::unique_ptr<Backend> backend_ = reference_backend(Precision::fp64, threads, Products::one_token);

  /// Parts of the held-out text, one after the other.
  static Tokens parts(std::int64_t sequences, std::int64_t length) {
    Tokens tokens = read_tokens(fs::path(REPLAYSSM_DATA) / "sherlock.safetensors");
    tokens.ids.resize(static_cast<std::size_t>(sequences * length));
    return {tokens.ids, sequences, length};
  }
  static DraftSources lookup() {
    return [](std::int64_t) { return prompt_lookup(3); };
  }
};

TEST_P(TrainedSpeculationTest, TheTextIsThatOfPlainDecoding) {
  for (const string policy :
       {"replay(L=16, state=exact, order=sequential)", "replay(L=16, anchor=fp32, read=int8:row, ring=bf16)"}) {
    SCOPED_TRACE(policy);
    const SpeculationResult r =
        speculate(*model_, *backend_, parts(2, 48), parse_policy(policy), lookup(),
                  {.window = 5, .ring = 16, .prompt_tokens = 48, .new_tokens = 24, .threads = threads});
    EXPECT_TRUE(r.passed());
    EXPECT_EQ(r.same_flushes.same_logits, 48);
    EXPECT_EQ(r.same_flushes.same_states, 2 * model_->ssm_layers());
    EXPECT_GT(r.accepted, 0);
    EXPECT_GT(r.rollbacks(), 0);
    EXPECT_GT(r.flushes(), 0);
  }
}

TEST_P(TrainedSpeculationTest, ATextThatIsGivenToo) {
  const SpeculationResult r = speculate(
      *model_, *backend_, parts(1, 160), parse_policy("replay(L=16, state=bf16, order=sequential)"), lookup(),
      {.window = 5, .ring = 16, .prompt_tokens = 48, .new_tokens = 112, .teacher_forced = true, .threads = threads});
  EXPECT_TRUE(r.passed());
  EXPECT_EQ(r.same_flushes.same_logits, 112);
  EXPECT_EQ(r.own_schedule.compared, 112);  // to the end, wherever it diverges
  EXPECT_GT(r.accepted, 0);
  EXPECT_GT(r.rollbacks(), 0);
}

INSTANTIATE_TEST_SUITE_P(Models, TrainedSpeculationTest, testing::Values("mamba2-5m", "gdn-hybrid-8m"),
                         [](const auto& m) { return string(m.param).substr(0, string(m.param).find('-')); });

}  // namespace
}  // namespace replayssm
