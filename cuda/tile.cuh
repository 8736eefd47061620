#pragma once

// The states of a step, tile by tile: one warp of a block fetches, the others work (decode.cuh, rebuild.cuh).

#include "cuda/places.cuh"

namespace replayssm::cuda {

/// Warps that work, and with the one that fetches.
inline constexpr int kWarps = 8, kWorkers = 32 * kWarps, kThreads = kWorkers + 32;
/// Pieces of an anchor that a warp may have on their way.
inline constexpr int kOwnPieces = 2;
/// Blocks on a multiprocessor.
inline constexpr int kResident = 2;

/// What a stage holds: a tile of a row. held < 0: nothing more comes.
struct Assignment {
  int row, tile, slot, held;
};

/// `recurrence` of state_dim N; outputs read states stored as Read, flushes rebuild those stored as Anchor. Split: the
/// two are different pools, and the delta rule recomputes every u of a flush (closed loop).
///
/// A tile is `geometry.tile` rows of the states of one sequence that share w and c: part of a head, or several heads of
/// a group.
template <Recurrence recurrence_, int N_, Storage Read_, Storage Anchor_, bool Split_>
class Tile {
 public:
  static constexpr Recurrence recurrence = recurrence_;
  static constexpr int N = N_;
  static constexpr Storage Read = Read_, Anchor = Anchor_;
  static constexpr bool Split = Split_;
  static constexpr bool kDelta = is_delta_rule(recurrence), kColumns = has_column_decay(recurrence);
  using StepType = std::conditional_t<kDelta, DeltaStep, Mamba2Step>;
  static constexpr int kVectors = output_vectors(kDelta, Split);

  /// Memory: of the block.
  __device__ Tile(const Arguments<StepType>& arguments, std::byte* memory)
      : step_(arguments.step),
        geometry_(arguments.geometry),
        at_{arguments.step, arguments.workspace, 0, 0},
        memory_(memory),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void assign(int stage, const Assignment& assignment) {
    shared_ = memory_ + stage * geometry_.stage_bytes;
    at_.row = assignment.row;
    at_.slot = assignment.slot;
    held_ = assignment.held;
    flush_ = held_ == step_.length - 1;
    first_ = assignment.tile * geometry_.tile;
    const auto P = static_cast<int>(step_.shape.head_dim);
    head_ = first_ / P;
    p0_ = first_ % P;
  }
  __device__ bool flushes() const { return flush_; }

  // ---- barriers -----------------------------------------------------------------------------------------------------

  /// Full: its copies are there. Empty: its workers are done with it.
  __device__ std::uint64_t* full(int stage) const { return barriers() + stage; }
  __device__ std::uint64_t* empty(int stage) const { return barriers() + geometry_.stages + stage; }
  /// Of further pieces of an anchor: the block's, or a warp's own.
  __device__ std::uint64_t* pieces() const { return barriers() + 2 * geometry_.stages; }
  __device__ std::uint64_t* own_pieces(int slot) const { return pieces() + 1 + warp_ + kWarps * slot; }
  __device__ Assignment& assignment(int stage) const {
    return reinterpret_cast<Assignment*>(memory_ + geometry_.assignments)[stage];
  }
  __device__ void make_barriers() const {
    for (int i = 0; i < geometry_.stages; ++i) {
      barrier_init(full(i), 1);
      barrier_init(empty(i), kWarps);
    }
    for (int i = 0; i < 1 + kOwnPieces * kWarps; ++i) barrier_init(pieces() + i, 1);
    barriers_ready();
  }

  // ---- fetching, by one warp ----------------------------------------------------------------------------------------

