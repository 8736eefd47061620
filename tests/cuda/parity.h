#pragma once

#include "tests/cuda/layer.h"

namespace replayssm::cuda::tests {

/// Runs random tokens and holds every step against the oracle, from what was stored before it: outputs, records,
/// states, and that nothing else was written. Does nothing where the machine has no kernel for the setup; says whether
/// it had.
bool CheckParity(Machine& machine, const Case& setup, int tokens);

}  // namespace replayssm::cuda::tests
