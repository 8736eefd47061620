#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstdio>

#include "analysis/cli/machine.h"
#include "analysis/layer_report.h"
#include "analysis/layer_study.h"
#include "analysis/report.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/models.h"
#include "core/error.h"
#include "core/replace_file.h"
#include "core/trace.h"

namespace replayssm::python {
namespace {

constexpr std::int64_t sample_every = 128;  // tokens between two samples of the states, as the program has it

/// What a study is asked, beside model, tokens and policies. Empty strings: not given.
struct Request {
  std::string output, tokens_name, precision = "fp64", device = "cpu", activations;
  std::uint64_t seed = 0;
  int threads = 0;
  bool local = false, attribution = true;
  std::function<void(std::int64_t, std::int64_t)> progress;
};

/// A study as Python runs it: without the GIL, which it takes back to say how far it is and to look for Ctrl-C.
class Session {
 public:
  Session(const OpenModel& open, const py::array& ids, std::vector<Policy> policies, const Request& request,
          const char* command)
      : request_(request), model_(*open.model), policies_(std::move(policies)) {
    require<std::int32_t>(ids, "tokens");
    if (ids.ndim() != 2) fail("tokens: expected the shape [sequences, length], found ", describe(ids));
    tokens_ = {.ids = {data_of<std::int32_t>(ids), data_of<std::int32_t>(ids) + ids.size()},
               .sequences = ids.shape(0),
               .length = ids.shape(1)};
    if (request.precision != "fp64" && request.precision != "fp32") {
      fail("precision: expected fp64 or fp32, found '", request.precision, "'");
    }
    if (request.device != "cpu" && request.device != "cuda") {
      fail("device: expected cpu or cuda, found '", request.device, "'");
    }
    for (const Policy& policy : policies_) check_policy(model_, policy, tokens_.length);
    if (!request.output.empty()) check_trace_path(request.output);
    cli::Machine machine;
    if (request.threads > 0) machine.threads = request.threads;
    machine.precision = request.precision;
    machine.device = request.device;
    machine.activations = request.activations;
    backend_ = machine.backend(model_, policies_);
    facts_ = {.command = command,
              .model_path = open.path,
              .model_sha256 = model_.sha256(),
              .tokens_path = request.tokens_name,
              .tokens = tokens_.length,
              .sequences = tokens_.sequences,
              .device = machine.device,
              .precision = machine.precision,
              .activations = machine.fed(),
              .seed = request.seed,
              .threads = machine.threads};
    options_ = {.threads = machine.threads, .seed = request.seed, .interrupted = signalled};
    if (request.progress) {
      options_.progress = [this](std::int64_t done, std::int64_t all) {
        const py::gil_scoped_acquire gil;
        request_.progress(done, all);
      };
    }
  }

  /// Calls study(), then write(path) where there is an output, which is replaced by what that has written. Without the
  /// GIL, both.
  template <class Study, class Write>
  void run(Study&& study, Write&& write) {
    try {
      const py::gil_scoped_release release;
      const auto start = std::chrono::steady_clock::now();
      study();
      facts_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      if (!request_.output.empty()) {
        const std::string part = request_.output + ".part";
        try {
          write(part);
        } catch (...) {
          std::remove(part.c_str());
          throw;
        }
        replace_file(part, request_.output);
      }
    } catch (const Interrupted&) {
      throw_interrupted();
    }
  }

  const Request& request_;
  const Model& model_;
  const std::vector<Policy> policies_;
  Tokens tokens_;
  std::unique_ptr<Backend> backend_;
  RunFacts facts_;
  StudyOptions options_;
};

/// The figures of every token, [sequences, length] each.
py::dict token_arrays(const PolicyResult& result, const Tokens& tokens) {
  py::dict out;
  const Shape shape = {tokens.sequences, tokens.length};
  const auto add = [&](const char* name, double TokenDivergence::*field) {
    std::vector<double> values;
    for (const TokenDivergence& token : result.tokens) values.push_back(token.*field);
    out[name] = owned(std::move(values), shape);
  };
  add("kl", &TokenDivergence::kl);
  add("kl_reverse", &TokenDivergence::kl_reverse);
  add("nll", &TokenDivergence::nll);
  add("nll_reference", &TokenDivergence::reference_nll);
  add("delta_p", &TokenDivergence::delta_p);
  py::array_t<bool> agrees(shape);
  std::transform(result.tokens.begin(), result.tokens.end(), agrees.mutable_data(),
                 [](const TokenDivergence& token) { return token.top1_agrees; });
  out["top1_agrees"] = agrees;
  return out;
}

/// The report as JSON, and the arrays of each policy.
py::tuple kl(const OpenModel& open, const py::array& tokens, const std::vector<Policy>& policies,
             const Request& request) {
  Session session(open, tokens, policies.empty() ? default_policies() : policies, request, "kl");
  session.options_.local = request.local;
  std::vector<PolicyResult> results;
  session.run(
      [&] {
        results = run_study(session.model_, *session.backend_, session.tokens_, session.policies_, session.options_);
      },
      [&](const std::string& path) { write_kl(path, session.model_, session.facts_, session.tokens_, results); });
  py::list arrays;
  for (const PolicyResult& result : results) arrays.append(token_arrays(result, session.tokens_));
  return py::make_tuple(kl_json(session.model_, session.facts_, results), arrays);
}

/// The report as JSON, the arrays of each policy, and those of each of its layers.
py::tuple layers(const OpenModel& open, const py::array& tokens, const std::vector<Policy>& policies,
                 const Request& request) {
  Session session(open, tokens, policies.empty() ? default_layer_policies() : policies, request, "layers");
  session.options_.chunk_tokens = sample_every;
  LayerStudy study;
  session.run(
      [&] {
        study = run_layer_study(session.model_, *session.backend_, session.tokens_, session.policies_, session.options_,
                                request.attribution);
      },
      [&](const std::string& path) { write_layers(path, session.model_, session.facts_, session.tokens_, study); });
  const Shape shape = {session.tokens_.sequences, session.tokens_.length};
  const std::string json = layers_json(session.model_, session.facts_, study);
  py::list arrays, curves;
  for (PolicyLayers& policy : study.policies) {
    arrays.append(token_arrays(policy.result, session.tokens_));
    py::list of_layers;
    for (LayerErrors& errors : policy.layers) {
      py::dict layer;
      layer["y_local_by_token"] = owned(std::move(errors.y_local_by_token), shape);
      layer["y_propagated_by_token"] = owned(std::move(errors.y_propagated_by_token), shape);
      of_layers.append(layer);
    }
    curves.append(of_layers);
  }
  return py::make_tuple(json, arrays, curves);
}

}  // namespace

void bind_studies(py::module_& module) {
  py::class_<Request>(module, "Request")
      .def(py::init<>())
      .def_readwrite("output", &Request::output)
      .def_readwrite("tokens_name", &Request::tokens_name)
      .def_readwrite("precision", &Request::precision)
      .def_readwrite("device", &Request::device)
      .def_readwrite("activations", &Request::activations)
      .def_readwrite("seed", &Request::seed)
      .def_readwrite("threads", &Request::threads)
      .def_readwrite("local", &Request::local)
      .def_readwrite("attribution", &Request::attribution)
      .def_readwrite("progress", &Request::progress);
  module.def("kl", &kl, py::arg("model"), py::arg("tokens").noconvert(), py::arg("policies"), py::arg("request"));
  module.def("layers", &layers, py::arg("model"), py::arg("tokens").noconvert(), py::arg("policies"),
             py::arg("request"));
}

}  // namespace replayssm::python
