#pragma once

// The fast decode kernel, one template for the three recurrences. A block of four warps takes `tile` rows of the states
// of one sequence that share w and c: part of a head, or several heads of a group. One asynchronous bulk copy brings
// what outputs read of them into shared memory while the block fetches the ring and works out the decays; a block that
// flushes takes the checkpoint or anchor through the same buffer, piece by piece.

#include "cuda/geometry.h"
#include "cuda/kernels.h"
#include "cuda/storage.cuh"

namespace replayssm::cuda {

inline constexpr int kWarps = 4, kThreads = 32 * kWarps;

// ---- asynchronous copies ------------------------------------------------------------------------------------------

__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

__device__ inline void barrier_init(std::uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Starts a copy of bytes (a multiple of 16) that completes a phase of the barrier. For one thread.
__device__ inline void bulk_copy(void* to, const void* from, std::uint32_t size, std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(size)
               : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(size), "r"(shared_address(barrier))
               : "memory");
}

__device__ inline void barrier_wait(std::uint64_t* barrier, std::uint32_t phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(phase)
      : "memory");
}

__device__ inline void async_copy_16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ inline void async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- warps --------------------------------------------------------------------------------------------------------

/// The sum over groups of `Lanes` lanes, in every lane.
template <int Lanes>
__device__ inline float lane_sum(float x) {
#pragma unroll
  for (int w = Lanes / 2; w > 0; w /= 2) x += __shfl_xor_sync(~0u, x, w);
  return x;
}

/// Sums x[i] over groups of `Lanes` lanes for Count values of i at once: lane l of a group returns the sum of
/// i = l / (Lanes / Count). Each exchange halves the values that a lane holds.
template <int Lanes, int Count>
__device__ inline float lane_sums(float (&x)[Count], int lane) {
  if constexpr (Count == 1) {
    return lane_sum<Lanes>(x[0]);
  } else {
    float half[Count / 2];
    const bool upper = (lane & (Lanes / 2)) != 0;
#pragma unroll
    for (int i = 0; i < Count / 2; ++i) {
      const float given = upper ? x[i] : x[i + Count / 2], kept = upper ? x[i + Count / 2] : x[i];
      half[i] = kept + __shfl_xor_sync(~0u, given, Lanes / 2);
    }
    return lane_sums<Lanes / 2>(half, lane);
  }
}

/// How the lanes of a warp lie on rows of N stored elements: `lanes` lanes a row, each with `chunks` pieces of
/// `chunk_bytes`; piece c of lane l begins at element (c lanes + l) per_chunk.
template <int N, Storage S>
struct Lay {
  static constexpr int size = bytes(S);
  static constexpr int lanes = N == 256 || (N == 128 && size == 4) ? 16 : 8;
  static constexpr int per_lane = N / lanes;
  static constexpr int lane_bytes = per_lane * size;
  static constexpr int chunk_bytes = lane_bytes % 16 == 0 ? 16 : lane_bytes % 8 == 0 ? 8 : 4;
  static constexpr int chunks = lane_bytes / chunk_bytes;
  static constexpr int per_chunk = chunk_bytes / size;
  static constexpr int at_once = 32 / lanes;  // rows that a warp touches with one instruction
  static constexpr int pitch = N * size;

  /// Element of the lane's value i.
  __device__ static int element(int lane, int i) { return (i / per_chunk * lanes + lane % lanes) * per_chunk + i % per_chunk; }
  /// Where element n lies in a vector in shared memory that lanes read four values at a time without conflicts.
  __device__ static int place(int n) {
    if constexpr (per_chunk % 4 != 0 || per_chunk == 4) {
      return n;
    } else {
      const int chunk = n / per_chunk, q = n % per_chunk / 4;
      return ((chunk / lanes * (per_chunk / 4) + q) * lanes + chunk % lanes) * 4 + n % 4;
    }
  }
  /// The lane's values of such a vector.
  __device__ static void gather(const float* vector, int lane, float (&out)[per_lane]) {
#pragma unroll
    for (int q = 0; q < per_lane / 4; ++q) {
      const float4 f = *reinterpret_cast<const float4*>(vector + (q * lanes + lane % lanes) * 4);
      out[4 * q] = f.x, out[4 * q + 1] = f.y, out[4 * q + 2] = f.z, out[4 * q + 3] = f.w;
    }
  }
  __device__ static void read(const std::byte* row, int lane, float (&out)[per_lane]) {
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      decode_words<S, chunk_bytes>(load_words<chunk_bytes>(row + (c * lanes + lane % lanes) * chunk_bytes),
                                   out + c * per_chunk);
    }
  }
  __device__ static void write(std::byte* row, int lane, const float (&x)[per_lane], const Divider& scale) {
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      store_words<chunk_bytes>(row + (c * lanes + lane % lanes) * chunk_bytes,
                               encode_words<S, chunk_bytes>(x + c * per_chunk, scale));
    }
  }
};

// ---- the kernel ---------------------------------------------------------------------------------------------------

template <class StepType>
struct Arguments {
  StepType step;
  Geometry geometry;
};

/// log(1 + e^z), as in core/real.h.
__device__ inline float softplus(float z) { return z > 0 ? z + log1pf(expf(-z)) : log1pf(expf(z)); }
__device__ inline float sigmoid(float z) {
  if (z >= 0) return 1.0f / (1.0f + expf(-z));
  const float e = expf(z);
  return e / (1.0f + e);
}

