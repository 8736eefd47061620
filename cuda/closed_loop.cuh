#pragma once

// The closed loop of a split delta rule: at a flush every u is solved for, from the anchor and the raw records.

#include "cuda/records.cuh"

namespace replayssm::cuda {

template <class TileType>
class ClosedLoop : public Records<TileType> {
  using T = TileType;
  using R = Records<TileType>;
  using R::add_current, R::add_products, R::add_record, R::current_w, R::decay_columns, R::of_lane, R::own,
      R::read_current, R::read_rows, R::scale_rows, R::wide_key, R::wide_w;
  using R::kOwn, R::N;
  using T::geometry_, T::held_, T::lane_, T::shared_, T::step_, T::warp_;
  using typename R::Row;
  static constexpr bool kColumns = T::kColumns;

 protected:
  __device__ explicit ClosedLoop(const T& tile) : R(tile) {}

  // ---- one decay a head ---------------------------------------------------------------------------------------------

  /// s <- the state after the records and the token at hand, given the anchor at row `place` of the buffer; r, p: the
  /// first of the lane's rows, in the tile and of head h.
  ///
  /// What the keys of the records read, the triangle of the head (triangle.cuh) turns into their u. Keys are exact in
  /// bf16; the token at hand, whose key is not, is apart.
  template <class Release>
  __device__ void solve_matrices(int place, int h, int r, int p, const RingField& field, float (&s)[2][kOwn],
                                 Release&& release) const {
    const float* gate = this->gates(h);
    std::uint32_t low[3], high[3];
    read_keys(place, h, p, field, low, high);
    float u[4];
    multiply_triangle(h, low, high, u);
    read_rows(place, s);
    release();
    scale_rows({gate[0], gate[0]}, s);
    // What the token's key reads: the lane has its part of rows 2 t and 2 t + 1 of the state, and of row g of the u.
    const float* to_current = gate + 4 + 2 * geometry_.slots;
    float of_records = 0, current[2] = {}, factor[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int j = of_lane(k);
      if (j < held_) of_records = fmaf(to_current[j], u[k], of_records);
      factor[k] = j < held_ ? gate[4 + j] * u[k] : 0.0f;
    }
    of_records = lane_sum<4>(of_records);
    read_current(s, current);
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const float read = lane_sum<8, 4>(current[q]) + __shfl_sync(~0u, of_records, lane_ % 4 * 8 + 4 * q);
      current[q] = this->value(r + q) - read;
    }
    add_products(0, factor, {1, 1}, s);
    add_current(gate[1], current, s);
  }