  /// Takes tiles until there are no more. Which block gets which is left to chance: flushes take longer.
  __device__ void fetch_all() {
    const Geometry& g = geometry_;
    const auto all = static_cast<int>(step_.rows * g.tiles), blocks = static_cast<int>(gridDim.x);
    // With a tile a block at most, order does not matter and the states need not wait for it.
    const bool one_round = all <= blocks;
    int stage = 0;
    std::uint32_t phase = 1;  // of a barrier that nobody has arrived at, the phase before counts as complete
    const auto assign_tile = [&](int tile) {
      Assignment a{0, tile % g.tiles, -1, -1};
      if (tile < all) {
        a.row = one_round ? tile / g.tiles : at_.order()[tile / g.tiles];
        a.slot = step_.slot[a.row];
        a.held = held_of(step_, a.row, a.slot);
      }
      return a;
    };
    if (!one_round) wait_for_predecessor();
    // Two tiles are always on their way here: where the next lies is being read while the number of the one behind it
    // is drawn.
    int tile = static_cast<int>(blockIdx.x), next = tile + blocks;
    Assignment current = assign_tile(tile);
    while (tile < all) {
      int drawing = 0;
      if (lane_ == 0 && !one_round) drawing = atomicAdd(at_.counter(), 1);
      const Assignment behind = assign_tile(next);
      if (current.held >= 0) {
        barrier_wait(empty(stage), phase);
        assign(stage, current);
        if (lane_ == 0) assignment(stage) = current;
        fetch(stage, one_round);
        if (++stage == g.stages) stage = 0, phase ^= 1;
      }
      tile = next;
      current = behind;
      next = 2 * blocks + __shfl_sync(~0u, drawing, 0);
    }
    wait_for_predecessor();  // also where every row was padding: this kernel must not end before the other
    barrier_wait(empty(stage), phase);
    if (lane_ == 0) {
      assignment(stage).held = -1;
      arrive(full(stage));
    }
  }

 protected:
  template <class T>
  __device__ T* in_shared(int offset) const {
    return reinterpret_cast<T*>(shared_ + offset);
  }
  /// Of the block, for flushes.
  template <class T>
  __device__ T* in_block(int offset) const {
    return reinterpret_cast<T*>(memory_ + offset);
  }
  __device__ std::uint64_t* barriers() const { return reinterpret_cast<std::uint64_t*>(memory_ + geometry_.barriers); }

  /// Codes and scales of the tile.
  __device__ std::byte* codes(const StatePool& pool, Storage storage) const {
    return static_cast<std::byte*>(pool.codes) +
           (at_.slot * pool.slot_stride + static_cast<std::int64_t>(first_) * N) * bytes(storage);
  }
  __device__ float* scales(const StatePool& pool) const {
    return pool.scales + at_.slot * pool.scale_slot_stride + first_;
  }
  /// The staged field of the ring: x, u, or v where every u is computed again.
  __device__ const RingField& staged() const {
    if constexpr (kDelta) {
      return Split && flush_ ? step_.ring.v : step_.ring.u;
    } else {
      return step_.ring.v;
    }
  }
  /// Staged values of row p of head h; those of record j lie j head_rows further.
  __device__ const std::byte* staged_row(int h, int p, Scalar type) const {
    return in_shared<std::byte>(geometry_.ring) + (h * held_ * geometry_.head_rows + p) * bytes(type);
  }
  __device__ const Activations& values() const {
    if constexpr (kDelta) {
      return step_.v;
    } else {
      return step_.x;
    }
  }
  /// x or v of row r of the tile.
  __device__ float value(int r) const { return load(values().type, in_shared<std::byte>(geometry_.x), r); }
  /// The gates of head h of the tile, as the workspace lists them.
  __device__ const float* gates(int h) const { return in_shared<float>(geometry_.gates) + h * at_.layout.gate_stride; }
  __device__ const float* vector(int m) const { return in_shared<float>(geometry_.vectors) + m * N; }
  __device__ int head_of(int r) const { return geometry_.heads == 1 ? 0 : r / geometry_.head_rows; }
  /// y + D x. Without D nothing is added: 0 times infinity would be NaN.
  __device__ float with_skip(const float* gate, float x, float y) const {
    if constexpr (!kDelta) {
      if (step_.D) return fmaf(gate[2], x, y);
    }
    return y;
  }
  __device__ void write_y(int r, float y) const {
    store(step_.y_type, step_.y, at_.row * step_.y_stride + first_ + r, y);
  }
  /// Of the piece of the checkpoint or anchor from row `done` of the tile.
  __device__ int piece_bytes(int done) const { return min(geometry_.piece, geometry_.tile - done) * N * bytes(Anchor); }
  /// The checkpoint or anchor from row `done` of the tile.
  __device__ const std::byte* anchor_rows(int done) const {
    return codes(step_.state, Anchor) + static_cast<std::int64_t>(done) * N * bytes(Anchor);
  }

