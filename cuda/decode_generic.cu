#include "cuda/generic.h"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"

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
cudaError_t launch_instance(const generic::Problem& in, cudaStream_t stream) {
  const auto threads = static_cast<int>((in.step.shape.head_dim + 31) / 32 * 32);
  return launch(generic_kernel<delta, columns>, in.step.rows * in.step.shape.heads, threads, 0, stream, false, in);
}

}  // namespace

cudaError_t launch_generic(const Mamba2Step& step, cudaStream_t stream) {
  return launch_instance<false, false>(generic::problem(step), stream);
}

cudaError_t launch_generic(const DeltaStep& step, cudaStream_t stream) {
  return has_column_decay(step.shape.recurrence) ? launch_instance<true, true>(generic::problem(step), stream)
                                                 : launch_instance<true, false>(generic::problem(step), stream);
}

}  // namespace replayssm::cuda
