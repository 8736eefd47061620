#include <pybind11/stl.h>

#include <limits>
#include <memory>

#include "analysis/shapes.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "core/delta_rule.h"
#include "core/error.h"
#include "core/mamba2.h"
#include "core/state.h"

namespace replayssm::python {
namespace {

constexpr std::int64_t tokens_between_signals = 256;

/// The inputs of a layer with everything that they point to: the raw arrays were copied.
template <class Real>
class Inputs {
 public:
  RecurrenceShape shape;
  LayerInputs<Real> layer;

  Inputs() = default;
  Inputs(const Inputs&) = delete;
  Inputs& operator=(const Inputs&) = delete;

  /// A copy of the array, which has that shape, as rows of tokens.
  Rows<Real> keep(const py::array& array, const char* name, const Shape& expected) {
    require<Real>(array, name);
    require_shape(array, name, expected);
    kept_.emplace_back(data_of<Real>(array), data_of<Real>(array) + array.size());
    return {kept_.back().data(), expected.front() > 0 ? array.size() / expected.front() : 0};
  }

  /// Tokens first .. first + count.
  LayerInputs<Real> part(std::int64_t first, std::int64_t count) const {
    LayerInputs<Real> out{count, layer.heads, {}};
    for (HeadInputs<Real>& head : out.heads) {
      for (Rows<Real>* rows : {&head.v, &head.w, &head.c, &head.log_decay, &head.gain}) {
        rows->data += first * rows->stride;
      }
    }
    return out;
  }

