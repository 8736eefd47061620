#pragma once

// The order in which the rows of a step are taken.

#include "cuda/places.cuh"

namespace replayssm::cuda {

/// A row of the batch that is not padding.
struct OrderedRow {
  int slot, row_and_held;
  __device__ int row() const { return row_and_held / kMostLength; }
  __device__ int held() const { return row_and_held % kMostLength; }
};

__device__ inline OrderedRow make_row(int row, int slot, int held) { return {slot, row * kMostLength + held}; }

/// Rows of a step that are not padding, and where they are listed: those that flush from the front, the others at the
/// back.
struct Rows {
  int all, flushing, gap;
  /// Where queue 0, of those that flush, and queue 1 begin, and how many they have.
  __device__ int first(int queue) const { return queue == 0 ? 0 : flushing + gap; }
  __device__ int count(int queue) const { return queue == 0 ? flushing : all - flushing; }
};

/// Fills `order`, shared memory of step.rows entries, with the rows that flush, which take longest, and the others; by
/// all threads of a block. `counts`: shared memory of two numbers a warp.
__device__ inline Rows order_rows(const Step& step, OrderedRow* order, int* counts) {
  const auto rows = static_cast<int>(step.rows), threads = static_cast<int>(blockDim.x);
  const auto thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int flush = static_cast<int>(step.length) - 1;
  int front = 0, back = rows;  // rows that flush are laid down from the front, the others from the back
  for (int base = 0; base < rows; base += threads) {
    const int row = base + thread;
    const int slot = row < rows ? step.slot[row] : -1, held = row < rows ? held_of(step, row, slot) : -1;
    const unsigned flushing = __ballot_sync(~0u, held == flush),
                   others = __ballot_sync(~0u, held >= 0 && held != flush);
    if (lane < 2) counts[2 * warp + lane] = __popc(lane == 0 ? flushing : others);
    __syncthreads();
    const unsigned earlier = (1u << lane) - 1;
    int place = front + __popc(flushing & earlier), from_back = back - 1 - __popc(others & earlier);
    for (int w = 0; w < threads / 32; ++w) {
      if (w < warp) place += counts[2 * w], from_back -= counts[2 * w + 1];
      front += counts[2 * w];
      back -= counts[2 * w + 1];
    }
    if (held == flush) order[place] = make_row(row, slot, held);
    if (held >= 0 && held != flush) order[from_back] = make_row(row, slot, held);
    __syncthreads();
  }
  return {front + rows - back, front, back - front};
}

}  // namespace replayssm::cuda
