#pragma once

// Launching a kernel so that its own error comes back, not one that was left before.

#include <cuda_runtime.h>

#include <cstdint>

namespace replayssm::cuda {

/// `early`: the kernel may start before the one ahead of it in the stream is done, and waits for it by itself.
template <class... Parameters, class... Given>
cudaError_t launch(void (*kernel)(Parameters...), std::int64_t blocks, int threads, std::size_t shared_bytes,
                   cudaStream_t stream, bool early, const Given&... given) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = early ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, Parameters(given)...);
  if (error != cudaSuccess) cudaGetLastError();  // it is told here
  return error;
}

}  // namespace replayssm::cuda
