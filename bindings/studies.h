#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "analysis/study.h"

namespace replayssm::python {

/// The figures of every token, [sequences, length] each.
pybind11::dict token_arrays(const PolicyResult& result, std::int64_t sequences);

}  // namespace replayssm::python
