// Fast decode kernels of Mamba-2.

#include "cuda/launch_fast.cuh"

namespace replayssm::cuda {

bool fast(const Mamba2Step& step) { return serves(step); }

void launch_fast(const Mamba2Step& step, CUstream_st* stream) { launch_recurrence<Recurrence::mamba2>(step, stream); }

}  // namespace replayssm::cuda
