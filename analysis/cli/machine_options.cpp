#include "analysis/cli/cli.h"

namespace replayssm::cli {

void MachineOptions::add_threads(CLI::App& app) {
  app.add_option("--threads", threads, "Threads; results do not depend on them")->check(CLI::Range(1, 1024));
}

void MachineOptions::add_device(CLI::App& app) {
  app.add_option("--device", device, "Where the states of policies are advanced: cpu, or cuda for the decode kernels")
      ->check(CLI::IsMember({"cpu", "cuda"}));
}

void MachineOptions::add_activations(CLI::App& app) {
  app.add_option("--activations", activations,
                 "With --device cuda: what the kernels are fed and write y in: fp32 (the default), fp16 or bf16")
      ->check(CLI::IsMember({"fp32", "fp16", "bf16"}));
}

void MachineOptions::add_precision(CLI::App& app) {
  app.add_option("--precision", precision, "Precision of everything, the reference included: fp64 or fp32")
      ->check(CLI::IsMember({"fp64", "fp32"}));
}

void MachineOptions::add_to(CLI::App& app) {
  add_threads(app);
  add_device(app);
  add_precision(app);
}

}  // namespace replayssm::cli
