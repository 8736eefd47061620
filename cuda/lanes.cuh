#pragma once

// What the fast kernels do in warps: asynchronous copies, sums over lanes, rows of a state on lanes, matrix products.

#include "cuda/storage.cuh"

namespace replayssm::cuda {

// ---- asynchronous copies ------------------------------------------------------------------------------------------

__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

/// A barrier in shared memory that completes a phase with `arrivals` arrivals.
__device__ inline void barrier_init(std::uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
/// Makes initialised barriers known to the copy engine.
__device__ inline void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
/// Arrives, and lets the phase wait for `size` bytes of copies too.
__device__ inline void arrive_and_expect(std::uint64_t* barrier, std::uint32_t size) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(size)
               : "memory");
}

/// Starts a copy of `size` bytes, a multiple of 16, that a phase of the barrier expects.
__device__ inline void bulk_copy(void* to, const void* from, std::uint32_t size, std::uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(size), "r"(shared_address(barrier))
               : "memory");
}

/// Starts a copy of `size` bytes, a multiple of 16, to memory.
__device__ inline void bulk_store(void* to, const void* from, std::uint32_t size) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
               "r"(size)
               : "memory");
}
/// Ends a group of those that this thread starts.
__device__ inline void close_bulk_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Waits until they have read what they store.
__device__ inline void wait_for_bulk_reads() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
/// Waits until all are done.
__device__ inline void wait_for_bulk_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

/// Starts copying 4 or 16 bytes, which wait_for_copies() waits for.
template <int Bytes>
__device__ inline void copy_async(void* to, const void* from) {
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(Bytes)
                 : "memory");
  }
}
/// Ends a group of the copies that this thread starts by copy_async().
__device__ inline void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until all but the last `Later` of these groups are done.
template <int Later>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Later) : "memory");
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

/// Whether that phase is complete.
__device__ inline bool barrier_done(std::uint64_t* barrier, std::uint32_t phase) {
  std::uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(phase)
      : "memory");
  return done != 0;
}

/// Orders what this thread has read from and written to shared memory before copies that are started later, by it or by
/// a thread that it synchronises with: loads wait in queues, and the copy engine does not.
__device__ inline void before_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// A barrier among `Threads` threads of a block, whole warps, that the others do not take part in.
template <int Threads>
__device__ inline void sync_threads() {
  asm volatile("bar.sync 1, %0;" ::"n"(Threads) : "memory");
}

/// Gives a warp of a group of four, all of which call this, `Count` registers a thread, fewer or more than it has; more
/// have to be given back by others first. Nothing where the target cannot.
template <int Count, bool more>
__device__ inline void set_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if constexpr (more) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
  }
#endif
}

/// The next kernel of the stream may start, and wait for this one where it needs it.
__device__ inline void let_dependents_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
/// Waits until the kernel before this one is done and its writes are visible.
__device__ inline void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- sums over lanes ----------------------------------------------------------------------------------------------

/// The sum over groups of `Lanes` lanes that are `Stride` apart, in every lane.
template <int Lanes, int Stride = 1>
__device__ inline float lane_sum(float x) {
#pragma unroll
  for (int w = Lanes / 2; w > 0; w /= 2) x += __shfl_xor_sync(~0u, x, w * Stride);
  return x;
}

/// Sums x[i] over such groups for Count values of i at once: the lane of index l in its group returns the sum of
/// i = l / (Lanes / Count). Each exchange halves the values that a lane holds.
template <int Lanes, int Stride = 1, int Count>
__device__ inline float lane_sums(const float (&x)[Count], int lane) {
  if constexpr (Count == 1) {
    return lane_sum<Lanes, Stride>(x[0]);
  } else {
    float half[Count / 2];
    const bool upper = (lane & (Lanes / 2 * Stride)) != 0;
#pragma unroll
    for (int i = 0; i < Count / 2; ++i) {
      const float given = upper ? x[i] : x[i + Count / 2], kept = upper ? x[i + Count / 2] : x[i];
      half[i] = kept + __shfl_xor_sync(~0u, given, Lanes / 2 * Stride);
    }
    return lane_sums<Lanes / 2, Stride>(half, lane);
  }
}

// ---- rows on lanes ------------------------------------------------------------------------------------------------

/// How rows of N stored elements lie on groups of `Lanes` lanes: each lane has `chunks` pieces of `chunk_bytes`; piece
/// c of lane l begins at element (c Lanes + l) per_chunk.
template <int N, Storage S, int Lanes>
struct Lay {
  static constexpr int lanes = Lanes;
  static constexpr int per_lane = N / lanes;
  static constexpr int lane_bytes = per_lane * bytes(S);
  static constexpr int chunk_bytes = lane_bytes % 16 == 0 ? 16 : lane_bytes % 8 == 0 ? 8 : 4;
  static constexpr int chunks = lane_bytes / chunk_bytes;
  static constexpr int per_chunk = chunk_bytes / bytes(S);
  static constexpr int pitch = N * bytes(S);
  static_assert(per_chunk % 4 == 0);

