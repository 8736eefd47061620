#include <pybind11/stl.h>

#include <cmath>
#include <limits>
#include <optional>

#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "core/error.h"
#include "core/format.h"

namespace replayssm::python {
namespace {

const char* name(Scale scale) {
  switch (scale) {
    case Scale::none:
      return "none";
    case Scale::row:
      return "row";
    case Scale::group:
      return "group";
    case Scale::tile:
      return "tile";
    case Scale::head:
      return "head";
    case Scale::tensor:
      break;
  }
  return "tensor";
}

const char* name(ScaleRule rule) {
  switch (rule) {
    case ScaleRule::amax:
      return "amax";
    case ScaleRule::floor:
      return "floor";
    case ScaleRule::ceil:
      return "ceil";
    case ScaleRule::nvfp4:
      break;
  }
  return "nvfp4";
}

const char* name(Rounding rounding) {
  switch (rounding) {
    case Rounding::nearest:
      return "nearest";
    case Rounding::toward_zero:
      return "toward_zero";
    case Rounding::stochastic:
      break;
  }
  return "stochastic";
}

/// What lies where: heads of `rows` rows of n elements, each head with its scales.
struct Heads {
  std::int64_t heads, rows, n;
};

/// The heads of an array [heads, rows, n].
Heads heads_of(const py::array& array, const char* name) {
  if (array.ndim() != 3) fail(name, ": expected the shape [heads, rows, n], found ", describe(array));
  return {array.shape(0), array.shape(1), array.shape(2)};
}

Draw draw_of(const StatePlace& place, std::uint32_t token, std::int64_t head) {
  return {.place = place, .token = token, .head = static_cast<std::uint32_t>(head)};
}

void check_heads(const Format& format, std::int64_t heads) {
  if (format.rounding == Rounding::stochastic && heads > 65536) {
    fail("stochastic rounding: expected at most 65536 heads, whose index a draw counts, found ", heads);
  }
}

/// What all heads of a tensor share their scale by; none where each has scales of its own.
template <class Real>
std::optional<Extremes<Real>> shared(const Format& format, const Real* data, const Heads& at) {
  if (format.scale != Scale::tensor) return {};
  Extremes<Real> all;
  for (std::int64_t h = 0; h < at.heads; ++h) {
    all.join(extremes(format, data + h * at.rows * at.n, at.rows, at.n));
  }
  return all;
}

py::tuple round_in_place(const Format& format, py::array array, const StatePlace& place, std::uint32_t token) {
  return with_real(array, "array", [&]<class Real>(Real) {
    require<Real>(array, "array", true);
    const Heads at = heads_of(array, "array");
    check_heads(format, at.heads);
    Real* data = mutable_data_of<Real>(array);
    RangeLoss lost;
    {
      const py::gil_scoped_release release;
      const auto all = shared(format, data, at);
      for (std::int64_t h = 0; h < at.heads; ++h) {
        lost += round_rows(format, data + h * at.rows * at.n, at.rows, at.n, draw_of(place, token, h),
                           all ? &*all : nullptr);
      }
    }
    return py::make_tuple(lost.overflows, lost.saturations);
  });
}

void check_bytes(const Format& format, const Heads& at, const py::array& codes, const py::array& scales) {
  if (format.exact()) fail("format 'exact': a double as it is has no codes");
  require_shape(codes, "codes", {at.heads, at.rows, format.code_bytes(at.n)});
  require_shape(scales, "scales", {at.heads, format.scale_bytes(at.rows, at.n)});
}

void encode_into(const Format& format, const py::array& array, py::array codes, py::array scales,
                 const StatePlace& place, std::uint32_t token) {
  with_real(array, "array", [&]<class Real>(Real) {
    require<Real>(array, "array");
    require<std::uint8_t>(codes, "codes", true);
    require<std::uint8_t>(scales, "scales", true);
    const Heads at = heads_of(array, "array");
    check_heads(format, at.heads);
    check_bytes(format, at, codes, scales);
    const Real* data = data_of<Real>(array);
    auto* code = reinterpret_cast<std::byte*>(mutable_data_of<std::uint8_t>(codes));
    std::uint8_t* scale = mutable_data_of<std::uint8_t>(scales);
    const py::gil_scoped_release release;
    const auto all = shared(format, data, at);
    for (std::int64_t h = 0; h < at.heads; ++h) {
      encode_rows(format, data + h * at.rows * at.n, at.rows, at.n, code + h * at.rows * format.code_bytes(at.n),
                  scale + h * format.scale_bytes(at.rows, at.n), draw_of(place, token, h), all ? &*all : nullptr);
    }
  });
}

void decode_into(const Format& format, const py::array& codes, const py::array& scales, py::array array) {
  with_real(array, "array", [&]<class Real>(Real) {
    require<Real>(array, "array", true);
    require<std::uint8_t>(codes, "codes");
    require<std::uint8_t>(scales, "scales");
    const Heads at = heads_of(array, "array");
    check_bytes(format, at, codes, scales);
    Real* data = mutable_data_of<Real>(array);
    const auto* code = reinterpret_cast<const std::byte*>(data_of<std::uint8_t>(codes));
    const std::uint8_t* scale = data_of<std::uint8_t>(scales);
    const py::gil_scoped_release release;
    for (std::int64_t h = 0; h < at.heads; ++h) {
      decode_rows(format, code + h * at.rows * format.code_bytes(at.n), scale + h * format.scale_bytes(at.rows, at.n),
                  at.rows, at.n, data + h * at.rows * at.n);
    }
  });
}

std::vector<std::string> format_names() {
  std::vector<std::string> names = {"exact"};
  for (const Element& element : elements()) names.emplace_back(element.name);
  for (const NamedFormat& named : named_formats()) names.emplace_back(named.name);
  return names;
}

std::int64_t head_scale_bytes(const Format& f) { return f.head_scale_width(); }

}  // namespace

void bind_formats(py::module_& module) {
  py::class_<StatePlace>(module, "StatePlace")
      .def(py::init([](std::uint64_t seed, std::uint32_t slot, std::uint32_t layer) {
             if (layer >= 65536) fail("layer: expected a number below 65536, found ", layer);
             return StatePlace{seed, slot, layer};
           }),
           py::arg("seed") = 0, py::arg("slot") = 0, py::arg("layer") = 0);
  py::class_<Format>(module, "Format")
      .def(py::init([](const std::string& text) { return parse_format(text); }), py::arg("text"))
      .def_property_readonly("text", &Format::text)
      .def_property_readonly("exact", &Format::exact)
      .def_property_readonly("element", [](const Format& f) { return std::string(f.element.name); })
      .def_property_readonly("bits", [](const Format& f) { return f.element.bits(); })
      .def_property_readonly("storage_bits", [](const Format& f) { return f.element.storage_bits; })
      .def_property_readonly("exponent_bits", [](const Format& f) { return f.element.exponent_bits; })
      .def_property_readonly("mantissa_bits", [](const Format& f) { return f.element.mantissa_bits; })
      .def_property_readonly("integer", [](const Format& f) { return f.element.integer; })
      .def_property_readonly("largest",
                             [](const Format& f) {
                               return f.exact() ? std::numeric_limits<double>::max()
                                                : decode<double>(f.element, f.element.max_code);
                             })
      .def_property_readonly("scale", [](const Format& f) { return name(f.scale); })
      .def_property_readonly("rule", [](const Format& f) { return f.scale == Scale::none ? "none" : name(f.rule); })
      .def_property_readonly("extent", [](const Format& f) { return f.extent; })
      .def_property_readonly("rounding", [](const Format& f) { return name(f.rounding); })
      .def_property_readonly("random_bits", [](const Format& f) { return f.random_bits; })
      .def_property_readonly("hadamard", [](const Format& f) { return f.hadamard; })
      .def_property_readonly("asymmetric", [](const Format& f) { return f.asymmetric; })
      .def_property_readonly("residual",
                             [](const Format& f) -> std::optional<std::string> {
                               return f.residual ? std::optional(f.residual->text()) : std::nullopt;
                             })
      .def_property_readonly("cap", [](const Format& f) { return f.cap; })
      .def_property_readonly("scale_width", &Format::scale_width)
      .def_property_readonly("zero_width", &Format::zero_width)
      .def_property_readonly("head_scale_bytes", &head_scale_bytes)
      .def(
          "state_bytes",
          [](const Format& f, std::int64_t heads, std::int64_t rows, std::int64_t n) {
            return f.state_code_bytes(heads, rows, n) + f.state_scale_bytes(heads, rows, n);
          },
          py::arg("heads"), py::arg("rows"), py::arg("n"))
      .def("code_bytes", &Format::code_bytes, py::arg("n"))
      .def("scale_bytes", &Format::scale_bytes, py::arg("rows"), py::arg("n"))
      .def(
          "decode_code",
          [](const Format& f, std::uint32_t code) {
            if (f.exact()) fail("format 'exact': a double as it is has no codes");
            return decode<double>(f.element, code);
          },
          py::arg("code"));
  module.def("format_names", &format_names);
  module.def("round_in_place", &round_in_place, py::arg("format"), py::arg("array").noconvert(), py::arg("place"),
             py::arg("token"));
  module.def("encode_into", &encode_into, py::arg("format"), py::arg("array").noconvert(), py::arg("codes").noconvert(),
             py::arg("scales").noconvert(), py::arg("place"), py::arg("token"));
  module.def("decode_into", &decode_into, py::arg("format"), py::arg("codes").noconvert(),
             py::arg("scales").noconvert(), py::arg("array").noconvert());
}

}  // namespace replayssm::python
