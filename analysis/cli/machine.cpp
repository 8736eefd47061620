#include "analysis/cli/machine.h"

#include <algorithm>
#include <thread>

#include "core/error.h"
#include "cuda/backend.h"

namespace replayssm::cli {

int Machine::default_threads() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

std::string Machine::fed() const {
  if (device == "cpu") return "";
  return activations.empty() ? "fp32" : activations;
}

std::unique_ptr<Backend> Machine::reference() const {
  return reference_backend(precision == "fp32" ? Precision::fp32 : Precision::fp64, threads, products);
}

std::unique_ptr<Backend> Machine::backend(const Model& model, const std::vector<Policy>& policies) const {
  if (device == "cpu") {
    if (!activations.empty()) fail("--activations ", activations, ": needs --device cuda");
    return reference();
  }
  if (!cuda::available()) {
    fail("--device cuda: this build has no CUDA kernels, or this machine no device that they run on");
  }
  for (const Policy& policy : policies) {
    for (std::int64_t i = 0; i < std::ssize(model.layers()); ++i) {
      const auto& shape = model.layers()[static_cast<std::size_t>(i)].recurrence;
      if (shape && policy.covers(i)) cuda::check_policy(*shape, policy);
    }
  }
  const std::string type = fed();
  const cuda::Scalar scalar = type == "fp16"   ? cuda::Scalar::fp16
                              : type == "bf16" ? cuda::Scalar::bf16
                                               : cuda::Scalar::fp32;
  return cuda::backend(reference(), cuda::gpu(), scalar);
}

}  // namespace replayssm::cli
