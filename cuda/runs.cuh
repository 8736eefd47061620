#pragma once

// Which run of tiles a block takes next, and the copies of what has to be prepared for it: the work of one warp.

#include "cuda/tile.cuh"

namespace replayssm::cuda {

/// Two queues: rows that flush, and the others. Some blocks begin with one and some with the other (`flush_weight`),
/// and go on with what is left of the other one. A queue gives runs of tiles, and the last one at last single tiles, so
/// that all blocks end at about the same time.
template <class TileType>
class Runs : public TileType {
  using T = TileType;
  using T::at_, T::brief_, T::flush_, T::geometry_, T::head_, T::held_, T::lane_, T::step_;
  static constexpr int N = T::N;
  static constexpr bool kDelta = T::kDelta, kColumns = T::kColumns, kSplit = T::Split;

 public:
  __device__ Runs(const T& tile, const Rows& rows) : T(tile), rows_(rows) {}

  /// Takes runs until there are no more, and has the copies for two at a time on their way.
  __device__ void run() {
    begin();
    std::uint32_t next = 0;  // the brief to be told next: twice the number, and the phase
    int behind = -1;         // the brief whose copies are on their way
    Gates gates{};           // that go with them
    for (;;) {
      this->forget();
      if (behind >= 0 && !barrier_done(this->free(next / 2), (next & 1) ^ 1)) {
        finish<0>(behind, gates);
        behind = -1;
      }
      barrier_wait(this->free(next / 2), (next & 1) ^ 1);  // of a new barrier, the phase before counts as complete
      const Assignment run = take();
      if (run.held < 0) break;
      tell(next, run);
      this->assign(run);
      this->in_brief(static_cast<int>(next / 2));
      const Gates own = load_gates();
      copy_inputs();
      if (behind >= 0) finish<1>(behind, gates);
      gates = own;
      behind = static_cast<int>(next / 2);
      next = this->after(next, geometry_.briefs);
    }
    if (behind >= 0) finish<0>(behind, gates);
    // Nothing more comes, for every warp that prepares and the one that fetches.
    for (int i = 0; i < kPreparers; ++i) {
      barrier_wait(this->free(next / 2), (next & 1) ^ 1);
      tell(next, {0, 0, -1, 0, 0, 0, 1, 0});
      next = this->after(next, geometry_.briefs);
    }
    // The last of all blocks leaves the tickets as it found them.
    Tickets* tickets = this->tickets();
    if (lane_ == 0 && atomicInc(&tickets->done, gridDim.x - 1) == gridDim.x - 1) {
      tickets->drawn[0] = tickets->drawn[1] = 0;
    }
  }

 private:
  __device__ void tell(std::uint32_t brief, const Assignment& run) const {
    if (lane_ == 0) {
      this->of_brief(static_cast<int>(brief / 2)) = run;
      arrive(this->told(static_cast<int>(brief / 2)));
    }
    __syncwarp();
  }

  // ---- which run is next --------------------------------------------------------------------------------------------

  __device__ int run_of(int queue) const { return queue == 0 ? geometry_.flush_run : geometry_.run; }
  /// Rows in a queue that come in single tiles.
  __device__ int single_rows(int queue) const {
    const Geometry& g = geometry_;
    const int rows = rows_.count(queue), blocks = static_cast<int>(gridDim.x);
    if (run_of(queue) == 1) return rows;
    return queue == 0 && rows_.count(1) > 0 ? 0 : min(rows, (kLastRounds * blocks + g.tiles - 1) / g.tiles);
  }
  /// Where the block is. In shared memory, as there are few registers.
  struct Position {
    int queue;
    int runs, turns;  ///< turns of the queue that are runs, and all
    int turn;         ///< that the block begins with, negative once it is taken
    int begun;        ///< blocks that begin with this queue
    int last;         ///< no queue comes behind this one
  };
  static_assert(sizeof(Position) <= kPositionBytes);
  __device__ Position& position() const { return *this->template in_block<Position>(geometry_.position); }

  __device__ void enter(int queue, int turn, int last) const {
    const Geometry& g = geometry_;
    const int single = single_rows(queue), runs = (rows_.count(queue) - single) * (g.tiles / run_of(queue));
    if (lane_ == 0) position() = {queue, runs, runs + single * g.tiles, turn, beginners(queue), last};
    __syncwarp();
  }
  /// How many blocks begin with a queue.
  __device__ int beginners(int queue) const {
    const auto blocks = static_cast<int>(gridDim.x);
    if (rows_.all == 0) return blocks;
    const std::int64_t flushing = std::int64_t{geometry_.flush_weight} * rows_.count(0),
                       all = flushing + rows_.count(1);
    int first = static_cast<int>((blocks * flushing + all - 1) / all);
    if (rows_.count(1) > 0) first = min(first, rows_.count(0) * (geometry_.tiles / run_of(0)));
    return queue == 0 ? first : blocks - first;
  }
  __device__ void begin() const {
    const int block = static_cast<int>(blockIdx.x), first = beginners(0);
    enter(block < first ? 0 : 1, block < first ? block : block - first, 0);
  }
  /// Draws a turn of the queue, behind those that blocks begin with.
  __device__ int draw() const {
    const int queue = position().queue;
    unsigned drawn = 0;
    if (lane_ == 0) drawn = atomicAdd(&this->tickets()->drawn[queue], 1u);
    return position().begun + static_cast<int>(__shfl_sync(~0u, drawn, 0));
  }
  /// The next turn: in this queue, or else in the other; negative: there is none.
  __device__ int next_turn() const {
    int turn = position().turn;  // the first
    if (turn < 0) turn = draw();
    if (turn >= position().turns) {
      if (position().last != 0) return -1;
      const int other = 1 - position().queue;
      __syncwarp();
      enter(other, -1, 1);
      if (position().turns > 0) turn = draw();
      if (turn >= position().turns) return -1;
    }
    __syncwarp();
    if (lane_ == 0) position().turn = -1;
    __syncwarp();
    return turn;
  }

