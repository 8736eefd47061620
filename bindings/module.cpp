#include <pybind11/pybind11.h>

#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "core/error.h"
#include "core/version.h"
#include "cuda/backend.h"

namespace replayssm::python {

std::string shape_text(const Shape& shape) {
  std::string text;
  for (const py::ssize_t n : shape) text += (text.empty() ? "" : ", ") + std::to_string(n);
  return "[" + text + "]";
}

std::string describe(const py::array& array) {
  std::string text =
      std::string(py::str(array.dtype())) + " " + shape_text(Shape(array.shape(), array.shape() + array.ndim()));
  if (!(array.flags() & py::array::c_style)) text += ", not C-contiguous";
  if (!(array.flags() & aligned)) text += ", not aligned";
  if (!array.writeable()) text += ", read-only";
  return text;
}

void require_shape(const py::array& array, const char* name, const Shape& shape) {
  if (Shape(array.shape(), array.shape() + array.ndim()) == shape) return;
  fail(name, ": expected the shape ", shape_text(shape), ", found ", describe(array));
}

bool signalled() {
  const py::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

void throw_interrupted() {
  if (PyErr_Occurred()) throw py::error_already_set();
  PyErr_SetNone(PyExc_KeyboardInterrupt);
  throw py::error_already_set();
}

}  // namespace replayssm::python

PYBIND11_MODULE(_core, module) {
  using namespace replayssm;
  module.doc() =
      "What the package calls in C++. Private: use the names of replayssm, which say what they take and give.";
  module.attr("__version__") = version();
  pybind11::register_exception<Error>(module, "Error", PyExc_ValueError).attr("__doc__") =
      "Bad input: a file, tensor, option or value that cannot be used. One line that names it, says what was expected "
      "and what was found.";
  module.def("build_description", &build_description);
  module.def("git_revision", &git_revision);
  module.def("cuda_available", &cuda::available);
  python::bind_formats(module);
  python::bind_policies(module);
  python::bind_states(module);
  python::bind_models(module);
  python::bind_studies(module);
}
