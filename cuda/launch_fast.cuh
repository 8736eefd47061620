#pragma once

// Choosing and launching an instance of the fast kernel. Each decode_*.cu instantiates those of one recurrence.

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <initializer_list>

#include "cuda/decode.cuh"
#include "cuda/prepare.cuh"

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

inline bool aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }
inline bool aligned(const Activations& a) { return aligned(a.data) && a.stride * bytes(a.type) % 16 == 0; }
inline bool aligned(const RingField& f) { return aligned(f.data) && f.slot_stride * bytes(f.type) % 16 == 0; }
inline bool aligned(const StatePool& p) {
  return aligned(p.codes) && p.slot_stride * bytes(p.storage) % 16 == 0 &&
         (!scaled(p.storage) || (aligned(p.scales) && p.scale_slot_stride % 4 == 0));
}

inline bool is_split(const Step& step) { return step.read.codes != nullptr; }

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
  f.batch = f.read_bytes == 4 ? 8 : f.read_bytes == 2 || step.shape.state_dim == 256 || (delta && split) ? 16 : 32;
  f.matrices = !f.column_decay && step.ring.w.type == Scalar::bf16;
  if constexpr (delta) {
    f.ring_bytes = bytes(step.ring.u.type);
    if (!split) f.flush_ring_bytes = f.ring_bytes;
    f.x_bytes = bytes(step.v.type);
  } else {
    f.x_bytes = bytes(step.x.type);
  }
  const Device device = current_device();
  Arguments<StepType> arguments{step, lay_out_workspace(step, delta, split), {}};
  arguments.geometry = plan(step, f, arguments.workspace, kWarps, kResident * device.multiprocessors,
                            device.shared_limit / kResident - 1024);  // 1 KiB a block is the system's
  return arguments;
}

template <class StepType>
bool serves(const StepType& step) {
  const std::int64_t N = step.shape.state_dim;
  if (N != 64 && N != 96 && N != 128 && N != 256) return false;
  if (step.shape.head_dim % 16 != 0) return false;
  if (step.workspace == nullptr || !aligned(step.workspace) || !aligned(step.state)) return false;
  const bool split = is_split(step);
  constexpr bool delta = std::is_same_v<StepType, DeltaStep>;
  if (step.length > (delta && split ? 16 : 64)) return false;
  // The keys of records go through matrix products of bf16.
  if (delta && split && !has_column_decay(step.shape.recurrence) && step.length > 1 &&
      step.ring.w.type != Scalar::bf16) {
    return false;
  }
  if (split && (step.state.storage != Storage::fp32 || !aligned(step.read))) return false;
  const bool ring = step.length > 1;
  if (ring && !aligned(step.ring.w)) return false;
  if constexpr (delta) {
    // Shared states fold the cached u in, split ones compute it again: what serving wants of each. Of a shared state
    // that flushes at every token both are the same.
    if (split ? !step.closed_loop : step.closed_loop && step.length > 1) return false;
    if (ring && (!aligned(step.ring.u) || (split && !aligned(step.ring.v)))) return false;
    if (ring && has_column_decay(step.shape.recurrence) && !aligned(step.ring.log_decay)) return false;
    if (!aligned(step.q) || !aligned(step.k) || !aligned(step.v)) return false;
  } else {
    if (ring && !aligned(step.ring.v)) return false;
    if (!aligned(step.x) || !aligned(step.B) || !aligned(step.C)) return false;
  }
  return arrange(step).geometry.shared_bytes > 0;
}

/// A kernel may use this much dynamic shared memory; false if the device has less.
template <class Kernel>
bool allow_shared(Kernel kernel, int bytes) {
  return bytes <= 48 * 1024 ||
         cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) == cudaSuccess;
}

template <Recurrence recurrence, int N, Storage Read, Storage Anchor, bool Split, class StepType>
void launch_one(const StepType& step, cudaStream_t stream) {
  const Arguments<StepType> arguments = arrange(step);
  const auto prepare = prepare_kernel<recurrence, N, Split>;
  const std::size_t prepare_shared = prepare_shared_bytes<recurrence, N, Split>(step, arguments.workspace.slots);
  const auto decode = decode_kernel<recurrence, N, Read, Anchor, Split>;
  if (!allow_shared(prepare, static_cast<int>(prepare_shared)) ||
      !allow_shared(decode, arguments.geometry.shared_bytes)) {
    return;
  }
  const std::int64_t units = has_column_decay(recurrence) ? step.shape.heads : step.shape.groups;
  const int threads = prepare_threads(static_cast<int>(step.shape.heads / step.shape.groups),
                                      has_column_decay(recurrence), is_delta_rule(recurrence) && Split);
  prepare<<<static_cast<unsigned>(step.rows * units + 1), static_cast<unsigned>(threads), prepare_shared, stream>>>(
      arguments);

  // The states are on their way while the first kernel runs.
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  const std::int64_t tiles = step.rows * arguments.geometry.tiles,
                     blocks = kResident * current_device().multiprocessors;
  launch.gridDim = dim3(static_cast<unsigned>(std::min(tiles, blocks)));
  launch.blockDim = dim3(kThreads);
  launch.dynamicSmemBytes = static_cast<std::size_t>(arguments.geometry.shared_bytes);
  launch.stream = stream;
  launch.attrs = &overlap;
  launch.numAttrs = 1;
  cudaLaunchKernelEx(&launch, decode, arguments);
}

template <Recurrence recurrence, int N, class StepType>
void launch_width(const StepType& step, cudaStream_t stream) {
  const auto shared = [&]<Storage S>() { launch_one<recurrence, N, S, S, false>(step, stream); };
  const auto split = [&]<Storage S>() { launch_one<recurrence, N, S, Storage::fp32, true>(step, stream); };
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
}

template <Recurrence recurrence, class StepType>
void launch_recurrence(const StepType& step, cudaStream_t stream) {
  switch (step.shape.state_dim) {
    case 64:
      return launch_width<recurrence, 64>(step, stream);
    case 96:
      return launch_width<recurrence, 96>(step, stream);
    case 128:
      return launch_width<recurrence, 128>(step, stream);
    default:
      return launch_width<recurrence, 256>(step, stream);
  }
}

}  // namespace
}  // namespace replayssm::cuda
