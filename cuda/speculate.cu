#include "cuda/generic_window.h"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/launch.h"

namespace replayssm::cuda {
namespace {

constexpr int kThreads = 256;

/// One block for each row of the batch and head, one thread for each row of the state.
template <bool delta, bool columns, class Plan>
__global__ void __launch_bounds__(generic::kMaxDim)
    verify_kernel(const __grid_constant__ generic::Problem in, const __grid_constant__ Plan plan) {
  __shared__ generic::Token token;
  const std::int64_t heads = in.step.shape.heads, row = blockIdx.x / heads;
  generic::Place at;
  generic::Tokens tokens;
  if (!generic::find_window(in.step, plan, row, blockIdx.x % heads, at, tokens) || tokens.count == 0) return;
  const int lane = static_cast<int>(threadIdx.x), lanes = static_cast<int>(blockDim.x);
  const bool works = lane < in.step.shape.head_dim;
  float s[generic::kMaxDim];
  // Nobody reads a record that is being appended: those of the window lie behind those that others may be folding.
  if (works) generic::begin_row<delta, columns>(in, plan, at, lane, s);
  generic::begin_records(plan, at);
  for (std::int64_t t = 0; t < tokens.count; ++t) {
    at.row = tokens.first + t;
    __syncthreads();  // all are done with the token before
    generic::prepare<delta, columns>(in, at, lane, lanes, token);
    __syncthreads();
    if (works) generic::token_row<delta, columns>(in, plan, row, t, at, token, lane, s);
    generic::token_head<delta, columns>(in, plan, at, token, lane, lanes);
  }
}

template <bool delta, bool columns, class Plan>
cudaError_t launch_instance(const generic::Problem& in, const Plan& plan, cudaStream_t stream) {
  const auto threads = static_cast<int>((in.step.shape.head_dim + 31) / 32 * 32);
  return launch(verify_kernel<delta, columns, Plan>, in.step.rows * in.step.shape.heads, threads, 0, stream, false, in,
                plan);
}

template <class Plan>
cudaError_t launch_plan(const Mamba2Step& step, const Plan& plan, cudaStream_t stream) {
  return launch_instance<false, false>(generic::problem(step), plan, stream);
}

template <class Plan>
cudaError_t launch_plan(const DeltaStep& step, const Plan& plan, cudaStream_t stream) {
  return has_column_decay(step.shape.recurrence) ? launch_instance<true, true>(generic::problem(step), plan, stream)
                                                 : launch_instance<true, false>(generic::problem(step), plan, stream);
}

/// One thread a row of the batch.
template <class SlotType, class Plan>
__global__ void commit_kernel(std::int64_t rows, std::int64_t slots, SlotType* slot, const __grid_constant__ Plan plan,
                              const std::int32_t* accepted, std::int32_t* refused) {
  const std::int64_t row = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  if (!generic::commit_row(slots, slot, plan, accepted, row) && refused) atomicAdd(refused, 1);
}

__global__ void roll_back_kernel(std::int64_t rows, std::int64_t slots, const std::int32_t* slot,
                                 const __grid_constant__ Window window, const std::int32_t* tokens,
                                 std::int32_t* refused) {
  const std::int64_t row = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  if (!generic::roll_back_row(slots, slot, window, tokens, row) && refused) atomicAdd(refused, 1);
}

/// One thread a row of the batch and channel.
__global__ void convolution_kernel(std::int64_t rows, std::int64_t slots, const std::int32_t* slot,
                                   const __grid_constant__ Drafts drafts,
                                   const __grid_constant__ ConvolutionWindow window,
                                   const __grid_constant__ Activations x, const std::int32_t* accepted) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x, row = i / window.channels;
  if (row < rows) generic::commit_channel(slots, slot, drafts, window, x, accepted, row, i % window.channels);
}

std::int64_t blocks_of(std::int64_t threads) { return (threads + kThreads - 1) / kThreads; }

}  // namespace

cudaError_t launch_verify(const Mamba2Step& step, const Window& window, cudaStream_t stream) {
  return launch_plan(step, window, stream);
}
cudaError_t launch_verify(const DeltaStep& step, const Window& window, cudaStream_t stream) {
  return launch_plan(step, window, stream);
}
cudaError_t launch_verify(const Mamba2Step& step, const Snapshots& snapshots, cudaStream_t stream) {
  return launch_plan(step, snapshots, stream);
}
cudaError_t launch_verify(const DeltaStep& step, const Snapshots& snapshots, cudaStream_t stream) {
  return launch_plan(step, snapshots, stream);
}

cudaError_t launch_commit(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const Window& window,
                          const std::int32_t* accepted, std::int32_t* refused, cudaStream_t stream) {
  return launch(commit_kernel<const std::int32_t, Window>, blocks_of(rows), kThreads, 0, stream, false, rows, slots,
                slot, window, accepted, refused);
}
cudaError_t launch_commit(std::int64_t rows, std::int64_t slots, std::int32_t* slot, const Snapshots& snapshots,
                          const std::int32_t* accepted, std::int32_t* refused, cudaStream_t stream) {
  return launch(commit_kernel<std::int32_t, Snapshots>, blocks_of(rows), kThreads, 0, stream, false, rows, slots, slot,
                snapshots, accepted, refused);
}
cudaError_t launch_roll_back(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const Window& window,
                             const std::int32_t* tokens, std::int32_t* refused, cudaStream_t stream) {
  return launch(roll_back_kernel, blocks_of(rows), kThreads, 0, stream, false, rows, slots, slot, window, tokens,
                refused);
}
cudaError_t launch_commit(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const Drafts& drafts,
                          const ConvolutionWindow& window, const Activations& x, const std::int32_t* accepted,
                          cudaStream_t stream) {
  return launch(convolution_kernel, blocks_of(rows * window.channels), kThreads, 0, stream, false, rows, slots, slot,
                drafts, window, x, accepted);
}

}  // namespace replayssm::cuda
