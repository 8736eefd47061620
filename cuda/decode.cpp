// The public functions: a step is checked, a kernel chosen and launched.

#include "cuda/decode.h"

#include <cuda_runtime_api.h>

#include "core/error.h"
#include "cuda/check.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace replayssm::cuda {

void check_launch(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    fail(what, ": the launch failed: ", cudaGetErrorName(error), ": ", cudaGetErrorString(error));
  }
}

namespace {

template <class AnyStep>
void run(const AnyStep& step, CUstream_st* stream, Kernel kernel) {
  check(step);
  const bool fast_one = kernel != Kernel::generic && fast(step);
  if (kernel == Kernel::fast && !fast_one) {
    fail("kernel: expected a shape, types and alignment that the fast kernels serve, found ",
         name(step.shape.recurrence), " of head_dim ", step.shape.head_dim, ", state_dim ", step.shape.state_dim);
  }
  if (step.rows == 0) return;
  check_launch(fast_one ? launch_fast(step, stream) : launch_generic(step, stream), "decode");
}

}  // namespace

void decode(const Mamba2Step& step, CUstream_st* stream, Kernel kernel) { run(step, stream, kernel); }
void decode(const DeltaStep& step, CUstream_st* stream, Kernel kernel) { run(step, stream, kernel); }

void advance_cursors(std::int64_t rows, const std::int32_t* slot, std::int32_t* held, std::int64_t length,
                     CUstream_st* stream) {
  check_cursors(rows, slot, held, length);
  if (rows == 0) return;
  check_launch(launch_advance_cursors(rows, slot, held, length, stream), "advance_cursors");
}

bool available() {
  int devices = 0;
  const bool runs = cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0 && has_code_for_device();
  cudaGetLastError();  // no device is an answer, not a failure of the next call
  return runs;
}

}  // namespace replayssm::cuda
