#pragma once

#include <pybind11/pybind11.h>

#include <functional>

namespace replayssm::python {

namespace py = pybind11;

// Each adds its classes and functions to the module; their docstrings are those of the Python package.
void bind_formats(py::module_& module);
void bind_policies(py::module_& module);
void bind_states(py::module_& module);
void bind_models(py::module_& module);
void bind_studies(py::module_& module);

/// Whether Ctrl-C was pressed, or another signal's handler raised; to be called without the GIL. The Python error stays
/// set, for throw_interrupted().
bool signalled();
/// Throws the Python error that signalled() found.
[[noreturn]] void throw_interrupted();

}  // namespace replayssm::python
