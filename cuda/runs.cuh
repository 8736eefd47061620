#pragma once

// Which run of tiles a block takes next, and the copies of what has to be prepared for it.

#include "cuda/tile.cuh"

namespace replayssm::cuda {

template <class TileType>
class Runs : public TileType {
  using T = TileType;
  using T::at_, T::brief_, T::flush_, T::geometry_, T::head_, T::held_, T::lane_, T::step_, T::tiles_;
  static constexpr int N = T::N;
  static constexpr bool kDelta = T::kDelta, kColumns = T::kColumns, kSplit = T::Split;

 protected:
  __device__ Runs(const T& tile, const Rows& rows) : T(tile), rows_(rows) {}

  /// In the run.
  __device__ int heads() const { return max(1, geometry_.by_head_dim.quotient(tiles_ * geometry_.tile)); }
  __device__ int group() const { return geometry_.by_group.quotient(head_); }
  __device__ int records() const { return static_cast<int>(step_.length) - 1; }

  // ---- which run is next --------------------------------------------------------------------------------------------

  /// Turns: first runs of tiles, at last single tiles, so that all blocks end at about the same time.
  struct Turns {
    int long_runs, all;  ///< turns up to the end of each kind
    int number;          ///< of the next
    unsigned drawing;    ///< what lane 0 has drawn for the one behind it
  };

  __device__ Turns first_turn() const {
    const Geometry& g = geometry_;
    const auto blocks = static_cast<int>(gridDim.x);
    const int single = g.run == 1 ? rows_.all : min(rows_.all, (kLastRounds * blocks + g.tiles - 1) / g.tiles);
    Turns t{0, 0, static_cast<int>(blockIdx.x), 0};
    t.long_runs = g.run == 1 ? 0 : (rows_.all - single) * (g.tiles / g.run);
    t.all = t.long_runs + single * g.tiles;
    if (lane_ == 0 && t.all > blocks) t.drawing = atomicAdd(&this->tickets()->drawn, 1u);
    return t;
  }

  /// The next run that is not padding; held < 0: there is none.
  __device__ Assignment take(Turns& turns) const {
    const Geometry& g = geometry_;
    const auto blocks = static_cast<int>(gridDim.x), P = static_cast<int>(step_.shape.head_dim);
    Assignment a{0, 0, -1, 0, 0, 0, 1, 0};
    while (turns.number < turns.all && a.held < 0) {
      const int tile = turns.number + min(turns.number, turns.long_runs) * (g.run - 1);
      a.tiles = turns.number < turns.long_runs ? g.run : 1;
      const int number = g.by_tiles.quotient(tile);
      if (g.order_rows > 0) {
        const auto row = this->template in_block<OrderedRow>(g.order)[rows_.place(number)];
        a.row = row.row(), a.slot = row.slot, a.held = row.held();
      } else {
        a.row = number;
        a.slot = step_.slot[number];
        a.held = held_of(step_, number, a.slot);
      }
      a.first = (tile - number * g.tiles) * g.tile;
      a.head = g.by_head_dim.quotient(a.first);
      a.p = a.first - a.head * P;
      turns.number = turns.all > blocks ? blocks + static_cast<int>(__shfl_sync(~0u, turns.drawing, 0)) : turns.all;
      if (lane_ == 0 && turns.number < turns.all) turns.drawing = atomicAdd(&this->tickets()->drawn, 1u);
    }
    return a;
  }

  // ---- fetching -----------------------------------------------------------------------------------------------------

  /// What the lane's head of a run has as gates, as it lies in memory: dt or the gate, and beta.
  struct RawGates {
    std::uint32_t gate, gain;
  };

  __device__ RawGates load_gates() const {
    RawGates raw{};
    if (lane_ >= heads()) return raw;
    const auto load = [&](const Activations& from, std::uint32_t& to) {
      load_bits(from.type, from.data, std::int64_t{at_.row} * from.stride + head_ + lane_, to);
    };
    if constexpr (kDelta) {
      load(step_.beta, raw.gain);
      if constexpr (!kColumns) load(step_.gate, raw.gate);
    } else {
      load(step_.dt, raw.gate);
    }
    return raw;
  }

  /// Starts the copies of what is to be prepared: the token's vectors and gates, the live records of w and of the
  /// gates.
  __device__ void fetch(std::uint64_t* barrier) const {
    const Geometry& g = geometry_;
    const int group = this->group(), count = heads();
    const auto copy_row = [&](int offset, const Activations& from, int first) {
      copy(offset,
           static_cast<const std::byte*>(from.data) + (std::int64_t{at_.row} * from.stride + first) * bytes(from.type),
           N * bytes(from.type));
    };
    copy_row(g.raw, this->c_input(), group * N);
    copy_row(g.raw + N * bytes(this->c_input().type), this->w_input(), group * N);
    if (held_ > 0) copy(g.ring_w, at_.records(step_.ring.w, group, N), held_ * N * bytes(step_.ring.w.type));
    if constexpr (kColumns) {
      copy_row(g.raw_gates, step_.gate, head_ * N);
      if (held_ > 0) copy(g.ring_log, at_.records(step_.ring.log_decay, head_, N), held_ * N * 4);
    }
    const auto copy_gates = [&](int offset, const RingField& field) {
      const auto* from = reinterpret_cast<const float*>(at_.records(field, head_, 1));
      auto* to = this->template in_brief<float>(offset);
      const auto capacity = static_cast<int>(step_.ring.capacity);
      for (int base = 0; base < held_; base += 16) {
        const int j = base + lane_ % 16;
        for (int h = lane_ / 16; h < count; h += 2) {
          if (j < held_) copy_async<4>(to + h * records() + j, from + h * capacity + j);
        }
      }
    };
    if (!kDelta || (kSplit && flush_)) copy_gates(g.ring_gain, step_.ring.gain);
    if constexpr (kDelta && !kColumns) copy_gates(g.ring_log, step_.ring.log_decay);
    arrive_after_copies(barrier);
  }

  /// Starts copying `size` bytes, a multiple of 16, to an offset in the brief.
  __device__ void copy(int offset, const std::byte* from, int size) const {
#pragma unroll 4
    for (int i = lane_ * 16; i < size; i += 512) copy_async<16>(brief_ + offset + i, from + i);
  }

 private:
  const Rows rows_;
};

}  // namespace replayssm::cuda
