#pragma once

// What the host code and the kernels of cuda/ share besides the decode kernels; private to cuda/.

#include <cstdint>

struct CUstream_st;

namespace replayssm::cuda {

/// Throws Error for what CUDA holds against the last launch.
void throw_launch_error(const char* what);

/// The kernel of advance_cursors(); rows is at least 1.
void launch_advance_cursors(std::int64_t rows, const std::int32_t* slot, std::int32_t* held, std::int64_t length,
                            CUstream_st* stream);

/// Whether this build's kernels can run on the current device.
bool has_code_for_device();

}  // namespace replayssm::cuda
