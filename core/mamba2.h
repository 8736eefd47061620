#pragma once

#include <limits>

#include "core/real.h"
#include "core/recurrence.h"

namespace replayssm {

/// Raw inputs of a Mamba-2 layer after the causal convolution and SiLU. x [T, H P], B and C [T, G N], dt [T, H]
/// before bias and softplus; A_log and dt_bias [H].
template <class Input>
struct Mamba2Inputs {
  RecurrenceShape shape;
  std::int64_t tokens = 0;
  Rows<Input> x, B, C, dt;
  const Input* A_log = nullptr;
  const Input* dt_bias = nullptr;
  double dt_min = 0, dt_max = std::numeric_limits<double>::infinity();
};

/// dt = clamp(softplus(dt_raw + dt_bias), dt_min, dt_max), A = -e^A_log, log decay = A dt, u = dt x, w = B, c = C,
/// every operation in Real (Dao & Gu 2024, section 3). The raw inputs must outlive the result.
template <class Real, class ForTokens = TokensInOrder>
LayerInputs<Real> prepare(const Mamba2Inputs<Real>& in, ForTokens for_tokens = {}) {
  using std::exp;
  const auto& shape = in.shape;
  const std::int64_t H = shape.heads, T = in.tokens;
  LayerInputs<Real> out{T, {}, std::vector<std::vector<Real>>(3)};
  auto& dt = out.storage[0];
  auto& log_decay = out.storage[1];
  auto& A = out.storage[2];
  dt.resize(static_cast<std::size_t>(T * H));
  log_decay.resize(dt.size());
  for (std::int64_t h = 0; h < H; ++h) A.push_back(-exp(in.A_log[h]));
  for_tokens(T, [&](std::int64_t t) {
    for (std::int64_t h = 0; h < H; ++h) {
      Real step = softplus(Real(in.dt[t][h] + in.dt_bias[h]));
      if (step < Real(in.dt_min)) step = Real(in.dt_min);
      if (step > Real(in.dt_max)) step = Real(in.dt_max);
      const auto i = static_cast<std::size_t>(t * H + h);
      dt[i] = step;
      log_decay[i] = A[static_cast<std::size_t>(h)] * step;
    }
  });
  for (std::int64_t h = 0; h < H; ++h) {
    const std::int64_t group = shape.group(h);
    out.heads.push_back({.v = {in.x.data + h * shape.head_dim, in.x.stride},
                         .w = {in.B.data + group * shape.state_dim, in.B.stride},
                         .c = {in.C.data + group * shape.state_dim, in.C.stride},
                         .log_decay = {log_decay.data() + h, H},
                         .gain = {dt.data() + h, H},
                         .rate = A.data() + h});
  }
  return out;
}

}  // namespace replayssm
