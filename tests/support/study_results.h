#pragma once

#include <gtest/gtest.h>

#include <cmath>

#include "analysis/study.h"

namespace replayssm {

inline bool same_bits(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

/// Expects the same figures, bit for bit, of every token and layer.
inline void expect_identical(const PolicyResult& a, const PolicyResult& b) {
  ASSERT_EQ(a.tokens.size(), b.tokens.size());
  for (std::size_t t = 0; t < a.tokens.size(); ++t) {
    const TokenDivergence &x = a.tokens[t], &y = b.tokens[t];
    EXPECT_TRUE(same_bits(x.kl, y.kl) && same_bits(x.kl_reverse, y.kl_reverse) && same_bits(x.nll, y.nll) &&
                same_bits(x.reference_nll, y.reference_nll) && same_bits(x.delta_p, y.delta_p))
        << "token " << t;
    EXPECT_EQ(x.top1_agrees, y.top1_agrees);
    EXPECT_EQ(x.top1_tie, y.top1_tie);
  }
  EXPECT_TRUE(same_bits(a.divergence.kl.mean, b.divergence.kl.mean));
  EXPECT_TRUE(same_bits(a.divergence.kl.sem, b.divergence.kl.sem));
  ASSERT_EQ(a.layers.size(), b.layers.size());
  for (std::size_t i = 0; i < a.layers.size(); ++i) {
    const LayerResult &x = a.layers[i], &y = b.layers[i];
    EXPECT_EQ(x.y_rel_l2.propagated, y.y_rel_l2.propagated) << "layer " << x.layer;
    EXPECT_EQ(x.state_rel_l2.propagated, y.state_rel_l2.propagated) << "layer " << x.layer;
    EXPECT_TRUE(same_bits(x.y_rel_l2.local, y.y_rel_l2.local)) << "layer " << x.layer;
    EXPECT_TRUE(same_bits(x.state_rel_l2.local, y.state_rel_l2.local)) << "layer " << x.layer;
    EXPECT_EQ(a.layers[i].events.overflows, b.layers[i].events.overflows);
    EXPECT_EQ(a.layers[i].events.first_overflow, b.layers[i].events.first_overflow);
    EXPECT_EQ(a.layers[i].events.first_non_finite, b.layers[i].events.first_non_finite);
  }
}

}  // namespace replayssm
