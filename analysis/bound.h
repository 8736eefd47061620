#pragma once

#include <cstdint>
#include <vector>

#include "core/format.h"
#include "core/policy.h"
#include "core/recurrence.h"

namespace replayssm {

/// Expected sum of the squares of the rounding errors that storing `rows` rows of n elements makes, each taken as
/// uniform between plus and minus half the spacing of the format's values at that element (times the scale of its row):
/// the sum of spacing^2 / 12. 0 for `exact`.
double rounding_variance(const Format& format, const double* state, std::int64_t rows, std::int64_t n);

/// What the bound needs of one step of the reference, of one head.
struct StepFacts {
  double decay = 0;                           ///< the largest of its columns
  double gain = 0;                            ///< dt or beta
  double u2 = 0, w2 = 0, c2 = 0, state2 = 0;  ///< squared norms of u, w, c and the new state
};

/// First-order bound of the local error of one head's readouts, ||y~_t - y_t||, token after token.
///
/// R_t bounds the expected squared Frobenius norm of the error of the state. A step multiplies the error by the decay
/// (and, in the delta rule, by I - beta k k^T, whose norm is at most 1 for beta in [0, 2] and |k| <= 1), so R_t = a_t^2
/// R_{t-1} with a_t the largest decay of a column; storing adds rounding_variance() of the reference's state at that
/// step. By Cauchy-Schwarz ||y~ - y||^2 <= R |c|^2. Squares are added, so errors of
/// different elements and flushes are taken as uncorrelated (Higham & Mary 2019 call such bounds probabilistic); how
/// they lie to c is not: there the worst case stands, some sqrt(N) above the typical one. Split states: outputs add the
/// read copy's rounding since the last flush; in an open loop what the read copy makes of each u, at most beta |k|
/// times its error, leaks into the anchor. Rounded rings add the rounding of each record times |u| |w|. Arithmetic in
/// `unit` = unit roundoff of the computing precision adds (N + 2 L) unit |S| |c|. Terms of second order in the unit
/// roundoffs are dropped.
class LocalBound {
 public:
  LocalBound(const RecurrenceShape& shape, const Policy& policy, double unit);

  /// Takes in one token and the reference's state behind it, [head_dim, state_dim], which is read where the policy
  /// flushes. Returns the bound of ||y~_t - y_t||.
  double advance(const StepFacts& step, const double* state);

 private:
  RecurrenceShape shape_;
  Replay schedule_;
  bool open_;
  double unit_, ring_vector_, ring_gate_;
  std::int64_t held_ = 0;
  double anchor_ = 0;   // R of the anchor or checkpoint, carried to the present
  double copy_ = 0;     // what the read copy adds to it
  double records_ = 0;  // what the rounded records of the ring add
};

}  // namespace replayssm
