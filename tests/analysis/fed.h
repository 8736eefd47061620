#pragma once

// What a layer of a model is fed, and its recurrence on that in 60 digits: the truth for the tests of the oracle.

#include <gtest/gtest.h>

#include <utility>
#include <variant>
#include <vector>

#include "core/delta_rule.h"
#include "core/format.h"
#include "core/mamba2.h"
#include "tests/core/oracle.h"
#include "tests/support/forward.h"

namespace replayssm::oracle {

/// What a layer fed its recurrence, each field [tokens, columns], in Real: rounded once, to a format or else to Real;
/// parameters to Real.
template <class Real>
struct Fed {
  RecurrenceShape shape;
  std::int64_t tokens = 0;
  std::vector<Vec<Real>> fields;  // x B C dt, or q k v gate beta
  Vec<Real> A_log, dt_bias;

  Fed(Backend& backend, const RecurrenceCall& call, const Format& activations = {}) : activations_(activations) {
    if (const auto* m = std::get_if<Mamba2Call>(&call)) {
      take(backend, *m, {m->x, m->B, m->C, m->dt});
    } else {
      const auto& d = std::get<DeltaCall>(call);
      take(backend, d, {d.q, d.k, d.v, d.gate, d.beta});
    }
  }

  Rows<Real> rows(std::size_t field) const { return {fields[field].data(), std::ssize(fields[field]) / tokens}; }
  LayerInputs<Real> prepared() const {
    if (shape.recurrence == Recurrence::mamba2) {
      return prepare(
          Mamba2Inputs<Real>{shape, tokens, rows(0), rows(1), rows(2), rows(3), A_log.data(), dt_bias.data()});
    }
    return prepare(
        DeltaInputs<Real>{shape, tokens, rows(0), rows(1), rows(2), rows(3), rows(4), A_log.data(), dt_bias.data()});
  }

 private:
  template <class Call>
  void take(Backend& backend, const Call& call, const std::vector<Tensor>& tensors) {
    shape = call.shape;
    tokens = tensors[0].rows;
    for (const Tensor& t : tensors) {
      Values values = read_all(backend, t);
      round_rows(activations_, values.data(), 1, std::ssize(values));
      fields.push_back(convert<Real>(values));
    }
    for (const auto& [view, out] : {std::pair{call.A_log, &A_log}, {call.dt_bias, &dt_bias}}) {
      Vec<double> values(static_cast<std::size_t>(view->elements()));
      widen(*view, 0, values.size(), values.data());
      *out = convert<Real>(values);
    }
  }

  Format activations_;
};

inline Wide softplus_of(const Wide& z) { return log(1 + exp(z)); }

/// The tokens of one head with everything done to them in 60 digits, on the inputs as Real has them.
template <class Real>
std::vector<Token<Wide>> wide_tokens(const Fed<Real>& in, std::int64_t head) {
  const auto& [recurrence, heads, groups, P, N] = in.shape;
  const std::int64_t group = head / (heads / groups);
  const auto part = [&](std::size_t field, std::int64_t t, std::int64_t first, std::int64_t count) {
    const Real* row = in.rows(field)[t] + first;
    return convert<Wide>(Vec<Real>(row, row + count));
  };
  const auto normalised = [](Vec<Wide> x, const Wide& scale) {
    Wide sum(1e-6);
    for (const Wide& e : x) sum += e * e;
    for (Wide& e : x) e *= scale / sqrt(sum);
    return x;
  };
  const Wide rate = -exp(Wide(in.A_log[static_cast<std::size_t>(head)]));
  const Wide bias(in.dt_bias[static_cast<std::size_t>(head)]);
  std::vector<Token<Wide>> out;
  for (std::int64_t t = 0; t < in.tokens; ++t) {
    if (recurrence == Recurrence::mamba2) {
      const Wide dt = softplus_of(part(3, t, head, 1)[0] + bias);
      out.push_back({part(0, t, head * P, P), part(1, t, group * N, N), part(2, t, group * N, N), {rate * dt}, dt, {}});
    } else {
      const Wide g = rate * softplus_of(part(3, t, head, 1)[0] + bias), beta = 1 / (1 + exp(-part(4, t, head, 1)[0]));
      out.push_back({part(2, t, head * P, P),
                     normalised(part(1, t, group * N, N), Wide(1)),
                     normalised(part(0, t, group * N, N), 1 / sqrt(Wide(N))),
                     {g},
                     beta,
                     {}});
    }
  }
  return out;
}

/// Correct decimal digits: -log10 of the relative L2 error.
template <class Value>
double digits(const Value* x, const Vec<Wide>& truth) {
  Wide difference(0), norm(0);
  for (std::size_t i = 0; i < truth.size(); ++i) {
    difference += (Wide(x[i]) - truth[i]) * (Wide(x[i]) - truth[i]);
    norm += truth[i] * truth[i];
  }
  return static_cast<double>(log10(norm / difference) / 2);
}

}  // namespace replayssm::oracle
