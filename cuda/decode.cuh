#pragma once

// The fast kernel: reads tiles of states, or rebuilds them.

#include "cuda/fetch.cuh"
#include "cuda/prepare.cuh"
#include "cuda/rebuild.cuh"
#include "cuda/runs.cuh"

namespace replayssm::cuda {

/// An output-only step of a tile.
///
/// States in 16 and 8 bits are exact as operands of a matrix product, [16 rows, 16 elements] at a time; the vectors
/// that they are multiplied with come in parts that are (Prepare::put_parts()), a column a part. States in fp32 are
/// multiplied in fp32, lane by lane.
template <class TileType>
class Outputs : public TileType {
  using T = TileType;
  using T::at_, T::geometry_, T::head_, T::held_, T::lane_, T::p0_, T::shared_, T::step_, T::warp_;
  static constexpr int kVectors = T::kVectors, N = T::N;
  static constexpr bool kMatrix = kParts<T::Read> > 0;
  /// Rows that a warp reads at once, lanes that share what is left to do for one, and how far they are apart.
  static constexpr int kBatch = rows_at_once(bytes(T::Read)), kCopies = 32 / kBatch, kApart = kMatrix ? kBatch : 1;

 public:
  __device__ explicit Outputs(const T& tile) : T(tile) {}

  __device__ void run() const {
    const Scalar type = this->staged().type;
    if (type == Scalar::bf16) {
      run_with<Scalar::bf16>();
    } else if (type == Scalar::fp32) {
      run_with<Scalar::fp32>();
    } else {
      run_with<Scalar::fp16>();
    }
  }

 private:
  template <Scalar ring_type>
  __device__ void run_with() const {
    const Geometry& g = geometry_;
    const int slots = g.slots, copy = lane_ / kApart % kCopies;
    // Where a tile has fewer batches than there are warps, the next tile goes to the others.
    for (int batch = this->turn() * kBatch; batch < g.tile; batch += kWarps * kBatch) {
      float z[kVectors];
      int row = batch;
      if constexpr (kMatrix) {
        multiply_matrices(batch, z);
        row += lane_ % kBatch;
      } else {
        row += multiply_vectors(batch, z);
      }
      const int r = min(row, g.tile - 1), h = this->head_of(r), p = r - h * g.head_rows;
      const float* gate = this->gates(h);
      const float* weight = gate + 4 + slots;
      const std::byte* values = this->staged_row(h, p, ring_type);
      float recent[kVectors] = {};
#pragma unroll 4
      for (int j = copy; j < held_; j += kCopies) {
        const float u = load(ring_type, values, j * g.head_rows);
#pragma unroll
        for (int m = 0; m < kVectors; ++m) recent[m] = fmaf(weight[m * slots + j], u, recent[m]);
      }
      float whole = T::kColumns ? 1.0f : gate[0];
      if constexpr (scaled(T::Read)) whole *= this->template in_shared<float>(g.scale)[r];
#pragma unroll
      for (int m = 0; m < kVectors; ++m) z[m] = fmaf(whole, z[m], lane_sum<kCopies, kApart>(recent[m]));
      if (copy == 0 && row < g.tile) finish(r, gate, weight, z);
    }
  }

  /// z of a row for the vectors, of codes without scale; returns which row of the batch.
  __device__ int multiply_vectors(int batch, float (&z)[kVectors]) const {
    // Lanes a row: few, so that few exchanges sum it up, as long as their parts of the vectors fit in registers.
    using Row = Lay<N, T::Read, N == 256 || (N == 128 && kVectors > 1) ? 16 : 8>;
    constexpr int kAtOnce = 32 / Row::lanes, kIterations = kBatch / kAtOnce;
    static_assert(Row::lanes / kIterations == kCopies);
    const int own = lane_ % Row::lanes, sub = lane_ / Row::lanes;
    float part[kVectors][Row::per_lane], sum[kVectors][kIterations];
#pragma unroll
    for (int m = 0; m < kVectors; ++m) Row::spread(this->vector(m), own, part[m]);
#pragma unroll
    for (int i = 0; i < kIterations; ++i) {
      float s[Row::per_lane];
      Row::read(shared_ + min(batch + i * kAtOnce + sub, geometry_.tile - 1) * Row::pitch, own, s);
#pragma unroll
      for (int m = 0; m < kVectors; ++m) {
        sum[m][i] = 0;
#pragma unroll
        for (int n = 0; n < Row::per_lane; ++n) sum[m][i] = fmaf(s[n], part[m][n], sum[m][i]);
      }
    }
#pragma unroll
    for (int m = 0; m < kVectors; ++m) z[m] = lane_sums<Row::lanes>(sum[m], lane_);
    return own / kCopies * kAtOnce + sub;
  }