  /// Element of the value i of lane l.
  __device__ static int element(int l, int i) { return (i / per_chunk * lanes + l) * per_chunk + i % per_chunk; }
  __device__ static void read(const std::byte* row, int l, float (&out)[per_lane]) {
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      decode_words<S, chunk_bytes>(load_words<chunk_bytes>(row + (c * lanes + l) * chunk_bytes), out + c * per_chunk);
    }
  }
  /// Rounds x once into the format To and stores it. `quick`: whether the instructions that round are
  /// right: no value is NaN, or of a scaled format, Divider::quick.
  template <Storage To>
  __device__ static void write(std::byte* row, int l, const float (&x)[per_lane], const Divider& scale, bool quick) {
    constexpr int run = To == S ? per_chunk : 4, size = run * bytes(To);
    if (quick || To == Storage::fp32) {
#pragma unroll
      for (int i = 0; i < per_lane; i += run) {
        Words<size> words;
#pragma unroll
        for (int k = 0; k < run; k += 4) {
          float q[4];
#pragma unroll
          for (int m = 0; m < 4; ++m) q[m] = scaled(To) ? scale.quick_quotient(x[i + k + m]) : x[i + k + m];
          const auto four = encode_four<To>(q);
#pragma unroll
          for (int m = 0; m < bytes(To); ++m) words.w[k / 4 * bytes(To) + m] = four.w[m];
        }
        store_words<size>(row + element(l, i) * bytes(To), words);
      }
    } else if constexpr (To != Storage::fp32) {
#pragma unroll
      for (int i = 0; i < per_lane; i += 4) {
        const uint2 codes = encode_carefully<To>(x[i], x[i + 1], x[i + 2], x[i + 3], scale.d);
        Words<4 * bytes(To)> words;
        words.w[0] = codes.x;
        if constexpr (bytes(To) == 2) words.w[1] = codes.y;
        store_words<4 * bytes(To)>(row + element(l, i) * bytes(To), words);
      }
    }
  }
  /// The lane's part of a vector in shared memory.
  __device__ static void spread(const float* vector, int l, float (&out)[per_lane]) {
#pragma unroll
    for (int i = 0; i < per_lane; i += 4) {
      const float4 f = *reinterpret_cast<const float4*>(vector + element(l, i));
      out[i] = f.x, out[i + 1] = f.y, out[i + 2] = f.z, out[i + 3] = f.w;
    }
  }
  /// Where element n lies in a vector that gather() reads, four values at a time and without bank conflicts.
  __device__ static int place(int n) {
    const int chunk = n / per_chunk, four = chunk / lanes * (per_chunk / 4) + n % per_chunk / 4;
    return (four * lanes + chunk % lanes) * 4 + n % 4;
  }
  __device__ static void gather(const float* vector, int l, float (&out)[per_lane]) {
#pragma unroll
    for (int i = 0; i < per_lane; i += 4) {
      const float4 f = *reinterpret_cast<const float4*>(vector + (i * lanes + l * 4));
      out[i] = f.x, out[i + 1] = f.y, out[i + 2] = f.z, out[i + 3] = f.w;
    }
  }
};

// ---- matrix products ----------------------------------------------------------------------------------------------

/// d += a b, a [16, 16] and b [16, 8] in bf16 or fp16, d in fp32: the fragments of mma.m16n8k16.
template <bool bf16 = true>
__device__ inline void multiply_add(float& d0, float& d1, float& d2, float& d3, const uint4& a, std::uint32_t b0,
                                    std::uint32_t b1) {
  if constexpr (!bf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
    return;
  }
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

/// Four matrices [8, 8] of 16 bits. Lane 8 i + j has the address of row j of matrix i, 16 bytes; lane 4 g + t gets
/// elements 2 t and 2 t + 1 of row g of each; transposed: of column g.
template <bool transposed>
__device__ inline uint4 load_matrices(const void* row) {
  uint4 r;
  if constexpr (transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "r"(shared_address(row)));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "r"(shared_address(row)));
  }
  return r;
}
/// Transposes a matrix [8, 8] of 16 bits, of which lane 4 g + t has elements 2 t and 2 t + 1 of row g.
__device__ inline std::uint32_t transpose(std::uint32_t pair) {
  std::uint32_t r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
  return r;
}
/// Two floats as three pairs of bf16 whose sum they are, cut off, not rounded, part by part: quicker. NaN for what is
/// infinite.
__device__ inline void cut_in_three(float x, float y, std::uint32_t (&parts)[3]) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const std::uint32_t a = __float_as_uint(x), b = __float_as_uint(y);
    parts[i] = __byte_perm(a, b, 0x7632);
    x -= __uint_as_float(a & 0xFFFF0000u);
    y -= __uint_as_float(b & 0xFFFF0000u);
  }
}

/// Two floats as three pairs of bf16 whose sum they are: 3 x 8 bits hold the 24 of a float. What is infinite stays so.
__device__ inline void split_in_three(float x, float y, std::uint32_t (&parts)[3]) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const __nv_bfloat162 b = __floats2bfloat162_rn(x, y);
    parts[i] = *reinterpret_cast<const std::uint32_t*>(&b);
    const float high = __uint_as_float(parts[i] << 16), other = __uint_as_float(parts[i] & 0xFFFF0000u);
    x = i == 0 && isinf(high) ? 0.0f : x - high;
    y = i == 0 && isinf(other) ? 0.0f : y - other;
  }
}

}  // namespace replayssm::cuda
