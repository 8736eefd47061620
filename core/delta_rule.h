#pragma once

#include "core/real.h"
#include "core/recurrence.h"

namespace replayssm {

/// Raw inputs of a delta-rule layer after the causal convolution and SiLU. q and k [T, G N], v [T, H P], gate
/// [T, H decay_dim] and beta [T, H] before their biases and activations; A_log [H], dt_bias [H decay_dim].
template <class Input>
struct DeltaInputs {
  RecurrenceShape shape;  ///< gated_delta or kda
  std::int64_t tokens = 0;
  Rows<Input> q, k, v, gate, beta;
  const Input* A_log = nullptr;
  const Input* dt_bias = nullptr;
  double beta_scale = 1;  ///< beta = beta_scale sigmoid(beta_raw); OLMo-Hybrid: 2
};

/// out <- v scale / sqrt(sum v^2 + 1e-6) over n scalars. The epsilon is added to the sum, not to the mean.
template <class Real>
void l2_normalize(const Real* v, std::int64_t n, const Real& scale, Real* out) {
  using std::sqrt;
  Real part[4] = {Real(0), Real(0), Real(0), Real(0)};  // four sums: one would wait for its own last addition
  for (std::int64_t i = 0; i < n; ++i) part[i % 4] += v[i] * v[i];
  // 1e-6 as a binary64 number, which is what the published layers add, in every Real.
  const Real norm = sqrt((part[0] + part[1]) + (part[2] + part[3]) + Real(1e-6));
  for (std::int64_t i = 0; i < n; ++i) out[i] = v[i] / norm * scale;
}

/// q and k normalised, q times N^-1/2, log decay g = -e^A_log softplus(gate + dt_bias) per head (Gated DeltaNet, Yang
/// et al. 2024) or per key channel (KDA, Kimi Linear 2025), beta = beta_scale sigmoid(beta_raw), w = k, c = q, every
/// operation in Real. The raw inputs must outlive the result.
template <class Real, class ForTokens = TokensInOrder>
LayerInputs<Real> prepare(const DeltaInputs<Real>& in, ForTokens for_tokens = {}) {
  using std::exp;
  using std::sqrt;
  const auto& shape = in.shape;
  const std::int64_t H = shape.heads, G = shape.groups, N = shape.state_dim, D = shape.decay_dim(), T = in.tokens;
  LayerInputs<Real> out{T, {}, std::vector<std::vector<Real>>(4)};
  auto& q = out.storage[0];
  auto& k = out.storage[1];
  auto& g = out.storage[2];
  auto& beta = out.storage[3];
  q.resize(static_cast<std::size_t>(T * G * N));
  k.resize(q.size());
  g.resize(static_cast<std::size_t>(T * H * D));
  beta.resize(static_cast<std::size_t>(T * H));
  const Real q_scale = Real(1) / sqrt(Real(N));
  for_tokens(T, [&](std::int64_t t) {
    for (std::int64_t i = 0; i < G; ++i) {
      l2_normalize(in.q[t] + i * N, N, q_scale, q.data() + (t * G + i) * N);
      l2_normalize(in.k[t] + i * N, N, Real(1), k.data() + (t * G + i) * N);
    }
    for (std::int64_t h = 0; h < H; ++h) {
      const Real rate = -exp(in.A_log[h]);
      for (std::int64_t d = h * D; d < (h + 1) * D; ++d) {
        g[static_cast<std::size_t>(t * H * D + d)] = rate * softplus(Real(in.gate[t][d] + in.dt_bias[d]));
      }
      beta[static_cast<std::size_t>(t * H + h)] = Real(in.beta_scale) * sigmoid(in.beta[t][h]);
    }
  });
  for (std::int64_t h = 0; h < H; ++h) {
    const std::int64_t group = shape.group(h);
    out.heads.push_back({.v = {in.v.data + h * shape.head_dim, in.v.stride},
                         .w = {k.data() + group * N, G * N},
                         .c = {q.data() + group * N, G * N},
                         .log_decay = {g.data() + h * D, H * D},
                         .gain = {beta.data() + h, H}});
  }
  return out;
}

}  // namespace replayssm