/// `recurrence` of state_dim N; outputs read states stored as Read, flushes rebuild those stored as Anchor. Split: the
/// two are different pools, and the delta rule recomputes every u of a flush (closed loop).
template <Recurrence recurrence, int N, Storage Read, Storage Anchor, bool Split>
class Block {
 public:
  static constexpr bool kDelta = is_delta_rule(recurrence), kColumns = has_column_decay(recurrence);
  using StepType = std::conditional_t<kDelta, DeltaStep, Mamba2Step>;
  using ReadLay = Lay<N, Read>;
  using AnchorLay = Lay<N, Anchor>;
  /// What outputs multiply the state with: c, and for the delta rule w, and w as the ring will hold it.
  static constexpr int kVectors = !kDelta ? 1 : Split ? 3 : 2;
  /// Rows that a warp reads at once.
  static constexpr int kBatch = bytes(Read) == 4 || N == 256 ? 16 : 32;
  static constexpr int kPitch = N + 4;  // of w in fp32: rows four banks apart

  __device__ Block(const Arguments<StepType>& arguments, std::byte* shared)
      : step_(arguments.step), geometry_(arguments.geometry), shared_(shared) {}

  __device__ void run() {
    const Geometry& g = geometry_;
    const auto row = static_cast<std::int64_t>(blockIdx.x / static_cast<unsigned>(g.tiles));
    const int first = static_cast<int>(blockIdx.x % static_cast<unsigned>(g.tiles)) * g.tile;
    row_ = row;
    first_ = first;
    const auto P = static_cast<int>(step_.shape.head_dim);
    head_ = first / P;
    group_ = head_ / static_cast<int>(step_.shape.heads / step_.shape.groups);
    p0_ = first % P;

    const int slot = step_.slot[row];
    const auto last = static_cast<int>(step_.length) - 1;
    held_ = step_.held ? min(max(step_.held[row], 0), last) : 0;
    fetch_inputs();
    if (slot < 0 || slot >= step_.slots) {
      async_wait();
      return;
    }
    slot_ = slot;
    flush_ = held_ == last;
    auto* barrier = at<std::uint64_t>(g.barrier);
    if (threadIdx.x == 0) {
      barrier_init(barrier);
      if (flush_) {
        copy_anchor(0);
      } else {
        const StatePool& pool = Split ? step_.read : step_.state;
        bulk_copy(shared_, codes(pool, Read), static_cast<std::uint32_t>(g.tile * ReadLay::pitch), barrier);
      }
    }
    fetch_ring();
    current_gates();
    async_wait();
    __syncthreads();
    current_vectors();
    if constexpr (kColumns) column_decays();
    __syncthreads();
    grams();
    if constexpr (!kColumns) decays();
    __syncthreads();
    if (!flush_) {
      weights();
      __syncthreads();
      outputs();
    } else {
      if constexpr (!kColumns) widen_records();
      rebuild();
    }
  }

 private:
  template <class T>
  __device__ T* at(int offset) const {
    return reinterpret_cast<T*>(shared_ + offset);
  }
  __device__ std::int64_t state_row(int r = 0) const { return first_ + r; }
  __device__ std::byte* codes(const StatePool& pool, Storage storage) const {
    return static_cast<std::byte*>(pool.codes) + (slot_ * pool.slot_stride + static_cast<std::int64_t>(first_) * N) * bytes(storage);
  }
  __device__ float* scales(const StatePool& pool) const {
    return pool.scales + slot_ * pool.scale_slot_stride + first_;
  }
  /// Records of one head or group.
  __device__ std::byte* records(const RingField& field, std::int64_t index, int width) const {
    return static_cast<std::byte*>(field.data) +
           (slot_ * field.slot_stride + index * step_.ring.capacity * width) * bytes(field.type);
  }
  __device__ void copy_anchor(int piece) {
    const int done = piece * geometry_.piece;
    bulk_copy(shared_, codes(step_.state, Anchor) + static_cast<std::int64_t>(done) * AnchorLay::pitch,
              static_cast<std::uint32_t>(min(geometry_.piece, geometry_.tile - done) * AnchorLay::pitch),
              at<std::uint64_t>(geometry_.barrier));
  }
  /// The staged field of the ring: x, u, or v where every u is computed again.
  __device__ const RingField& staged() const {
    if constexpr (!kDelta) return step_.ring.v;
    return Split && flush_ ? step_.ring.v : step_.ring.u;
  }
  /// Where record 0 of the raw w lies: packed at the end of its buffer, so that it can be widened in place.
  __device__ int raw_w() const {
    return geometry_.w + static_cast<int>(step_.length) * kPitch * 4 - held_ * N * bytes(step_.ring.w.type);
  }
  __device__ static void fetch(void* to, const void* from, int size) {
    for (int i = static_cast<int>(threadIdx.x) * 16; i < size; i += kThreads * 16) {
      async_copy_16(static_cast<std::byte*>(to) + i, static_cast<const std::byte*>(from) + i);
    }
  }
  __device__ static const std::byte* row_of(const Activations& a, std::int64_t row, std::int64_t column) {
    return static_cast<const std::byte*>(a.data) + (row * a.stride + column) * bytes(a.type);
  }
  __device__ const Activations& values() const {
    if constexpr (kDelta) return step_.v; else return step_.x;
  }
  __device__ const Activations& keys() const {
    if constexpr (kDelta) return step_.k; else return step_.B;
  }
  __device__ const Activations& queries() const {
    if constexpr (kDelta) return step_.q; else return step_.C;
  }

