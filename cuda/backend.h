#pragma once

// Recurrences of a policy on the decode kernels, everything else on the CPU: what the kernels make of a model's layers
// beside what the reference makes of them. No CUDA header is needed.

#include <cstddef>
#include <memory>

#include "core/backend.h"
#include "cuda/decode.h"

namespace replayssm::cuda {

/// Where decode steps run, and its memory. All calls are done in the order in which they are made; several threads may
/// call at once.
class StepDevice {
 public:
  virtual ~StepDevice() = default;
  /// Memory aligned to 256 bytes, all of it zero. Throws Error where there is none left.
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void release(void* there) noexcept = 0;
  virtual void write(void* there, const void* here, std::size_t bytes) = 0;
  /// Waits for the steps before it, and throws Error where one of them failed.
  virtual void read(void* here, const void* there, std::size_t bytes) = 0;
  /// May return before the step is done.
  virtual void decode(const Mamba2Step& step) = 0;
  virtual void decode(const DeltaStep& step) = 0;
};

/// The current CUDA device. Throws Error where this build has no kernels or the machine no device that runs them.
std::shared_ptr<StepDevice> gpu(Kernel kernel = Kernel::automatic);

/// Throws Error, naming what the kernels do not know, for a policy that backend() would refuse for such a layer.
void check_policy(const RecurrenceShape& shape, const Policy& policy);

/// A backend that advances the states of policies with decode steps and leaves every other operation to `host`.
///
/// An eager state that is never rounded (the reference, and layers that a policy does not cover) stays with `host`. For
/// any other policy new_state() makes one slot on the device: state or anchor, read copy and ring in the formats of the
/// policy, fields of the ring that it leaves exact in fp32. In a closed loop the cached u, which the reference leaves
/// unrounded, is kept in the ring's format. advance() puts the raw inputs of all its tokens on the device, each rounded
/// once to `activations`, makes one decode step a token and takes y back, rounded once to `activations`; arithmetic is
/// that of decode(), in fp32. Results do not depend on how the tokens are cut into calls.
///
/// Of such a state, checkpoint() and read_copy() are what the kernels read, code times scale rounded to fp32;
/// effective() is what a flush behind the last token would rebuild from it and the records, in binary64. events()
/// counts no overflows, which stay on the device; its first_non_finite is the first output, or else the state at the
/// end, that is not finite: a stored state that is not is found in the output that reads it next.
///
/// new_state() throws what check_policy() throws; advance() throws Error for a state of another backend and for what
/// decode() refuses.
std::unique_ptr<Backend> backend(std::unique_ptr<Backend> host, std::shared_ptr<StepDevice> device,
                                 Scalar activations = Scalar::fp32);

}  // namespace replayssm::cuda
