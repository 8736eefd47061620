#pragma once

// The records of a row that flushes: arranged for the lanes that need them, and taken into a state.

#include "cuda/tile.cuh"

namespace replayssm::cuda {

/// A warp rebuilds eight rows at a time. Lane 4 g + t holds the elements of lane g of Lay<N, Anchor, 8> of rows 2 t and
/// 2 t + 1: the places at which a product of w [16 elements, 16 records] and u [16 records, 8 rows] leaves its results.
template <class TileType>
class Records : public TileType {
  using T = TileType;
  using T::geometry_, T::held_, T::lane_, T::shared_, T::step_;
  static constexpr bool kDelta = T::kDelta, kColumns = T::kColumns;

 protected:
  static constexpr int N = T::N;
  using Row = Lay<N, T::Anchor, 8>;
  static constexpr int kOwn = Row::per_lane, kRows = 8;
  /// Every u is solved for, from the anchor and the raw records.
  static constexpr bool kSolve = kDelta && T::Split;

  __device__ explicit Records(const T& tile) : T(tile) {}

  __device__ int own() const { return lane_ / 4; }  // g
  __device__ float* wide_w(int j) const { return this->template in_flush<float>(geometry_.w) + j * N; }
  __device__ float* wide_key(int j) const {
    return this->template in_flush<float>(kColumns ? geometry_.keys : geometry_.w) + j * N;
  }
  /// Live log decays [held, N], KDA.
  __device__ const float* staged_logs() const { return this->template in_brief<float>(geometry_.ring_log); }
  __device__ const std::byte* ring_w() const { return this->template in_brief<std::byte>(geometry_.ring_w); }
  /// The token's own w, unrounded.
  __device__ const float* current_w() const { return this->vector(kColumns ? T::kVectors + 2 : 1); }

  /// Whether records are taken in as matrix products, for which their w has to be exact in bf16: in Mamba-2 with the
  /// token at hand as the last of them, in the delta rule without it, as normalisation leaves its key in fp32.
  __device__ bool matrices() const {
    return !kColumns && held_ > 0 && step_.ring.w.type == Scalar::bf16 &&
           (kDelta || this->w_input().type == Scalar::bf16);
  }
  /// Records in them.
  __device__ int count() const { return kDelta ? held_ : held_ + 1; }
  /// The w of 16 records at a time as fragments of a matrix [16 elements, 16 records], 16 bytes a lane. The elements of
  /// product i are 2 i and 2 i + 1 of each lane group.
  __device__ void arrange_matrices() const {
    const auto* w = reinterpret_cast<const std::uint32_t*>(ring_w());
    const auto* current = this->template in_brief<std::uint32_t>(geometry_.raw + N * bytes(this->c_input().type));
    auto* out = this->template in_flush<uint4>(geometry_.w);
    const int count = this->count(), blocks = (count + 15) / 16;
    for (int f = this->thread(); f < blocks * (N / 16) * 32; f += kWorkers) {
      const int g = f % 32 / 4, t = f % 4, i = f / 32 % (N / 16), j = f / 32 / (N / 16) * 16 + 2 * t;
      const int pair = Row::element(g, 2 * i) / 2;  // the element and the next are neighbours
      std::uint32_t r[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int record = j + k % 2 + k / 2 * 8;
        r[k] = record < held_ ? w[record * (N / 2) + pair] : record < count ? current[pair] : 0;
      }
      out[f] = make_uint4(__byte_perm(r[0], r[1], 0x5410), __byte_perm(r[0], r[1], 0x7632),
                          __byte_perm(r[2], r[3], 0x5410), __byte_perm(r[2], r[3], 0x7632));
    }
  }

  /// The w of the records in fp32, for KDA times what their decays make of them by now, and its keys e^{g_0 + ... +
  /// g_i} k_i that read the anchor as it was.
  __device__ void arrange_records() const {
    const std::byte* ring = ring_w();
    const Scalar type = step_.ring.w.type;
    if constexpr (!kColumns) {
      for (int i = this->thread(); i < held_ * N; i += kWorkers) {
        wide_w(i / N)[Row::place(i % N)] = load(type, ring, i);
      }
      if constexpr (!kDelta) {
        for (int n = this->thread(); n < N; n += kWorkers) wide_w(held_)[Row::place(n)] = current_w()[n];
      }
    } else {
      const float* logs = staged_logs();
      for (int n = this->thread(); n < N; n += kWorkers) {
        const int place = Row::place(n);
        float sum = this->vector(T::kVectors + 3)[n];
        for (int j = held_ - 1; j >= 0; --j) {
          wide_w(j)[place] = expf(sum) * load(type, ring, j * N + n);
          sum += logs[j * N + n];
        }
        if constexpr (kSolve) {
          sum = 0;
          for (int i = 0; i < held_; ++i) {
            sum += logs[i * N + n];
            wide_key(i)[place] = expf(sum) * load(type, ring, i * N + n);
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

  /// s <- factor s + w u over all records, 16 at a time; w is exact in bf16, u goes in three parts. `row`: the staged
  /// values of row r of the tile, which is row g of the batch.
  __device__ void add_matrices(const float* gate, const std::byte* row, int r, Scalar type, const float (&factor)[2],
                               float (&s)[2][kOwn]) const {
    const auto* fragments = this->template in_flush<uint4>(geometry_.w) + lane_;
    const int count = this->count();
    const float x = kDelta ? 0.0f : gate[4 + held_] * this->value(r);
    for (int base = 0; base < count; base += 16, fragments += N / 16 * 32) {
      float u[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int j = base + lane_ % 4 * 2 + k % 2 + k / 2 * 8;
        u[k] = 0;
        if (j < held_) u[k] = gate[4 + j] * load_either(type, row, j * geometry_.head_rows);
        if (!kDelta && j == held_) u[k] = x;
      }
      const float f[2] = {base == 0 ? factor[0] : 1.0f, base == 0 ? factor[1] : 1.0f};
      add_products(fragments, u, f, s);
    }
  }
  /// s <- factor s + w u of 16 records, given the fragments of w and of u, small parts first. Matrix products cut their
  /// sums off: where the state is kept in fp32, so that this would show, they sum up the records alone, and one rounded
  /// operation takes in the state.
  __device__ static void add_products(const uint4* fragments, const float (&u)[4], const float (&factor)[2],
                                      float (&s)[2][kOwn]) {
    constexpr bool kApart = T::Anchor == Storage::fp32;
    constexpr int kGroup = kApart ? 2 : 4;  // products side by side, each of which waits for itself only
    std::uint32_t low[3], high[3];
    split_in_three(u[0], u[1], low);
    split_in_three(u[2], u[3], high);
#pragma unroll
    for (int first = 0; first < kOwn / 2; first += kGroup) {
      uint4 w[kGroup];
      float sum[kGroup][4];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if (first + i >= kOwn / 2) continue;
        w[i] = fragments[(first + i) * 32];
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
