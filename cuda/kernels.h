#pragma once

// The kernels behind decode(), private to cuda/: decode.cpp checks a step, chooses and launches.

#include "cuda/decode.h"

namespace replayssm::cuda {

/// Whether the fast kernels serve this step.
bool fast(const Mamba2Step& step);
bool fast(const DeltaStep& step);

/// Launch; the step has been checked and has at least one row. CUDA's error is left in cudaGetLastError().
void launch_fast(const Mamba2Step& step, CUstream_st* stream);
void launch_fast(const DeltaStep& step, CUstream_st* stream);
void launch_generic(const Mamba2Step& step, CUstream_st* stream);
void launch_generic(const DeltaStep& step, CUstream_st* stream);

}  // namespace replayssm::cuda
