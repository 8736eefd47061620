// Fast decode kernels of KDA.

#include "cuda/launch_fast.cuh"

namespace replayssm::cuda {

void launch_fast_kda(const DeltaStep& step, cudaStream_t stream);

void launch_fast_kda(const DeltaStep& step, cudaStream_t stream) { launch_recurrence<Recurrence::kda>(step, stream); }

}  // namespace replayssm::cuda
