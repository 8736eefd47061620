#include <algorithm>

#include "cuda/check.h"
#include "cuda/codes.cuh"
#include "cuda/convert.h"
#include "cuda/launch.cuh"
#include "cuda/launch.h"

namespace replayssm::cuda {
namespace {

constexpr int kThreads = 128;
constexpr std::int64_t kMostBlocks = 1 << 20;

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

std::int64_t blocks_for(std::int64_t rows) { return std::min((rows + kThreads - 1) / kThreads, kMostBlocks); }

}  // namespace

void encode_rows(Storage storage, const float* data, std::int64_t rows, std::int64_t n, void* codes, float* scales,
                 CUstream_st* stream) {
  check_rows(storage, data, rows, n, codes, scales);
  if (rows == 0) return;
  check_launch(
      launch(encode_kernel, blocks_for(rows), kThreads, 0, stream, false, storage, data, rows, n, codes, scales),
      "encode_rows");
}

void decode_rows(Storage storage, const void* codes, const float* scales, std::int64_t rows, std::int64_t n,
                 float* data, CUstream_st* stream) {
  check_rows(storage, data, rows, n, codes, scales);
  if (rows == 0) return;
  check_launch(
      launch(decode_kernel, blocks_for(rows), kThreads, 0, stream, false, storage, codes, scales, rows, n, data),
      "decode_rows");
}

}  // namespace replayssm::cuda
