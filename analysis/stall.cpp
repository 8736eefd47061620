#include "analysis/stall.h"

#include <algorithm>

namespace replayssm {

Standstill& Standstill::operator+=(const Standstill& other) {
  still += other.still;
  all += other.all;
  return *this;
}

StallTrack::StallTrack(const RecurrenceShape& shape, const Policy& policy)
    : format_(policy.as_replay().anchor),
      length_(policy.as_replay().length),
      state_(shape, exact_policy()),
      stored_(state_.checkpoint(0)) {}

Standstill StallTrack::advance(const HeadInputs<double>& inputs, std::int64_t tokens) {
  Standstill sum;
  const bool adds_up = format_.rounding == Rounding::stochastic || format_.residual;
  if (format_.exact() || adds_up || format_.joins_heads()) return sum;
  std::vector<double> y(static_cast<std::size_t>(std::min(tokens, length_) * state_.shape().head_dim));
  for (std::int64_t t = 0; t < tokens;) {
    const std::int64_t steps = std::min(length_ - since_store_, tokens - t);
    state_.advance_head(0, {steps, {inputs.from(t)}, {}}, y.data(), state_.shape().head_dim);
    t += steps;
    since_store_ += steps;
    if (since_store_ == length_) sum += store();
  }
  return sum;
}

Standstill StallTrack::store() {
  const std::vector<double>& x = state_.checkpoint(0);
  std::vector<double> rounded = x;
  round_rows(format_, rounded.data(), state_.shape().head_dim, state_.shape().state_dim);
  Standstill sum;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double v = stored_[i];
    if (x[i] == v) continue;
    sum.all += v * v;
    if (rounded[i] == v) sum.still += v * v;
  }
  state_.set(rounded.data());
  stored_ = std::move(rounded);
  since_store_ = 0;
  return sum;
}

}  // namespace replayssm
