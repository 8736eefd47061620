#pragma once

// The closed loop of a split delta rule: at a flush every u is solved for, from the anchor and the raw records.

#include "cuda/records.cuh"

namespace replayssm::cuda {

template <class TileType>
class ClosedLoop : public Records<TileType> {
  using T = TileType;
  using R = Records<TileType>;
  using R::add_products, R::add_record, R::current_w, R::decay_columns, R::own, R::read_rows, R::scale_rows, R::ring_w,
      R::wide_key, R::wide_w;
  using R::kOwn, R::N;
  using T::at_, T::geometry_, T::held_, T::lane_, T::shared_, T::step_, T::warp_;
  using typename R::Row;
  static constexpr bool kColumns = T::kColumns;

 protected:
  __device__ explicit ClosedLoop(const T& tile) : R(tile) {}

  /// What feeds the records' u into each other, of head h: [length, length], e^{g_{j+1} + ... + g_i} w_j . w_i for
  /// j < i (KDA: with the decays inside the product, and the token at hand as the last record); then [length],
  /// e^{g_0 + ... + g_i}.
  __device__ float* products(int h) const {
    return this->template in_flush<float>(geometry_.products) + h * step_.length * (step_.length + 1);
  }
  /// beta of the live records of head h.
  __device__ const float* betas(int h) const {
    return this->template in_brief<float>(geometry_.ring_gain) + this->of_run(h) * (step_.length - 1);
  }

  /// The token at hand behind the records.
  __device__ void arrange_current() const {
    for (int n = this->thread(); n < N; n += kWorkers) {
      wide_w(held_)[Row::place(n)] = current_w()[n];
      if constexpr (kColumns) wide_key(held_)[Row::place(n)] = this->vector(T::kVectors + 1)[n] * current_w()[n];
    }
  }
  /// The keys of 16 records at a time as fragments of a matrix [16 records, 16 elements]. The lanes t of product i have
  /// elements 16 i + 4 t .. 16 i + 4 t + 3 of a row.
  __device__ void arrange_keys() const {
    const auto* w = reinterpret_cast<const std::uint32_t*>(ring_w());
    auto* out = this->template in_flush<uint4>(geometry_.keys);
    const int blocks = (held_ + 15) / 16;
    for (int f = this->thread(); f < blocks * (N / 16) * 32; f += kWorkers) {
      const int g = f % 32 / 4, t = f % 4, i = f / 32 % (N / 16), j = f / 32 / (N / 16) * 16 + g;
      const int pair = i * 8 + 2 * t;
      uint2 near = make_uint2(0, 0), far = near;
      if (j < held_) near = *reinterpret_cast<const uint2*>(w + j * (N / 2) + pair);
      if (j + 8 < held_) far = *reinterpret_cast<const uint2*>(w + (j + 8) * (N / 2) + pair);
      out[f] = make_uint4(near.x, far.x, near.y, far.y);
    }
  }

  /// products(), given the live keys in bf16; a step of all workers inside.
  __device__ void arrange_products() const {
    const auto L = static_cast<int>(step_.length);
    auto* dots = this->template in_flush<float>(geometry_.w);  // [16, 16], until the matrices come here
    if (warp_ == 0) multiply_keys(dots);
    sync_threads<kWorkers>();
    // A thread for each head and record j, whose decay grows as i goes on; j = -1: the anchor.
    const int each = held_ + 1, records = L - 1;
    for (int t = this->thread(); t < geometry_.heads * each; t += kWorkers) {
      const int h = t / each, j = t % each - 1;
      const float* log_decay = this->template in_brief<float>(geometry_.ring_log) + this->of_run(h) * records;
      float* out = products(h);
      float sum = 0;
      for (int i = j + 1; i < held_; ++i) {
        sum += log_decay[i];
        if (j < 0) {
          out[L * L + i] = expf(sum);
        } else {
          out[i * L + j] = expf(sum) * dots[i * 16 + j];
        }
      }
    }
    sync_threads<kWorkers>();
  }

  /// w_i . w_j of up to 16 records, by one warp.
  __device__ void multiply_keys(float* dots) const {
    const auto* w = reinterpret_cast<const std::uint32_t*>(ring_w());
    const int g = lane_ / 4, t = lane_ % 4;
    float near[4] = {}, far[4] = {};
    for (int i = 0; i < N / 16; ++i) {
      const auto pair = [&](int record, int of) { return record < held_ ? w[record * (N / 2) + i * 8 + of + t] : 0u; };
      const uint4 a = make_uint4(pair(g, 0), pair(g + 8, 0), pair(g, 4), pair(g + 8, 4));
      multiply_add(near[0], near[1], near[2], near[3], a, a.x, a.z);
      multiply_add(far[0], far[1], far[2], far[3], a, a.y, a.w);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      dots[(g + k / 2 * 8) * 16 + 2 * t + k % 2] = near[k];
      dots[(g + k / 2 * 8) * 16 + 8 + 2 * t + k % 2] = far[k];
    }
  }

