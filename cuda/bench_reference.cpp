#include "cuda/bench_reference.h"

#include <cmath>
#include <span>

#include "core/delta_rule.h"
#include "core/mamba2.h"
#include "core/state.h"

namespace replayssm::cuda {
namespace {

template <class Real>
std::vector<Real> in(const std::vector<double>& values) {
  return {values.begin(), values.end()};
}

std::string_view text(Scalar type) { return type == Scalar::fp32 ? "fp32" : type == Scalar::fp16 ? "fp16" : "bf16"; }

double unit_roundoff(const Format& format) { return std::ldexp(0.5, -format.element.mantissa_bits); }

/// Of the records: those of the delta rule are computed and then rounded, those of Mamba-2 come as they are.
double ring_roundings(const BenchCase& c) {
  const Replay replay = c.policy.as_replay();
  if (replay.length == 1) return 0;
  if (is_delta_rule(c.shape.recurrence)) {
    return unit_roundoff(replay.ring.of("k")) + unit_roundoff(replay.ring.of("u"));
  }
  const Format activations = parse_format(text(c.activations));
  return replay.ring.of("x") == activations && replay.ring.of("B") == activations
             ? 0
             : unit_roundoff(replay.ring.of("x")) + unit_roundoff(replay.ring.of("B"));
}

}  // namespace

template <class Real>
Trajectory follow(const BenchCase& c, const HostParameters& parameters, const HostSequence& sequence,
                  const std::vector<std::int64_t>& heads) {
  const std::int64_t P = c.shape.head_dim, T = sequence.tokens, count = std::ssize(heads);
  std::vector<std::vector<Real>> raw;
  for (const auto& values : sequence.inputs) raw.push_back(in<Real>(values));
  const auto A_log = in<Real>(parameters.A_log), dt_bias = in<Real>(parameters.dt_bias), D = in<Real>(parameters.D);
  const auto rows = [&](std::size_t i) { return Rows<Real>{raw[i].data(), std::ssize(raw[i]) / T}; };

  const bool delta = is_delta_rule(c.shape.recurrence);
  const LayerInputs<Real> inputs = delta ? prepare(DeltaInputs<Real>{.shape = c.shape,
                                                                     .tokens = T,
                                                                     .q = rows(0),
                                                                     .k = rows(1),
                                                                     .v = rows(2),
                                                                     .gate = rows(3),
                                                                     .beta = rows(4),
                                                                     .A_log = A_log.data(),
                                                                     .dt_bias = dt_bias.data()})
                                         : prepare(Mamba2Inputs<Real>{.shape = c.shape,
                                                                      .tokens = T,
                                                                      .x = rows(0),
                                                                      .B = rows(1),
                                                                      .C = rows(2),
                                                                      .dt = rows(3),
                                                                      .A_log = A_log.data(),
                                                                      .dt_bias = dt_bias.data()});
  State<Real> state(c.shape, c.policy);
  std::vector<Real> y(static_cast<std::size_t>(T * count * P));
  Trajectory out;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t head = heads[static_cast<std::size_t>(i)];
    state.advance_head(head, inputs, y.data() + i * P, count * P);
    for (std::int64_t t = 0; t < T && !delta; ++t) {
      for (std::int64_t p = 0; p < P; ++p) {
        y[static_cast<std::size_t>((t * count + i) * P + p)] +=
            D[static_cast<std::size_t>(head)] * rows(0)[t][head * P + p];
      }
    }
    const auto& stored = state.checkpoint(head);
    out.state.insert(out.state.end(), stored.begin(), stored.end());
    if (!c.policy.as_replay().read) continue;
    const auto& read = state.read_copy(head);
    out.read.insert(out.read.end(), read.begin(), read.end());
  }
  out.y.assign(y.begin(), y.end());
  return out;
}

template Trajectory follow<float>(const BenchCase&, const HostParameters&, const HostSequence&,
                                  const std::vector<std::int64_t>&);
template Trajectory follow<double>(const BenchCase&, const HostParameters&, const HostSequence&,
                                   const std::vector<std::int64_t>&);

double relative_l2(const std::vector<double>& a, const std::vector<double>& b, std::int64_t begin, std::int64_t count) {
  double difference = 0, norm = 0;
  for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(begin + count); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(difference / norm);
}

double state_roundings(const BenchCase& c) {
  const Replay replay = c.policy.as_replay();
  return unit_roundoff(replay.anchor) + (replay.read ? unit_roundoff(*replay.read) : 0) + ring_roundings(c);
}

double y_rounding(const BenchCase& c) { return unit_roundoff(parse_format(text(c.activations))); }

}  // namespace replayssm::cuda
