#pragma once

// What rows that flush need of their records beyond what others do, worked out once for the heads of a run.

#include "cuda/tile.cuh"

namespace replayssm::cuda {

/// In the closed loop of a split Gated DeltaNet state the u of the records depend on each other,
///
///     u_i = beta_i (r_i - sum_{j<i} f_ij u_j),  f_ij = e^{g_{j+1} + ... + g_i} w_j . w_i,
///
/// r_i = v_i less what the decayed key reads of the anchor. So u = T r with one triangle T a head for all its rows (the
/// UT transform: Joffrain et al. 2006; Yang et al. 2024).
template <class TileType>
class Triangle : public TileType {
  using T = TileType;
  using T::geometry_, T::heads, T::held_, T::lane_, T::records, T::step_;
  static constexpr int N = T::N;
  static constexpr int kMost = 16;  // records

 protected:
  __device__ explicit Triangle(const T& tile) : T(tile) {}

  /// Puts the rows of ring_w() in the order that matrix products read: the live records, in Mamba-2 the token at hand,
  /// and zeros, for as many as come in sixteens. Of each, pieces of eight elements: number 2 i has those that are
  /// number 2 i of the eight lanes of AnchorRow, and number 2 i + 1 those behind them.
  __device__ void order_records() const {
    constexpr int kAtOnce = 4, kPairs = N / 4, kEach = (kPairs + 31) / 32;
    using Row = typename T::AnchorRow;
    const auto* current = this->template in_brief<std::uint32_t>(geometry_.raw + N * bytes(this->c_input().type));
    const auto row = [&](int j) { return reinterpret_cast<std::uint32_t*>(this->ring_w(j)); };
    const int rows = (held_ + T::kMatrixExtra + 15) / 16 * 16;
    for (int base = 0; base < rows; base += kAtOnce) {
      uint2 words[kAtOnce][kEach];  // elements 2 i and 2 i + 1 of two neighbouring lanes
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        const int n = lane_ + 32 * k, near = Row::element(n % 4 * 2, n / 4 * 2) / 2,
                  far = Row::element(n % 4 * 2 + 1, n / 4 * 2) / 2;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int j = base + i;
          words[i][k] = make_uint2(0, 0);
          if (n >= kPairs) continue;
          if (j < held_) words[i][k] = make_uint2(row(j)[near], row(j)[far]);
          if (T::kMatrixExtra > 0 && j == held_) words[i][k] = make_uint2(current[near], current[far]);
        }
      }
      __syncwarp();
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        const int n = lane_ + 32 * k;
        if (n >= kPairs) continue;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const uint2 w = words[i][k];
          row(base + i)[n / 4 * 8 + n % 4] = __byte_perm(w.x, w.y, 0x5410);
          row(base + i)[n / 4 * 8 + 4 + n % 4] = __byte_perm(w.x, w.y, 0x7632);
        }
      }
    }
    __syncwarp();
  }

  /// The triangles of all heads, as operands [16 records, 8 records] of a product with r in three parts each, two heads
  /// at a time; and what decays the anchor for each record.
  __device__ void make_triangles() const {
    float near[4] = {}, far[4] = {};
    multiply_keys(near, far);
    const int g = lane_ / 4, t = lane_ % 4, own = lane_ / 16, j = lane_ % 16;
    for (int first = 0; first < heads(); first += 2) {
      const int head = first + own;
      const bool live = head < heads();
      // Where the triangle will be, f is first: [16, 16].
      for (int h = first; h < min(first + 2, heads()); ++h) {
        float* f = factors(h);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int i = (g + k / 2 * 8) * kMost + 2 * t + k % 2;
          f[i] = near[k];
          f[i + 8] = far[k];
        }
      }
      __syncwarp();
      const float* log_decay = this->template in_brief<float>(geometry_.ring_log) + head * records();
      float* f = factors(live ? head : first);
      // A lane for each record, whose decay grows as i goes on; the last one, which is none: the anchor.
      float sum = 0;
      for (int i = 0; live && i < held_; ++i) {
        const bool anchor = j == kMost - 1;
        if (i <= j && !anchor) continue;
        sum += log_decay[i];
        if (anchor) {
          f[kTriangleParts * 128 + i] = expf(sum);
        } else {
          f[i * kMost + j] *= expf(sum);
        }
      }
      __syncwarp();
      // Column j by substitution.
      const float* beta = this->template in_brief<float>(geometry_.ring_gain) + (live ? head : first) * records();
      float column[kMost];
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        float rest = i == j ? 1.0f : 0.0f;
#pragma unroll
        for (int k = 0; k < i; ++k) {
          // Above the diagonal of f are products that are not meant, and column is 0 there.
          rest = fmaf(-f[i * kMost + k], column[k], rest);
        }
        column[i] = i < held_ && i >= j ? beta[i] * rest : 0.0f;
      }
      __syncwarp();
      if (live) {
        auto* out = reinterpret_cast<std::uint16_t*>(f);
#pragma unroll
        for (int i = 0; i < kMost; ++i) {
          // Element (record j, record i) of the operand is lane 4 (i % 8) + j % 8 / 2's.
          if (i < 8 && j >= 8) continue;  // above the diagonal, not kept
          const int word = i < 8 ? 0 : j < 8 ? 1 : 2;
          float rest = column[i];
#pragma unroll
          for (int part = 0; part < kTriangleParts; ++part) {
            const float high = round_to(Scalar::bf16, rest);
            store(Scalar::bf16, out, ((part * 32 + 4 * (i % 8) + j % 8 / 2) * 4 + word) * 2 + j % 2, high);
            rest -= high;
          }
        }
      }
      __syncwarp();
    }
  }

 private:
  __device__ float* factors(int h) const {
    return this->template in_brief<float>(geometry_.triangles + h * kTriangleBytes);
  }

  /// w_i . w_j of 16 records, in the order of order_records(): lane 4 g + t has rows g and g + 8, of `near` columns 2 t
  /// and 2 t + 1, of `far` those 8 further on.
  __device__ void multiply_keys(float (&near)[4], float (&far)[4]) const {
    const std::byte* keys = this->ring_w(lane_ % 16) + lane_ / 16 * 16;
#pragma unroll 4
    for (int i = 0; i < N / 16; ++i) {
      const uint4 a = load_matrices<false>(keys + i * 32);
      multiply_add(near[0], near[1], near[2], near[3], a, a.x, a.z);
      multiply_add(far[0], far[1], far[2], far[3], a, a.y, a.w);
    }
  }
};

}  // namespace replayssm::cuda
