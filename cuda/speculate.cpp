// The public functions of speculative decoding: arguments are checked, a kernel is launched.

#include "cuda/speculate.h"

#include "core/error.h"
#include "cuda/check.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace replayssm::cuda {
namespace {

template <class AnyStep, class Plan>
void run(const AnyStep& step, const Plan& plan, CUstream_st* stream, Kernel kernel) {
  check(step, plan);
  if (kernel == Kernel::fast) fail("kernel: expected automatic or generic: there is no fast one that verifies");
  if (step.rows == 0) return;
  check_launch(launch_verify(step, plan, stream), "verify");
}

}  // namespace

void verify(const Mamba2Step& step, const Window& window, CUstream_st* stream, Kernel kernel) {
  run(step, window, stream, kernel);
}
void verify(const DeltaStep& step, const Window& window, CUstream_st* stream, Kernel kernel) {
  run(step, window, stream, kernel);
}
void verify(const Mamba2Step& step, const Snapshots& snapshots, CUstream_st* stream, Kernel kernel) {
  run(step, snapshots, stream, kernel);
}
void verify(const DeltaStep& step, const Snapshots& snapshots, CUstream_st* stream, Kernel kernel) {
  run(step, snapshots, stream, kernel);
}

void commit(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const Window& window,
            const std::int32_t* accepted, std::int32_t* refused, CUstream_st* stream) {
  check_commit(rows, slots, slot, window, "accepted", accepted, refused);
  if (rows == 0) return;
  check_launch(launch_commit(rows, slots, slot, window, accepted, refused, stream), "commit");
}

void roll_back(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const Window& window,
               const std::int32_t* tokens, std::int32_t* refused, CUstream_st* stream) {
  check_commit(rows, slots, slot, window, "tokens", tokens, refused);
  if (rows == 0) return;
  check_launch(launch_roll_back(rows, slots, slot, window, tokens, refused, stream), "roll_back");
}

void commit(std::int64_t rows, std::int64_t slots, std::int32_t* slot, const Snapshots& snapshots,
            const std::int32_t* accepted, std::int32_t* refused, CUstream_st* stream) {
  check_commit(rows, slots, slot, snapshots, accepted, refused);
  if (rows == 0) return;
  check_launch(launch_commit(rows, slots, slot, snapshots, accepted, refused, stream), "commit");
}

void commit_convolution(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const Drafts& drafts,
                        const ConvolutionWindow& window, const Activations& x, const std::int32_t* accepted,
                        CUstream_st* stream) {
  check_commit(rows, slots, slot, drafts, window, x, accepted);
  if (rows == 0) return;
  check_launch(launch_commit(rows, slots, slot, drafts, window, x, accepted, stream), "commit_convolution");
}

}  // namespace replayssm::cuda
