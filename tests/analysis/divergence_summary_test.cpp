#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "analysis/divergence.h"
#include "core/error.h"

namespace replayssm {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

template <class Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(Summary, Quantiles) {
  const std::vector<double> values{1, 2, 4, 8, 16};
  EXPECT_EQ(quantile(values, 0), 1);
  EXPECT_EQ(quantile(values, 0.5), 4);
  EXPECT_EQ(quantile(values, 0.625), 6);    // position 2.5
  EXPECT_EQ(quantile(values, 0.9375), 14);  // position 3.75
  EXPECT_EQ(quantile(values, 1), 16);
  EXPECT_EQ(quantile(std::vector<double>{3}, 0.9), 3);
  EXPECT_TRUE(std::isnan(quantile({}, 0.5)));
  const std::vector<double> infinite{0, 1, kInf, kInf, kInf};
  EXPECT_EQ(quantile(infinite, 0.25), 1);
  EXPECT_EQ(quantile(infinite, 0.375), kInf);
  EXPECT_EQ(quantile(infinite, 0.625), kInf);
}

// values[t] = level of the block that t is in.
std::vector<double> steps(std::size_t length, std::vector<double> levels) {
  std::vector<double> values(length);
  for (std::size_t t = 0; t < length; ++t) values[t] = levels[t / 64];
  return values;
}

TEST(Summary, BatchMeans) {
  // Means 1, 2, 6: squares about 3 are 4, 1, 9; 14 / (3 * 2).
  EXPECT_EQ(batch_means_error(steps(192, {1, 2, 6}), 192), std::sqrt(14.0 / 6.0));
  // Within a block only the mean counts.
  auto values = steps(192, {1, 2, 6});
  for (std::size_t t = 0; t < 192; ++t) values[t] += t % 2 ? 0.5 : -0.5;
  EXPECT_EQ(batch_means_error(values, 192), std::sqrt(14.0 / 6.0));
  // An incomplete block is left out behind two full ones, but not behind one.
  EXPECT_EQ(batch_means_error(steps(191, {1, 3, 100}), 191), 1);  // means 1, 3: 2 / (2 * 1)
  EXPECT_EQ(batch_means_error(steps(100, {1, 3}), 100), 1);
  EXPECT_TRUE(std::isnan(batch_means_error(steps(64, {1}), 64)));
  EXPECT_TRUE(std::isnan(batch_means_error(steps(10, {1}), 10)));
  // Blocks do not reach across sequences: of two sequences of 96, blocks 1 and 3 are full; of 48, each is a block.
  std::vector<double> two = steps(96, {1, 50}), other = steps(96, {3, 70});
  two.insert(two.end(), other.begin(), other.end());
  EXPECT_EQ(batch_means_error(two, 96), 1);
  std::vector<double> shorter(48, 1.0);
  shorter.resize(96, 3.0);
  EXPECT_EQ(batch_means_error(shorter, 48), 1);
}

std::vector<TokenDivergence> tokens_with_kl(const std::vector<double>& kl) {
  std::vector<TokenDivergence> tokens;
  for (double x : kl) tokens.push_back({x, 2 * x, kNaN, kNaN, kNaN, true, false});
  return tokens;
}

TEST(Summary, MomentsOfAFiniteRun) {
  auto tokens = tokens_with_kl(steps(192, {1, 2, 6}));
  tokens[3].top1_agrees = tokens[4].top1_agrees = tokens[5].top1_agrees = false;
  tokens[5].top1_tie = tokens[9].top1_tie = true;
  // Two predicted tokens only; what they hold is in eighths, so means are exact.
  tokens[0] = {1, 2, 3.0, 2.5, 0.375, true, false};
  tokens[1] = {1, 2, 1.0, 1.25, -0.5, true, false};
  const DivergenceSummary s = summarize(tokens, 192);
  EXPECT_EQ(s.positions, 192);
  EXPECT_EQ(s.predicted, 2);
  EXPECT_EQ(s.non_finite, 0);
  EXPECT_EQ(s.kl.mean, 3);
  EXPECT_EQ(s.kl.sem, std::sqrt(14.0 / 6.0));
  EXPECT_EQ(s.kl.p50, 2);
  EXPECT_EQ(s.kl.p90, 6);
  EXPECT_EQ(s.kl.p99, 6);
  EXPECT_EQ(s.kl.max, 6);
  EXPECT_EQ(s.kl.infinite, 0);
  EXPECT_EQ(s.kl_reverse.mean, 6);
  EXPECT_EQ(s.kl_reverse.sem, 2 * std::sqrt(14.0 / 6.0));
  EXPECT_EQ(s.kl_reverse.max, 12);
  EXPECT_EQ(s.top1_agreement, 189.0 / 192.0);
  EXPECT_EQ(s.top1_ties, 2);
  EXPECT_EQ(s.nll, 2);
  EXPECT_EQ(s.nll_reference, 1.875);
  EXPECT_EQ(s.nll_delta, 0.125);
  EXPECT_EQ(s.delta_p.rms, std::sqrt((0.375 * 0.375 + 0.25) / 2));
  EXPECT_EQ(s.delta_p.p1, -0.5 + 0.01 * 0.875);
  EXPECT_EQ(s.delta_p.p99, -0.5 + 0.99 * 0.875);
}

TEST(Summary, InfinitePositionsAreCountedAndKeptOutOfTheMeanAlone) {
  auto tokens = tokens_with_kl({1, kInf, 3, kInf, 5, 0, 0, 0});
  tokens[1].kl_reverse = 4;
  tokens[3].kl_reverse = 4;
  const DivergenceSummary s = summarize(tokens, 4);
  EXPECT_EQ(s.kl.mean, 1.5);
  EXPECT_EQ(s.kl.infinite, 2);
  EXPECT_EQ(s.kl.max, kInf);
  EXPECT_EQ(s.kl.p50, 2);  // 0 0 0 1 3 5 inf inf
  EXPECT_EQ(s.kl.p90, kInf);
  EXPECT_TRUE(std::isnan(s.kl.sem));
  EXPECT_EQ(s.kl_reverse.infinite, 0);
  EXPECT_EQ(s.kl_reverse.mean, 26.0 / 8.0);
  EXPECT_EQ(s.kl_reverse.sem, 0.75);  // means 4 and 2.5 of the two sequences: half their distance
  const DivergenceSummary all = summarize(tokens_with_kl({kInf, kInf}), 2);
  EXPECT_TRUE(std::isnan(all.kl.mean));
  EXPECT_EQ(all.kl.p50, kInf);
  EXPECT_EQ(all.kl.infinite, 2);
}

TEST(Summary, ABrokenRunHasNoMeans) {
  auto tokens = tokens_with_kl({1, 2, 3, kInf});
  tokens[0] = {1, 2, 3.0, 2.0, 0.5, true, false};
  tokens[1] = {kNaN, kNaN, kNaN, 4.0, kNaN, false, true};
  const DivergenceSummary s = summarize(tokens, 4);
  EXPECT_EQ(s.non_finite, 1);
  EXPECT_EQ(s.positions, 4);
  EXPECT_EQ(s.predicted, 2);
  for (double x : {s.kl.mean, s.kl.sem, s.kl.p50, s.kl.p90, s.kl.p99, s.kl.max, s.kl_reverse.mean, s.kl_reverse.max,
                   s.nll, s.nll_delta, s.delta_p.rms, s.delta_p.p1, s.delta_p.p99}) {
    EXPECT_TRUE(std::isnan(x));
  }
  EXPECT_EQ(s.kl.infinite, 1);
  EXPECT_EQ(s.nll_reference, 3);
  EXPECT_EQ(s.top1_agreement, 0.75);
  EXPECT_EQ(s.top1_ties, 1);

  auto at_the_end = tokens_with_kl({1, kNaN});  // where nothing is predicted
  at_the_end[0] = {1, 2, 3.0, 2.0, 0.5, true, false};
  const DivergenceSummary end = summarize(at_the_end, 2);
  EXPECT_TRUE(std::isnan(end.nll) && std::isnan(end.nll_delta) && std::isnan(end.delta_p.rms));
  EXPECT_EQ(end.nll_reference, 2);
}

TEST(Summary, NothingPredicted) {
  const DivergenceSummary s = summarize(tokens_with_kl({1, 2}), 1);
  EXPECT_EQ(s.predicted, 0);
  EXPECT_TRUE(std::isnan(s.nll) && std::isnan(s.nll_reference) && std::isnan(s.nll_delta));
  EXPECT_TRUE(std::isnan(s.delta_p.rms) && std::isnan(s.delta_p.p1) && std::isnan(s.delta_p.p99));
}

TEST(Summary, LengthsThatDoNotFit) {
  const auto tokens = tokens_with_kl({1, 2, 3});
  EXPECT_NE(message_of([&] { summarize(tokens, 2); }).find("multiple of the sequence length 2, found 3 positions"),
            std::string::npos);
  EXPECT_NE(message_of([&] { summarize(tokens, 0); }).find("sequence length 0"), std::string::npos);
  EXPECT_NE(message_of([&] { summarize({}, 1); }).find("found 0 positions"), std::string::npos);
}

}  // namespace
}  // namespace replayssm
