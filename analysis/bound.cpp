#include "analysis/bound.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "core/real.h"
#include "core/scales.h"

namespace replayssm {
namespace {

/// What rounding can add, in half spacings: all of a spacing toward zero. Stochastic rounding adds f (1 - f) of a
/// squared spacing in the mean, of which a quarter is the most.
double worst_of_half(const Format& format) { return format.rounding == Rounding::toward_zero ? 2 : 1; }

/// Largest square of the relative rounding error of a normal number; of a scaled one relative to the largest of those
/// that share its scale.
double relative_error2(const Format& format) {
  if (format.exact()) return 0;
  if (format.own) return std::numeric_limits<double>::quiet_NaN();  // not known
  const Element& e = format.element;
  const double max = format.cap > 0 ? format.cap : decode<double>(e, e.max_code), top = power_of_two_below(max);
  // The least that the largest element over the scale can be, and what is beyond the range of the element.
  const double least = format.rule == ScaleRule::amax    ? max
                       : format.rule == ScaleRule::floor ? top
                       : format.rule == ScaleRule::ceil  ? max / 2
                                                         : max * (1 - 0x1p-4);
  const double beyond = format.rule == ScaleRule::floor ? 1 - max / (2 * top) : 0;
  const double half_step =
      e.integer ? std::ldexp(1.0, e.emin - e.mantissa_bits - 1) / least : std::ldexp(1.0, -e.mantissa_bits - 1);
  return std::pow(std::max(worst_of_half(format) * half_step, beyond), 2);
}

double dot(const double* x, const double* y, std::int64_t n) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += x[i] * y[i];
  return sum;
}

/// x^T m for m [n, n]. Adds rows, which vector units can, where dot products with columns would wait for their sums.
std::vector<double> times(const double* x, const std::vector<double>& m, std::int64_t n) {
  std::vector<double> out(static_cast<std::size_t>(n), 0.0);
  double* sum = out.data();
  for (std::int64_t i = 0; i < n; ++i) {
    const double* row = m.data() + i * n;
    for (std::int64_t j = 0; j < n; ++j) sum[j] += x[i] * row[j];
  }
  return out;
}

/// Of H x the errors have the squares D, of x they have H D H, which as a matrix is at most the largest of D in each
/// block of H.
void add_rotated_errors(const Format& format, const double* state, std::int64_t rows, std::int64_t n, double* out) {
  Format inner = format;
  inner.hadamard = false;
  std::vector<double> turned(state, state + rows * n), errors(static_cast<std::size_t>(n));
  hadamard_rows(turned.data(), rows, n);
  add_rounding_errors(inner, turned.data(), rows, n, errors.data());
  const std::int64_t size = n & -n;
  for (std::int64_t first = 0; first < n; first += size) {
    const double most = *std::max_element(errors.begin() + first, errors.begin() + first + size);
    for (std::int64_t i = first; i < first + size; ++i) out[i] += most;
  }
}

}  // namespace

void add_rounding_errors(const Format& format, const double* state, std::int64_t rows, std::int64_t n, double* out) {
  if (format.exact()) return;
  if (format.hadamard) return add_rotated_errors(format, state, rows, n, out);
  if (format.scale == Scale::tensor) {
    std::fill_n(out, n, std::numeric_limits<double>::quiet_NaN());
    return;
  }
  if (format.own) {
    std::vector<double> rounded(state, state + rows * n);
    round_rows(format, rounded.data(), rows, n);
    for (std::int64_t i = 0; i < rows * n; ++i) {
      const double error = rounded[static_cast<std::size_t>(i)] - state[i];
      out[i % n] += error * error;
    }
    return;
  }
  const Element& e = format.element;
  const double largest = decode<double>(e, e.max_code), smallest = std::ldexp(1.0, e.emin);
  const double worst = worst_of_half(format);
  const auto add = [&](const double* x, std::int64_t count, double scale, double* sum) {
    const double inverse = 1 / scale, half_last_place = worst * std::ldexp(scale, -e.mantissa_bits - 1);
    for (std::int64_t i = 0; i < count; ++i) {
      const double size = std::abs(x[i]);
      const double half_spacing = power_of_two_below(std::max(size * inverse, smallest)) * half_last_place;
      const double error = format.asymmetric ? worst * scale / 2 : std::max(half_spacing, size - largest * scale);
      sum[i] += error * error;
    }
  };
  if (format.scale == Scale::none) {
    for (std::int64_t row = 0; row < rows; ++row) add(state + row * n, n, 1, out);
    return;
  }
  const Scaler<double> scaler(format, state, rows * n);
  for_each_block(format, rows, n, [&](std::int64_t first, std::int64_t count) {
    const double scale = scaler.value(format.asymmetric ? scaler.affine(extremes_of(state + first, count)).code
                                                        : scaler.code(largest_magnitude(state + first, count)));
    for (std::int64_t i = first, end = first + count; i < end;) {
      const std::int64_t column = i % n, part = std::min(n - column, end - i);
      add(state + i, part, scale, out + column);
      i += part;
    }
  });
}

