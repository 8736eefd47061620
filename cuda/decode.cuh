#pragma once

// The second of the two fast kernels: reads a tile of states, or rebuilds it.

#include "cuda/rebuild.cuh"

namespace replayssm::cuda {

/// An output-only step of a tile.
template <class TileType>
class Outputs : public TileType {
  using T = TileType;
  using T::at_, T::geometry_, T::head_, T::held_, T::lane_, T::p0_, T::shared_, T::step_, T::warp_;
  static constexpr int kVectors = T::kVectors, N = T::N;
  /// Lanes a row: few, so that few exchanges sum it up, as long as their parts of the vectors fit in registers.
  using Row =
      Lay<N, T::Read, (N == 256 || (N == 128 && (kVectors == 3 || (kVectors == 2 && bytes(T::Read) > 1))) ? 16 : 8)>;
  static constexpr int kAtOnce = 32 / Row::lanes;
  /// Rows that a warp reads before it sums them up.
  static constexpr int kBatch = bytes(T::Read) == 4 ? 8 : bytes(T::Read) == 2 || N == 256 || kVectors > 2 ? 16 : 32;
  static constexpr int kIterations = kBatch / kAtOnce, kCopies = Row::lanes / kIterations;

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
    const int slots = at_.layout.slots, own = lane_ % Row::lanes, sub = lane_ / Row::lanes;
    float part[kVectors][Row::per_lane];
#pragma unroll
    for (int m = 0; m < kVectors; ++m) Row::spread(this->vector(m), own, part[m]);
    for (int batch = warp_ * kBatch; batch < g.tile; batch += kWarps * kBatch) {
      float sum[kVectors][kIterations];
#pragma unroll
      for (int i = 0; i < kIterations; ++i) {
        const int r = min(batch + i * kAtOnce + sub, g.tile - 1);
        float s[Row::per_lane];
        Row::read(shared_ + r * Row::pitch, own, s);
#pragma unroll
        for (int m = 0; m < kVectors; ++m) {
          float z = 0;
#pragma unroll
          for (int n = 0; n < Row::per_lane; ++n) z = fmaf(s[n], part[m][n], z);
          sum[m][i] = z;
        }
      }
      // This lane's row, and which of its records.
      const int r = min(batch + own / kCopies * kAtOnce + sub, g.tile - 1), copy = own % kCopies;
      const int h = this->head_of(r), p = r - h * g.head_rows;
      const float* gate = this->gates(h);
      const float* weight = gate + 4 + slots;
      const std::byte* row = this->staged_row(h, p, ring_type);
      float z[kVectors], recent[kVectors] = {};
#pragma unroll 4
      for (int j = copy; j < held_; j += kCopies) {
        const float u = load(ring_type, row, j * g.head_rows);
#pragma unroll
        for (int m = 0; m < kVectors; ++m) recent[m] = fmaf(weight[m * slots + j], u, recent[m]);
      }
      float whole = T::kColumns ? 1.0f : gate[0];
      if constexpr (scaled(T::Read)) whole *= this->template in_shared<float>(g.scale)[r];
#pragma unroll
      for (int m = 0; m < kVectors; ++m) {
        z[m] = fmaf(whole, lane_sums<Row::lanes>(sum[m], lane_), lane_sum<kCopies>(recent[m]));
      }
      if (copy == 0 && batch + own / kCopies * kAtOnce + sub < g.tile) finish(r, h, p, gate, weight, z);
    }
  }

  __device__ void finish(int r, int h, int p, const float* gate, const float* weight,
                         const float (&z)[kVectors]) const {
    const float x = this->value(r);
    const auto append = [&](const RingField& field, float u) {
      const auto P = static_cast<int>(step_.shape.head_dim);
      store(field.type, at_.records(field, head_ + h, P), static_cast<std::int64_t>(held_) * P + p0_ + p, u);
    };
    if constexpr (!T::kDelta) {
      this->write_y(r, this->with_skip(gate, x, fmaf(weight[held_], x, z[0])));
      append(step_.ring.v, x);
    } else {
      const float u = gate[1] * (x - z[1]);
      this->write_y(r, fmaf(weight[held_], u, z[0]));
      if constexpr (T::Split) {
        // Later outputs use the u of the record as it is stored.
        append(step_.ring.u, gate[1] * (round_to(step_.ring.v.type, x) - z[2]));
        append(step_.ring.v, x);
      } else {
        append(step_.ring.u, u);
      }
    }
  }
};

template <Recurrence recurrence, int N, Storage Read, Storage Anchor, bool Split>
__global__ void __launch_bounds__(kThreads, kResident) decode_kernel(
    const __grid_constant__ Arguments<typename Tile<recurrence, N, Read, Anchor, Split>::StepType> arguments) {
  extern __shared__ __align__(128) std::byte shared_memory[];
  using Rows = Tile<recurrence, N, Read, Anchor, Split>;
  Rows rows(arguments, shared_memory);
  if (threadIdx.x == 0) rows.make_barriers();
  __syncthreads();
  if (threadIdx.x >= kWorkers) {
    rows.fetch_all();
    return;
  }
  std::uint32_t phase = 0, piece_phases = 0;
  for (int stage = 0;;) {
    barrier_wait(rows.full(stage), phase);
    const Assignment assignment = rows.assignment(stage);
    if (assignment.held < 0) return;
    rows.assign(stage, assignment);
    if (rows.flushes()) {
      Rebuild<Rows>(rows).run(piece_phases);
    } else {
      Outputs<Rows>(rows).run();
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(rows.empty(stage));
    if (++stage == arguments.geometry.stages) stage = 0, phase ^= 1;
  }
}

}  // namespace replayssm::cuda
