#pragma once

// Flushes: the checkpoint or anchor goes through the buffer piece by piece, is decayed, takes in the records and the
// token at hand, is read, and is stored.

#include "cuda/tile.cuh"

namespace replayssm::cuda {

/// A warp rebuilds eight rows at a time. Lane 4 g + t holds the elements of lane g of Lay<N, Anchor, 8> of rows 2 t and
/// 2 t + 1: the places at which a product of w [16 elements, 16 records] and u [16 records, 8 rows] leaves its results.
template <class TileType>
class Rebuild : public TileType {
  using T = TileType;
  using T::at_, T::first_, T::flush_, T::geometry_, T::head_, T::held_, T::lane_, T::p0_, T::shared_, T::step_,
      T::warp_;
  static constexpr int N = T::N;
  static constexpr bool kDelta = T::kDelta, kColumns = T::kColumns, kSplit = T::Split;
  using Row = Lay<N, T::Anchor, 8>;
  static constexpr int kOwn = Row::per_lane, kRows = 8;
  /// Every u is solved for, from the anchor and the raw records.
  static constexpr bool kSolve = kDelta && kSplit;

 public:
  __device__ explicit Rebuild(const T& tile) : T(tile) {}

  /// phases: of the barriers of pieces, the block's in bit 0 and the warp's own above it; moved on.
  __device__ void run(std::uint32_t& phases) const {
    const Geometry& g = geometry_;
    const bool matrices = !kColumns && step_.ring.w.type == Scalar::bf16;
    if (held_ > 0) {
      if (matrices) {
        arrange_matrices();
        if constexpr (kSolve && !kColumns) arrange_keys();
      } else if constexpr (!kSolve || kColumns) {
        arrange_records();
      }
    }
    if constexpr (kSolve) {
      if constexpr (kColumns) arrange_current();
      const float* from = at_.products(head_);
      const int size = g.heads * static_cast<int>(step_.length * (step_.length + 2));
      for (int i = static_cast<int>(threadIdx.x); i < size; i += kWorkers) products(0)[i] = from[i];
    }
    sync_threads<kWorkers>();
    constexpr int kTogether = kWarps * kRows;
    if (g.piece % kTogether == 0 && g.piece / kTogether <= kOwnPieces) {
      // The buffer has places for a number of batches of every warp. As soon as a warp has read one, it fetches the
      // batch that comes to the same place.
      for (int r0 = warp_ * kRows; r0 < g.tile; r0 += kTogether) {
        const int place = r0 % g.piece, slot = place / kTogether;
        if (r0 >= g.piece) {
          barrier_wait(this->own_pieces(slot), phases >> (1 + slot) & 1);
          phases ^= 2u << slot;
        }
        batch(place, r0, matrices, [&] {
          if (r0 + g.piece >= g.tile) return;
          before_copies();
          __syncwarp();
          if (lane_ == 0) {
            arrive_and_expect(this->own_pieces(slot), kRows * Row::pitch);
            bulk_copy(shared_ + place * Row::pitch, this->anchor_rows(r0 + g.piece), kRows * Row::pitch,
                      this->own_pieces(slot));
          }
        });
      }
    } else {
      for (int done = 0; done < g.tile; done += g.piece) {
        if (done > 0) {
          before_copies();
          sync_threads<kWorkers>();
          if (threadIdx.x == 0) {
            arrive_and_expect(this->pieces(), static_cast<std::uint32_t>(this->piece_bytes(done)));
            bulk_copy(shared_, this->anchor_rows(done), static_cast<std::uint32_t>(this->piece_bytes(done)),
                      this->pieces());
          }
          barrier_wait(this->pieces(), phases & 1);
          phases ^= 1;
        }
        const int rows = min(g.piece, g.tile - done);
        for (int base = warp_ * kRows; base < rows; base += kTogether) batch(base, done + base, matrices, [] {});
      }
    }
    sync_threads<kWorkers>();  // the next flush arranges its records in the same place
  }

 private:
  __device__ int own() const { return lane_ / 4; }  // g
  __device__ float* wide_w(int j) const { return this->template in_block<float>(geometry_.w) + j * N; }
  __device__ float* wide_key(int j) const {
    return this->template in_block<float>(kColumns ? geometry_.keys : geometry_.w) + j * N;
  }
  __device__ float* products(int h) const {
    return this->template in_block<float>(geometry_.products) + h * step_.length * (step_.length + 2);
  }
  __device__ const std::byte* ring_w() const { return this->template in_shared<std::byte>(geometry_.ring_w); }
  /// The token's own w, unrounded.
  __device__ const float* current_w() const { return this->vector(kColumns ? T::kVectors + 2 : 1); }