LocalBound::LocalBound(const RecurrenceShape& shape, const Policy& policy, double unit)
    : shape_(shape), schedule_(policy.as_replay()), delta_(is_delta_rule(shape.recurrence)), unit_(unit) {
  const bool open = delta_ && policy.loop == Loop::open;
  leaks_ = open && schedule_.read;
  const auto of = [this](const char* field) { return relative_error2(schedule_.ring.of(field)); };
  // k enters u and stands beside it.
  ring_vectors_ = delta_ ? of(open ? "u" : "v") + 2 * of("k") + of("beta") : of("x") + of("B") + of("dt");
  ring_decay_ = of(delta_ ? "g" : "dt");
  const Matrix zero = diagonal(std::vector<double>(static_cast<std::size_t>(shape.state_dim), 0.0));
  anchor_ = zero;
  if (schedule_.read) copy_ = zero;
  if (leaks_) cross_ = decayed_ = zero;
}

double LocalBound::advance(const ReferenceStep& step) {
  const std::int64_t N = shape_.state_dim;
  carry(step, anchor_);
  if (schedule_.read) carry(step, copy_);
  if (leaks_) carry_cross(step);

  const bool flush = held_ == schedule_.length - 1;
  if (flush && leaks_) join(anchor_, leak());
  // A flush reads the rebuilt state, other steps the read copy.
  const double copy2 = schedule_.read && !flush ? along(step.c, copy_) : 0;
  const double arithmetic = static_cast<double>(N + 2 * schedule_.length) * unit_;
  const double bound =
      std::sqrt(along(step.c, anchor_) + copy2) + arithmetic * std::sqrt(step.state2 * dot(step.c, step.c, N));

  if (flush) {
    join(anchor_, rounding(schedule_.anchor, step.state, last_anchor_));
    if (schedule_.read) copy_ = rounding(*schedule_.read, step.state, last_copy_);
    if (leaks_) cross_ = decayed_ = copy_;
    held_ = 0;
  } else {
    if (!schedule_.ring.exact()) {
      const Matrix record = diagonal(std::vector<double>(static_cast<std::size_t>(N), record_error2(step)));
      std::ranges::transform(anchor_, record, anchor_.begin(), std::plus());
    }
    ++held_;
  }
  return bound;
}

/// m <- diag(a) m diag(a).
void LocalBound::decay(const double* a, Matrix& m) const {
  const std::int64_t N = shape_.state_dim;
  if (!delta_) {
    for (std::int64_t n = 0; n < N; ++n) m[static_cast<std::size_t>(n)] *= a[n] * a[n];
    return;
  }
  for (std::int64_t i = 0; i < N; ++i) {
    double* row = m.data() + i * N;
    for (std::int64_t j = 0; j < N; ++j) row[j] *= a[i] * a[j];
  }
}

/// C <- M^T C M = B - w r^T - r w^T with B = diag(a) C diag(a), q = B w, r = beta q - beta^2 / 2 (w . q) w.
void LocalBound::carry(const ReferenceStep& step, Matrix& c) const {
  decay(step.decay, c);
  if (!delta_) return;
  const std::int64_t N = shape_.state_dim;
  const double *w = step.record.w, beta = step.record.gain;
  Matrix out = times(w, c, N);
  double* r = out.data();
  const double half = beta * beta / 2 * dot(w, r, N);
  for (std::int64_t n = 0; n < N; ++n) r[n] = beta * r[n] - half * w[n];
  for (std::int64_t i = 0; i < N; ++i) {
    double* row = c.data() + i * N;
    for (std::int64_t j = 0; j < N; ++j) row[j] -= w[i] * r[j] + r[i] * w[j];
  }
}

