#pragma once

// Private. What a layer feeds one head of its recurrence, taken out of a backend and prepared in any Real.

#include <cstdint>
#include <vector>

#include "core/backend.h"
#include "core/delta_rule.h"
#include "core/mamba2.h"

namespace replayssm {

/// What one head is fed over some tokens: the fields of Mamba2Inputs or DeltaInputs in their order, [tokens, width]
/// each, with the numbers of the backend, unrounded.
struct RawHead {
  RecurrenceShape shape;  ///< of this head alone
  std::int64_t tokens = 0;
  std::vector<std::vector<double>> fields;
  std::vector<double> A_log, dt_bias;
  double dt_min = 0, dt_max = 0, beta_scale = 1;
};

RawHead raw_head(Backend& backend, const RecurrenceCall& call, std::int64_t head);

/// The tokens first .. first + count of a call.
RecurrenceCall part_of(RecurrenceCall call, std::int64_t first, std::int64_t count);

/// The inputs of one head in Real, with the raw values that they point to. Moves; a copy would point to the original.
template <class Real>
struct PreparedHead {
  std::vector<std::vector<Real>> raw;
  LayerInputs<Real> inputs;

  PreparedHead() = default;
  explicit PreparedHead(const RawHead& in) {
    for (const auto& field : in.fields) add(field);
    add(in.A_log);
    add(in.dt_bias);
    const auto rows = [&](std::size_t i) { return Rows<Real>{raw[i].data(), std::ssize(raw[i]) / in.tokens}; };
    const Real *A_log = raw[in.fields.size()].data(), *dt_bias = raw.back().data();
    if (is_delta_rule(in.shape.recurrence)) {
      inputs = prepare(DeltaInputs<Real>{in.shape, in.tokens, rows(0), rows(1), rows(2), rows(3), rows(4), A_log,
                                         dt_bias, in.beta_scale});
    } else {
      inputs = prepare(Mamba2Inputs<Real>{in.shape, in.tokens, rows(0), rows(1), rows(2), rows(3), A_log, dt_bias,
                                          in.dt_min, in.dt_max});
    }
  }
  PreparedHead(PreparedHead&&) = default;
  PreparedHead& operator=(PreparedHead&&) = default;

  const HeadInputs<Real>& head() const { return inputs.heads.front(); }

 private:
  void add(const std::vector<double>& values) {
    raw.emplace_back();
    for (const double x : values) raw.back().push_back(static_cast<Real>(x));
  }
};

}  // namespace replayssm
