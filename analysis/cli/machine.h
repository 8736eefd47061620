#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/backend.h"
#include "core/model.h"

namespace replayssm::cli {

/// Where to compute, and in what. Knows no command line: Python chooses with it too.
struct Machine {
  int threads = default_threads();
  std::string device = "cpu", precision = "fp64";
  std::string activations;  ///< of the decode kernels; empty where not given
  Products products = Products::many_tokens;

  /// As many as the machine runs at once.
  static int default_threads();
  /// What the decode kernels are fed and write y in: fp32 where not given, empty where they are not used.
  std::string fed() const;
  /// The reference on the CPU.
  std::unique_ptr<Backend> reference() const;
  /// The same or, with device cuda, with the decode kernels for the states of policies. Throws Error for a policy
  /// that they do not know, where there are no kernels, and for activations without them.
  std::unique_ptr<Backend> backend(const Model& model, const std::vector<Policy>& policies) const;
};

}  // namespace replayssm::cli