 private:
  std::vector<std::vector<Real>> kept_;
};

template <class Real>
using Prepared = std::unique_ptr<Inputs<Real>>;

/// The shape that the values [T, H, P] and the keys [T, G, N] of a layer have.
RecurrenceShape shape_of(Recurrence recurrence, const py::array& values, const py::array& keys, const char* v,
                         const char* w) {
  if (values.ndim() != 3) fail(v, ": expected the shape [tokens, heads, head_dim], found ", describe(values));
  if (keys.ndim() != 3) fail(w, ": expected the shape [tokens, groups, state_dim], found ", describe(keys));
  const RecurrenceShape shape{recurrence, values.shape(1), keys.shape(1), values.shape(2), keys.shape(2)};
  if (shape.heads < 1 || shape.groups < 1 || shape.head_dim < 1 || shape.state_dim < 1 ||
      shape.heads % shape.groups != 0) {
    fail(v, " and ", w, ": expected positive dimensions and heads a multiple of groups, found ", describe(values),
         " and ", describe(keys));
  }
  return shape;
}

template <class Real>
Prepared<Real> mamba2(const py::array& x, const py::array& B, const py::array& C, const py::array& dt,
                      const py::array& A_log, const py::array& dt_bias, double dt_min, double dt_max) {
  auto out = std::make_unique<Inputs<Real>>();
  const RecurrenceShape s = out->shape = shape_of(Recurrence::mamba2, x, B, "x", "B");
  const std::int64_t T = x.shape(0);
  if (!(dt_min <= dt_max)) fail("dt_limit: expected two ascending numbers, found ", dt_min, " and ", dt_max);
  Mamba2Inputs<Real> in;
  in.shape = s;
  in.tokens = T;
  in.dt_min = dt_min;
  in.dt_max = dt_max;
  in.x = out->keep(x, "x", {T, s.heads, s.head_dim});
  in.B = out->keep(B, "B", {T, s.groups, s.state_dim});
  in.C = out->keep(C, "C", {T, s.groups, s.state_dim});
  in.dt = out->keep(dt, "dt", {T, s.heads});
  in.A_log = out->keep(A_log, "A_log", {s.heads}).data;
  in.dt_bias = out->keep(dt_bias, "dt_bias", {s.heads}).data;
  const py::gil_scoped_release release;
  out->layer = prepare(in);
  return out;
}

template <class Real>
Prepared<Real> delta(Recurrence recurrence, const py::array& q, const py::array& k, const py::array& v,
                     const py::array& gate, const py::array& beta, const py::array& A_log, const py::array& dt_bias,
                     double beta_scale) {
  auto out = std::make_unique<Inputs<Real>>();
  const RecurrenceShape s = out->shape = shape_of(recurrence, v, k, "v", "k");
  const std::int64_t T = v.shape(0);
  DeltaInputs<Real> in;
  in.shape = s;
  in.tokens = T;
  in.beta_scale = beta_scale;
  in.q = out->keep(q, "q", {T, s.groups, s.state_dim});
  in.k = out->keep(k, "k", {T, s.groups, s.state_dim});
  in.v = out->keep(v, "v", {T, s.heads, s.head_dim});
  const bool columns = has_column_decay(recurrence);
  in.gate = out->keep(gate, "gate", columns ? Shape{T, s.heads, s.state_dim} : Shape{T, s.heads});
  in.beta = out->keep(beta, "beta", {T, s.heads});
  in.A_log = out->keep(A_log, "A_log", {s.heads}).data;
  in.dt_bias = out->keep(dt_bias, "dt_bias", columns ? Shape{s.heads, s.state_dim} : Shape{s.heads}).data;
  const py::gil_scoped_release release;
  out->layer = prepare(in);
  return out;
}

template <class Real>
Prepared<Real> records(Recurrence recurrence, const py::array& v, const py::array& w, const py::array& c,
                       const py::array& log_decay, const py::array& gain) {
  auto out = std::make_unique<Inputs<Real>>();
  const RecurrenceShape s = out->shape = shape_of(recurrence, v, w, "v", "w");
  const std::int64_t T = v.shape(0), D = s.decay_dim();
  const Rows<Real> vs = out->keep(v, "v", {T, s.heads, s.head_dim});
  const Rows<Real> ws = out->keep(w, "w", {T, s.groups, s.state_dim});
  const Rows<Real> cs = out->keep(c, "c", {T, s.groups, s.state_dim});
  const Rows<Real> decays =
      out->keep(log_decay, "log_decay", has_column_decay(recurrence) ? Shape{T, s.heads, D} : Shape{T, s.heads});
  const Rows<Real> gains = out->keep(gain, "gain", {T, s.heads});
  out->layer.tokens = T;
  for (std::int64_t h = 0; h < s.heads; ++h) {
    const std::int64_t group = s.group(h) * s.state_dim;
    out->layer.heads.push_back({.v = {vs.data + h * s.head_dim, vs.stride},
                                .w = {ws.data + group, ws.stride},
                                .c = {cs.data + group, cs.stride},
                                .log_decay = {decays.data + h * D, decays.stride},
                                .gain = {gains.data + h, gains.stride}});
  }
  return out;
}

/// A read-only view of the rows of all heads (or groups) that keeps its owner alive.
template <class Real>
py::array view(const py::object& owner, Rows<Real> HeadInputs<Real>::*field, bool by_group, bool with_width,
               std::int64_t width) {
  const auto& in = owner.cast<const Inputs<Real>&>();
  Shape shape = {in.layer.tokens, by_group ? in.shape.groups : in.shape.heads};
  if (with_width) shape.push_back(width);
  py::array_t<Real> out(shape, (in.layer.heads.front().*field).data, owner);
  out.attr("flags").attr("writeable") = false;
  return out;
}

/// A state and the tokens that it has seen.
template <class Real>
struct Kept {
  State<Real> state;
  std::int64_t tokens = 0;

