// Heads that stand still: states built so that every store is known, and a trained model.

#include "analysis/stall.h"

#include <gtest/gtest.h>

#include <cmath>

#include "analysis/layer_report.h"
#include "core/tokens.h"

namespace replayssm {
namespace {

/// One row of Mamba-2 that takes in `first` at token 0 and only decays after it, by 1 - loss a token.
class Decaying {
 public:
  Decaying(std::vector<double> first, double loss, std::int64_t tokens)
      : tokens_(tokens),
        shape_{Recurrence::mamba2, 1, 1, 1, std::ssize(first)},
        w_(std::move(first)),
        c_(w_.size(), 1.0),
        v_(static_cast<std::size_t>(tokens), 0.0),
        log_decay_(v_.size(), std::log1p(-loss)) {
    v_[0] = 1;
  }
  Standstill run(const std::string& policy, std::int64_t chunk) const {
    StallTrack track(shape_, parse_policy(policy));
    Standstill sum;
    for (std::int64_t t = 0; t < tokens_; t += chunk) {
      const HeadInputs<double> in{.v = {v_.data() + t, 1},
                                  .w = {w_.data(), 0},
                                  .c = {c_.data(), 0},
                                  .log_decay = {log_decay_.data() + t, 1},
                                  .gain = {&one_, 0}};
      sum += track.advance(in, std::min(chunk, tokens_ - t));
    }
    return sum;
  }

 private:
  std::int64_t tokens_;
  RecurrenceShape shape_;
  std::vector<double> w_, c_, v_, log_decay_;
  const double one_ = 1;
};

// e4m3 has steps of 2^-3 from 1 and of 2^-4 below it: 1 loses 2^-6, less than half of 2^-4, and stays 1 for ever; and
// so does 1.5, which loses 1.5 2^-6 of steps of 2^-3. A quarter of the loss a token, or of the steps, changes nothing.
TEST(Standstill, IsAllOfAStateThatLosesLessThanHalfAStep) {
  for (const char* format : {"e4m3", "mxfp8_e4m3", "mxfp8_e4m3:ceil", "e4m3:row:floor", "e4m3:group3:ceil"}) {
    const std::string policy = "eager(state=" + std::string(format) + ")";
    for (const double loss : {0x1p-6, 0x1p-8}) {
      const Decaying head({1, 1.5, -1}, loss, 50);
      // 49 stores of a state that was stored; the first finds zeros, which weigh nothing.
      const Standstill found = head.run(policy, 50);
      EXPECT_EQ(found.all, 49 * 4.25) << format;
      EXPECT_EQ(found.share(), 1) << format;
      EXPECT_EQ(head.run(policy, 7).still, found.still) << format;
    }
    // Eight tokens lose 1 - (1 - 2^-6)^8 = 0.118, more than half a step of either: a store in eight moves on.
    EXPECT_EQ(Decaying({1, 1.5, -1}, 0x1p-6, 48).run("replay(L=8, state=" + std::string(format) + ")", 48).share(), 0)
        << format;
  }
}

// 1 loses a little over half a step a token, and a step of 2^-4 with it, until at 7/8 half a step is more than it
// loses: at 1 and 15/16 it moves, at 14/16 it loses 0.0328 of a step of 0.0625, at 13/16 0.0305, where it stays.
TEST(Standstill, BeginsWhereAStepBecomesTooLarge) {
  const double loss = 0.0375;
  for (std::int64_t tokens = 1; tokens < 12; ++tokens) {
    const Standstill found = Decaying({1}, loss, tokens).run("eager(state=mxfp8_e4m3:ceil)", tokens);
    double v = 1, still = 0, all = 0;
    for (std::int64_t t = 1; t < tokens; ++t) {  // the same by hand, in sixteenths
      const double next = std::round(16 * v * (1 - loss)) / 16;
      all += v * v;
      if (next == v) still += v * v;
      v = next;
    }
    EXPECT_EQ(found.all, all);
    EXPECT_EQ(found.still, still);
    EXPECT_EQ(found.share() > 0, tokens > 4);
  }
}

// A scale that is the largest element over 448 decays as it does, and the codes stay.
TEST(Standstill, IsNoneUnderAScaleThatFollows) {
  for (const char* format : {"e4m3:row", "int8:row", "e4m3:group3", "int4:row"}) {
    EXPECT_EQ(Decaying({1, 1.5, -1}, 0x1p-8, 50).run("eager(state=" + std::string(format) + ")", 50).share(), 0);
  }
  EXPECT_EQ(Decaying({1}, 0x1p-8, 50).run("eager(state=exact)", 50).all, 0);
  // What reads a copy that stands still keeps an anchor that does not.
  EXPECT_EQ(Decaying({1}, 0x1p-6, 50).run("replay(L=1, anchor=fp32, read=mxfp8_e4m3)", 50).share(), 0);
}

TEST(Standstill, NamesTheSlowHeadsOfATrainedModelUnderMx) {
  const auto model = Model::open(REPLAYSSM_DATA "/mamba2-5m");
  const auto backend = reference_backend(Precision::fp64, 2);
  Tokens tokens = read_tokens(REPLAYSSM_DATA "/sherlock.safetensors");
  tokens.length = 256;
  tokens.ids.resize(256);
  const std::vector<Policy> policies = {parse_policy("eager(state=mxfp8_e4m3)"), parse_policy("eager(state=e4m3:row)")};
  const LayerStudy study = run_layer_study(*model, *backend, tokens, policies, {.threads = 2}, false);
  int stalled = 0, slow = 0;
  for (const LayerErrors& e : study.policies[0].layers) {
    stalled += static_cast<int>(e.stalled().size());
    for (const Growth& g : e.growth) {
      // A decay that two steps could not hide, a half-life of 6, moves all that is not fed; one of 40 loses 0.017 a
      // token, under half of the least half step over v, 2^-5.
      if (g.half_life > 40) {
        EXPECT_TRUE(g.stalls()) << e.layer << ", half-life " << g.half_life;
        ++slow;
      }
      if (g.half_life < 6) {
        EXPECT_FALSE(g.stalls()) << e.layer << ", half-life " << g.half_life;
      }
    }
  }
  EXPECT_GT(slow, 10);
  EXPECT_GE(stalled, slow);
  for (const LayerErrors& e : study.policies[1].layers) EXPECT_TRUE(e.stalled().empty()) << e.layer;
  const std::string table = layers_table(study);
  EXPECT_NE(table.find("; stalled"), std::string::npos) << table;
  EXPECT_EQ(table.find("; stalled", table.find("e4m3:row)")), std::string::npos) << table;
}

}  // namespace
}  // namespace replayssm