/// E[e^T d] <- M^T E[e^T d] diag(a), E[d^T d] <- diag(a) E[d^T d] diag(a).
void LocalBound::carry_cross(const ReferenceStep& step) {
  const std::int64_t N = shape_.state_dim;
  decay(step.decay, decayed_);
  decay(step.decay, cross_);
  const Matrix q = times(step.record.w, cross_, N);
  for (std::int64_t i = 0; i < N; ++i) {
    const double factor = step.record.gain * step.record.w[i], *from = q.data();
    double* row = cross_.data() + i * N;
    for (std::int64_t j = 0; j < N; ++j) row[j] -= factor * from[j];
  }
}

/// E[(e - d)^T (e - d)].
LocalBound::Matrix LocalBound::leak() const {
  const auto N = static_cast<std::size_t>(shape_.state_dim);
  Matrix out = copy_;
  for (std::size_t i = 0; i < N; ++i) {
    for (std::size_t j = 0; j < N; ++j) out[i * N + j] += decayed_[i * N + j] - cross_[i * N + j] - cross_[j * N + i];
  }
  return out;
}

/// c^T C c.
double LocalBound::along(const double* c, const Matrix& m) const {
  const std::int64_t N = shape_.state_dim;
  if (delta_) return std::max(dot(c, times(c, m, N).data(), N), 0.0);
  double sum = 0;
  for (std::int64_t n = 0; n < N; ++n) sum += c[n] * c[n] * m[static_cast<std::size_t>(n)];
  return sum;
}

LocalBound::Matrix LocalBound::diagonal(const std::vector<double>& d) const {
  if (!delta_) return d;
  Matrix out(d.size() * d.size(), 0.0);
  for (std::size_t n = 0; n < d.size(); ++n) out[n * (d.size() + 1)] = d[n];
  return out;
}

/// `last`: what the store before could leave, which error feedback adds to this one.
LocalBound::Matrix LocalBound::rounding(const Format& format, const double* state, std::vector<double>& last) const {
  std::vector<double> errors(static_cast<std::size_t>(shape_.state_dim), 0.0);
  add_rounding_errors(format, state, shape_.head_dim, shape_.state_dim, errors.data());
  if (!format.residual) return diagonal(errors);
  std::vector<double> both = errors;
  for (std::size_t n = 0; n < last.size(); ++n) both[n] = std::pow(std::sqrt(errors[n]) + 2 * std::sqrt(last[n]), 2);
  last = std::move(errors);
  return diagonal(both);
}

/// The moments of a sum of errors that may be correlated in any way.
void LocalBound::join(Matrix& covariance, const Matrix& other) const {
  const auto trace = [this](const Matrix& m) {
    const std::size_t step = delta_ ? static_cast<std::size_t>(shape_.state_dim) + 1 : 1;
    double sum = 0;
    for (std::size_t n = 0; n < m.size(); n += step) sum += m[n];
    return sum;
  };
  const double old = std::max(trace(covariance), 0.0), added = trace(other);
  if (added == 0) return;
  const double q = std::min(std::sqrt(added / old), 0x1p53);  // from there on what there was counts for nothing
  const double old_factor = 1 + q, added_factor = 1 + 1 / q;
  std::ranges::transform(covariance, other, covariance.begin(),
                         [=](double x, double y) { return old_factor * x + added_factor * y; });
}

/// What rounding the record of this step can add to the squared Frobenius norm of the state.
double LocalBound::record_error2(const ReferenceStep& step) const {
  const Record<double>& r = step.record;
  const std::int64_t D = shape_.decay_dim();
  const double v2 = dot(r.v, r.v, shape_.head_dim), w2 = dot(r.w, r.w, shape_.state_dim);
  const double log_decay = std::abs(*std::min_element(r.log_decay, r.log_decay + D));
  // u = gain (v - S' w), of which Mamba-2 has the first part.
  const double readout2 = delta_ ? step.before2 * w2 : 0, u2 = 2 * r.gain * r.gain * (v2 + readout2);
  return ring_vectors_ * u2 * w2 + ring_decay_ * log_decay * log_decay * step.before2;
}

}  // namespace replayssm