  /// products() of KDA, the token at hand as the last record: a warp for each record, which takes those before it
  /// newest first.
  __device__ void arrange_column_products() const {
    constexpr int kEach = N / 32;
    const auto L = static_cast<int>(step_.length);
    const int first = lane_ * kEach;
    const float* logs = this->staged_logs();
    float* out = products(0);
    for (int i = warp_; i <= held_; i += kWarps) {
      float sum[kEach], key[kEach];
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        sum[e] = this->vector(T::kVectors + 3)[first + e];
        key[e] = current_w()[first + e];
      }
      if (i < held_) {
        load_run(Scalar::fp32, logs, i * N + first, sum);
        load_run(step_.ring.w.type, ring_w(), i * N + first, key);
      }
      for (int j = i - 1; j >= 0; --j) {
        float w[kEach], g[kEach], dot = 0;
        load_run(step_.ring.w.type, ring_w(), j * N + first, w);
        load_run(Scalar::fp32, logs, j * N + first, g);
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
          dot = fmaf(w[e] * expf(sum[e]), key[e], dot);
          sum[e] += g[e];
        }
        dot = lane_sum<32>(dot);
        if (lane_ == 0) out[i * L + j] = dot;
      }
    }
  }

  /// Records that a lane keeps when every u is solved for: lane g has g, g + 8, ...
  static constexpr int kEach = 2;

  /// Solves for the u of every record and takes them in: a lane keeps v less what the keys of its records read; when
  /// the u before them are known, its own are next.
  __device__ void solve_columns(int h, int r, int p, const RingField& field, float (&s)[2][kOwn]) const {
    constexpr int Each = kEach;
    const float* gate = this->gates(h);
    const auto L = static_cast<int>(step_.length);
    const float* beta = betas(h);
    float rest[Each][2];  // v_i - what record i's key reads so far
#pragma unroll
    for (int k = 0; k < Each; ++k) {
      rest[k][0] = rest[k][1] = 0;
      if (k * 8 > held_) continue;
      float z[16] = {};
#pragma unroll
      for (int m = 0; m < 8; ++m) {
        if (k * 8 + m > held_) continue;
        float key[kOwn];
        Row::gather(wide_key(k * 8 + m), own(), key);
#pragma unroll
        for (int e = 0; e < kOwn; ++e) {
          z[2 * m] = fmaf(s[0][e], key[e], z[2 * m]);
          z[2 * m + 1] = fmaf(s[1][e], key[e], z[2 * m + 1]);
        }
      }
      // The first three exchanges pick the record; the sums of its two rows stay.
      float first[8], second[8];
#pragma unroll
      for (int m = 0; m < 8; ++m) first[m] = z[2 * m], second[m] = z[2 * m + 1];
      const float z0 = lane_sums<8, 4>(first, lane_), z1 = lane_sums<8, 4>(second, lane_);
      const int i = k * 8 + own();
      if (i <= held_) {
        const std::byte* row = this->staged_row(h, p, field.type);
        const float v0 = i == held_ ? this->value(r) : load_either(field.type, row, i * geometry_.head_rows);
        const float v1 = i == held_ ? this->value(r + 1) : load_either(field.type, row, i * geometry_.head_rows + 1);
        rest[k][0] = v0 - z0;
        rest[k][1] = v1 - z1;
      }
    }
    decay_columns(s);
#pragma unroll
    for (int k = 0; k < Each; ++k) {
      for (int m = 0; m < 8 && k * 8 + m <= held_; ++m) {
        const int j = k * 8 + m;
        const float b = j < held_ ? beta[j] : gate[1];
        const float u0 = b * __shfl_sync(~0u, rest[k][0], m * 4 + lane_ % 4);
        const float u1 = b * __shfl_sync(~0u, rest[k][1], m * 4 + lane_ % 4);
#pragma unroll
        for (int q = k; q < Each; ++q) {
          const int i = q * 8 + own();
          if (i > j && i <= held_) {
            const float product = products(h)[i * L + j];
            rest[q][0] = fmaf(-product, u0, rest[q][0]);
            rest[q][1] = fmaf(-product, u1, rest[q][1]);
          }
        }
        add_record(wide_w(j), gate[4 + j] * u0, gate[4 + j] * u1, s);
      }
    }
  }

  /// The same by matrix products, for keys that are exact in bf16; the token at hand, whose key is not, apart.
  template <class Release>
  __device__ void solve_matrices(int place, int h, int r, int p, const RingField& field, float (&s)[2][kOwn],
                                 Release&& release) const {
    const float* gate = this->gates(h);
    const auto L = static_cast<int>(step_.length);
    const float *feed = products(h), *before = feed + L * L, *beta = betas(h);
    const float* to_current = gate + 4 + 2 * geometry_.slots;
    const int g = own(), blocks = (held_ + 15) / 16;
    float rest[kEach][2] = {};  // of rows 2 t and 2 t + 1
#pragma unroll
    for (int b = 0; b < kEach / 2; ++b) {
      if (b >= blocks) break;
      // The small parts for themselves: fewer roundings of the large sum.
      float z[2][4] = {};
      const auto* keys = this->template in_flush<uint4>(geometry_.keys) + b * (N / 16) * 32 + lane_;
#pragma unroll 2
      for (int i = 0; i < N / 16; ++i) {
        const float4 f =
            *reinterpret_cast<const float4*>(shared_ + (place + g) * Row::pitch + (i * 16 + lane_ % 4 * 4) * 4);
        std::uint32_t low[3], high[3];
        split_in_three(f.x, f.y, low);
        split_in_three(f.z, f.w, high);
        const uint4 key = keys[i * 32];
        multiply_add(z[1][0], z[1][1], z[1][2], z[1][3], key, low[2], high[2]);
        multiply_add(z[1][0], z[1][1], z[1][2], z[1][3], key, low[1], high[1]);
        multiply_add(z[0][0], z[0][1], z[0][2], z[0][3], key, low[0], high[0]);
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int i = b * 16 + k * 8 + g;
        if (i >= held_) continue;
        const std::byte* row = this->staged_row(h, p, field.type);
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          const float read = z[0][2 * k + q] + z[1][2 * k + q];
          rest[2 * b + k][q] = fmaf(-before[i], read, load_either(field.type, row, i * geometry_.head_rows + q));
        }
      }
    }
    read_rows(place, s);
    scale_rows({gate[0], gate[0]}, s);
    release();
    float w[kOwn], u[2] = {};
    Row::spread(current_w(), g, w);
