#pragma once

// The states of a step, tile by tile. Of the warps of a block one takes runs of tiles (runs.cuh), one fetches their
// states (fetch.cuh), some prepare what the heads of a run share (prepare.cuh), the others work (decode.cuh,
// rebuild.cuh).

#include "cuda/order.cuh"

namespace replayssm::cuda {

/// Warps that work, those that prepare, and with the two that take and fetch.
inline constexpr int kWarps = 8, kPreparers = 2;
inline constexpr int kWorkers = 32 * kWarps, kThreads = kWorkers + 32 * (2 + kPreparers);
/// Blocks on a multiprocessor.
inline constexpr int kResident = 2;
/// Registers of a thread that works: more than it began with, and what that leaves the others. It takes groups of four
/// warps, and a target that has the instruction. Chosen so that working threads keep nothing in local memory, which is
/// behind a cache that shared memory leaves little of.
inline constexpr int kWorkerRegisters = 88, kBeginRegisters = 65536 / kResident / kThreads / 8 * 8;
inline constexpr int kOtherRegisters =
    (kThreads * kBeginRegisters - kWorkers * kWorkerRegisters) / (kThreads - kWorkers) / 8 * 8;
static_assert(kWarps % 4 == 0 && kThreads % 128 == 0);
/// Pieces of an anchor that a warp may have on their way.
inline constexpr int kOwnPieces = 2;
static_assert(kPieceBarriers == kOwnPieces * kWarps);

/// A run of tiles of a row, or one of them. held < 0: nothing more comes.
struct alignas(16) Assignment {
  int row, slot, held;
  int first;         ///< of the sequence's rows of states
  int head, p;       ///< where that lies
  int tiles;         ///< in the run, from this one on
  int heads_before;  ///< in the run, before this tile
};
static_assert(sizeof(Assignment) == kAssignmentBytes);

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
  /// How flushes take the rows of checkpoints and anchors.
  using AnchorRow = Lay<N, Anchor, 8>;
  /// Records of matrix products behind the live ones: in Mamba-2 the token at hand; in the delta rule none, as
  /// normalisation leaves its key in fp32.
  static constexpr int kMatrixExtra = kDelta ? 0 : 1;

