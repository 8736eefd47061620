#pragma once

// A model run layer by layer over the public interface of Model and Backend, as a program outside would.

#include <cmath>
#include <memory>
#include <vector>

#include "core/model.h"
#include "core/policy.h"

namespace replayssm {

using Values = std::vector<double>;

inline Values read_all(Backend& backend, const Tensor& x) {
  Values out(static_cast<std::size_t>(x.rows * x.columns));
  backend.read(x, out.data());
  return out;
}

/// One sequence of a model under one policy: call by call, with the caches kept between the calls.
class Runner {
 public:
  Runner(const Model& model, Backend& backend, const Policy& policy = exact_policy())
      : model_(model), backend_(backend), caches_(model.layers().size()) {
    for (std::size_t i = 0; i < caches_.size(); ++i) {
      const LayerInfo& info = model.layers()[i];
      const bool covered = policy.covers(static_cast<std::int64_t>(i));
      if (info.recurrence) caches_[i].state = backend.new_state(*info.recurrence, covered ? policy : exact_policy());
    }
  }

  /// Logits [tokens, vocabulary] of the next tokens.
  Values logits(const std::vector<std::int32_t>& ids) {
    Tensor x = model_.embed(backend_, ids);
    for (std::size_t i = 0; i < caches_.size(); ++i) {
      x = model_.forward(backend_, static_cast<std::int64_t>(i), x, caches_[i]);
    }
    return read_all(backend_, model_.logits(backend_, model_.final_norm(backend_, x)));
  }

  LayerCache& cache(std::size_t layer) { return caches_[layer]; }

 private:
  const Model& model_;
  Backend& backend_;
  std::vector<LayerCache> caches_;
};

/// sqrt(sum (a - b)^2 / sum b^2).
inline double relative_l2(const Values& a, const Values& b) {
  EXPECT_EQ(a.size(), b.size());
  long double difference = 0, norm = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const long double d = static_cast<long double>(a[i]) - b[i];
    difference += d * d;
    norm += static_cast<long double>(b[i]) * b[i];
  }
  return static_cast<double>(std::sqrt(difference / norm));
}

}  // namespace replayssm
