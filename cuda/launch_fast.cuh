#pragma once

// Choosing and launching an instance of the fast kernel. Each decode_*.cu instantiates those of one recurrence.

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <initializer_list>
#include <utility>

#include "cuda/decode.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/state_dims.h"

namespace replayssm::cuda {
namespace {

/// Properties of the current device, asked for once.
struct Device {
  int index = 0, multiprocessors = 0, shared_limit = 0;
};
inline Device current_device() {
  static std::array<std::atomic<int>, 64> multiprocessors, shared_limits;
  Device d;
  if (cudaGetDevice(&d.index) != cudaSuccess || d.index >= 64) return d;
  const auto i = static_cast<std::size_t>(d.index);
  if (multiprocessors[i] == 0) {
    int value = 0;
    cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerMultiprocessor, d.index);
    shared_limits[i] = value;
    cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, d.index);
    multiprocessors[i] = value;
  }
  d.multiprocessors = multiprocessors[i];
  d.shared_limit = shared_limits[i];
  return d;
}

/// Blocks that run at a time.
inline int blocks_at_once(const Device& device) {
  const int all = kResident * device.multiprocessors, most = most_blocks;
  return most > 0 ? std::min(all, most) : all;
}
/// Of a block of decode_kernel(); 1 KiB a block is the system's.
inline int shared_of_block(const Device& device) { return device.shared_limit / kResident - 1024; }

inline bool aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }
inline bool aligned(const Activations& a) { return aligned(a.data) && a.stride * bytes(a.type) % 16 == 0; }
inline bool aligned(const RingField& f) { return aligned(f.data) && f.slot_stride * bytes(f.type) % 16 == 0; }
inline bool aligned(const StatePool& p) {
  return aligned(p.codes) && p.slot_stride * bytes(p.storage) % 16 == 0 &&
         (!scaled(p.storage) || (aligned(p.scales) && p.scale_slot_stride % 4 == 0));
}

inline bool is_split(const Step& step) { return step.read.codes != nullptr; }

/// What a plan depends on.
struct Shape {
  int device = -1, blocks = 0;
  std::int64_t rows, length, heads, groups, head_dim, state_dim;
  Footprint footprint;
  bool operator==(const Shape&) const = default;
};

template <class StepType>
Arguments<StepType> arrange(const StepType& step) {
  constexpr bool delta = std::is_same_v<StepType, DeltaStep>;
  const bool split = is_split(step);
  Footprint f{};
  const Storage read = split ? step.read.storage : step.state.storage;
  f.read_bytes = bytes(read);
  f.anchor_bytes = bytes(step.state.storage);
  f.scaled = scaled(read);
  f.delta = delta;
  f.column_decay = has_column_decay(step.shape.recurrence);
  f.split = split;
  f.ring_bytes = f.flush_ring_bytes = bytes(step.ring.v.type);
  f.w_bytes = bytes(step.ring.w.type);
  f.y_bytes = bytes(step.y_type);
  f.append_bytes = step.length == 1 ? 0
                   : delta          ? bytes(step.ring.u.type) + (split ? bytes(step.ring.v.type) : 0)
                                    : bytes(step.ring.v.type);
  f.parts = read == Storage::fp32 ? 0 : read == Storage::bf16 ? 3 : 2;
  if constexpr (delta) {
    f.ring_bytes = bytes(step.ring.u.type);
    if (!split) f.flush_ring_bytes = f.ring_bytes;
    f.matrices = !f.column_decay && step.ring.w.type == Scalar::bf16;
    f.x_bytes = bytes(step.v.type);
    f.vector_bytes = bytes(step.q.type) + bytes(step.k.type);
    f.gate_bytes = bytes(step.gate.type);
  } else {
    f.matrices = step.length > 1 && step.ring.w.type == Scalar::bf16 && step.B.type == Scalar::bf16;
    f.x_bytes = bytes(step.x.type);
    f.vector_bytes = bytes(step.B.type) + bytes(step.C.type);
  }
  // A layer asks twice, and the layers of a model all ask the same.
  const Device device = current_device();
  const Shape shape{device.index,        blocks_at_once(device), step.rows,
                    step.length,         step.shape.heads,       step.shape.groups,
                    step.shape.head_dim, step.shape.state_dim,   f};
  static thread_local Shape last_shape;
  static thread_local Geometry last;
  if (shape != last_shape) {
    last = plan(step, f, shape.blocks, shared_of_block(device));
    last_shape = shape;
  }
  return {step, last};
}

template <int... N>
constexpr bool contains(std::integer_sequence<int, N...>, std::int64_t state_dim) {
  return ((state_dim == N) || ...);
}

