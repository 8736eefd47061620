#pragma once

// What the bindings ask of an array, and arrays that own what C++ made.

#include <pybind11/numpy.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

namespace replayssm::python {

namespace py = pybind11;
using Shape = std::vector<py::ssize_t>;

// Flags of an array that pybind11 has no public name for.
inline constexpr int aligned = 0x0100, writeable = 0x0400;

std::string shape_text(const Shape& shape);
/// dtype, shape and layout for messages: "float64 [2, 3], not C-contiguous".
std::string describe(const py::array& array);

/// Throws py::type_error naming `name` unless the array is of the native dtype T, aligned and C-contiguous, and, where
/// it is to be written, writable: nothing is ever copied behind the caller's back.
template <class T>
void require(const py::array& array, const char* name, bool writable = false) {
  const bool same = py::isinstance<py::array_t<T>>(array);  // the native byte order is part of the type
  const int wanted = py::array::c_style | aligned | (writable ? writeable : 0);
  if (same && (array.flags() & wanted) == wanted) return;
  throw py::type_error(std::string(name) + ": expected a C-contiguous " + (writable ? "writable " : "") + "array of " +
                       std::string(py::str(py::dtype::of<T>())) + ", found " + describe(array));
}

/// Throws Error naming `name` unless the array has that shape.
void require_shape(const py::array& array, const char* name, const Shape& shape);

/// The elements of an array that require() lets through.
template <class T>
const T* data_of(const py::array& array) {
  return static_cast<const T*>(array.data());
}
template <class T>
T* mutable_data_of(py::array& array) {
  return static_cast<T*>(array.mutable_data());
}

/// An array that owns the values; nothing is copied.
template <class T>
py::array owned(std::vector<T> values, const Shape& shape) {
  auto* kept = new std::vector<T>(std::move(values));
  const py::capsule owner(kept, [](void* p) { delete static_cast<std::vector<T>*>(p); });
  return py::array_t<T>(shape, kept->data(), owner);
}

/// Calls use(T()) with T float or double, the type of the elements of `array`; throws py::type_error for another one.
template <class Use>
auto with_real(const py::array& array, const char* name, Use&& use) {
  if (py::isinstance<py::array_t<float>>(array)) return use(float());
  if (py::isinstance<py::array_t<double>>(array)) return use(double());
  throw py::type_error(std::string(name) + ": expected a C-contiguous array of float32 or float64, found " +
                       describe(array));
}

}  // namespace replayssm::python