  /// The next run; held < 0: there is none.
  __device__ Assignment take() const {
    const Geometry& g = geometry_;
    Assignment a{0, 0, -1, 0, 0, 0, 1, 0};
    while (a.held < 0) {
      const int turn = next_turn();
      if (turn < 0) break;
      const int runs = position().runs, run = run_of(position().queue), tile = turn + min(turn, runs) * (run - 1);
      a.tiles = turn < runs ? run : 1;
      const int number = g.by_tiles.quotient(tile);
      if (g.order_rows > 0) {
        const auto row = this->template in_block<OrderedRow>(g.order)[rows_.first(position().queue) + number];
        a.row = row.row(), a.slot = row.slot, a.held = row.held();
      } else {
        a.row = number;
        a.slot = step_.slot[number];
        a.held = held_of(step_, number, a.slot);
      }
      a.first = (tile - number * g.tiles) * g.tile;
      a.head = g.by_head_dim.quotient(a.first);
      a.p = a.first - a.head * static_cast<int>(step_.shape.head_dim);
    }
    return a;
  }

  // ---- what has to be prepared --------------------------------------------------------------------------------------

  using Gates = typename T::RawGates;

  /// Of the lane's head of the run.
  __device__ Gates load_gates() const {
    Gates g{};
    if (lane_ >= this->heads()) return g;
    const int head = head_ + lane_;
    const auto load = [&](const Activations& from, std::uint32_t& to) {
      load_bits(from.type, from.data, std::int64_t{at_.row} * from.stride + head, to);
    };
    g.A_log = step_.A_log[head];
    if constexpr (!kColumns) g.bias = step_.dt_bias[head];
    if constexpr (kDelta) {
      load(step_.beta, g.gain);
      if constexpr (!kColumns) load(step_.gate, g.gate);
    } else {
      load(step_.dt, g.gate);
      if (step_.D) g.skip = step_.D[head];
    }
    return g;
  }
  /// Hands on a brief when all but the last `Later` groups of copies are there.
  template <int Later>
  __device__ void finish(int brief, const Gates& gates) {
    this->in_brief(brief);
    if (lane_ < this->heads_of(this->of_brief(brief))) this->raw_gates(lane_) = gates;
    wait_for_copies<Later>();
    arrive(this->raw(brief));
  }

  /// Starts the copies of what is to be prepared: the token's vectors and gates, the live records of w and of the
  /// gates.
  __device__ void copy_inputs() const {
    const Geometry& g = geometry_;
    const int group = this->group(), count = this->heads();
    const auto copy_row = [&](int offset, const Activations& from, int first) {
      copy(offset,
           static_cast<const std::byte*>(from.data) + (std::int64_t{at_.row} * from.stride + first) * bytes(from.type),
           N * bytes(from.type));
    };
    copy_row(g.raw, this->c_input(), group * N);
    copy_row(g.raw + N * bytes(this->c_input().type), this->w_input(), group * N);
    copy_records(at_.records(step_.ring.w, group, N));
    if constexpr (kColumns) {
      copy_row(g.raw_decays, step_.gate, head_ * N);
      if (held_ > 0) copy(g.ring_log, at_.records(step_.ring.log_decay, head_, N), held_ * N * 4);
    }
    const auto copy_gates = [&](int offset, const RingField& field) {
      const auto* from = reinterpret_cast<const float*>(at_.records(field, head_, 1));
      auto* to = this->template in_brief<float>(offset);
      const std::int64_t capacity = step_.ring.capacity;
      for (int base = 0; base < held_; base += 16) {
        const int j = base + lane_ % 16;
        for (int h = lane_ / 16; h < count; h += 2) {
          if (j < held_) copy_async<4>(to + h * this->records() + j, from + h * capacity + j);
        }
      }
    };
    if (!kDelta || (kSplit && flush_)) copy_gates(g.ring_gain, step_.ring.gain);
    if constexpr (kDelta && !kColumns) copy_gates(g.ring_log, step_.ring.log_decay);
    close_copies();
  }

  /// Starts copying the live records of w.
  __device__ void copy_records(const std::byte* from) const {
    const int row = N * bytes(step_.ring.w.type), size = held_ * row;
    std::byte* to = this->ring_w(0);
#pragma unroll 4
    for (int i = lane_ * 16; i < size; i += 512) {
      const int j = row == N * 2 ? i / (N * 2) : i / (N * 4);
      copy_async<16>(to + i + j * kRowGap, from + i);
    }
  }
  /// Starts copying `size` bytes, a multiple of 16, to an offset in the brief.
  __device__ void copy(int offset, const std::byte* from, int size) const {
#pragma unroll 4
    for (int i = lane_ * 16; i < size; i += 512) copy_async<16>(brief_ + offset + i, from + i);
  }

  const Rows rows_;
};

}  // namespace replayssm::cuda
