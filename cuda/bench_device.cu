#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/bench.h"
#include "cuda/bench_device.h"

namespace replayssm::cuda {
namespace {

/// The output function of SplitMix64 (Steele, Lea & Flood 2014).
__device__ std::uint64_t mix(std::uint64_t z) {
  z += 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

__device__ void put(float* to, float x) { *to = x; }
__device__ void put(__half* to, float x) { *to = __float2half_rn(x); }
__device__ void put(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }

template <class T>
__global__ void fill_kernel(T* data, std::int64_t n, float mean, float deviation, std::uint64_t seed) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) {
    const std::uint64_t random = mix(mix(seed) + static_cast<std::uint64_t>(i));
    const float unit = 0x1p-32f;  // both uniforms lie in (0, 1]
    const float a = (static_cast<float>(static_cast<std::uint32_t>(random)) + 0.5f) * unit;
    const float b = (static_cast<float>(static_cast<std::uint32_t>(random >> 32)) + 0.5f) * unit;
    const float z = sqrtf(-2.0f * logf(a)) * cospif(2.0f * b);  // Box and Muller 1958
    put(data + i, mean + deviation * fminf(fmaxf(z, -4.0f), 4.0f));
  }
}

template <class T>
void fill(void* data, std::int64_t n, float mean, float deviation, std::uint64_t seed, cudaStream_t stream) {
  if (n == 0) return;
  constexpr std::int64_t threads = 256, most_blocks = 4096;
  const auto blocks = static_cast<unsigned>(std::min((n + threads - 1) / threads, most_blocks));
  fill_kernel<<<blocks, threads, 0, stream>>>(static_cast<T*>(data), n, mean, deviation, seed);
  check(cudaGetLastError(), "filling a buffer");
}

/// Each thread has `Loads` loads of 16 bytes under way. What is read decides whether something is written, which never
/// happens with the contents that the buffer has, but the compiler cannot know.
template <int Loads>
__global__ void read_kernel(const uint4* data, std::int64_t n, uint4* never) {
  const std::int64_t block = std::int64_t{blockDim.x} * Loads, step = gridDim.x * block;
  unsigned all = 0;
  for (std::int64_t base = blockIdx.x * block + threadIdx.x; base < n; base += step) {
    uint4 x[Loads];
#pragma unroll
    for (int i = 0; i < Loads; ++i) x[i] = __ldcs(data + base + i * blockDim.x);
#pragma unroll
    for (int i = 0; i < Loads; ++i) all |= x[i].x | x[i].y | x[i].z | x[i].w;
  }
  if (all >> 31) *never = make_uint4(all, all, all, all);
}

template <int Loads>
__global__ void update_kernel(uint4* data, std::int64_t n) {
  const std::int64_t block = std::int64_t{blockDim.x} * Loads, step = gridDim.x * block;
  for (std::int64_t base = blockIdx.x * block + threadIdx.x; base < n; base += step) {
    uint4 x[Loads];
#pragma unroll
    for (int i = 0; i < Loads; ++i) x[i] = __ldcs(data + base + i * blockDim.x);
#pragma unroll
    for (int i = 0; i < Loads; ++i) {
      x[i].x ^= 1, x[i].y ^= 2, x[i].z ^= 1, x[i].w ^= 2;
      __stcs(data + base + i * blockDim.x, x[i]);
    }
  }
}

}  // namespace

Spread spread(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return {values.front(), (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2, values.back()};
}

void fill_normal(Scalar type, void* data, std::int64_t n, float mean, float deviation, std::uint64_t seed,
                 cudaStream_t stream) {
  switch (type) {
    case Scalar::fp32:
      return fill<float>(data, n, mean, deviation, seed, stream);
    case Scalar::fp16:
      return fill<__half>(data, n, mean, deviation, seed, stream);
    case Scalar::bf16:
      return fill<__nv_bfloat16>(data, n, mean, deviation, seed, stream);
  }
}

Ceilings measure_ceilings() {
  if (!available()) fail("no CUDA device, or a build without CUDA kernels");
  cudaDeviceProp device{};
  int current = 0;
  check(cudaGetDevice(&current), "asking for the device");
  check(cudaGetDeviceProperties(&device, current), "asking for the device");
  constexpr std::int64_t bytes = std::int64_t{4} << 30, n = bytes / sizeof(uint4);
  const Buffer data(bytes), never(sizeof(uint4));
  const Stream stream;
  // Positive floats: the highest bit, which read_kernel looks at, is clear, and stays so under update_kernel.
  fill_normal(Scalar::fp32, data.at(), bytes / 4, 8, 1, 1, stream);
  stream.wait();
  Ceilings best{.device = device.name};
  for (const int threads : {256, 512, 1024}) {
    for (const int blocks_per_sm : {1024 / threads, 2048 / threads, 32}) {
      const auto blocks = static_cast<unsigned>(device.multiProcessorCount * blocks_per_sm);
      const auto rate = [&](double moved, auto launch) {
        const auto run = [&] {
          launch();
          check(cudaGetLastError(), "measuring the memory");
        };
        return moved / spread(time_runs(stream, 0.05, run)).median;
      };
      // n is a multiple of threads * 8, so that no block's part goes beyond the end.
      best.read = std::max(best.read, rate(double{bytes}, [&] {
                             read_kernel<4><<<blocks, threads, 0, stream>>>(data.at<uint4>(), n, never.at<uint4>());
                           }));
      best.read = std::max(best.read, rate(double{bytes}, [&] {
                             read_kernel<8><<<blocks, threads, 0, stream>>>(data.at<uint4>(), n, never.at<uint4>());
                           }));
      best.update = std::max(best.update, rate(2 * double{bytes}, [&] {
                               update_kernel<4><<<blocks, threads, 0, stream>>>(data.at<uint4>(), n);
                             }));
    }
  }
  return best;
}

}  // namespace replayssm::cuda
