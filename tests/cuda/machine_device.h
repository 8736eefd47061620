#pragma once

// A machine of the test program behind the backend of the decode kernels.

#include <memory>
#include <vector>

#include "cuda/backend.h"
#include "tests/cuda/machine.h"

namespace replayssm::cuda::tests {

/// Thrown where a machine has no kernel for a step.
struct NotServed {};

/// A machine of the test program as the backend wants it.
class MachineDevice : public StepDevice {
 public:
  explicit MachineDevice(Machine& machine) : machine_(machine) {}
  void* allocate(std::size_t bytes) override {
    void* there = machine_.allocate(bytes);
    machine_.write(there, std::vector<char>(bytes, 0).data(), bytes);
    return there;
  }
  void release(void* there) noexcept override { machine_.release(there); }
  void write(void* there, const void* here, std::size_t bytes) override { machine_.write(there, here, bytes); }
  void read(void* here, const void* there, std::size_t bytes) override { machine_.read(here, there, bytes); }
  void decode(const Mamba2Step& step) override { run(step); }
  void decode(const DeltaStep& step) override { run(step); }

 private:
  template <class AnyStep>
  void run(const AnyStep& step) {
    if (!machine_.serves(step)) throw NotServed();
    machine_.decode(step);
  }
  Machine& machine_;
};

inline std::unique_ptr<Backend> Reference(Precision precision = Precision::fp64) {
  return reference_backend(precision, 1);
}
inline std::unique_ptr<Backend> Kernels(Machine& machine, Scalar activations = Scalar::fp32) {
  return backend(Reference(), std::make_shared<MachineDevice>(machine), activations);
}

}  // namespace replayssm::cuda::tests
