#pragma once

// The kernels behind decode(), private to cuda/: decode.cpp checks a step, chooses and launches.

#include <cuda_runtime_api.h>

#include "cuda/decode.h"

namespace replayssm::cuda {

/// Whether the fast kernels serve this step.
bool fast(const Mamba2Step& step);
bool fast(const DeltaStep& step);

/// Launch; the step has been checked and has at least one row.
cudaError_t launch_fast(const Mamba2Step& step, cudaStream_t stream);
cudaError_t launch_fast(const DeltaStep& step, cudaStream_t stream);
cudaError_t launch_generic(const Mamba2Step& step, cudaStream_t stream);
cudaError_t launch_generic(const DeltaStep& step, cudaStream_t stream);

}  // namespace replayssm::cuda
