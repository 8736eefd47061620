#pragma once

// The records of a row that flushes, taken into a state.

#include "cuda/tile.cuh"

namespace replayssm::cuda {

/// A warp rebuilds eight rows at a time. Lane 4 g + t holds the elements of lane g of T::AnchorRow of rows 2 t and 2 t
/// + 1: the places at which a product of w [16 elements, 16 records] and u [16 records, 8 rows] leaves its results.
template <class TileType>
class Records : public TileType {
  using T = TileType;
  using T::geometry_, T::held_, T::lane_, T::shared_, T::step_;
  static constexpr bool kDelta = T::kDelta, kColumns = T::kColumns;

 protected:
  static constexpr int N = T::N;
  using Row = typename T::AnchorRow;
  static constexpr int kOwn = Row::per_lane, kRows = 8;
  /// Every u is solved for, from the anchor and the raw records.
  static constexpr bool kSolve = kDelta && T::Split;

  __device__ explicit Records(const T& tile) : T(tile) {}

  __device__ int own() const { return lane_ / 4; }  // g
  __device__ float* wide_w(int j) const { return this->template in_block<float>(geometry_.w) + j * N; }
  __device__ float* wide_key(int j) const { return this->template in_block<float>(geometry_.keys) + j * N; }
  /// Live log decays [held, N], KDA.
  __device__ const float* staged_logs() const { return this->template in_brief<float>(geometry_.ring_log); }
  /// The token's own w, unrounded.
  __device__ const float* current_w() const { return this->vector(kColumns ? T::kVectors + 2 : 1); }

  /// The w of the records in fp32, for KDA times what their decays make of them by now, and its keys e^{g_0 + ... +
  /// g_i} k_i that read the anchor as it was. By all workers.
  __device__ void arrange_records() const {
    const Scalar type = step_.ring.w.type;
    if constexpr (!kColumns) {
      for (int i = this->thread(); i < held_ * N; i += kWorkers) {
        wide_w(i / N)[Row::place(i % N)] = load(type, this->ring_w(i / N), i % N);
      }
    } else {
      const float* logs = staged_logs();
      for (int n = this->thread(); n < N; n += kWorkers) {
        const int place = Row::place(n);
        float sum = this->vector(T::kVectors + 3)[n];
        for (int j = held_ - 1; j >= 0; --j) {
          wide_w(j)[place] = expf(sum) * load(type, this->ring_w(j), n);
          sum += logs[j * N + n];
        }
        if constexpr (kSolve) {
          sum = 0;
          for (int i = 0; i < held_; ++i) {
            sum += logs[i * N + n];
            wide_key(i)[place] = expf(sum) * load(type, this->ring_w(i), n);
          }
        }
      }
    }
  }
  /// The lane's elements of two rows at `place` of the buffer.
  __device__ void read_rows(int place, float (&s)[2][kOwn]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) Row::read(shared_ + (place + lane_ % 4 * 2 + i) * Row::pitch, own(), s[i]);
  }
  __device__ static void scale_rows(const float (&factor)[2], float (&s)[2][kOwn]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < kOwn; ++e) s[i][e] *= factor[i];
    }
  }

  __device__ void decay_columns(float (&s)[2][kOwn]) const {
    float e[kOwn];
    Row::spread(this->vector(T::kVectors + 1), own(), e);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) s[0][i] *= e[i], s[1][i] *= e[i];
  }

  __device__ void add_record(const float* arranged, float u0, float u1, float (&s)[2][kOwn]) const {
    float w[kOwn];
    Row::gather(arranged, own(), w);
#pragma unroll
    for (int e = 0; e < kOwn; ++e) {
      s[0][e] = fmaf(u0, w[e], s[0][e]);
      s[1][e] = fmaf(u1, w[e], s[1][e]);
    }
  }

  /// s += weight u w for the token at hand.
  __device__ void add_current(float weight, const float (&u)[2], float (&s)[2][kOwn]) const {
    float w[kOwn];
    Row::spread(current_w(), own(), w);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < kOwn; ++e) s[i][e] = fmaf(weight * u[i], w[e], s[i][e]);
    }
  }
  /// The lane's parts of the products of two rows with the token's w.
  __device__ void read_current(const float (&s)[2][kOwn], float (&z)[2]) const {
    float w[kOwn];
    Row::spread(current_w(), own(), w);
#pragma unroll
    for (int e = 0; e < kOwn; ++e) z[0] = fmaf(s[0][e], w[e], z[0]), z[1] = fmaf(s[1][e], w[e], z[1]);
  }

  /// Of 16 records, the lane's number k of four.
  __device__ int of_lane(int k) const { return lane_ % 4 * 2 + k % 2 + k / 2 * 8; }
  /// s <- factor s + w u over all records, 16 at a time, in Mamba-2 with the token at hand behind them, whose x times
  /// dt is `current`; w is exact in bf16, u goes in three parts. `values`: the staged ones of row g of the batch.
  __device__ void add_matrices(const float* gate, const std::byte* values, Scalar type, float current,
                               const float (&factor)[2], float (&s)[2][kOwn]) const {
    for (int base = 0; base < held_ + T::kMatrixExtra; base += 16) {
      float u[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int j = base + of_lane(k);
        u[k] = 0;
        if (j < held_) u[k] = gate[4 + j] * load_either(type, values, j * geometry_.head_rows);
        if (!kDelta && j == held_) u[k] = current;
      }
      const float f[2] = {base == 0 ? factor[0] : 1.0f, base == 0 ? factor[1] : 1.0f};
      add_products(base, u, f, s);
    }
  }
  /// s <- factor s + w u of the 16 records from `base` on, given the lane's u of row g; small parts first. Matrix
  /// products cut their sums off: where the state is kept in fp32, so that this would show, they sum up the records
  /// alone, and one rounded operation takes in the state.
  __device__ void add_products(int base, const float (&u)[4], const float (&factor)[2], float (&s)[2][kOwn]) const {
    constexpr bool kApart = T::Anchor == Storage::fp32;
    // Products side by side, each of which waits for itself only; measured, as more take registers.
    constexpr int kGroup = !kApart ? 4 : T::Split ? 2 : 1;
    std::uint32_t low[3], high[3];
    split_in_three(u[0], u[1], low);
    split_in_three(u[2], u[3], high);
    const std::byte* rows = this->ring_w(base + lane_ % 16) + lane_ / 16 * 16;
#pragma unroll
    for (int first = 0; first < kOwn / 2; first += kGroup) {
      uint4 w[kGroup];
      float sum[kGroup][4];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if (first + i >= kOwn / 2) continue;
        const uint4 pieces = load_matrices<true>(rows + (first + i) * 32);
        w[i] = make_uint4(pieces.x, pieces.z, pieces.y, pieces.w);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          sum[i][k] = kApart ? 0.0f : s[k % 2][2 * (first + i) + k / 2] * factor[k % 2];
        }
      }
#pragma unroll
      for (int k = 2; k >= 0; --k) {
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          if (first + i >= kOwn / 2) continue;
          multiply_add(sum[i][0], sum[i][1], sum[i][2], sum[i][3], w[i], low[k], high[k]);
        }
      }
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if (first + i >= kOwn / 2) continue;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float& x = s[k % 2][2 * (first + i) + k / 2];
          x = kApart ? fmaf(x, factor[k % 2], sum[i][k]) : sum[i][k];
        }
      }
    }
  }
};

}  // namespace replayssm::cuda
