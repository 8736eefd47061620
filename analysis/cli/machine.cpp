#include <thread>

#include "analysis/cli/cli.h"
#include "core/error.h"
#include "cuda/backend.h"

namespace replayssm::cli {

void Machine::add_threads(CLI::App& app) {
  threads = static_cast<int>(std::thread::hardware_concurrency());
  app.add_option("--threads", threads, "Threads; results do not depend on them")->check(CLI::Range(1, 1024));
}

void Machine::add_device(CLI::App& app) {
  app.add_option("--device", device, "Where the states of policies are advanced: cpu, or cuda for the decode kernels")
      ->check(CLI::IsMember({"cpu", "cuda"}));
}

void Machine::add_activations(CLI::App& app) {
  app.add_option("--activations", activations,
                 "With --device cuda: what the kernels are fed and write y in: fp32 (the default), fp16 or bf16")
      ->check(CLI::IsMember({"fp32", "fp16", "bf16"}));
}

void Machine::add_to(CLI::App& app) {
  add_threads(app);
  add_device(app);
  app.add_option("--precision", precision, "Precision of everything, the reference included: fp64 or fp32")
      ->check(CLI::IsMember({"fp64", "fp32"}));
}

std::string Machine::fed() const {
  if (device == "cpu") return "";
  return activations.empty() ? "fp32" : activations;
}

std::unique_ptr<Backend> Machine::reference() const {
  return reference_backend(precision == "fp32" ? Precision::fp32 : Precision::fp64, threads);
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