  /// What does not depend on the slot.
  __device__ void fetch_inputs() {
    fetch(at<std::byte>(geometry_.raw_x), row_of(values(), row_, first_), geometry_.tile * bytes(values().type));
    fetch(at<std::byte>(geometry_.raw_c), row_of(queries(), row_, group_ * N), N * bytes(queries().type));
    fetch(at<std::byte>(geometry_.raw_k), row_of(keys(), row_, group_ * N), N * bytes(keys().type));
  }

  /// Live records only.
  __device__ void fetch_ring() {
    const Geometry& g = geometry_;
    const auto P = static_cast<int>(step_.shape.head_dim);
    const int tid = static_cast<int>(threadIdx.x);
    if constexpr (scaled(Read) || scaled(Anchor)) {
      if (scaled(Read) && !flush_) fetch(at<float>(g.scale), scales(Split ? step_.read : step_.state), g.tile * 4);
      if (scaled(Anchor) && flush_) fetch(at<float>(g.scale), scales(step_.state), g.tile * 4);
    }
    fetch(at<std::byte>(raw_w()), records(step_.ring.w, group_, N), held_ * N * bytes(step_.ring.w.type));
    const RingField& field = staged();
    const int size = g.head_rows * bytes(field.type), pieces = size / 16, in_head = held_ * pieces;
    for (int i = tid; i < g.heads * in_head; i += kThreads) {
      const int h = i / in_head, j = i % in_head / pieces, k = i % pieces;
      async_copy_16(at<std::byte>(g.ring) + (h * held_ + j) * size + k * 16,
                    records(field, head_ + h, P) + static_cast<std::int64_t>(j * P + p0_) * bytes(field.type) + k * 16);
    }
    if constexpr (kColumns) fetch(at<float>(g.gates), records(step_.ring.log_decay, head_, N), held_ * N * 4);
    const int L = static_cast<int>(step_.length);
    for (int i = tid; i < g.heads * held_; i += kThreads) {
      const int h = i / held_, j = i % held_;
      const auto scalar = [&](const RingField& f) { return reinterpret_cast<const float*>(records(f, head_ + h, 1))[j]; };
      if constexpr (!kDelta) at<float>(g.gain)[h * L + j] = scalar(step_.ring.gain);
      if constexpr (kDelta && !kColumns) at<float>(g.log_decay)[h * L + j] = scalar(step_.ring.log_decay);
      if constexpr (kDelta && Split) {
        if (flush_) at<float>(g.gain)[h * L + j] = scalar(step_.ring.gain);
      }
    }
  }

  /// dt or beta and the log decay of the token at hand, at index held.
  __device__ void current_gates() {
    const Geometry& g = geometry_;
    const int h = static_cast<int>(threadIdx.x), L = static_cast<int>(step_.length);
    const bool owner = p0_ == 0 && !flush_;  // appends the records of its heads
    if (h < g.heads) {
      const int head = head_ + h;
      float gain, log_decay = 0;
      if constexpr (kDelta) {
        gain = step_.beta_scale * sigmoid(load(step_.beta.type, step_.beta.data, row_ * step_.beta.stride + head));
        if constexpr (!kColumns) {
          log_decay = -expf(step_.A_log[head]) *
                      softplus(load(step_.gate.type, step_.gate.data, row_ * step_.gate.stride + head) + step_.dt_bias[head]);
        }
      } else {
        gain = softplus(load(step_.dt.type, step_.dt.data, row_ * step_.dt.stride + head) + step_.dt_bias[head]);
        if (gain < step_.dt_min) gain = step_.dt_min;
        if (gain > step_.dt_max) gain = step_.dt_max;
        log_decay = -expf(step_.A_log[head]) * gain;
      }
      at<float>(g.gain)[h * L + held_] = gain;
      at<float>(g.log_decay)[h * L + held_] = log_decay;
      if (owner) {
        const auto scalar = [&](const RingField& f) { return reinterpret_cast<float*>(records(f, head, 1)) + held_; };
        if constexpr (!kDelta || Split) *scalar(step_.ring.gain) = gain;
        if constexpr (kDelta && !kColumns) *scalar(step_.ring.log_decay) = log_decay;
      }
    }
    if constexpr (kColumns) {
      for (int n = h; n < N; n += kThreads) {
        const std::int64_t column = static_cast<std::int64_t>(head_) * N + n;
        const float log_decay =
            -expf(step_.A_log[head_]) *
            softplus(load(step_.gate.type, step_.gate.data, row_ * step_.gate.stride + column) + step_.dt_bias[column]);
        at<float>(g.gates)[held_ * N + n] = log_decay;
        if (owner) reinterpret_cast<float*>(records(step_.ring.log_decay, head_, N))[held_ * N + n] = log_decay;
      }
    }
  }

  __device__ float* c() const { return at<float>(geometry_.vectors); }
  __device__ float* k() const { return at<float>(geometry_.vectors) + N; }       ///< w of the token at hand
  __device__ float* kept_k() const { return at<float>(geometry_.vectors) + 2 * N; }  ///< and as the ring holds it

