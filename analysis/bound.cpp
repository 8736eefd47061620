#include "analysis/bound.h"

#include <algorithm>
#include <cmath>

namespace replayssm {
namespace {

/// Largest relative rounding error of a normal number; of a scaled one relative to the largest of its row.
double relative_bound(const Format& format) {
  if (format.exact()) return 0;
  return std::ldexp(0.5, -format.element.mantissa_bits);
}

}  // namespace

double rounding_variance(const Format& format, const double* state, std::int64_t rows, std::int64_t n) {
  if (format.exact()) return 0;
  const Element& e = format.element;
  const double largest_code = decode<double>(e, e.max_code);
  double sum = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    const double* x = state + r * n;
    double scale = 1;
    if (format.scale == Scale::row) {
      double amax = 0;
      for (std::int64_t i = 0; i < n; ++i) amax = std::max(amax, std::abs(x[i]));
      scale = static_cast<double>(static_cast<float>(amax / largest_code));
      if (scale == 0) scale = 1;
    }
    for (std::int64_t i = 0; i < n; ++i) {
      const double magnitude = std::abs(x[i] / scale);
      const int exponent = magnitude == 0 ? e.emin : std::max(std::ilogb(magnitude), e.emin);
      const double spacing = std::ldexp(scale, exponent - e.mantissa_bits);
      sum += spacing * spacing / 12;
    }
  }
  return sum;
}

LocalBound::LocalBound(const RecurrenceShape& shape, const Policy& policy, double unit) : shape_(shape), unit_(unit) {
  schedule_ = policy.as_replay();
  const bool delta = is_delta_rule(shape.recurrence);
  open_ = delta && policy.loop == Loop::open;
  const RingFormats& ring = schedule_.ring;
  // As the variance of a uniform error whose largest value is the unit roundoff.
  const double v = relative_bound(ring.of(open_   ? "u"
                                          : delta ? "v"
                                                  : "x")),
               w = relative_bound(ring.of(delta ? "k" : "B"));
  ring_vector_ = (v * v + w * w) / 3;
  // An error of the gate enters u directly and the decay with the logarithm as a factor; the latter is at most of the
  // size of the former for the decays that keep anything.
  const double gate = relative_bound(ring.of(delta ? "beta" : "dt")),
               decay = relative_bound(ring.of(delta ? "g" : "dt"));
  ring_gate_ = (gate * gate + decay * decay) / 3;
}

double LocalBound::advance(const StepFacts& step, const double* state) {
  const double leak = open_ && schedule_.read ? step.gain * step.gain * step.w2 * copy_ : 0;
  for (double* error : {&anchor_, &copy_, &records_}) *error *= step.decay * step.decay;

  // A flush reads the rebuilt state, into which the read copy enters in an open loop only.
  const bool flush = held_ == schedule_.length - 1;
  const double state_error = anchor_ + records_ + (flush && !open_ ? 0 : copy_);
  const double arithmetic = static_cast<double>(shape_.state_dim + 2 * schedule_.length) * unit_;
  const double bound = std::sqrt(state_error * step.c2) + arithmetic * std::sqrt(step.state2 * step.c2);

  anchor_ += leak;
  if (flush) {
    anchor_ += records_ + rounding_variance(schedule_.anchor, state, shape_.head_dim, shape_.state_dim);
    copy_ = schedule_.read ? rounding_variance(*schedule_.read, state, shape_.head_dim, shape_.state_dim) : 0;
    records_ = 0;
    held_ = 0;
  } else {
    records_ += (ring_vector_ + ring_gate_) * step.u2 * step.w2;
    ++held_;
  }
  return bound;
}

}  // namespace replayssm
