#include <cuda_runtime.h>

#include "cuda/check.h"
#include "cuda/codes.cuh"
#include "cuda/convert.h"
#include "cuda/launch.h"

namespace replayssm::cuda {
namespace {

constexpr unsigned kThreads = 128, kMostBlocks = 1u << 20;

__global__ void encode_kernel(Storage storage, const float* data, std::int64_t rows, std::int64_t n, void* codes,
                              float* scales) {
  for (std::int64_t row = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; row < rows;
       row += std::int64_t{gridDim.x} * blockDim.x) {
    encode_row(storage, data + row * n, n, codes, row * n, has_scale(storage) ? scales + row : nullptr);
  }
}

__global__ void decode_kernel(Storage storage, const void* codes, const float* scales, std::int64_t rows,
                              std::int64_t n, float* data) {
  for (std::int64_t row = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; row < rows;
       row += std::int64_t{gridDim.x} * blockDim.x) {
    decode_row(storage, codes, row * n, has_scale(storage) ? scales + row : nullptr, n, data + row * n);
  }
}

unsigned blocks_for(std::int64_t rows) {
  const std::int64_t blocks = (rows + kThreads - 1) / kThreads;
  return blocks < kMostBlocks ? static_cast<unsigned>(blocks) : kMostBlocks;
}

}  // namespace

void encode_rows(Storage storage, const float* data, std::int64_t rows, std::int64_t n, void* codes, float* scales,
                 CUstream_st* stream) {
  check_rows(storage, data, rows, n, codes, scales);
  if (rows == 0) return;
  encode_kernel<<<blocks_for(rows), kThreads, 0, stream>>>(storage, data, rows, n, codes, scales);
  throw_launch_error("encode_rows");
}

void decode_rows(Storage storage, const void* codes, const float* scales, std::int64_t rows, std::int64_t n,
                 float* data, CUstream_st* stream) {
  check_rows(storage, data, rows, n, codes, scales);
  if (rows == 0) return;
  decode_kernel<<<blocks_for(rows), kThreads, 0, stream>>>(storage, codes, scales, rows, n, data);
  throw_launch_error("decode_rows");
}

}  // namespace replayssm::cuda