template <class StepType>
bool serves(const StepType& step) {
  if (!contains(FastStateDims{}, step.shape.state_dim)) return false;
  if (step.shape.head_dim % 16 != 0 || step.shape.heads * step.shape.head_dim >= 1 << 30) return false;
  if (step.workspace == nullptr || !aligned(step.workspace) || !aligned(step.state)) return false;
  const bool split = is_split(step);
  constexpr bool delta = std::is_same_v<StepType, DeltaStep>;
  if (step.length > (delta && split ? 16 : kMostLength)) return false;
  // One that flushes at every token has no use for a read copy.
  if (delta && split && step.length == 1) return false;
  // The keys of records go through matrix products of bf16.
  if (delta && split && !has_column_decay(step.shape.recurrence) && step.ring.w.type != Scalar::bf16) {
    return false;
  }
  if (split && (step.state.storage != Storage::fp32 || !aligned(step.read))) return false;
  if (!aligned(step.y) || step.y_stride * bytes(step.y_type) % 16 != 0) return false;
  const bool ring = step.length > 1;
  if (ring && !aligned(step.ring.w)) return false;
  if constexpr (delta) {
    // Shared states fold the cached u in, split ones compute it again: what serving wants of each. Of a shared state
    // that flushes at every token both are the same.
    if (split ? !step.closed_loop : step.closed_loop && step.length > 1) return false;
    if (ring && (!aligned(step.ring.u) || (split && !aligned(step.ring.v)))) return false;
    if (has_column_decay(step.shape.recurrence) && !(aligned(step.gate) && (!ring || aligned(step.ring.log_decay)))) {
      return false;
    }
    if (!aligned(step.q) || !aligned(step.k) || !aligned(step.v)) return false;
  } else {
    if (ring && !aligned(step.ring.v)) return false;
    if (!aligned(step.x) || !aligned(step.B) || !aligned(step.C)) return false;
  }
  const Geometry geometry = arrange(step).geometry;
  // Tiles are counted in 32 bits, those of every block beyond the last too.
  return geometry.shared_bytes > 0 && step.rows * geometry.tiles < (std::int64_t{1} << 30);
}

template <Recurrence recurrence, int N, Storage Read, Storage Anchor, bool Split, class StepType>
cudaError_t launch_one(const StepType& step, cudaStream_t stream) {
  const Arguments<StepType> arguments = arrange(step);
  const auto kernel = decode_kernel<recurrence, N, Read, Anchor, Split>;
  const Device device = current_device();
  // The same limit at every call: host threads may call with different steps at a time.
  const cudaError_t allowed =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_of_block(device));
  if (allowed != cudaSuccess) return allowed;
  const std::int64_t tiles = step.rows * arguments.geometry.tiles, blocks = blocks_at_once(device);
  // It starts while the kernel before it ends, and waits for that where it needs to.
  return launch(kernel, std::min(tiles, blocks), kThreads, static_cast<std::size_t>(arguments.geometry.shared_bytes),
                stream, true, arguments);
}

template <Recurrence recurrence, int N, class StepType>
cudaError_t launch_width(const StepType& step, cudaStream_t stream) {
  const auto shared = [&]<Storage S>() { return launch_one<recurrence, N, S, S, false>(step, stream); };
  const auto split = [&]<Storage S>() { return launch_one<recurrence, N, S, Storage::fp32, true>(step, stream); };
  const bool apart = is_split(step);
  switch (apart ? step.read.storage : step.state.storage) {
    case Storage::fp32:
      return apart ? split.template operator()<Storage::fp32>() : shared.template operator()<Storage::fp32>();
    case Storage::fp16:
      return apart ? split.template operator()<Storage::fp16>() : shared.template operator()<Storage::fp16>();
    case Storage::bf16:
      return apart ? split.template operator()<Storage::bf16>() : shared.template operator()<Storage::bf16>();
    case Storage::e4m3_row:
      return apart ? split.template operator()<Storage::e4m3_row>() : shared.template operator()<Storage::e4m3_row>();
    case Storage::int8_row:
      return apart ? split.template operator()<Storage::int8_row>() : shared.template operator()<Storage::int8_row>();
  }
  return cudaErrorInvalidValue;
}

template <Recurrence recurrence, class StepType>
cudaError_t launch_recurrence(const StepType& step, cudaStream_t stream) {
  cudaError_t result = cudaErrorInvalidValue;
  const auto launch_if = [&]<int N>() {
    if (step.shape.state_dim == N) result = launch_width<recurrence, N>(step, stream);
  };
  [&]<int... N>(std::integer_sequence<int, N...>) { (launch_if.template operator()<N>(), ...); }
  (FastStateDims{});
  return result;
}

}  // namespace
}  // namespace replayssm::cuda
