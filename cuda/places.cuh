#pragma once

// Where a step keeps things, and the scalar functions of the recurrences.

#include "cuda/geometry.h"
#include "cuda/lanes.cuh"

namespace replayssm::cuda {

/// log(1 + e^z), as in core/real.h.
__device__ inline float softplus(float z) { return fmaxf(z, 0.0f) + log1pf(expf(-fabsf(z))); }
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

/// Rounds x into elements i .. i + Count, i a multiple of Count.
template <int Count>
__device__ inline void store_run(Scalar type, void* data, std::int64_t i, const float (&x)[Count]) {
  auto* p = static_cast<std::byte*>(data) + i * bytes(type);
  if constexpr (Count % 4 == 0) {
#pragma unroll
    for (int k = 0; k < Count; k += 4) {
      if (type == Scalar::fp32) {
        store_words<16>(p + k * 4, encode_four<Storage::fp32>(x + k));
      } else if (type == Scalar::bf16) {
        store_words<8>(p + k * 2, encode_four<Storage::bf16>(x + k));
      } else {
        store_words<8>(p + k * 2, encode_four<Storage::fp16>(x + k));
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < Count; ++k) store(type, p, k, x[k]);
  }
}

/// How blocks share out the tiles of a step; all zero between steps.
struct Tickets {
  unsigned drawn[2];  ///< turns of each queue, beyond those that blocks begin with
  unsigned done;      ///< blocks that draw no more
};
static_assert(sizeof(Tickets) <= kWorkspaceBytes);

template <class StepType>
struct Arguments {
  StepType step;
  Geometry geometry;
};

/// Where the records of a slot lie.
template <class StepType>
struct Places {
  const StepType& step;
  int row, slot;

  __device__ std::byte* records(const RingField& field, std::int64_t index, int width) const {
    return static_cast<std::byte*>(field.data) +
           (std::int64_t{slot} * field.slot_stride + index * step.ring.capacity * width) * bytes(field.type);
  }
};

/// The number of records of a row in this slot, -1 for padding.
__device__ inline int held_of(const Step& step, std::int64_t row, int slot) {
  const int held = step.held ? step.held[row] : 0;  // on its way beside the slot
  return slot < 0 || slot >= step.slots ? -1 : min(max(held, 0), static_cast<int>(step.length) - 1);
}

}  // namespace replayssm::cuda
