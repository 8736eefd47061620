#pragma once

// A block's share of the states, and how it gets there: what outputs (decode.cuh) and flushes (rebuild.cuh) have in
// common.

#include "cuda/prepare.cuh"

namespace replayssm::cuda {

inline constexpr int kWarps = 8, kThreads = 32 * kWarps;

/// `recurrence` of state_dim N; outputs read states stored as Read, flushes rebuild those stored as Anchor. Split: the
/// two are different pools, and the delta rule recomputes every u of a flush (closed loop).
///
/// A tile is `geometry.tile` rows of the states of one sequence that share w and c: part of a head, or several heads of
/// a group. One asynchronous bulk copy brings it into shared memory; the records and what prepare_kernel() worked out
/// come beside it.
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

  __device__ Tile(const Arguments<StepType>& arguments, std::byte* shared)
      : step_(arguments.step),
        geometry_(arguments.geometry),
        at_{arguments.step, arguments.workspace, 0, 0},
        shared_(shared),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  /// Starts every copy and waits for all but the state; false for padding.
  __device__ bool fetch() {
    const Geometry& g = geometry_;
    at_.row = blockIdx.x / static_cast<unsigned>(g.tiles);
    first_ = static_cast<int>(blockIdx.x % static_cast<unsigned>(g.tiles)) * g.tile;
    const auto P = static_cast<int>(step_.shape.head_dim);
    head_ = first_ / P;
    p0_ = first_ % P;
    const int slot = step_.slot[at_.row];
    held_ = held_of(step_, at_.row, slot);
    if (held_ < 0) return false;
    at_.slot = slot;
    flush_ = held_ == step_.length - 1;
    if (threadIdx.x == 0) {
      barrier_init(barrier());
      if (flush_) {
        copy_anchor(0);
      } else {
        bulk_copy(shared_, codes(Split ? step_.read : step_.state, Read),
                  static_cast<std::uint32_t>(g.tile * N * bytes(Read)), barrier());
      }
    }
    copy(g.x, static_cast<const std::byte*>(values().data) + (at_.row * values().stride + first_) * bytes(values().type),
         g.tile * bytes(values().type));
    copy_ring();
    wait_for_predecessor();
    copy(g.gates, at_.gates(head_), g.heads * at_.layout.gate_stride * 4);
    const int groups = static_cast<int>(kColumns ? step_.shape.heads : step_.shape.groups);
    const int of = static_cast<int>(step_.shape.heads) / groups;
    copy(g.vectors, at_.vectors(head_ / of, groups), at_.layout.vectors * N * 4);
    async_wait();
    __syncthreads();
    return true;
  }

  __device__ bool flushes() const { return flush_; }

 protected:
  template <class T>
  __device__ T* in_shared(int offset) const {
    return reinterpret_cast<T*>(shared_ + offset);
  }
  __device__ std::uint64_t* barrier() const { return in_shared<std::uint64_t>(geometry_.barrier); }
  /// Codes and scales of the tile.
  __device__ std::byte* codes(const StatePool& pool, Storage storage) const {
    return static_cast<std::byte*>(pool.codes) +
           (at_.slot * pool.slot_stride + static_cast<std::int64_t>(first_) * N) * bytes(storage);
  }
  __device__ float* scales(const StatePool& pool) const {
    return pool.scales + at_.slot * pool.scale_slot_stride + first_;
  }
  /// Starts the copy of a piece of the checkpoint or anchor from row `done` of the tile. For one thread.
  __device__ void copy_anchor(int done) const {
    bulk_copy(shared_, codes(step_.state, Anchor) + static_cast<std::int64_t>(done) * N * bytes(Anchor),
              static_cast<std::uint32_t>(min(geometry_.piece, geometry_.tile - done) * N * bytes(Anchor)), barrier());
  }
  __device__ void copy(int to, const void* from, int size) const {
    for (int i = static_cast<int>(threadIdx.x) * 16; i < size; i += kThreads * 16) {
      async_copy_16(shared_ + to + i, static_cast<const std::byte*>(from) + i);
    }
  }
  /// Live records only: [heads, held, head_rows], and the scales of what is read.
  __device__ void copy_ring() const {
    const Geometry& g = geometry_;
    if constexpr (scaled(Anchor)) {
      copy(g.scale, scales(step_.state), g.tile * 4);
    } else if constexpr (scaled(Read)) {
      if (!flush_) copy(g.scale, scales(step_.read), g.tile * 4);
    }
    const RingField& field = staged();
    const auto P = static_cast<int>(step_.shape.head_dim);
    const int size = g.head_rows * bytes(field.type);
    const std::int64_t record = static_cast<std::int64_t>(P) * bytes(field.type);
    for (int h = 0; h < g.heads; ++h) {
      const std::byte* from = at_.records(field, head_ + h, P) + p0_ * bytes(field.type);
      std::byte* to = in_shared<std::byte>(g.ring) + h * held_ * size;
      // A quarter of a warp takes a record at a time; its lanes, 16 bytes each.
      for (int j = static_cast<int>(threadIdx.x) / 8; j < held_; j += kThreads / 8) {
        for (int k = lane_ % 8 * 16; k < size; k += 128) async_copy_16(to + j * size + k, from + j * record + k);
      }
    }
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
  __device__ void write_y(int r, float y) const {
    store(step_.y_type, step_.y, at_.row * step_.y_stride + first_ + r, y);
  }

  const StepType& step_;
  const Geometry& geometry_;
  Places<StepType> at_;
  std::byte* const shared_;
  const int warp_, lane_;
  int first_, head_, p0_, held_;
  bool flush_;
};

}  // namespace replayssm::cuda