  /// c and w in fp32, normalised in the delta rule; appends w.
  __device__ void current_vectors() {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    if (warp > 1) return;
    const bool is_k = warp == 1;
    const Scalar type = is_k ? keys().type : queries().type;
    const std::byte* raw = at<std::byte>(is_k ? geometry_.raw_k : geometry_.raw_c);
    float x[N / 32], factor = 1;
#pragma unroll
    for (int i = 0; i < N / 32; ++i) x[i] = load(type, raw, i * 32 + lane);
    if constexpr (kDelta) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < N / 32; ++i) sum = fmaf(x[i], x[i], sum);
      const float norm = sqrtf(lane_sum<32>(sum) + 1e-6f);
      factor = is_k ? 1.0f : rsqrtf(static_cast<float>(N));
#pragma unroll
      for (int i = 0; i < N / 32; ++i) x[i] = __fdiv_rn(x[i], norm) * factor;
    }
    const std::int64_t group_rows = step_.shape.heads / step_.shape.groups * step_.shape.head_dim;
    const bool owner = is_k && !flush_ && first_ % group_rows == 0;
    std::byte* record = records(step_.ring.w, group_, N) + static_cast<std::int64_t>(held_) * N * bytes(step_.ring.w.type);
#pragma unroll
    for (int i = 0; i < N / 32; ++i) {
      const int n = i * 32 + lane;
      (is_k ? k() : c())[n] = x[i];
      if (is_k && kVectors == 3) kept_k()[n] = round_to(step_.ring.w.type, x[i]);
      if (owner) store(step_.ring.w.type, record, n, x[i]);
    }
  }

  __device__ float* wide_w(int j) const { return at<float>(geometry_.w) + j * kPitch; }

  /// Decays of KDA, suffix sums newest first, a channel a thread: the records become e^{g_{j+1} + ... + g_h} w_j, in
  /// fp32, and total_decay e^{G}.
  __device__ void column_decays() {
    const Geometry& g = geometry_;
    const int tid = static_cast<int>(threadIdx.x);
    const Scalar type = step_.ring.w.type;
    __syncthreads();  // k() is there
    if constexpr (Split) {
      if (flush_) {  // keys e^{g_0 + ... + g_i} k_i that read the anchor as it was
        for (int n = tid; n < N; n += kThreads) {
          float sum = 0;
          for (int i = 0; i <= held_; ++i) {
            sum += at<float>(g.gates)[i * N + n];
            const float w = i == held_ ? k()[n] : load(type, at<std::byte>(raw_w()), i * N + n);
            at<float>(g.keys)[i * kPitch + AnchorLay::place(n)] = expf(sum) * w;
          }
        }
        column_products();
        __syncthreads();
      }
    }
    // Record by record, oldest first, as widen_records() does; the sums go from the newest.
    for (int n = tid; n < N; n += kThreads) {
      float sum = 0;
      for (int j = held_; j >= 0; --j) {
        const float step = at<float>(g.gates)[j * N + n];
        at<float>(g.gates)[j * N + n] = expf(sum);
        sum += step;
      }
      at<float>(g.total_decay)[n] = expf(sum);
    }
    for (int j = 0; j <= held_; ++j) {
      float w[(N + kThreads - 1) / kThreads];
#pragma unroll
      for (int i = 0; i < (N + kThreads - 1) / kThreads; ++i) {
        const int n = tid + i * kThreads;
        if (n < N) {
          w[i] = (j == held_ ? k()[n] : load(type, at<std::byte>(raw_w()), j * N + n)) * at<float>(g.gates)[j * N + n];
        }
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < (N + kThreads - 1) / kThreads; ++i) {
        const int n = tid + i * kThreads;
        if (n < N) wide_w(j)[AnchorLay::place(n)] = w[i];
      }
    }
  }

  /// w in fp32, laid out for rebuild(), in place: record j never reaches the raw records behind it.
  __device__ void widen_records() {
    const int tid = static_cast<int>(threadIdx.x);
    const Scalar type = step_.ring.w.type;
    const int raw = raw_w();
    constexpr int each = (N + kThreads - 1) / kThreads;
    for (int j = 0; j <= held_; ++j) {
      float w[each];
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int n = tid + i * kThreads;
        if (n < N) w[i] = j == held_ ? k()[n] : load(type, at<std::byte>(raw), j * N + n);
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int n = tid + i * kThreads;
        if (n < N) wide_w(j)[AnchorLay::place(n)] = w[i];
      }
    }
    __syncthreads();
  }

  /// w_j . c, and for the delta rule w_j . w and w_j . w as kept, of the live records and of the token at hand.
  __device__ void grams() {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int L = static_cast<int>(step_.length);
    const std::byte* raw = at<std::byte>(raw_w());
    const float* vectors[3] = {c(), k(), kept_k()};
    float v[kVectors][N / 32];
#pragma unroll
    for (int m = 0; m < kVectors; ++m) {
#pragma unroll
      for (int i = 0; i < N / 32; ++i) v[m][i] = vectors[m][i * 32 + lane];
    }
    for (int j = warp; j <= held_; j += kWarps) {
      float sum[kVectors] = {};
#pragma unroll
      for (int i = 0; i < N / 32; ++i) {
        const int n = i * 32 + lane;
        float w;
        if constexpr (kColumns) {
          w = wide_w(j)[AnchorLay::place(n)];
        } else {
          w = j == held_ ? k()[n] : load(step_.ring.w.type, raw, j * N + n);
        }
#pragma unroll
        for (int m = 0; m < kVectors; ++m) sum[m] = fmaf(w, v[m][i], sum[m]);
      }
#pragma unroll
      for (int m = 0; m < kVectors; ++m) {
        sum[m] = lane_sum<32>(sum[m]);
        if (lane == 0) at<float>(geometry_.gram)[m * L + j] = sum[m];
      }
    }
  }

  /// Decays of one scalar a head: coefficient[j] = e^{g_{j+1} + ... + g_h}, times dt in Mamba-2, and e^G. Suffix sums,
  /// newest first, 32 records at a time; differences of prefix sums would cancel.
  __device__ void decays() {
    const Geometry& g = geometry_;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int L = static_cast<int>(step_.length);
    for (int h = warp; h < g.heads; h += kWarps) {
      float newer = 0;  // sum over the records that are newer than these 32
      const float rate = kDelta ? 0.0f : -expf(step_.A_log[head_ + h]);
      for (int base = held_; base >= 0; base -= 32) {
        const int j = base - lane;  // lane 0 is the newest
        float own = 0;
        if (j >= 0) {
          own = kDelta || j == held_ ? at<float>(g.log_decay)[h * L + j] : rate * at<float>(g.gain)[h * L + j];
        }
        float sum = own;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
          const float other = __shfl_up_sync(~0u, sum, d);
          if (lane >= d) sum += other;
        }
        float before = __shfl_up_sync(~0u, sum, 1);
        if (lane == 0) before = 0;
        if (j >= 0) {
          const float a = expf(newer + before);
          at<float>(g.coefficient)[h * L + j] = kDelta ? a : a * at<float>(g.gain)[h * L + j];
        }
        newer += __shfl_sync(~0u, sum, 31);
      }
      if (lane == 0) at<float>(g.total_decay)[h] = expf(newer);
    }
  }

  /// What each record's u or x is multiplied with, a head and vector.
  __device__ void weights() {
    const Geometry& g = geometry_;
    const int L = static_cast<int>(step_.length), n = held_ + 1;
    for (int i = static_cast<int>(threadIdx.x); i < g.heads * kVectors * n; i += kThreads) {
      const int j = i % n, m = i / n % kVectors, h = i / n / kVectors;
      const float a = kColumns ? 1.0f : at<float>(g.coefficient)[h * L + j];
      at<float>(g.weight)[(h * kVectors + m) * L + j] = a * at<float>(g.gram)[m * L + j];
    }
  }

  /// The lane's part of a vector in natural order.
  template <class L>
  __device__ static void spread(const float* vector, int lane, float (&out)[L::per_lane]) {
#pragma unroll
    for (int i = 0; i < L::per_lane; i += 4) {
      const float4 f = *reinterpret_cast<const float4*>(vector + L::element(lane, i));
      out[i] = f.x, out[i + 1] = f.y, out[i + 2] = f.z, out[i + 3] = f.w;
    }
  }

  __device__ void write_y(int r, float y) {
    store(step_.y_type, step_.y, row_ * step_.y_stride + state_row(r), y);
  }
  __device__ float skip(int r, float x) const {  ///< D x
    if constexpr (kDelta) return 0.0f;
    else return step_.D ? step_.D[head_ + r / geometry_.head_rows] * x : 0.0f;
  }

  /// Output-only step.
  __device__ void outputs() {
    using Lanes = ReadLay;
    constexpr int kIterations = kBatch / Lanes::at_once, kCopies = Lanes::lanes / kIterations;
    const Geometry& g = geometry_;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int L = static_cast<int>(step_.length);
    float vector[kVectors][Lanes::per_lane];
#pragma unroll
    for (int m = 0; m < kVectors; ++m) {
      spread<Lanes>(at<float>(g.vectors) + m * N, lane, vector[m]);
      if constexpr (kColumns) {
        float e[Lanes::per_lane];
        spread<Lanes>(at<float>(g.total_decay), lane, e);
#pragma unroll
        for (int i = 0; i < Lanes::per_lane; ++i) vector[m][i] *= e[i];
      }
    }
    const RingField& field = staged();
    const std::byte* ring = at<std::byte>(g.ring);
    barrier_wait(at<std::uint64_t>(g.barrier), 0);
    for (int batch = warp; batch * kBatch < g.tile; batch += kWarps) {
      float sum[kVectors][kIterations];
#pragma unroll
      for (int i = 0; i < kIterations; ++i) {
        const int r = batch * kBatch + i * Lanes::at_once + lane / Lanes::lanes;
        float s[Lanes::per_lane];
        Lanes::read(shared_ + r * Lanes::pitch, lane, s);
#pragma unroll
        for (int m = 0; m < kVectors; ++m) {
          float z = 0;
#pragma unroll
          for (int n = 0; n < Lanes::per_lane; ++n) z = fmaf(s[n], vector[m][n], z);
          sum[m][i] = z;
        }
      }
      const int copy = lane % kCopies;
      const int r = batch * kBatch + lane % Lanes::lanes / kCopies * Lanes::at_once + lane / Lanes::lanes;
      const int h = g.heads == 1 ? 0 : r / g.head_rows, p = r - h * g.head_rows;
      float z[kVectors], recent[kVectors] = {};
#pragma unroll
      for (int m = 0; m < kVectors; ++m) {
        z[m] = lane_sums<Lanes::lanes>(sum[m], lane);
        if constexpr (scaled(Read)) z[m] *= at<float>(g.scale)[r];
        if constexpr (!kColumns) z[m] *= at<float>(g.total_decay)[h];
      }
      const float* weight = at<float>(g.weight) + h * kVectors * L;
      for (int j = copy; j < held_; j += kCopies) {
        const float u = load(field.type, ring, (h * held_ + j) * g.head_rows + p);
#pragma unroll
        for (int m = 0; m < kVectors; ++m) recent[m] = fmaf(weight[m * L + j], u, recent[m]);
      }
#pragma unroll
      for (int m = 0; m < kVectors; ++m) z[m] += lane_sum<kCopies>(recent[m]);
      if (copy != 0) continue;

      const float x = load(values().type, at<std::byte>(g.raw_x), r);
      const std::int64_t record = static_cast<std::int64_t>(held_) * step_.shape.head_dim + p0_ + p;
      const auto append = [&](const RingField& f, float value) {
        store(f.type, records(f, head_ + h, static_cast<int>(step_.shape.head_dim)), record, value);
      };
      if constexpr (!kDelta) {
        write_y(r, fmaf(weight[held_], x, z[0]) + skip(r, x));
        append(step_.ring.v, x);
      } else {
        const float beta = at<float>(g.gain)[h * L + held_];
        const float u = beta * (x - z[1]);
        write_y(r, fmaf(weight[held_], u, z[0]));
        if constexpr (Split) {
          // Later outputs use the u of the record as it is stored.
          append(step_.ring.u, beta * (round_to(step_.ring.v.type, x) - z[2]));
          append(step_.ring.v, x);
        } else {
          append(step_.ring.u, u);
        }
      }
    }
  }

  // ---- flush ------------------------------------------------------------------------------------------------------

  using Tile = AnchorLay;
  /// Rows of a lane group that rebuild() holds in registers.
  static constexpr int kRows = Tile::per_lane <= 8 && Tile::lanes == 16 ? 8 : 4;
  static constexpr int kRebuilt = kRows * Tile::at_once;  // rows a warp

  /// Row kRows of a lane group in a batch of a piece, decoded with its scale.
  __device__ void read_rows(int done, int r, int lane, float (&s)[kRows][Tile::per_lane]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      Tile::read(shared_ + (r + i) * Tile::pitch, lane, s[i]);
      if constexpr (scaled(Anchor)) {
        const float scale = at<float>(geometry_.scale)[done + r + i];
#pragma unroll
        for (int n = 0; n < Tile::per_lane; ++n) s[i][n] *= scale;
      }
    }
  }

  /// Dot products of the lane group's rows with the lane's part of a vector; lane l gets that of row l / copies.
  __device__ static float dot_rows(const float (&s)[kRows][Tile::per_lane], const float (&vector)[Tile::per_lane], int lane) {
    float sum[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float z = 0;
#pragma unroll
      for (int n = 0; n < Tile::per_lane; ++n) z = fmaf(s[i][n], vector[n], z);
      sum[i] = z;
    }
    return lane_sums<Tile::lanes>(sum, lane);
  }
  static constexpr int kRowCopies = Tile::lanes / kRows;

  /// u of the token at hand from the checkpoint and the cached u: updates[row].
  __device__ void solve_shared(int done, int rows) {
    const Geometry& g = geometry_;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int L = static_cast<int>(step_.length);
    float key[Tile::per_lane];
    spread<Tile>(k(), lane, key);
    if constexpr (kColumns) {
      float e[Tile::per_lane];
      spread<Tile>(at<float>(g.total_decay), lane, e);
#pragma unroll
      for (int n = 0; n < Tile::per_lane; ++n) key[n] *= e[n];
    }
    const RingField& field = staged();
    for (int base = warp * kRebuilt; base < rows; base += kWarps * kRebuilt) {
      const int first = base + lane / Tile::lanes * kRows;
      float s[kRows][Tile::per_lane];
      read_rows(done, first, lane, s);
      float z = dot_rows(s, key, lane);
      const int r = done + first + lane % Tile::lanes / kRowCopies, copy = lane % kRowCopies;
      const int h = r / g.head_rows, p = r % g.head_rows;
      if constexpr (!kColumns) z *= at<float>(g.total_decay)[h];
      float recent = 0;
      for (int j = copy; j < held_; j += kRowCopies) {
        const float a = kColumns ? 1.0f : at<float>(g.coefficient)[h * L + j];
        const float u = load(field.type, at<std::byte>(g.ring), (h * held_ + j) * g.head_rows + p);
        recent = fmaf(a * at<float>(g.gram)[L + j], u, recent);
      }
      z += lane_sum<kRowCopies>(recent);
      const float x = load(values().type, at<std::byte>(g.raw_x), r);
      if (copy == 0) at<float>(g.updates)[r - done] = at<float>(g.gain)[h * L + held_] * (x - z);
    }
  }

  /// Products that feed the records' u into each other, products[i L + j] = e^{g_{j+1} + ... + g_i} w_j . w_i for j < i,
  /// and e^{g_0 + ... + g_i} behind them; of one head.
  __device__ void products(int h) {
    const Geometry& g = geometry_;
    const int L = static_cast<int>(step_.length);
    float* out = at<float>(g.products);
    const float* log_decay = at<float>(g.log_decay) + h * L;
    for (int t = static_cast<int>(threadIdx.x); t < (held_ + 1) * (held_ + 1); t += kThreads) {
      const int i = t / (held_ + 1), j = t % (held_ + 1);
      if (j > i) continue;
      float sum = 0;
      if (j == i) {  // from the anchor
        for (int m = i; m >= 0; --m) sum += log_decay[m];
        out[L * L + i] = expf(sum);
      } else {
        for (int m = i; m > j; --m) sum += log_decay[m];
        float dot = 0;
        for (int n = 0; n < N; n += 4) {
          const float4 a = *reinterpret_cast<const float4*>(wide_w(i) + n), b = *reinterpret_cast<const float4*>(wide_w(j) + n);
          dot = fmaf(a.x, b.x, dot), dot = fmaf(a.y, b.y, dot), dot = fmaf(a.z, b.z, dot), dot = fmaf(a.w, b.w, dot);
        }
        out[i * L + j] = expf(sum) * dot;
      }
    }
  }
  /// The same with a decay a channel, from the raw records.
  __device__ void column_products() {
    const Geometry& g = geometry_;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int L = static_cast<int>(step_.length);
    const Scalar type = step_.ring.w.type;
    const std::byte* raw = at<std::byte>(raw_w());
    for (int i = warp; i <= held_; i += kWarps) {
      float sum[N / 32] = {}, w[N / 32];
#pragma unroll
      for (int m = 0; m < N / 32; ++m) w[m] = i == held_ ? k()[m * 32 + lane] : load(type, raw, i * N + m * 32 + lane);
      for (int j = i - 1; j >= 0; --j) {
        float dot = 0;
#pragma unroll
        for (int m = 0; m < N / 32; ++m) {
          const int n = m * 32 + lane;
          sum[m] += at<float>(g.gates)[(j + 1) * N + n];
          dot = fmaf(load(type, raw, j * N + n) * expf(sum[m]), w[m], dot);
        }
        dot = lane_sum<32>(dot);
        if (lane == 0) at<float>(g.products)[i * L + j] = dot;
      }
    }
  }

  /// Every u from the anchor and the raw records: updates[i piece + row].
  __device__ void solve_split(int done, int rows) {
    const Geometry& g = geometry_;
    const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, lane = tid % 32;
    const int L = static_cast<int>(step_.length), h = done / g.head_rows;
    float* us = at<float>(g.updates);
    if constexpr (!kColumns) products(h);
    for (int base = warp * kRebuilt; base < rows; base += kWarps * kRebuilt) {
      const int first = base + lane / Tile::lanes * kRows;
      float s[kRows][Tile::per_lane];
      read_rows(done, first, lane, s);
      for (int i = 0; i <= held_; ++i) {
        float key[Tile::per_lane];
        Tile::gather(kColumns ? at<float>(g.keys) + i * kPitch : wide_w(i), lane, key);
        const float z = dot_rows(s, key, lane);
        if (lane % kRowCopies == 0) us[i * g.piece + first + lane % Tile::lanes / kRowCopies] = z;
      }
    }
    __syncthreads();
    const RingField& field = staged();
    for (int r = tid; r < rows; r += kThreads) {
      const int row = done + r, p = row % g.head_rows;
      for (int i = 0; i <= held_; ++i) {
        float z = us[i * g.piece + r];
        if constexpr (!kColumns) z *= at<float>(g.products)[L * L + i];
        for (int j = 0; j < i; ++j) z = fmaf(at<float>(g.products)[i * L + j], us[j * g.piece + r], z);
        const float v = i == held_ ? load(values().type, at<std::byte>(g.raw_x), row)
                                   : load(field.type, at<std::byte>(g.ring), (h * held_ + i) * g.head_rows + p);
        us[i * g.piece + r] = at<float>(g.gain)[h * L + i] * (v - z);
      }
    }
  }

  /// The factors of record j's w in rows r .. r + kRows of a piece.
  __device__ void factors(int done, int r, int h, int j, float (&u)[kRows]) const {
    const Geometry& g = geometry_;
    const int L = static_cast<int>(step_.length);
    if constexpr (kDelta && Split) {
#pragma unroll
      for (int i = 0; i < kRows; i += 4) {
        const float4 f = *reinterpret_cast<const float4*>(at<float>(g.updates) + j * g.piece + r + i);
        u[i] = f.x, u[i + 1] = f.y, u[i + 2] = f.z, u[i + 3] = f.w;
      }
    } else if (j == held_) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        u[i] = kDelta ? at<float>(g.updates)[r + i] : load(values().type, at<std::byte>(g.raw_x), done + r + i);
      }
    } else {
      const RingField& field = staged();
      const std::byte* from = at<std::byte>(g.ring) +
                              ((h * held_ + j) * g.head_rows + (done + r) - h * g.head_rows) * bytes(field.type);
#pragma unroll
      for (int i = 0; i < kRows; i += 4) {
        if (field.type == Scalar::fp32) {
          const float4 f = *reinterpret_cast<const float4*>(from + i * 4);
          u[i] = f.x, u[i + 1] = f.y, u[i + 2] = f.z, u[i + 3] = f.w;
        } else {
          const Words<8> w = load_words<8>(from + i * 2);
          if (field.type == Scalar::bf16) {
            decode_words<Storage::bf16, 8>(w, u + i);
          } else {
            decode_words<Storage::fp16, 8>(w, u + i);
          }
        }
      }
    }
    if constexpr (!kColumns) {
      const float a = at<float>(g.coefficient)[h * L + j];
#pragma unroll
      for (int i = 0; i < kRows; ++i) u[i] *= a;
    }
  }

  /// Stores rows of the rebuilt state and, of a split one, the read copy of what was stored.
  __device__ void store_rows(int row, int lane, const float (&s)[kRows][Tile::per_lane]) {
    const std::int64_t step = static_cast<std::int64_t>(row);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float scale = 1;
      if constexpr (scaled(Anchor)) scale = scale_of<Anchor>(s[i]);
      const Divider divider(scale);
      Tile::write(codes(step_.state, Anchor) + (step + i) * Tile::pitch, lane, s[i], divider);
      if (scaled(Anchor) && lane % Tile::lanes == 0) scales(step_.state)[row + i] = scale;
      if constexpr (Split) {
        static_assert(Anchor == Storage::fp32);  // else s would have to be read back first
        float copy_scale = 1;
        if constexpr (scaled(Read)) copy_scale = scale_of<Read>(s[i]);
        const Divider copy_divider(copy_scale);
        std::byte* copy = codes(step_.read, Read) + (step + i) * ReadLay::pitch;
        constexpr int size = Tile::per_chunk * bytes(Read);
#pragma unroll
        for (int c = 0; c < Tile::chunks; ++c) {
          store_words<size>(copy + (c * Tile::lanes + lane % Tile::lanes) * size,
                            encode_words<Read, size>(s[i] + c * Tile::per_chunk, copy_divider));
        }
        if (scaled(Read) && lane % Tile::lanes == 0) scales(step_.read)[row + i] = copy_scale;
      }
    }
  }
  template <Storage S>
  __device__ static float scale_of(const float (&x)[Tile::per_lane]) {
    float largest = 0;
#pragma unroll
    for (int n = 0; n < Tile::per_lane; ++n) largest = larger(largest, fabsf(x[n]));
#pragma unroll
    for (int w = Tile::lanes / 2; w > 0; w /= 2) largest = larger(largest, __shfl_xor_sync(~0u, largest, w));
    return row_scale<S>(largest);
  }

  /// Flush: every piece of the checkpoint or anchor through the buffer and back.
  __device__ void rebuild() {
    const Geometry& g = geometry_;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    for (int done = 0, piece = 0; done < g.tile; done += g.piece, ++piece) {
      const int rows = min(g.piece, g.tile - done);
      if (piece > 0) {
        __syncthreads();
        if (threadIdx.x == 0) copy_anchor(piece);
      }
      barrier_wait(at<std::uint64_t>(g.barrier), static_cast<std::uint32_t>(piece) & 1u);
      if constexpr (kDelta) {
        if constexpr (Split) {
          solve_split(done, rows);
        } else {
          solve_shared(done, rows);
        }
        __syncthreads();
      }
      for (int base = warp * kRebuilt; base < rows; base += kWarps * kRebuilt) {
        const int r = base + lane / Tile::lanes * kRows, h = (done + r) / g.head_rows;
        float s[kRows][Tile::per_lane];
        read_rows(done, r, lane, s);
        if constexpr (kColumns) {
          float e[Tile::per_lane];
          spread<Tile>(at<float>(g.total_decay), lane, e);
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
#pragma unroll
            for (int n = 0; n < Tile::per_lane; ++n) s[i][n] *= e[n];
          }
        } else {
          const float e = at<float>(g.total_decay)[h];
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
#pragma unroll
            for (int n = 0; n < Tile::per_lane; ++n) s[i][n] *= e;
          }
        }
        for (int j = 0; j <= held_; ++j) {
          float w[Tile::per_lane], u[kRows];
          Tile::gather(wide_w(j), lane, w);
          factors(done, r, h, j, u);
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
#pragma unroll
            for (int n = 0; n < Tile::per_lane; ++n) s[i][n] = fmaf(u[i], w[n], s[i][n]);
          }
        }
        float vector[Tile::per_lane];
        spread<Tile>(c(), lane, vector);
        const float y = dot_rows(s, vector, lane);
        const int own = done + r + lane % Tile::lanes / kRowCopies;
        if (lane % kRowCopies == 0) {
          write_y(own, y + skip(own, kDelta ? 0.0f : load(values().type, at<std::byte>(g.raw_x), own)));
        }
        store_rows(done + r, lane, s);
      }
    }
  }

  const StepType& step_;
  const Geometry& geometry_;
  std::byte* const shared_;
  std::int64_t row_, slot_;
  int first_, head_, group_, p0_, held_;
  bool flush_;
};

template <Recurrence recurrence, int N, Storage Read, Storage Anchor, bool Split>
__global__ void __launch_bounds__(kThreads, 4)
    decode_kernel(const __grid_constant__ Arguments<typename Block<recurrence, N, Read, Anchor, Split>::StepType> arguments) {
  extern __shared__ __align__(128) std::byte shared[];
  Block<recurrence, N, Read, Anchor, Split>(arguments, shared).run();
}

}  // namespace replayssm::cuda