  const StepType& step_;
  const Geometry& geometry_;
  Places<StepType> at_;
  std::byte* const memory_;
  std::byte* shared_ = nullptr;  // of the stage
  const int warp_, lane_;
  int first_ = 0, head_ = 0, p0_ = 0, held_ = 0;
  bool flush_ = false;

 private:
  /// Starts all copies of a tile: states with their scales, live records [heads, held, head_rows], x, and what
  /// prepare_kernel() left, for which it may have to wait.
  __device__ void fetch(int stage, bool wait) const {
    const Geometry& g = geometry_;
    std::uint64_t* barrier = full(stage);
    const auto P = static_cast<int>(step_.shape.head_dim);
    const RingField& field = staged();
    const int state_bytes = flush_ ? piece_bytes(0) : g.tile * N * bytes(Read);
    const bool with_scale = flush_ ? scaled(Anchor) : scaled(Read);
    const int x_bytes = g.tile * bytes(values().type), gate_bytes = g.heads * at_.layout.gate_stride * 4;
    const int w_bytes = flush_ ? held_ * N * bytes(step_.ring.w.type) : 0;  // outputs have its products
    const int vector_bytes = at_.layout.vectors * N * 4, record_bytes = g.head_rows * bytes(field.type);
    if (lane_ == 0) {
      arrive_and_expect(barrier,
                        static_cast<std::uint32_t>(state_bytes + (with_scale ? g.tile * 4 : 0) + x_bytes + gate_bytes +
                                                   vector_bytes + w_bytes + g.heads * held_ * record_bytes));
      const StatePool& pool = Split && !flush_ ? step_.read : step_.state;
      bulk_copy(shared_, flush_ ? anchor_rows(0) : codes(pool, Read), static_cast<std::uint32_t>(state_bytes), barrier);
      if (with_scale) bulk_copy(shared_ + g.scale, scales(pool), static_cast<std::uint32_t>(g.tile * 4), barrier);
      bulk_copy(
          shared_ + g.x,
          static_cast<const std::byte*>(values().data) + (at_.row * values().stride + first_) * bytes(values().type),
          static_cast<std::uint32_t>(x_bytes), barrier);
      if (w_bytes > 0) {
        const auto of = static_cast<int>(step_.shape.heads / step_.shape.groups);
        bulk_copy(shared_ + g.ring_w, at_.records(step_.ring.w, head_ / of, N), static_cast<std::uint32_t>(w_bytes),
                  barrier);
      }
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
    if (wait) wait_for_predecessor();
    if (lane_ == 0) {
      bulk_copy(shared_ + g.gates, at_.gates(head_), static_cast<std::uint32_t>(gate_bytes), barrier);
      const int groups = static_cast<int>(kColumns ? step_.shape.heads : step_.shape.groups);
      const int of = static_cast<int>(step_.shape.heads) / groups;
      bulk_copy(shared_ + g.vectors, at_.vectors(head_ / of, groups), static_cast<std::uint32_t>(vector_bytes),
                barrier);
    }
    __syncwarp();
  }
};

}  // namespace replayssm::cuda
