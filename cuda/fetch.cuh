#pragma once

// The copies of the states that a block's tiles need, and of what belongs to each of their rows: the work of one warp.

#include "cuda/tile.cuh"

namespace replayssm::cuda {

template <class TileType>
class Fetch : public TileType {
  using T = TileType;
  using T::at_, T::first_, T::flush_, T::geometry_, T::head_, T::held_, T::lane_, T::p0_, T::shared_, T::step_;
  static constexpr int N = T::N;

 public:
  __device__ explicit Fetch(const T& tile) : T(tile) {}

  /// Goes through the runs that it is told of. Whenever the workers are done with a stage, what they left in it beside
  /// states goes to memory.
  __device__ void run() {
    std::uint32_t stage = 0, brief = 0;  // twice the number, and the phase
    bool again = false;                  // whether stages have been used before
    const auto next_stage = [&] {
      barrier_wait(this->empty(stage / 2), (stage & 1) ^ 1);  // of a new barrier, the phase before counts as complete
      if (again) store_results(stage);
    };
    const auto after_stage = [&] {
      stage = this->after(stage, geometry_.stages);
      again = again || stage / 2 == 0;
    };
    for (;;) {
      this->forget();
      barrier_wait(this->told(brief / 2), brief & 1);
      Assignment tile = this->of_brief(brief / 2);
      if (tile.held < 0) break;
      do {
        next_stage();
        if (lane_ == 0) this->of_stage(stage / 2) = tile;
        this->assign(tile);
        this->in_stage(stage / 2);
        fetch_states(this->full(stage / 2));
        after_stage();
        tile.first += geometry_.tile;
        tile.p += geometry_.tile;
        if (tile.p >= step_.shape.head_dim) {
          tile.p = 0;
          tile.head += geometry_.heads;
          tile.heads_before += geometry_.heads;
        }
      } while (--tile.tiles > 0);
      brief = this->after(brief, geometry_.briefs);
    }
    for (int i = 0; i < geometry_.stages; ++i) {
      next_stage();
      if (i == 0 && lane_ == 0) {
        this->of_stage(stage / 2).held = -1;
        arrive(this->full(stage / 2));
      }
      after_stage();
    }
    wait_for_bulk_stores();
  }

 private:
  /// y, and what is appended to the ring, of the tile that was last in a stage.
  __device__ void store_results(std::uint32_t stage) {
    const Geometry& g = geometry_;
    const auto P = static_cast<int>(step_.shape.head_dim);
    this->assign(this->of_stage(stage / 2));
    __syncwarp();  // before lane 0 writes the next one there
    this->in_stage(stage / 2);
    const std::byte* from = this->out();
    const int y_bytes = bytes(step_.y_type);
    if (lane_ == 0) {
      bulk_store(static_cast<std::byte*>(step_.y) + (std::int64_t{at_.row} * step_.y_stride + first_) * y_bytes, from,
                 static_cast<std::uint32_t>(g.tile * y_bytes));
    }
    from += g.tile * y_bytes;
    if (!flush_) {
      for (int i = 0; i < (T::kDelta && T::Split ? 2 : 1); ++i) {
        const RingField& field = this->appended(i);
        const int size = g.head_rows * bytes(field.type);
        if (lane_ < g.heads) {
          bulk_store(
              at_.records(field, head_ + lane_, P) + static_cast<std::int64_t>(held_ * P + p0_) * bytes(field.type),
              from + lane_ * size, static_cast<std::uint32_t>(size));
        }
        from += g.tile * bytes(field.type);
      }
    }
    close_bulk_stores();
  }

  /// States with their scales, live records [heads, held, head_rows] and x.
  __device__ void fetch_states(std::uint64_t* barrier) const {
    const Geometry& g = geometry_;
    const auto P = static_cast<int>(step_.shape.head_dim);
    const RingField& field = this->staged();
    const int state_bytes = flush_ ? this->piece_bytes(0) : g.tile * N * bytes(T::Read);
    const bool with_scale = flush_ ? scaled(T::Anchor) : scaled(T::Read);
    const int x_bytes = g.tile * bytes(this->values().type), record_bytes = g.head_rows * bytes(field.type);
    if (lane_ == 0) {
      const StatePool& pool = T::Split && !flush_ ? step_.read : step_.state;
      bulk_copy(shared_, flush_ ? this->anchor_rows(0) : this->codes(pool, T::Read),
                static_cast<std::uint32_t>(state_bytes), barrier);
      if (with_scale) bulk_copy(shared_ + g.scale, this->scales(pool), static_cast<std::uint32_t>(g.tile * 4), barrier);
      this->copy_row(shared_ + g.x, this->values(), first_, g.tile, barrier);
    }
    __syncwarp();
    const bool whole_heads = g.head_rows == P;
    const int runs = whole_heads ? 1 : held_;
    const int run_bytes = whole_heads ? held_ * record_bytes : record_bytes;
    if (held_ > 0) {
      for (int i = lane_; i < g.heads * runs; i += 32) {
        const int h = i / runs, j = i % runs;
        bulk_copy(shared_ + g.ring + h * held_ * record_bytes + j * record_bytes,
                  at_.records(field, head_ + h, P) + static_cast<std::int64_t>(j * P + p0_) * bytes(field.type),
                  static_cast<std::uint32_t>(run_bytes), barrier);
      }
    }
    // Before the workers may write results anew, those of the tile before have to be read.
    wait_for_bulk_reads();
    __syncwarp();
    if (lane_ == 0) {
      arrive_and_expect(barrier, static_cast<std::uint32_t>(state_bytes + (with_scale ? g.tile * 4 : 0) + x_bytes +
                                                            g.heads * held_ * record_bytes));
    }
    __syncwarp();
  }
};

}  // namespace replayssm::cuda
