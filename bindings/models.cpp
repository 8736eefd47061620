#include "bindings/models.h"

#include <pybind11/stl.h>

#include <algorithm>

#include "analysis/cli/machine.h"
#include "analysis/inspection.h"
#include "analysis/shapes.h"
#include "analysis/study.h"
#include "analysis/traffic_report.h"
#include "analysis/verify.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "core/error.h"
#include "core/tokens.h"

namespace replayssm::python {
namespace {

py::array read_token_file(const std::string& path) {
  Tokens tokens = read_tokens(path);
  return owned(std::move(tokens.ids), {tokens.sequences, tokens.length});
}

std::string verify_golden(const OpenModel& open, const std::string& golden, double bound, const std::string& precision,
                          int threads) {
  if (!(bound >= 0)) fail("bound: expected a number of at least 0, found ", bound);
  cli::Machine machine;
  if (threads > 0) machine.threads = threads;
  machine.precision = precision;
  std::string json;
  try {
    const py::gil_scoped_release release;
    const auto backend = machine.reference();
    json = verify_json(verify(*open.model, *backend, golden, signalled), open.path, golden, bound);
  } catch (const Interrupted&) {
    throw_interrupted();
  }
  return json;
}

/// The layers are those of a model, or None and shapes.
std::string traffic(const py::object& model, const std::vector<std::string>& shapes, std::vector<Policy> policies,
                    const TrafficQuestion& question) {
  const OpenModel* open = model.is_none() ? nullptr : model.cast<const OpenModel*>();
  if ((open == nullptr) == shapes.empty()) fail("traffic: expected either a model or shapes");
  if (policies.empty()) policies = default_traffic_policies();
  const std::vector<LayerInfo> layers = open ? open->model->layers() : layers_of_shapes(shapes);
  const py::gil_scoped_release release;
  std::vector<PolicyCost> costs;
  for (const Policy& policy : policies) costs.push_back(policy_cost(layers, policy, question));
  const auto with_state = std::ranges::count_if(layers, [](const LayerInfo& l) { return l.recurrence.has_value(); });
  return traffic_json(costs, open ? open->path : "", shapes, with_state, question);
}

}  // namespace

void bind_models(py::module_& module) {
  py::class_<OpenModel>(module, "Model")
      .def(py::init([](const std::string& path) {
             const py::gil_scoped_release release;
             return OpenModel{Model::open(path), path};
           }),
           py::arg("path"))
      .def_readonly("path", &OpenModel::path)
      .def_property_readonly("type", [](const OpenModel& open) { return open.model->type(); })
      .def_property_readonly("vocabulary", [](const OpenModel& open) { return open.model->vocabulary(); })
      .def_property_readonly("notices", [](const OpenModel& open) { return open.model->notices(); })
      .def("inspect_json", [](const OpenModel& open) {
        const py::gil_scoped_release release;
        return inspect_json(*open.model, open.path);
      });
  py::class_<TrafficQuestion>(module, "TrafficQuestion")
      .def(py::init<>())
      .def_readwrite("batches", &TrafficQuestion::batches)
      .def_readwrite("bandwidth", &TrafficQuestion::bandwidth)
      .def_readwrite("launch", &TrafficQuestion::launch)
      .def_readwrite("replay_launch", &TrafficQuestion::replay_launch)
      .def_readwrite("activations", &TrafficQuestion::activations)
      .def_readwrite("longest", &TrafficQuestion::longest);
  module.def("read_tokens", &read_token_file, py::arg("path"));
  module.def("verify_json", &verify_golden, py::arg("model"), py::arg("golden"), py::arg("bound"), py::arg("precision"),
             py::arg("threads"));
  module.def("traffic_json", &traffic, py::arg("model"), py::arg("shapes"), py::arg("policies"), py::arg("question"));
}

}  // namespace replayssm::python
