#pragma once

// Private: pulls in Boost.Multiprecision. The recurrences as they are written, one step after the other, for any Real:
// no schedule, no blocks, no vectors, nothing shared with State. What State computes is measured against this.

#include <cstdint>

#include "core/big_real.h"
#include "core/recurrence.h"

namespace replayssm {

/// One step on `rows` rows of the state of one head: u = gain v or gain (v - S' w) with S' = S decay, S = S' + u w^T,
/// y = S c. Rows do not depend on each other. Every operation is rounded to Real, a sum of products at least once; S'
/// is not formed by itself, which would only round it once more: S' w = S (decay w).
///
/// `record.v` and y [rows] begin at the first of the rows, s [rows, state_dim]; decay = e^log_decay, one scalar or one
/// for every column; c [state_dim].
template <class Real>
void literal_step(const RecurrenceShape& shape, const Record<Real>& record, const Real* decay, const Real* c,
                  std::int64_t rows, Real* s, Real* y) {
  const std::int64_t N = shape.state_dim, per_column = has_column_decay(shape.recurrence) ? 1 : 0;
  std::vector<Real> decayed;  // S' w = S (decay w), the same for all rows
  if (is_delta_rule(shape.recurrence) && per_column) {
    for (std::int64_t n = 0; n < N; ++n) decayed.push_back(decay[n] * record.w[n]);
  }
  Real u, readout;
  for (std::int64_t p = 0; p < rows; ++p, s += N) {
    u = record.v[p];
    if (is_delta_rule(shape.recurrence)) {
      set_dot(readout, s, per_column ? decayed.data() : record.w, N);
      if (!per_column) readout *= *decay;
      u -= readout;
    }
    u *= record.gain;
    for (std::int64_t n = 0; n < N; ++n) scale_and_add(s[n], decay[n * per_column], u, record.w[n]);
    set_dot(y[p], s, c, N);
  }
}

}  // namespace replayssm