  /// The same for row lane % kBatch of the batch, by matrix products.
  __device__ void multiply_matrices(int batch, float (&z)[kVectors]) const {
    constexpr Storage S = T::Read;
    // A vector's parts have kWide neighbouring columns, as many vectors as fit share a matrix.
    constexpr int kWide = kParts<S> == 3 ? 4 : 2, kShare = 8 / kWide, kSets = (kVectors + kShare - 1) / kShare;
    constexpr int kBlocks = kBatch / 16, pitch = N * bytes(S), chunk = N * bytes(S) % 64 == 0 ? 16 : 8;
    constexpr int kSteps = chunk / bytes(S) / 4;  // products that a chunk of a row is enough for
    const int g = lane_ / 4, t = lane_ % 4;
    const std::byte* column[kSets];
#pragma unroll
    for (int i = 0; i < kSets; ++i) {
      const int m = i * kShare + g / kWide, part = g % kWide;
      column[i] = part < kParts<S> && m < kVectors ? this->parts(m * kParts<S> + part) : nullptr;
    }
    float d[kBlocks][kSets][4] = {};
#pragma unroll
    for (int q = 0; q < pitch; q += 4 * chunk) {
      const int at = q + t * chunk;
      Words<4 * kSteps * 2> b[kSets];
#pragma unroll
      for (int i = 0; i < kSets; ++i) {
        b[i] = {};
        if (column[i]) b[i] = load_words<4 * kSteps * 2>(column[i] + at * (2 / bytes(S)));
      }
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const auto row = [&](int half) {
          return load_words<chunk>(shared_ + min(batch + block * 16 + half * 8 + g, geometry_.tile - 1) * pitch + at);
        };
        const Words<chunk> near = row(0), far = row(1);
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          const uint2 a = operand<S>(near, k), c = operand<S>(far, k);
#pragma unroll
          for (int i = 0; i < kSets; ++i) {
            float(&sum)[4] = d[block][i];
            multiply_add<S == Storage::bf16>(sum[0], sum[1], sum[2], sum[3], make_uint4(a.x, c.x, a.y, c.y),
                                             b[i].w[2 * k], b[i].w[2 * k + 1]);
          }
        }
      }
    }
    // Lane t has columns 2 t and 2 t + 1 of rows g and g + 8; what the largest part makes infinite stays so.
#pragma unroll
    for (int m = 0; m < kVectors; ++m) {
      const int from = lane_ % 8 * 4 + m % kShare * (kWide / 2);
      z[m] = 0;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float(&sum)[4] = d[block][m / kShare];
          float x = isfinite(sum[2 * half]) ? sum[2 * half] + sum[2 * half + 1] : sum[2 * half];
          if constexpr (kWide == 4) {
            const float low = __shfl_xor_sync(~0u, x, 1);
            x = isfinite(x) ? x + low : x;
          }
          x = __shfl_sync(~0u, x, from);
          if (lane_ % kBatch / 8 == 2 * block + half) z[m] = x;
        }
      }
      if constexpr (kParts<S> == 2) z[m] *= this->part_factors()[m];
    }
  }

  __device__ void finish(int r, const float* gate, const float* weight, const float (&z)[kVectors]) const {
    const float x = this->value(r);
    if constexpr (!T::kDelta) {
      this->write_y(r, this->with_skip(gate, x, fmaf(weight[held_], x, z[0])));
      this->append(0, r, x);
    } else {
      const float u = gate[1] * (x - z[1]);
      this->write_y(r, fmaf(weight[held_], u, z[0]));
      if constexpr (T::Split) {
        // Later outputs use the u of the record as it is stored.
        this->append(0, r, gate[1] * (round_to(step_.ring.v.type, x) - z[2]));
        this->append(1, r, x);
      } else {
        this->append(0, r, u);
      }
    }
  }
};

template <Recurrence recurrence, int N, Storage Read, Storage Anchor, bool Split>
__global__ void __launch_bounds__(kThreads, kResident) decode_kernel(
    const __grid_constant__ Arguments<typename Tile<recurrence, N, Read, Anchor, Split>::StepType> arguments) {
  extern __shared__ __align__(128) std::byte shared_memory[];
  using Tiles = Tile<recurrence, N, Read, Anchor, Split>;
  Tiles tiles(arguments, shared_memory);
  let_dependents_start();
  if (threadIdx.x == 0) tiles.make_barriers();
  wait_for_predecessor();
  const Rows rows = tiles.order();
  __syncthreads();
  if (threadIdx.x >= kWorkers) {
    set_registers<kOtherRegisters, false>();
    const int other = static_cast<int>(threadIdx.x - kWorkers) / 32;
    if (other == 0) {
      Fetch<Tiles>(tiles).run();
    } else if (other == 1) {
      Runs<Tiles>(tiles, rows).run();
    } else {
      Prepare<Tiles>(tiles).run(other - 2);
    }
    return;
  }
  set_registers<kWorkerRegisters, true>();
  if (threadIdx.x % 32 == 0) tiles.progress() = {0, 0, 0, threadIdx.x / 32};
  __syncwarp();
  for (;;) {
    tiles.forget();
    const std::uint32_t stage = tiles.progress().stage, brief = tiles.progress().brief;
    barrier_wait(tiles.full(stage / 2), stage & 1);
    const Assignment& tile = tiles.of_stage(stage / 2);
    if (tile.held < 0) return;
    barrier_wait(tiles.ready(brief / 2), brief & 1);
    tiles.assign(tile);
    tiles.in_stage(stage / 2);
    tiles.in_brief(brief / 2);
    if (tiles.flushes()) {
      Rebuild<Tiles>(tiles).run();
    } else {
      Outputs<Tiles>(tiles).run();
    }
    before_copies();
    __syncwarp();
    tiles.forget();
    if (threadIdx.x % 32 == 0) {
      auto& progress = tiles.progress();
      const std::uint32_t done = progress.stage / 2, last = progress.brief / 2;
      progress.turn += static_cast<std::uint32_t>(arguments.geometry.turns);
      progress.stage = tiles.after(progress.stage, arguments.geometry.stages);
      if (tiles.of_stage(done).tiles == 1) {
        progress.brief = tiles.after(progress.brief, arguments.geometry.briefs);
        arrive(tiles.free(last));
      }
      arrive(tiles.empty(done));
    }
    __syncwarp();
  }
}

}  // namespace replayssm::cuda