  Kept(const RecurrenceShape& shape, const Policy& policy, const StatePlace& place) : state(shape, policy, place) {}
};

std::string full_shape_text(const RecurrenceShape& shape) { return replayssm::shape_text(shape); }

/// Advances the state, or, where Ctrl-C comes meanwhile, leaves it as it was.
template <class Real>
void advance(State<Real>& state, const Inputs<Real>& inputs, Real* y) {
  const auto& a = state.shape();
  const auto& b = inputs.shape;
  if (a.recurrence != b.recurrence || a.heads != b.heads || a.groups != b.groups || a.head_dim != b.head_dim ||
      a.state_dim != b.state_dim) {
    fail("inputs: expected those of ", full_shape_text(a), ", found ", full_shape_text(b));
  }
  const std::int64_t tokens = inputs.layer.tokens;
  bool stopped = false;
  {
    const py::gil_scoped_release release;
    if (tokens <= tokens_between_signals) {
      state.advance(inputs.layer, y);
    } else {
      State<Real> next = state;
      for (std::int64_t first = 0; first < tokens && !stopped; first += tokens_between_signals) {
        next.advance(inputs.part(first, std::min(tokens_between_signals, tokens - first)),
                     y + first * a.heads * a.head_dim);
        stopped = signalled();
      }
      if (!stopped) state = std::move(next);
    }
  }
  if (stopped) throw_interrupted();
}

Shape state_shape(const RecurrenceShape& shape) { return {shape.heads, shape.head_dim, shape.state_dim}; }

template <class Real, class Of>
py::array whole_state(const RecurrenceShape& shape, Of&& of_head) {
  std::vector<Real> out;
  for (std::int64_t h = 0; h < shape.heads; ++h) {
    const std::vector<Real>& head = of_head(h);
    out.insert(out.end(), head.begin(), head.end());
  }
  return owned(std::move(out), state_shape(shape));
}

py::object event(const std::optional<RangeEvents::Event>& e) {
  if (!e) return py::none();
  return py::make_tuple(e->step, e->head);
}

template <class Real>
void require_y(const py::array& y, const Inputs<Real>& in) {
  require<Real>(y, "out", true);
  require_shape(y, "out", {in.layer.tokens, in.shape.heads, in.shape.head_dim});
}

template <class Real>
void bind(py::module_& module, const char* inputs_name, const char* state_name) {
  using In = Inputs<Real>;
  using HI = HeadInputs<Real>;
  py::class_<In>(module, inputs_name)
      .def_static("mamba2", &mamba2<Real>, py::arg("x").noconvert(), py::arg("B").noconvert(), py::arg("C").noconvert(),
                  py::arg("dt").noconvert(), py::arg("A_log").noconvert(), py::arg("dt_bias").noconvert(),
                  py::arg("dt_min"), py::arg("dt_max"))
      .def_static("delta", &delta<Real>, py::arg("recurrence"), py::arg("q").noconvert(), py::arg("k").noconvert(),
                  py::arg("v").noconvert(), py::arg("gate").noconvert(), py::arg("beta").noconvert(),
                  py::arg("A_log").noconvert(), py::arg("dt_bias").noconvert(), py::arg("beta_scale"))
      .def_static("records", &records<Real>, py::arg("recurrence"), py::arg("v").noconvert(), py::arg("w").noconvert(),
                  py::arg("c").noconvert(), py::arg("log_decay").noconvert(), py::arg("gain").noconvert())
      .def_property_readonly("tokens", [](const In& in) { return in.layer.tokens; })
      .def_property_readonly("shape", [](const In& in) { return in.shape; })
      .def_property_readonly(
          "v",
          [](py::object self) { return view<Real>(self, &HI::v, false, true, self.cast<const In&>().shape.head_dim); })
      .def_property_readonly(
          "w",
          [](py::object self) { return view<Real>(self, &HI::w, true, true, self.cast<const In&>().shape.state_dim); })
      .def_property_readonly(
          "c",
          [](py::object self) { return view<Real>(self, &HI::c, true, true, self.cast<const In&>().shape.state_dim); })
      .def_property_readonly("log_decay",
                             [](py::object self) {
                               const RecurrenceShape& s = self.cast<const In&>().shape;
                               return view<Real>(self, &HI::log_decay, false, has_column_decay(s.recurrence),
                                                 s.decay_dim());
                             })
      .def_property_readonly("gain", [](py::object self) { return view<Real>(self, &HI::gain, false, false, 1); });

  using K = Kept<Real>;
  py::class_<K>(module, state_name)
      .def(py::init<const RecurrenceShape&, const Policy&, const StatePlace&>(), py::arg("shape"), py::arg("policy"),
           py::arg("place"))
      .def(
          "advance",
          [](K& self, const In& inputs, py::array out) {
            require_y(out, inputs);
            advance(self.state, inputs, mutable_data_of<Real>(out));
            self.tokens += inputs.layer.tokens;
          },
          py::arg("inputs"), py::arg("out").noconvert())
      .def(
          "set",
          [](K& self, const py::array& state) {
            require<Real>(state, "state");
            require_shape(state, "state", state_shape(self.state.shape()));
            self.state.set(data_of<Real>(state));
          },
          py::arg("state").noconvert())
      .def_property_readonly("tokens", [](const K& self) { return self.tokens; })
      .def_property_readonly("held", [](const K& self) { return self.state.held(); })
      .def_property_readonly("shape", [](const K& self) { return self.state.shape(); })
      .def("effective",
           [](K& self) {
             return whole_state<Real>(self.state.shape(), [&](std::int64_t h) { return self.state.effective(h); });
           })
      .def("checkpoint",
           [](const K& self) {
             return whole_state<Real>(
                 self.state.shape(), [&](std::int64_t h) -> const auto& { return self.state.checkpoint(h); });
           })
      .def("read_copy",
           [](const K& self) {
             return whole_state<Real>(
                 self.state.shape(), [&](std::int64_t h) -> const auto& { return self.state.read_copy(h); });
           })
      .def_property_readonly("saturations", [](const K& self) { return self.state.events().saturations; })
      .def_property_readonly("overflows", [](const K& self) { return self.state.events().overflows; })
      .def_property_readonly("first_overflow", [](const K& self) { return event(self.state.events().first_overflow); })
      .def_property_readonly("first_non_finite",
                             [](const K& self) { return event(self.state.events().first_non_finite); });

  module.def(
      "step_in_place",
      [](py::array state, const In& inputs, const Format& format, const StatePlace& place, py::array out) {
        require<Real>(state, "state", true);
        require_shape(state, "state", state_shape(inputs.shape));
        require_y(out, inputs);
        if (format.residual) {
          fail("format '", format.text(), "': a step in place keeps no residual for the next one; use a State");
        }
        Policy policy;
        policy.schedule = Eager{format};
        State<Real> own(inputs.shape, policy, place);
        Real* data = mutable_data_of<Real>(state);
        own.set(data);
        advance(own, inputs, mutable_data_of<Real>(out));
        for (std::int64_t h = 0; h < inputs.shape.heads; ++h) {
          data = std::copy(own.checkpoint(h).begin(), own.checkpoint(h).end(), data);
        }
      },
      py::arg("state").noconvert(), py::arg("inputs"), py::arg("format"), py::arg("place"), py::arg("out").noconvert());
}

}  // namespace

void bind_states(py::module_& module) {
  py::enum_<Recurrence>(module, "Recurrence")
      .value("mamba2", Recurrence::mamba2)
      .value("gated_delta", Recurrence::gated_delta)
      .value("kda", Recurrence::kda);
  py::class_<RecurrenceShape>(module, "RecurrenceShape")
      .def(py::init<Recurrence, std::int64_t, std::int64_t, std::int64_t, std::int64_t>(), py::arg("recurrence"),
           py::arg("heads"), py::arg("groups"), py::arg("head_dim"), py::arg("state_dim"))
      .def_property_readonly("recurrence", [](const RecurrenceShape& s) { return std::string(name(s.recurrence)); })
      .def_readonly("heads", &RecurrenceShape::heads)
      .def_readonly("groups", &RecurrenceShape::groups)
      .def_readonly("head_dim", &RecurrenceShape::head_dim)
      .def_readonly("state_dim", &RecurrenceShape::state_dim);
  bind<float>(module, "Inputs32", "State32");
  bind<double>(module, "Inputs64", "State64");
}

}  // namespace replayssm::python