  /// Memory: of the block.
  __device__ Tile(const Arguments<StepType>& arguments, std::byte* memory)
      : step_(arguments.step),
        geometry_(arguments.geometry),
        at_{arguments.step, 0, 0},
        memory_(memory),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  /// Turns to a tile, or the first one of a run.
  __device__ void assign(const Assignment& a) {
    at_.row = a.row;
    at_.slot = a.slot;
    held_ = a.held;
    first_ = a.first;
    head_ = a.head;
    p0_ = a.p;
    tiles_ = a.tiles;
    heads_before_ = a.heads_before;
    flush_ = held_ == step_.length - 1;
  }
  /// Finds out anew which thread this is. What the compiler would work out from that once and keep, there are no
  /// registers for, and local memory is far away behind a cache that shared memory leaves little of.
  __device__ void forget() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    warp_ = thread / 32, lane_ = thread % 32;
  }
  /// The same for what would be kept from one part of a tile to the next.
  __device__ void launder() { asm volatile("" : "+r"(warp_), "+r"(lane_)); }
  /// Where a working warp is, in shared memory for the same reason.
  struct Progress {
    std::uint32_t stage, brief;  ///< twice the number, and the phase of its barriers
    std::uint32_t piece_phases;  ///< see Rebuild
    std::uint32_t turn;
  };
  __device__ Progress& progress() const { return in_block<Progress>(geometry_.progress)[warp_]; }
  __device__ int thread() const { return 32 * warp_ + lane_; }
  /// Which of the tile's batches is this warp's.
  __device__ int turn() const { return static_cast<int>(progress().turn % kWarps); }
  /// Goes round a ring of `count` buffers.
  __device__ static std::uint32_t after(std::uint32_t at, int count) {
    return at / 2 + 1 == static_cast<std::uint32_t>(count) ? (at & 1) ^ 1 : at + 2;
  }
  __device__ void in_stage(int stage) { shared_ = memory_ + stage * geometry_.stage_bytes; }
  __device__ void in_brief(int brief) { brief_ = memory_ + geometry_.brief + brief * geometry_.brief_bytes; }
  __device__ bool flushes() const { return flush_; }

  // ---- barriers -----------------------------------------------------------------------------------------------------

  /// Of a brief. Told: its assignment is there. Raw: what is to be prepared is there. Ready: that is done. Free: the
  /// workers are done with it.
  __device__ std::uint64_t* told(int brief) const { return barriers() + brief; }
  __device__ std::uint64_t* raw(int brief) const { return barriers() + kMostBriefs + brief; }
  __device__ std::uint64_t* ready(int brief) const { return barriers() + 2 * kMostBriefs + brief; }
  __device__ std::uint64_t* free(int brief) const { return barriers() + 3 * kMostBriefs + brief; }
  /// Of a stage. Full: all copies are there. Empty: the workers are done with it.
  __device__ std::uint64_t* full(int stage) const { return barriers() + 4 * kMostBriefs + stage; }
  __device__ std::uint64_t* empty(int stage) const { return barriers() + 4 * kMostBriefs + kMostStages + stage; }
  /// Of further pieces of an anchor: the block's, or a warp's own.
  __device__ std::uint64_t* pieces() const { return barriers() + 4 * kMostBriefs + 2 * kMostStages; }
  __device__ std::uint64_t* own_pieces(int slot) const { return pieces() + 1 + warp_ + kWarps * slot; }
  __device__ void make_barriers() const {
    for (int i = 0; i < kMostBriefs; ++i) {
      barrier_init(told(i), 1);
      barrier_init(raw(i), 32);
      barrier_init(ready(i), 32);
      barrier_init(free(i), kWarps);
    }
    for (int i = 0; i < kMostStages; ++i) {
      barrier_init(full(i), 1);
      barrier_init(empty(i), kWarps);
    }
    for (int i = 0; i < 1 + kPieceBarriers; ++i) barrier_init(pieces() + i, 1);
    barriers_ready();
  }

  /// What lies in a brief and in a stage.
  __device__ Assignment& of_brief(int brief) const { return in_block<Assignment>(geometry_.assignments)[brief]; }
  __device__ Assignment& of_stage(int stage) const {
    return in_block<Assignment>(geometry_.assignments)[kMostBriefs + stage];
  }

  // ---- the order of rows --------------------------------------------------------------------------------------------

  /// By all threads, before anything else that reads what other kernels wrote.
  __device__ Rows order() const {
    if (geometry_.order_rows == 0) return {static_cast<int>(step_.rows), 0, 0};
    return order_rows(step_, in_block<OrderedRow>(geometry_.order), in_block<int>(geometry_.counts));
  }

 protected:
  /// Of the stage, the brief, and the block.
  template <class T>
  __device__ T* in_shared(int offset) const {
    return reinterpret_cast<T*>(shared_ + offset);
  }
  template <class T>
  __device__ T* in_brief(int offset) const {
    return reinterpret_cast<T*>(brief_ + offset);
  }
  template <class T>
  __device__ T* in_block(int offset) const {
    return reinterpret_cast<T*>(memory_ + offset);
  }
  __device__ Tickets* tickets() const { return static_cast<Tickets*>(step_.workspace); }
  __device__ std::uint64_t* barriers() const { return reinterpret_cast<std::uint64_t*>(memory_ + geometry_.barriers); }

  /// Of the run: its heads, their group, and the records of a full ring.
  __device__ int heads() const { return max(1, geometry_.by_head_dim.quotient(tiles_ * geometry_.tile)); }
  __device__ int heads_of(const Assignment& run) const {
    return max(1, geometry_.by_head_dim.quotient(run.tiles * geometry_.tile));
  }
  __device__ int group() const { return geometry_.by_group.quotient(head_); }
  __device__ int records() const { return static_cast<int>(step_.length) - 1; }
  /// The w of record j of the run: rows that are 16 bytes apart beyond their length, so that the same places of
  /// neighbouring ones lie in different banks.
  __device__ std::byte* ring_w(int j) const {
    return in_brief<std::byte>(geometry_.ring_w) + j * (N * bytes(step_.ring.w.type) + kRowGap);
  }
  /// Whether a flush takes its records in as matrix products, for which their w has to be exact in bf16. Prepare leaves
  /// the rows of ring_w() in the order that Triangle::order_records() says then, zeros behind the live ones.
  __device__ bool matrices() const {
    return !kColumns && held_ > 0 && step_.ring.w.type == Scalar::bf16 && (kDelta || w_input().type == Scalar::bf16);
  }
  /// Of head h of the tile, where every u is solved for: the triangle in parts (triangle.cuh), and behind it
  /// e^{g_0 + ... + g_i} of record i.
  __device__ uint4* triangle(int h) const {
    return reinterpret_cast<uint4*>(in_brief<std::byte>(geometry_.triangles) + of_run(h) * kTriangleBytes);
  }
  __device__ float* before(int h) const { return reinterpret_cast<float*>(triangle(h) + kTriangleParts * 32); }
  /// What head number h of the run has as gates, as it lies in memory: dt or the gate, and beta; and the parameters.
  struct RawGates {
    std::uint32_t gate, gain;
    float A_log, bias, skip;
  };
  static_assert(sizeof(RawGates) == kRawGatesBytes);
  __device__ RawGates& raw_gates(int h) const { return in_brief<RawGates>(geometry_.raw_gates)[h]; }

  /// Codes and scales of the tile.
  __device__ std::byte* codes(const StatePool& pool, Storage storage) const {
    return static_cast<std::byte*>(pool.codes) +
           (std::int64_t{at_.slot} * pool.slot_stride + static_cast<std::int64_t>(first_) * N) * bytes(storage);
  }
  __device__ float* scales(const StatePool& pool) const {
    return pool.scales + std::int64_t{at_.slot} * pool.scale_slot_stride + first_;
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
  __device__ float value(int r) const { return load_either(values().type, in_shared<std::byte>(geometry_.x), r); }
  /// The number in the run of the tile's head h.
  __device__ int of_run(int h) const { return heads_before_ + h; }
  /// The gates of head h of the tile, as Geometry lists them.
  __device__ float* gates(int h) const { return in_brief<float>(geometry_.gates) + of_run(h) * geometry_.gate_stride; }
  __device__ float* vector(int m) const { return in_brief<float>(geometry_.vectors) + m * N; }
  /// Part number i of the vectors, in 16 bits, and what the parts of a vector have been divided by.
  __device__ std::byte* parts(int i) const { return in_brief<std::byte>(geometry_.parts) + i * (N * 2 + 16); }
  __device__ float* part_factors() const { return in_brief<float>(geometry_.part_factors); }
  __device__ int head_of(int r) const { return geometry_.heads == 1 ? 0 : r / geometry_.head_rows; }
  /// y + D x. Without D nothing is added: 0 times infinity would be NaN.
  __device__ float with_skip(const float* gate, float x, float y) const {
    if constexpr (!kDelta) {
      if (step_.D) return fmaf(gate[2], x, y);
    }
    return y;
  }
  /// What the tile leaves beside its states, for Fetch to store: y [tile], then what is appended to the ring, u and v,
  /// or x, [tile] each.
  __device__ std::byte* out() const { return shared_ + geometry_.out; }
  __device__ void write_y(int r, float y) const { store(step_.y_type, out(), r, y); }
  /// To the field number i of two.
  __device__ void append(int i, int r, float u) const {
    int offset = geometry_.tile * bytes(step_.y_type);
    if (i == 1) offset += geometry_.tile * bytes(appended(0).type);
    store(appended(i).type, out() + offset, r, u);
  }
  __device__ const RingField& appended(int i) const {
    if constexpr (kDelta) {
      return i == 0 ? step_.ring.u : step_.ring.v;
    } else {
      return step_.ring.v;
    }
  }
  /// Of the piece of the checkpoint or anchor from row `done` of the tile.
  __device__ int piece_bytes(int done) const { return min(geometry_.piece, geometry_.tile - done) * N * bytes(Anchor); }
  /// The checkpoint or anchor from row `done` of the tile.
  __device__ const std::byte* anchor_rows(int done) const {
    return codes(step_.state, Anchor) + static_cast<std::int64_t>(done) * N * bytes(Anchor);
  }

  /// The fields of the token's w and c.
  __device__ const Activations& w_input() const {
    if constexpr (kDelta) {
      return step_.k;
    } else {
      return step_.B;
    }
  }
  __device__ const Activations& c_input() const {
    if constexpr (kDelta) {
      return step_.q;
    } else {
      return step_.C;
    }
  }

  const StepType& step_;
  const Geometry& geometry_;
  Places<StepType> at_;
  std::byte* const memory_;
  std::byte *shared_ = nullptr, *brief_ = nullptr;  // the stage and the brief
  int warp_, lane_;
  int first_ = 0, head_ = 0, p0_ = 0, held_ = 0, tiles_ = 0, heads_before_ = 0;
  bool flush_ = false;

  /// Row `at_.row` of activations from element `first` on, `count` of them.
  __device__ void copy_row(std::byte* to, const Activations& from, int first, int count, std::uint64_t* barrier) const {
    bulk_copy(
        to, static_cast<const std::byte*>(from.data) + (std::int64_t{at_.row} * from.stride + first) * bytes(from.type),
        static_cast<std::uint32_t>(count * bytes(from.type)), barrier);
  }
};

}  // namespace replayssm::cuda
