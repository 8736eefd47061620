#pragma once

// Where a step keeps things, and the scalar functions of the recurrences: what both fast kernels need.

#include "cuda/geometry.h"
#include "cuda/lanes.cuh"

namespace replayssm::cuda {

/// log(1 + e^z), as in core/real.h.
__device__ inline float softplus(float z) { return z > 0 ? z + log1pf(expf(-z)) : log1pf(expf(z)); }
__device__ inline float sigmoid(float z) {
  if (z >= 0) return 1.0f / (1.0f + expf(-z));
  const float e = expf(z);
  return e / (1.0f + e);
}

/// Elements i .. i + Count, i a multiple of Count.
template <int Count>
__device__ inline void load_run(Scalar type, const void* data, std::int64_t i, float (&out)[Count]) {
  const auto* p = static_cast<const std::byte*>(data) + i * bytes(type);
  if constexpr (Count % 4 == 0) {
#pragma unroll
    for (int k = 0; k < Count; k += 4) {
      if (type == Scalar::fp32) {
        const float4 f = *reinterpret_cast<const float4*>(p + k * 4);
        out[k] = f.x, out[k + 1] = f.y, out[k + 2] = f.z, out[k + 3] = f.w;
      } else {
        const Words<8> w = load_words<8>(p + k * 2);
        if (type == Scalar::bf16) {
          decode_words<Storage::bf16, 8>(w, out + k);
        } else {
          decode_words<Storage::fp16, 8>(w, out + k);
        }
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < Count; ++k) out[k] = load(type, p, k);
  }
}

template <class StepType>
struct Arguments {
  StepType step;
  Workspace workspace;
  Geometry geometry;
};

/// Where a step keeps things, for both kernels.
template <class StepType>
struct Places {
  const StepType& step;
  const Workspace& layout;
  std::int64_t row, slot;

  __device__ std::byte* records(const RingField& field, std::int64_t index, int width) const {
    return static_cast<std::byte*>(field.data) +
           (slot * field.slot_stride + index * step.ring.capacity * width) * bytes(field.type);
  }
  __device__ float* gates(int head) const {
    return static_cast<float*>(step.workspace) + (row * step.shape.heads + head) * layout.gate_stride;
  }
  /// index: group, or head where every head has its own vectors.
  __device__ float* vectors(int index, int of) const {
    return static_cast<float*>(step.workspace) + layout.vector_offset +
           (row * of + index) * layout.vectors * step.shape.state_dim;
  }
  /// Rows in the order in which they are to be taken.
  __device__ int* order() const { return counter() + 4; }
  __device__ int* counter() const {
    return reinterpret_cast<int*>(static_cast<float*>(step.workspace) + layout.counter_offset);
  }
  __device__ float* products(int head) const {
    return static_cast<float*>(step.workspace) + layout.product_offset +
           (row * step.shape.heads + head) * step.length * (step.length + 2);
  }
};

/// The number of records of a row in this slot, -1 for padding.
__device__ inline int held_of(const Step& step, std::int64_t row, int slot) {
  const int held = step.held ? step.held[row] : 0;  // on its way beside the slot
  return slot < 0 || slot >= step.slots ? -1 : min(max(held, 0), static_cast<int>(step.length) - 1);
}

}  // namespace replayssm::cuda
