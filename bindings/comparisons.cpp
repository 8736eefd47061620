#include <pybind11/stl.h>

#include <algorithm>
#include <utility>

#include "analysis/divergence.h"
#include "analysis/report.h"
#include "analysis/study.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/studies.h"
#include "core/error.h"
#include "core/parallel.h"

namespace replayssm::python {
namespace {

constexpr std::int64_t rows_a_block = 16;  // a block of the reference takes 16 bytes for each logit

/// A KL study whose logits somebody else computes: policies against the exact state, as the tokens come.
class Comparison {
 public:
  using Layer = std::pair<std::string, std::optional<RecurrenceShape>>;  // kind, and the state where it keeps one

  Comparison(const std::vector<Layer>& layers, std::vector<Policy> policies, const py::array& ids)
      : sequences_(ids.ndim() == 2 ? ids.shape(0) : 0), length_(ids.ndim() == 2 ? ids.shape(1) : 0) {
    require<std::int32_t>(ids, "tokens");
    if (sequences_ < 1 || length_ < 1) fail("tokens: expected the shape [sequences, length], found ", describe(ids));
    ids_.assign(data_of<std::int32_t>(ids), data_of<std::int32_t>(ids) + ids.size());
    for (const auto& [kind, shape] : layers) layers_.push_back({kind, shape});
    for (Policy& policy : policies) {
      check_policy(layers_, policy, length_);
      PolicyResult& result = results_.emplace_back();
      result.policy = std::move(policy);
      result.tokens.resize(ids_.size());
    }
  }

  /// Tokens first .. first + rows of a sequence under a policy: logits [rows, vocabulary], of float32 or float64.
  void compare(std::size_t policy, std::int64_t sequence, std::int64_t first, const py::array& reference,
               const py::array& run, int threads) {
    if (reference.ndim() != 2) fail("reference: expected the shape [rows, vocabulary], found ", describe(reference));
    const std::int64_t rows = reference.shape(0), vocabulary = reference.shape(1);
    if (sequence < 0 || sequence >= sequences_ || first < 0 || first + rows > length_) {
      fail("tokens ", first, " .. ", first + rows, " of sequence ", sequence, ": expected some of ", sequences_, " x ",
           length_);
    }
    TokenDivergence* out = results_.at(policy).tokens.data() + sequence * length_ + first;
    std::vector<std::int32_t> next;
    for (std::int64_t t = first + 1; t <= first + rows; ++t) {
      next.push_back(t < length_ ? ids_[static_cast<std::size_t>(sequence * length_ + t)] : -1);
    }
    with_real(reference, "reference", [&](auto real) {
      using Real = decltype(real);
      require<Real>(reference, "reference");
      require<Real>(run, "run");
      require_shape(run, "run", {rows, vocabulary});
      const Real *p = data_of<Real>(reference), *q = data_of<Real>(run);
      const py::gil_scoped_release release;
      parallel_for((rows + rows_a_block - 1) / rows_a_block, threads, [&](std::int64_t i) {
        const std::int64_t at = i * rows_a_block, count = std::min(rows_a_block, rows - at);
        const ReferenceBlock<Real> block(p + at * vocabulary, count, vocabulary, first + at);
        replayssm::compare(block, q + at * vocabulary, next.data() + at, out + at, OnNonFinite::record);
      });
    });
  }

  /// What a policy did to a layer; errors relative L2.
  void layer(std::size_t policy, std::int64_t layer, double y_error, double state_error, const RangeEvents& events) {
    LayerResult result;
    result.layer = layer;
    result.kind = layers_.at(static_cast<std::size_t>(layer)).kind;
    result.y_rel_l2.propagated = y_error;
    result.state_rel_l2.propagated = state_error;
    result.events = events;
    results_.at(policy).layers.push_back(std::move(result));
  }

  /// The report as JSON, and the arrays of each policy.
  py::tuple report(const std::string& model_path, const std::string& model_type, const std::string& tokens_name,
                   const std::string& device, const std::string& precision, std::uint64_t seed, int threads,
                   double seconds) {
    ModelFacts model;
    model.type = model_type;
    model.layers = std::ssize(layers_);
    model.ssm_layers = std::count_if(layers_.begin(), layers_.end(), [](const auto& l) { return l.recurrence; });
    RunFacts facts;
    facts.command = "kl";
    facts.model_path = model_path;
    facts.tokens_path = tokens_name;
    facts.tokens = length_;
    facts.sequences = sequences_;
    facts.device = device;
    facts.precision = precision;
    facts.seed = seed;
    facts.threads = threads;
    facts.seconds = seconds;
    py::list arrays;
    for (PolicyResult& result : results_) {
      result.divergence = summarize(result.tokens, length_);
      result.cost = state_cost(layers_, result.policy, length_);
      arrays.append(token_arrays(result, sequences_));
    }
    return py::make_tuple(kl_json(model, facts, results_), arrays);
  }

 private:
  std::int64_t sequences_, length_;
  std::vector<std::int32_t> ids_;
  std::vector<LayerInfo> layers_;
  std::vector<PolicyResult> results_;
};

}  // namespace

void bind_comparisons(py::module_& module) {
  py::class_<Comparison>(module, "Comparison")
      .def(py::init<const std::vector<Comparison::Layer>&, std::vector<Policy>, const py::array&>(), py::arg("layers"),
           py::arg("policies"), py::arg("tokens").noconvert())
      .def("compare", &Comparison::compare, py::arg("policy"), py::arg("sequence"), py::arg("first"),
           py::arg("reference").noconvert(), py::arg("run").noconvert(), py::arg("threads"))
      .def("layer", &Comparison::layer, py::arg("policy"), py::arg("layer"), py::arg("y_error"), py::arg("state_error"),
           py::arg("events"))
      .def("report", &Comparison::report, py::arg("model_path"), py::arg("model_type"), py::arg("tokens_name"),
           py::arg("device"), py::arg("precision"), py::arg("seed"), py::arg("threads"), py::arg("seconds"));
  module.def(
      "check_layers",
      [](const std::vector<Comparison::Layer>& layers, const Policy& policy) {
        std::vector<LayerInfo> infos;
        for (const auto& [kind, shape] : layers) infos.push_back({kind, shape});
        check_policy_layers(infos, policy);
      },
      py::arg("layers"), py::arg("policy"));
}

}  // namespace replayssm::python
