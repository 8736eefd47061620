#pragma once

#include <cstdint>
#include <vector>

#include "core/format.h"
#include "core/policy.h"
#include "core/recurrence.h"

namespace replayssm {

/// The most that storing `rows` rows of n elements can add to the squared errors of each column: out[i] += the sum over
/// the rows of (spacing / 2)^2, spacing the distance of the format's values at that element (times its scale), or of
/// what is beyond the largest value, where that is more; toward zero of spacing^2; of stochastic rounding in the mean.
/// Overflow to infinity is not covered. With scales of a tensor, of which one head does not tell, NaN: not known. Of a
/// function only what it does to these elements is known, and added. Nothing for `exact`.
void add_rounding_errors(const Format& format, const double* state, std::int64_t rows, std::int64_t n, double* out);

/// What the bound needs of one step of the reference, of one head.
struct ReferenceStep {
  Record<double> record;
  const double* decay;             ///< e^log_decay, of every column: [state_dim]
  const double* c;                 ///< [state_dim]
  const double* state;             ///< behind the step: [head_dim, state_dim]
  double before2 = 0, state2 = 0;  ///< squared Frobenius norms of the state before and behind it
};

/// First-order bound of the local error of one head's readouts, ||y~_t - y_t||, token after token.
///
/// A row of the state has an error e [N], which a step multiplies as it does the row: by M = a for Mamba-2, by
/// M = diag(a) (I - beta k k^T) for the delta rule. With C the sum over rows of E[e^T e],
///
///     C_t = M_t^T C_{t-1} M_t,    E ||y~ - y||^2 = c^T C c.
///
/// A store adds D = diag(add_rounding_errors()): each error as large as rounding to nearest can make it, and errors of
/// different elements of one store uncorrelated (such bounds are called probabilistic, Higham & Mary 2019). Those of
/// successive stores may be correlated in any way - a slow decay rounds an element the same way again and again - so C
/// and D are joined as (1 + q) C + (1 + 1/q) D, which is at least E[(e + d)^T (e + d)] for every q > 0; q^2 = tr D / tr
/// C makes the trace least.
///
/// C is [N, N]; for Mamba-2 it stays diagonal. A split state has another one for what the read copy adds since the last
/// flush. With error feedback a store also adds the residual of the store before, which is at most twice what that one
/// could not keep: rounding the residual at most doubles it. In an open loop u is computed from the copy; what that
/// leaves in the rebuilt anchor is e - d, e the copy's error carried on and d the same when it only decays. Rounded
/// rings add to every direction of C what rounding a record can add to the squared norm of u w^T, and to the state by
/// the decay, one record uncorrelated to another. Arithmetic in `unit` = unit roundoff of the computing precision adds
/// (N + 2 L) unit |S| |c|. Terms of second order in the unit roundoffs are dropped. Takes some 8 N^2 operations a token
/// for the delta rule.
class LocalBound {
 public:
  LocalBound(const RecurrenceShape& shape, const Policy& policy, double unit);

  /// Takes in one token. Returns the bound of ||y~_t - y_t||.
  double advance(const ReferenceStep& step);

 private:
  using Matrix = std::vector<double>;  // [N, N], or its diagonal [N] where the recurrence keeps it one

  void decay(const double* a, Matrix& m) const;
  void carry(const ReferenceStep& step, Matrix& covariance) const;
  void carry_cross(const ReferenceStep& step);
  double along(const double* c, const Matrix& covariance) const;
  Matrix diagonal(const std::vector<double>& d) const;
  Matrix rounding(const Format& format, const double* state, std::vector<double>& last) const;
  Matrix leak() const;
  void join(Matrix& covariance, const Matrix& other) const;
  double record_error2(const ReferenceStep& step) const;

  RecurrenceShape shape_;
  Replay schedule_;
  bool delta_, leaks_;
  double unit_, ring_vectors_, ring_decay_;
  std::int64_t held_ = 0;
  Matrix anchor_;                                // of the anchor or checkpoint with its ring, carried to the present
  Matrix copy_;                                  // E[e^T e] of the read copy's own error
  std::vector<double> last_anchor_, last_copy_;  // what their last stores left, column by column; error feedback only
  // Where it leaks: E[e^T d] and E[d^T d].
  Matrix cross_, decayed_;
};

}  // namespace replayssm
