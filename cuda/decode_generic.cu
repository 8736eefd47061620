#include <cuda_runtime.h>

#include "cuda/generic.h"
#include "cuda/kernels.h"

namespace replayssm::cuda {
namespace {

/// One block for each row of the batch and head, one thread for each row of the state.
template <bool delta, bool columns>
__global__ void __launch_bounds__(generic::kMaxDim) generic_kernel(const __grid_constant__ generic::Problem in) {
  __shared__ generic::Token token;
  const std::int64_t heads = in.step.shape.heads;
  generic::Place at;
  if (!generic::find_place(in.step, blockIdx.x / heads, blockIdx.x % heads, at)) return;
  const int lane = static_cast<int>(threadIdx.x), lanes = static_cast<int>(blockDim.x);
  generic::prepare<delta, columns>(in, at, lane, lanes, token);
  __syncthreads();
  if (lane < in.step.shape.head_dim) generic::step_row<delta, columns>(in, at, token, lane);
  // Nobody reads a record that is being appended.
  if (!at.flush) generic::append_head<delta, columns>(in, at, token, lane, lanes);
}

template <bool delta, bool columns>
void launch(const generic::Problem& in, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(in.step.rows * in.step.shape.heads);
  const auto threads = static_cast<unsigned>((in.step.shape.head_dim + 31) / 32 * 32);
  generic_kernel<delta, columns><<<blocks, threads, 0, stream>>>(in);
}

}  // namespace

void launch_generic(const Mamba2Step& step, CUstream_st* stream) {
  launch<false, false>(generic::problem(step), stream);
}

void launch_generic(const DeltaStep& step, CUstream_st* stream) {
  if (has_column_decay(step.shape.recurrence)) {
    launch<true, true>(generic::problem(step), stream);
  } else {
    launch<true, false>(generic::problem(step), stream);
  }
}

}  // namespace replayssm::cuda
