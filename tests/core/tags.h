#pragma once

// Inputs by which a state spells out the tokens that it holds.

#include <cmath>
#include <vector>

#include "tests/core/state_helpers.h"

namespace replayssm {

/// Mamba-2: one element that sums the tags. Delta rule: key t is the unit vector e_t, so that element t holds tag t.
template <class Kind>
std::vector<Token<typename Kind::Real>> Tags(std::size_t count) {
  using Real = typename Kind::Real;
  const bool delta = is_delta_rule(Kind::recurrence);
  const std::size_t n = delta ? count : 1;
  std::vector<Token<Real>> tokens;
  for (std::size_t t = 0; t < count; ++t) {
    Token<Real> x;
    x.v = {std::ldexp(Real(1), static_cast<int>(t))};
    x.w.assign(n, Real(0));
    x.w[delta ? t : 0] = 1;
    x.c.assign(n, Real(1));
    x.g.assign(has_column_decay(Kind::recurrence) ? n : 1, Real(0));
    x.gain = 1;
    tokens.push_back(x);
  }
  return tokens;
}

template <class Kind>
RecurrenceShape TagShape(std::size_t count) {
  return Kind::shape(1, is_delta_rule(Kind::recurrence) ? static_cast<std::int64_t>(count) : 1);
}

/// Tags from .. to - 1.
template <class Real>
Real SumOfTags(std::size_t from, std::size_t to) {
  return std::ldexp(Real(1), static_cast<int>(to)) - std::ldexp(Real(1), static_cast<int>(from));
}

template <class Real>
Real Sum(const std::vector<Real>& x) {
  Real sum = 0;
  for (const Real& value : x) sum += value;
  return sum;
}

}  // namespace replayssm
