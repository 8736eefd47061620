#include <pybind11/stl.h>

#include "analysis/study.h"
#include "bindings/bind.h"
#include "core/policy.h"

namespace replayssm::python {
namespace {

std::map<std::string, std::string> ring_of(const Policy& policy) {
  std::map<std::string, std::string> out;
  const Replay replay = policy.as_replay();
  if (!replay.ring.activations.exact()) out["*"] = replay.ring.activations.text();
  for (const auto& [field, format] : replay.ring.fields) out[field] = format.text();
  return out;
}

}  // namespace

void bind_policies(py::module_& module) {
  py::class_<Policy>(module, "Policy")
      .def(py::init([](const std::string& text) { return parse_policy(text); }), py::arg("text"))
      .def_property_readonly("text", &Policy::text)
      .def_property_readonly("exact", &Policy::exact)
      .def_property_readonly("eager", [](const Policy& p) { return std::holds_alternative<Eager>(p.schedule); })
      .def_property_readonly("length", [](const Policy& p) { return p.as_replay().length; })
      .def_property_readonly("state", [](const Policy& p) { return p.as_replay().anchor.text(); })
      .def_property_readonly("read",
                             [](const Policy& p) -> std::optional<std::string> {
                               const Replay replay = p.as_replay();
                               return replay.read ? std::optional(replay.read->text()) : std::nullopt;
                             })
      .def_property_readonly("ring", &ring_of)
      .def_property_readonly("order",
                             [](const Policy& p) { return p.order == Order::closed ? "closed" : "sequential"; })
      .def_property_readonly("loop", [](const Policy& p) { return p.loop == Loop::closed ? "closed" : "open"; })
      .def_readonly("layers", &Policy::layers)
      .def("covers", &Policy::covers, py::arg("layer"));
  module.def("default_policies", &default_policies);
}

}  // namespace replayssm::python
