#pragma once

// Private to the benchmark: what one row of a case has to compute, by the reference on the CPU.

#include <cstdint>
#include <vector>

#include "cuda/bench.h"

namespace replayssm::cuda {

/// A_log [heads], dt_bias [heads decay_dim], D [heads] (Mamba-2). Floats, widened.
struct HostParameters {
  std::vector<double> A_log, dt_bias, D;
};

/// Raw inputs of one row, widened: x, B, C, dt or q, k, v, gate, beta, each [tokens, width].
struct HostSequence {
  std::int64_t tokens = 0;
  std::vector<std::vector<double>> inputs;
};

/// What became of some heads: y [tokens, heads, head_dim], as the kernels write it, D x included but not rounded, and
/// the stored states [heads, head_dim, state_dim] behind the last token.
struct Trajectory {
  std::vector<double> y, state, read;
};

/// Runs State<Real> of the case's policy from the zero state; everything, the inputs' preparation too, in Real.
template <class Real>
Trajectory follow(const BenchCase& bench_case, const HostParameters& parameters, const HostSequence& sequence,
                  const std::vector<std::int64_t>& heads);

/// |a - b| / |b| over `count` elements of both.
double relative_l2(const std::vector<double>& a, const std::vector<double>& b, std::int64_t begin, std::int64_t count);

/// What one rounding may change, relative: the unit roundoffs of states, read copies and computed records together.
double state_roundings(const BenchCase& bench_case);
/// The same of y as it is written.
double y_rounding(const BenchCase& bench_case);

}  // namespace replayssm::cuda