#pragma unroll
    for (int e = 0; e < kOwn; ++e) {
      u[0] = fmaf(s[0][e], w[e], u[0]), u[1] = fmaf(s[1][e], w[e], u[1]);
    }
#pragma unroll
    for (int q = 0; q < 2; ++q) u[q] = this->value(r + q) - lane_sum<8, 4>(u[q]);
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      for (int m = 0; m < 8 && k * 8 + m < held_; ++m) {
        const int j = k * 8 + m;
        const float u0 = beta[j] * __shfl_sync(~0u, rest[k][0], m * 4 + lane_ % 4);
        const float u1 = beta[j] * __shfl_sync(~0u, rest[k][1], m * 4 + lane_ % 4);
        if (g == m) rest[k][0] = u0, rest[k][1] = u1;  // known now
#pragma unroll
        for (int q = k; q < kEach; ++q) {
          const int i = q * 8 + g;
          if (i > j && i < held_) {
            const float product = feed[i * L + j];
            rest[q][0] = fmaf(-product, u0, rest[q][0]);
            rest[q][1] = fmaf(-product, u1, rest[q][1]);
          }
        }
        u[0] = fmaf(-to_current[j], u0, u[0]);
        u[1] = fmaf(-to_current[j], u1, u[1]);
      }
    }
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      u[q] *= gate[1];
#pragma unroll
      for (int e = 0; e < kOwn; ++e) s[q][e] = fmaf(u[q], w[e], s[q][e]);
    }
    // The fragments of u want row g where a lane has rows 2 t and 2 t + 1.
    const auto* fragments = this->template in_flush<uint4>(geometry_.w) + lane_;
#pragma unroll
    for (int b = 0; b < kEach / 2; ++b) {
      if (b >= blocks) break;
      float factor[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int j = b * 16 + lane_ % 4 * 2 + k % 2 + k / 2 * 8, from = j % 8 * 4 + g / 2;
        const float even = __shfl_sync(~0u, rest[2 * b + k / 2][0], from);
        const float odd = __shfl_sync(~0u, rest[2 * b + k / 2][1], from);
        factor[k] = j < held_ ? gate[4 + j] * (g % 2 == 0 ? even : odd) : 0.0f;
      }
      add_products(fragments + b * (N / 16) * 32, factor, {1, 1}, s);
    }
  }
};

}  // namespace replayssm::cuda
