#pragma once

// The kernels behind decode() and verify(), private to cuda/: decode.cpp and speculate.cpp check a step, choose and
// launch.

#include <cuda_runtime_api.h>

#include <atomic>

#include "cuda/speculate.h"

namespace replayssm::cuda {

/// Whether the fast kernels serve this step.
bool fast(const Mamba2Step& step);
bool fast(const DeltaStep& step);

/// Blocks that the fast kernels run on at most, so that tests can have one take many tiles of few; 0: as many as fit.
inline std::atomic<int> most_blocks = 0;

/// Launch; the step has been checked and has at least one row.
cudaError_t launch_fast(const Mamba2Step& step, cudaStream_t stream);
cudaError_t launch_fast(const DeltaStep& step, cudaStream_t stream);
cudaError_t launch_generic(const Mamba2Step& step, cudaStream_t stream);
cudaError_t launch_generic(const DeltaStep& step, cudaStream_t stream);
cudaError_t launch_verify(const Mamba2Step& step, const Window& window, cudaStream_t stream);
cudaError_t launch_verify(const DeltaStep& step, const Window& window, cudaStream_t stream);
cudaError_t launch_verify(const Mamba2Step& step, const Snapshots& snapshots, cudaStream_t stream);
cudaError_t launch_verify(const DeltaStep& step, const Snapshots& snapshots, cudaStream_t stream);

/// The kernels that move cursors, slots and windows of convolutions on; rows is at least 1.
cudaError_t launch_commit(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const Window& window,
                          const std::int32_t* accepted, std::int32_t* refused, cudaStream_t stream);
cudaError_t launch_commit(std::int64_t rows, std::int64_t slots, std::int32_t* slot, const Snapshots& snapshots,
                          const std::int32_t* accepted, std::int32_t* refused, cudaStream_t stream);
cudaError_t launch_commit(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const Drafts& drafts,
                          const ConvolutionWindow& window, const Activations& x, const std::int32_t* accepted,
                          cudaStream_t stream);
cudaError_t launch_roll_back(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const Window& window,
                             const std::int32_t* tokens, std::int32_t* refused, cudaStream_t stream);

}  // namespace replayssm::cuda
