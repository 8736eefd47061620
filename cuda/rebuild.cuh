#pragma once

// Flushes: the checkpoint or anchor goes through the buffer piece by piece, is decayed, takes in the records and the
// token at hand, is read, and is stored.

#include "cuda/closed_loop.cuh"

namespace replayssm::cuda {

template <class TileType>
class Rebuild : public ClosedLoop<TileType> {
  using T = TileType;
  using R = Records<TileType>;
  using C = ClosedLoop<TileType>;
  using C::solve_columns, C::solve_matrices;
  using R::add_current, R::add_matrices, R::add_record, R::decay_columns, R::own, R::read_current, R::read_rows,
      R::scale_rows, R::wide_w;
  using R::kOwn, R::kRows, R::kSolve, R::N;
  using T::at_, T::flush_, T::geometry_, T::head_, T::held_, T::lane_, T::shared_, T::step_, T::warp_;
  using typename R::Row;
  static constexpr bool kDelta = T::kDelta, kColumns = T::kColumns, kSplit = T::Split;

 public:
  __device__ explicit Rebuild(const T& tile) : C(tile) {}

  __device__ void run() {
    const Geometry& g = geometry_;
    const bool matrices = this->matrices(), arranged = !matrices && held_ > 0;
    if (arranged) {
      this->arrange_records();
      if constexpr (kSolve && kColumns) {
        this->arrange_current();
        this->arrange_column_products();
      }
      sync_threads<kWorkers>();
    }
    constexpr int kTogether = kWarps * kRows;
    if constexpr (!kSplit) {
      const auto batches = [&](auto with) {
        for (int r0 = warp_ * kRows; r0 < g.tile; r0 += kTogether) {
          this->launder();
          with(r0);
        }
      };
      // Measured: one loop or two, whichever takes fewer registers.
      if constexpr (T::Anchor != Storage::fp32) {
        batches([&](int r0) { batch_of(matrices, r0, r0, [] {}); });
      } else if (matrices) {
        batches([&](int r0) { batch<true>(r0, r0, [] {}); });
      } else {
        batches([&](int r0) { batch<false>(r0, r0, [] {}); });
      }
    } else if (g.piece % kTogether == 0 && g.piece / kTogether <= kOwnPieces) {
      // The buffer has places for a number of batches of every warp. As soon as a warp has read one, it fetches the
      // batch that comes to the same place.
      for (int r0 = warp_ * kRows; r0 < g.tile; r0 += kTogether) {
        this->launder();
        const int place = r0 % g.piece, slot = place / kTogether;
        if (r0 >= g.piece) {
          barrier_wait(this->own_pieces(slot), phases() >> (1 + slot) & 1);
          __syncwarp();
          if (lane_ == 0) phases() ^= 2u << slot;
          __syncwarp();
        }
        batch_of(matrices, place, r0, [&] {
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
          if (this->thread() == 0) {
            arrive_and_expect(this->pieces(), static_cast<std::uint32_t>(this->piece_bytes(done)));
            bulk_copy(shared_, this->anchor_rows(done), static_cast<std::uint32_t>(this->piece_bytes(done)),
                      this->pieces());
          }
          barrier_wait(this->pieces(), phases() & 1);
          __syncwarp();
          if (lane_ == 0) phases() ^= 1;
          __syncwarp();
        }
        const int rows = min(g.piece, g.tile - done);
        for (int base = warp_ * kRows; base < rows; base += kTogether) {
          batch_of(matrices, base, done + base, [] {});
        }
      }
    }
    // What was arranged is read until here.
    if (arranged) sync_threads<kWorkers>();
  }

 private:
  /// Of the barriers of pieces: the block's in bit 0 and the warp's own above it.
  __device__ std::uint32_t& phases() const { return this->progress().piece_phases; }

  template <class Release>
  __device__ void batch_of(bool matrices, int place, int r0, Release&& release) const {
    if (kSolve || matrices) {  // to solve is the same for both
      batch<true>(place, r0, release);
    } else {
      batch<false>(place, r0, release);
    }
  }

  /// Rows r0 .. r0 + 8 of the tile, which are rows of one head and lie at row `place` of the buffer. release(): called
  /// by all lanes when the buffer has been read.
  template <bool matrices, class Release>
  __device__ void batch(int place, int r0, Release&& release) const {
    const Geometry& g = geometry_;
    const int h = this->head_of(r0), r = r0 + lane_ % 4 * 2, p = r - h * g.head_rows;
    const float* gate = this->gates(h);
    float s[2][kOwn], factor[2] = {1, 1};
    if constexpr (!kSolve || kColumns) {
      if constexpr (scaled(T::Anchor)) {
        factor[0] = this->template in_shared<float>(g.scale)[r];
        factor[1] = this->template in_shared<float>(g.scale)[r + 1];
      }
      if constexpr (!kColumns) factor[0] *= gate[0], factor[1] *= gate[0];
      read_rows(place, s);
    }
    const RingField& field = this->staged();
    if constexpr (kSolve && !kColumns) {
      solve_matrices(place, h, r, p, field, s, release);
    } else if constexpr (kSolve) {
      release();
      solve_columns(h, r, p, field, s);
    } else {
      release();
      const auto matrix_row = [&] { return this->staged_row(h, r0 - h * g.head_rows + own(), field.type); };
      if constexpr (!kDelta) {
        if constexpr (matrices) {
          add_matrices(gate, matrix_row(), field.type, gate[4 + held_] * this->value(r0 + own()), factor, s);
        } else {
          scale_rows(factor, s);
          add_wide(gate, h, p, field, s);
          add_current(gate[4 + held_], {this->value(r), this->value(r + 1)}, s);
        }
      } else {
        scale_rows(factor, s);
        if constexpr (kColumns) decay_columns(s);
        float u[2] = {this->value(r), this->value(r + 1)};
        solve_current(gate, h, p, field, s, u);
        add_current(gate[4 + held_], u, s);
        if constexpr (matrices) {
          add_matrices(gate, matrix_row(), field.type, 0, {1, 1}, s);
        } else {
          add_wide(gate, h, p, field, s);
        }
      }
    }
    const float2 witness = read_out(h, r, s);
    store_rows<T::Anchor>(step_.state, r, s, witness);
    // Of an fp32 anchor s is what was stored.
    static_assert(!kSplit || T::Anchor == Storage::fp32);
    if constexpr (kSplit) store_rows<T::Read>(step_.read, r, s, witness);
  }

  /// s += w u over all records, in fp32.
  __device__ void add_wide(const float* gate, int h, int p, const RingField& field, float (&s)[2][kOwn]) const {
    const std::byte* row = this->staged_row(h, p, field.type);
    for (int j = 0; j < held_; ++j) {
      const float u0 = gate[4 + j] * load_either(field.type, row, j * geometry_.head_rows);
      const float u1 = gate[4 + j] * load_either(field.type, row, j * geometry_.head_rows + 1);
      add_record(wide_w(j), u0, u1, s);
    }
  }

  /// u of the token at hand from the decayed checkpoint and the cached u; each lane of a row adds some records.
  __device__ void solve_current(const float* gate, int h, int p, const RingField& field, const float (&s)[2][kOwn],
                                float (&u)[2]) const {
    float z[2] = {};
    read_current(s, z);
    const float* weight = gate + 4 + 2 * geometry_.slots;
    const std::byte* row = this->staged_row(h, p, field.type);
    for (int j = own(); j < held_; j += 8) {
      z[0] = fmaf(weight[j], load_either(field.type, row, j * geometry_.head_rows), z[0]);
      z[1] = fmaf(weight[j], load_either(field.type, row, j * geometry_.head_rows + 1), z[1]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) u[i] = gate[1] * (u[i] - lane_sum<8, 4>(z[i]));
  }

  /// y = S c + D x from the unrounded state. Returns the lane's parts of it, which are NaN where an element is.
  __device__ float2 read_out(int h, int r, const float (&s)[2][kOwn]) const {
    float c[kOwn], y[4] = {};
    Row::spread(this->vector(kColumns ? T::kVectors : 0), own(), c);
#pragma unroll
    for (int e = 0; e < kOwn; e += 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) y[i] = fmaf(s[i % 2][e + i / 2], c[e + i / 2], y[i]);
    }
    // The first exchange picks the row: lanes 0 .. 3 of a column have the first.
    const float rows[2] = {y[0] + y[2], y[1] + y[3]};
    const float mine = lane_sums<8, 4>(rows, lane_);
    if (own() % 4 == 0) {
      const int i = own() / 4;
      this->write_y(r + i, this->with_skip(this->gates(h), this->value(r + i), mine));
    }
    return make_float2(rows[0], rows[1]);
  }

  template <Storage S>
  __device__ void store_rows(const StatePool& pool, int r, const float (&s)[2][kOwn], float2 witness) const {
    float largest[2] = {};
    if constexpr (scaled(S)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int e = 0; e < kOwn; e += 2) {
          largest[i] = larger(largest[i], larger(fabsf(s[i][e]), fabsf(s[i][e + 1])));
        }
#pragma unroll
        for (int d = 4; d < 32; d *= 2) largest[i] = larger(largest[i], __shfl_xor_sync(~0u, largest[i], d));
      }
    }
    std::byte* to = this->codes(pool, S) + static_cast<std::int64_t>(r) * N * bytes(S);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Divider scale(scaled(S) ? row_scale<S>(largest[i]) : 1.0f);
      // The instructions that round lose the sign and payload of a NaN.
      const float any = i == 0 ? witness.x : witness.y;
      Row::template write<S>(to + i * N * bytes(S), own(), s[i], scale, scaled(S) ? scale.quick : any == any);
      if (scaled(S) && own() == i) this->scales(pool)[r + i] = scale.d;
    }
  }
};

}  // namespace replayssm::cuda