  /// v less what the decayed keys of 16 records read of the anchor; as operand [8 rows, 16 records] in three parts.
  __device__ void read_keys(int place, int h, int p, const RingField& field, std::uint32_t (&low)[3],
                            std::uint32_t (&high)[3]) const {
    // The small parts for themselves: fewer roundings of the large sum.
    float z[2][4] = {};
    const std::byte* keys = this->ring_w(lane_ % 16) + lane_ / 16 * 16;
    // Lane 4 g + t has eight neighbouring elements of row g at a time: those of lanes 2 t and 2 t + 1 of Row.
    const auto* row = reinterpret_cast<const float4*>(shared_ + (place + own()) * Row::pitch) + lane_ % 4 * 2;
#pragma unroll 2
    for (int i = 0; i < N / 32; ++i) {
      const float4 a = row[i * 8], b = row[i * 8 + 1];
      const float near[4] = {a.x, a.y, a.z, a.w}, far[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int k = 0; k < 4; k += 2) {
        std::uint32_t first[3], second[3];
        cut_in_three(near[k], far[k], first);
        cut_in_three(near[k + 1], far[k + 1], second);
        const uint4 key = load_matrices<false>(keys + i * 64 + k * 16);
        multiply_add(z[1][0], z[1][1], z[1][2], z[1][3], key, first[2], second[2]);
        multiply_add(z[1][0], z[1][1], z[1][2], z[1][3], key, first[1], second[1]);
        multiply_add(z[0][0], z[0][1], z[0][2], z[0][3], key, first[0], second[0]);
      }
    }
    // Records g and g + 8 of rows 2 t and 2 t + 1.
    const float* before = this->before(h);
    const std::byte* values = this->staged_row(h, p, field.type);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int i = own() + 8 * k;
      float rest[2] = {};
      if (i < held_) {
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          const float v = load_either(field.type, values, i * geometry_.head_rows + q);
          rest[q] = fmaf(-before[i], z[0][2 * k + q] + z[1][2 * k + q], v);
        }
      }
      std::uint32_t(&out)[3] = k == 0 ? low : high;
      split_in_three(rest[0], rest[1], out);
#pragma unroll
      for (std::uint32_t& pair : out) pair = transpose(pair);
    }
  }

  /// u of the lane's four records, see of_lane(), of row g.
  __device__ void multiply_triangle(int h, const std::uint32_t (&low)[3], const std::uint32_t (&high)[3],
                                    float (&u)[4]) const {
    const uint4* triangle = this->triangle(h) + lane_;
    const uint4 b[3] = {triangle[0], triangle[32], triangle[64]};
    float small[4] = {}, other[4] = {};
    // Parts whose product is below the last bit are left out; small ones first.
#pragma unroll
    for (int sum = 2; sum >= 0; --sum) {
#pragma unroll
      for (int k = 0; k <= sum; ++k) {
        const uint4 a = make_uint4(low[k], 0, high[k], 0);
        multiply_add(small[0], small[1], small[2], small[3], a, b[sum - k].x, 0);
        multiply_add(other[0], other[1], other[2], other[3], a, b[sum - k].y, b[sum - k].z);
      }
    }
    u[0] = small[0], u[1] = small[1], u[2] = other[0], u[3] = other[1];
  }

  // ---- one decay a channel ------------------------------------------------------------------------------------------

  /// [length, length]: (e^{g_{j+1} + ... + g_i} w_j) . w_i for j < i, the token at hand as the last record.
  __device__ float* products() const { return this->template in_block<float>(geometry_.products); }

  /// The token at hand behind the records. By all workers.
  __device__ void arrange_current() const {
    for (int n = this->thread(); n < N; n += kWorkers) {
      wide_w(held_)[Row::place(n)] = current_w()[n];
      wide_key(held_)[Row::place(n)] = this->vector(T::kVectors + 1)[n] * current_w()[n];
    }
  }
  /// products(): a warp for each record, which takes those before it newest first.
  __device__ void arrange_column_products() const {
    constexpr int kEach = N / 32;
    const auto L = static_cast<int>(step_.length);
    const int first = lane_ * kEach;
    const float* logs = this->staged_logs();
    const Scalar type = step_.ring.w.type;
    float* out = products();
    for (int i = warp_; i <= held_; i += kWarps) {
      float sum[kEach], key[kEach];
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        sum[e] = this->vector(T::kVectors + 3)[first + e];
        key[e] = current_w()[first + e];
      }
      if (i < held_) {
        load_run(Scalar::fp32, logs, i * N + first, sum);
        load_run(type, this->ring_w(i), first, key);
      }
      for (int j = i - 1; j >= 0; --j) {
        float w[kEach], g[kEach], dot = 0;
        load_run(type, this->ring_w(j), first, w);
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
    const float* beta = this->template in_brief<float>(geometry_.ring_gain);
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
            const float product = products()[i * L + j];
            rest[q][0] = fmaf(-product, u0, rest[q][0]);
            rest[q][1] = fmaf(-product, u1, rest[q][1]);
          }
        }
        add_record(wide_w(j), gate[4 + j] * u0, gate[4 + j] * u1, s);
      }
    }
  }
};

}  // namespace replayssm::cuda
