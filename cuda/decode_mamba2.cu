// Fast decode kernels of Mamba-2.

#include "cuda/launch_fast.cuh"

namespace replayssm::cuda {

bool fast(const Mamba2Step& step) { return serves(step); }

cudaError_t launch_fast(const Mamba2Step& step, cudaStream_t stream) {
  return launch_recurrence<Recurrence::mamba2>(step, stream);
}

}  // namespace replayssm::cuda
