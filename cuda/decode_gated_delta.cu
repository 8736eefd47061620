// Fast decode kernels of Gated DeltaNet.

#include "cuda/launch_fast.cuh"

namespace replayssm::cuda {

cudaError_t launch_fast_kda(const DeltaStep& step, cudaStream_t stream);  // decode_kda.cu

bool fast(const DeltaStep& step) { return serves(step); }

cudaError_t launch_fast(const DeltaStep& step, cudaStream_t stream) {
  if (step.shape.recurrence == Recurrence::kda) return launch_fast_kda(step, stream);
  return launch_recurrence<Recurrence::gated_delta>(step, stream);
}

}  // namespace replayssm::cuda