  /// The w of 16 records at a time as fragments of a matrix [16 elements, 16 records], 16 bytes a lane. The elements of
  /// product i are 2 i and 2 i + 1 of each lane group.
  __device__ void arrange_matrices() const {
    const auto* w = reinterpret_cast<const std::uint32_t*>(ring_w());
    auto* out = this->template in_block<uint4>(geometry_.w);
    const int blocks = (held_ + 15) / 16;
    for (int f = static_cast<int>(threadIdx.x); f < blocks * (N / 16) * 32; f += kWorkers) {
      const int g = f % 32 / 4, t = f % 4, i = f / 32 % (N / 16), j = f / 32 / (N / 16) * 16 + 2 * t;
      const int pair = Row::element(g, 2 * i) / 2;  // the element and the next are neighbours
      std::uint32_t r[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int record = j + k % 2 + k / 2 * 8;
        r[k] = record < held_ ? w[record * (N / 2) + pair] : 0;
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
      for (int i = static_cast<int>(threadIdx.x); i < held_ * N; i += kWorkers) {
        wide_w(i / N)[Row::place(i % N)] = load(type, ring, i);
      }
    } else {
      const auto* logs = reinterpret_cast<const float*>(at_.records(step_.ring.log_decay, head_, N));
      for (int n = static_cast<int>(threadIdx.x); n < N; n += kWorkers) {
        const int place = Row::place(n);
        float sum = current_gate(n);
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
  /// The token at hand behind the records.
  __device__ void arrange_current() const {
    for (int n = static_cast<int>(threadIdx.x); n < N; n += kWorkers) {
      wide_w(held_)[Row::place(n)] = current_w()[n];
      if constexpr (kColumns) wide_key(held_)[Row::place(n)] = this->vector(T::kVectors + 1)[n] * current_w()[n];
    }
  }
  /// KDA: the token's own log decay, worked out as prepare_kernel() does.
  __device__ float current_gate(int n) const {
    if constexpr (kColumns) {
      const std::int64_t column = static_cast<std::int64_t>(head_) * N + n;
      return -expf(step_.A_log[head_]) *
             softplus(load(step_.gate.type, step_.gate.data, at_.row * step_.gate.stride + column) +
                      step_.dt_bias[column]);
    }
    return 0;
  }

  /// The keys of 16 records at a time as fragments of a matrix [16 records, 16 elements]. The lanes t of product i have
  /// elements 16 i + 4 t .. 16 i + 4 t + 3 of a row.
  __device__ void arrange_keys() const {
    const auto* w = reinterpret_cast<const std::uint32_t*>(ring_w());
    auto* out = this->template in_block<uint4>(geometry_.keys);
    const int blocks = (held_ + 15) / 16;
    for (int f = static_cast<int>(threadIdx.x); f < blocks * (N / 16) * 32; f += kWorkers) {
      const int g = f % 32 / 4, t = f % 4, i = f / 32 % (N / 16), j = f / 32 / (N / 16) * 16 + g;
      const int pair = i * 8 + 2 * t;
      uint2 near = make_uint2(0, 0), far = near;
      if (j < held_) near = *reinterpret_cast<const uint2*>(w + j * (N / 2) + pair);
      if (j + 8 < held_) far = *reinterpret_cast<const uint2*>(w + (j + 8) * (N / 2) + pair);
      out[f] = make_uint4(near.x, far.x, near.y, far.y);
    }
  }

  /// Rows r0 .. r0 + 8 of the tile, which are rows of one head and lie at row `place` of the buffer. release(): called
  /// by all lanes when the buffer has been read.
  template <class Release>
  __device__ void batch(int place, int r0, bool matrices, Release&& release) const {
    const Geometry& g = geometry_;
    const int h = this->head_of(r0), r = r0 + lane_ % 4 * 2, p = r - h * g.head_rows;
    const float* gate = this->gates(h);
    float s[2][kOwn];
    if constexpr (!kSolve || kColumns) {
      float factor[2] = {1, 1};
      if constexpr (scaled(T::Anchor)) {
        factor[0] = this->template in_shared<float>(g.scale)[r];
        factor[1] = this->template in_shared<float>(g.scale)[r + 1];
      }
      if constexpr (!kColumns && !kSolve) factor[0] *= gate[0], factor[1] *= gate[0];
      read_rows(place, factor, s);
    }
    const RingField& field = this->staged();
    if constexpr (kSolve && !kColumns) {
      solve_matrices(place, h, r, p, field, s, release);
    } else if constexpr (kSolve) {
      release();
      solve(h, r, p, field, s);
    } else {
      release();
      if constexpr (kColumns) decay_columns(s);
      float u[2] = {this->value(r), this->value(r + 1)};
      if constexpr (kDelta) solve_current(gate, h, p, field, s, u);
      const float a = gate[4 + held_];
      float w[kOwn];
      Row::spread(current_w(), own(), w);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int e = 0; e < kOwn; ++e) s[i][e] = fmaf(a * u[i], w[e], s[i][e]);
      }
      if (held_ > 0) {
        if (matrices) {
          add_matrices(gate, this->staged_row(h, r0 - h * g.head_rows + own(), field.type), field.type, s);
        } else {
          for (int j = 0; j < held_; ++j) {
            const std::byte* row = this->staged_row(h, p, field.type);
            const float u0 = gate[4 + j] * load(field.type, row, j * g.head_rows);
            const float u1 = gate[4 + j] * load(field.type, row, j * g.head_rows + 1);
            add_record(wide_w(j), u0, u1, s);
          }
        }
      }
    }
    read_out(h, r, s);
    store_rows<T::Anchor>(step_.state, r, s);
    // Of an fp32 anchor s is what was stored.
    static_assert(!kSplit || T::Anchor == Storage::fp32);
    if constexpr (kSplit) store_rows<T::Read>(step_.read, r, s);
  }

  /// The lane's elements of two rows at `place` of the buffer, times a factor.
  __device__ void read_rows(int place, const float (&factor)[2], float (&s)[2][kOwn]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Row::read(shared_ + (place + lane_ % 4 * 2 + i) * Row::pitch, own(), s[i]);
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

  /// s += w u for 16 records at a time; w is exact in bf16, u goes in three parts, largest last so that the small ones
  /// are not lost. `row`: the staged values of row g of the batch.
  __device__ void add_matrices(const float* gate, const std::byte* row, Scalar type, float (&s)[2][kOwn]) const {
    const auto* fragments = this->template in_block<uint4>(geometry_.w) + lane_;
    for (int base = 0; base < held_; base += 16, fragments += N / 16 * 32) {
      float u[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int j = base + lane_ % 4 * 2 + k % 2 + k / 2 * 8;
        u[k] = j < held_ ? gate[4 + j] * load(type, row, j * geometry_.head_rows) : 0.0f;
      }
      add_products(fragments, u, s);
    }
  }
  /// s += w u of 16 records, given the fragments of w and of u.
  __device__ static void add_products(const uint4* fragments, const float (&u)[4], float (&s)[2][kOwn]) {
    std::uint32_t low[3], high[3];
    split_in_three(u[0], u[1], low);
    split_in_three(u[2], u[3], high);
#pragma unroll
    for (int i = 0; i < kOwn / 2; ++i) {
      const uint4 w = fragments[i * 32];
#pragma unroll
      for (int k = 2; k >= 0; --k) {
        multiply_add(s[0][2 * i], s[1][2 * i], s[0][2 * i + 1], s[1][2 * i + 1], w, low[k], high[k]);
      }
    }
  }

  /// u of the token at hand from the decayed checkpoint and the cached u; each lane of a row adds some records.
  __device__ void solve_current(const float* gate, int h, int p, const RingField& field, const float (&s)[2][kOwn],
                                float (&u)[2]) const {
    float key[kOwn], z[2] = {};
    Row::spread(current_w(), own(), key);
#pragma unroll
    for (int e = 0; e < kOwn; ++e) z[0] = fmaf(s[0][e], key[e], z[0]), z[1] = fmaf(s[1][e], key[e], z[1]);
    const float* weight = gate + 4 + 2 * at_.layout.slots;
    const std::byte* row = this->staged_row(h, p, field.type);
    for (int j = own(); j < held_; j += 8) {
      z[0] = fmaf(weight[j], load(field.type, row, j * geometry_.head_rows), z[0]);
      z[1] = fmaf(weight[j], load(field.type, row, j * geometry_.head_rows + 1), z[1]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) u[i] = gate[1] * (u[i] - lane_sum<8, 4>(z[i]));
  }

  /// Records that a lane keeps when every u is solved for: lane g has g, g + 8, ...
  static constexpr int kEach = 2;

  /// Solves for the u of every record and takes them in: a lane keeps v less what the keys of its records read; when
  /// the u before them are known, its own are next.
  __device__ void solve(int h, int r, int p, const RingField& field, float (&s)[2][kOwn]) const {
    constexpr int Each = kEach;
    const float* gate = this->gates(h);
    const auto L = static_cast<int>(step_.length);
    const float *before = products(h) + L * L, *beta = before + L;
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
        const float v0 = i == held_ ? this->value(r) : load(field.type, row, i * geometry_.head_rows);
        const float v1 = i == held_ ? this->value(r + 1) : load(field.type, row, i * geometry_.head_rows + 1);
        rest[k][0] = fmaf(-before[i], z0, v0);
        rest[k][1] = fmaf(-before[i], z1, v1);
      }
    }
    decay_columns(s);
#pragma unroll
    for (int k = 0; k < Each; ++k) {
      for (int m = 0; m < 8 && k * 8 + m <= held_; ++m) {
        const int j = k * 8 + m;
        const float u0 = beta[j] * __shfl_sync(~0u, rest[k][0], m * 4 + lane_ % 4);
        const float u1 = beta[j] * __shfl_sync(~0u, rest[k][1], m * 4 + lane_ % 4);
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
    const float *feed = products(h), *before = feed + L * L, *beta = before + L;
    const int g = own(), blocks = (held_ + 15) / 16;
    float rest[kEach][2] = {};  // of rows 2 t and 2 t + 1
#pragma unroll
    for (int b = 0; b < kEach / 2; ++b) {
      if (b >= blocks) break;
      // The small parts for themselves: fewer roundings of the large sum.
      float z[2][4] = {};
      const auto* keys = this->template in_block<uint4>(geometry_.keys) + b * (N / 16) * 32 + lane_;
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
          rest[2 * b + k][q] = fmaf(-before[i], read, load(field.type, row, i * geometry_.head_rows + q));
        }
      }
    }
    read_rows(place, {gate[0], gate[0]}, s);
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
        u[0] = fmaf(-feed[held_ * L + j], u0, u[0]);
        u[1] = fmaf(-feed[held_ * L + j], u1, u[1]);
      }
    }
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      u[q] *= gate[1];
#pragma unroll
      for (int e = 0; e < kOwn; ++e) s[q][e] = fmaf(u[q], w[e], s[q][e]);
    }
    // The fragments of u want row g where a lane has rows 2 t and 2 t + 1.
    const auto* fragments = this->template in_block<uint4>(geometry_.w) + lane_;
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
      add_products(fragments + b * (N / 16) * 32, factor, s);
    }
  }

  /// y = S c + D x from the unrounded state.
  __device__ void read_out(int h, int r, const float (&s)[2][kOwn]) const {
    float c[kOwn], y[2] = {};
    Row::spread(this->vector(kColumns ? T::kVectors : 0), own(), c);
#pragma unroll
    for (int e = 0; e < kOwn; ++e) y[0] = fmaf(s[0][e], c[e], y[0]), y[1] = fmaf(s[1][e], c[e], y[1]);
    y[0] = lane_sum<8, 4>(y[0]);
    y[1] = lane_sum<8, 4>(y[1]);
    if (own() < 2) {
      const float mine = own() == 0 ? y[0] : y[1];
      this->write_y(r + own(), this->with_skip(this->gates(h), this->value(r + own()), mine));
    }
  }

  template <Storage S>
  __device__ void store_rows(const StatePool& pool, int r, const float (&s)[2][kOwn]) const {
    float largest[2] = {};
    if constexpr (scaled(S)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int e = 0; e < kOwn; ++e) largest[i] = larger(largest[i], fabsf(s[i][e]));
#pragma unroll
        for (int d = 4; d < 32; d *= 2) largest[i] = larger(largest[i], __shfl_xor_sync(~0u, largest[i], d));
      }
    }
    std::byte* to = this->codes(pool, S) + static_cast<std::int64_t>(r) * N * bytes(S);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Divider scale(scaled(S) ? row_scale<S>(largest[i]) : 1.0f);
      Row::template write<S>(to + i * N * bytes(S), own(), s[i], scale);
      if (scaled(S) && own() == i) this->scales(pool)[r + i] = scale.d;
    }
  }
};

}  // namespace replayssm::cuda
