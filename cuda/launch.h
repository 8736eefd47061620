#pragma once

// What the host code and the kernels of cuda/ share besides the decode kernels; private to cuda/.

#include <cuda_runtime_api.h>

#include <cstdint>

namespace replayssm::cuda {

/// Throws Error, unless a launch succeeded.
void check_launch(cudaError_t error, const char* what);

/// The kernel of advance_cursors(); rows is at least 1.
cudaError_t launch_advance_cursors(std::int64_t rows, const std::int32_t* slot, std::int32_t* held, std::int64_t length,
                                   cudaStream_t stream);

/// Whether this build's kernels can run on the current device.
bool has_code_for_device();

}  // namespace replayssm::cuda
