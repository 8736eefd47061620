// Fast decode kernels of KDA.

#include "cuda/launch_fast.cuh"

namespace replayssm::cuda {

cudaError_t launch_fast_kda(const DeltaStep& step, cudaStream_t stream);

cudaError_t launch_fast_kda(const DeltaStep& step, cudaStream_t stream) {
  return launch_recurrence<Recurrence::kda>(step, stream);
}

}  // namespace replayssm::cuda
