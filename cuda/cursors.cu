#include "cuda/launch.cuh"
#include "cuda/launch.h"

namespace replayssm::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void advance_kernel(std::int64_t rows, const std::int32_t* slot, std::int32_t* held, std::int64_t length) {
  const std::int64_t row = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= rows || slot[row] < 0) return;
  const std::int32_t h = held[row];
  held[row] = h == length - 1 ? 0 : h + 1;
}

}  // namespace

cudaError_t launch_advance_cursors(std::int64_t rows, const std::int32_t* slot, std::int32_t* held, std::int64_t length,
                                   cudaStream_t stream) {
  return launch(advance_kernel, (rows + kThreads - 1) / kThreads, kThreads, 0, stream, false, rows, slot, held, length);
}

bool has_code_for_device() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, advance_kernel) == cudaSuccess;
}

}  // namespace replayssm::cuda
