#include "analysis/head_inputs.h"

namespace replayssm {
namespace {

std::vector<double> columns(Backend& backend, const Tensor& x, std::int64_t first, std::int64_t count) {
  std::vector<double> out(static_cast<std::size_t>(x.rows * count));
  backend.read(x.slice(first, count), out.data());
  return out;
}

std::vector<double> elements(const TensorView& weight, std::int64_t first, std::int64_t count) {
  std::vector<double> out(static_cast<std::size_t>(count));
  widen(weight, static_cast<std::size_t>(first), out.size(), out.data());
  return out;
}

RawHead take(Backend& backend, const Mamba2Call& call, std::int64_t head) {
  const auto& [recurrence, heads, groups, P, N] = call.shape;
  const std::int64_t group = call.shape.group(head) * N;
  return {.shape = {recurrence, 1, 1, P, N},
          .tokens = call.x.rows,
          .fields = {columns(backend, call.x, head * P, P), columns(backend, call.B, group, N),
                     columns(backend, call.C, group, N), columns(backend, call.dt, head, 1)},
          .A_log = elements(*call.A_log, head, 1),
          .dt_bias = elements(*call.dt_bias, head, 1),
          .dt_min = call.dt_min,
          .dt_max = call.dt_max};
}

RawHead take(Backend& backend, const DeltaCall& call, std::int64_t head) {
  const auto& [recurrence, heads, groups, P, N] = call.shape;
  const std::int64_t group = call.shape.group(head) * N, D = call.shape.decay_dim();
  return {.shape = {recurrence, 1, 1, P, N},
          .tokens = call.v.rows,
          .fields = {columns(backend, call.q, group, N), columns(backend, call.k, group, N),
                     columns(backend, call.v, head * P, P), columns(backend, call.gate, head * D, D),
                     columns(backend, call.beta, head, 1)},
          .A_log = elements(*call.A_log, head, 1),
          .dt_bias = elements(*call.dt_bias, head * D, D),
          .beta_scale = call.beta_scale};
}

}  // namespace

RawHead raw_head(Backend& backend, const RecurrenceCall& call, std::int64_t head) {
  return std::visit([&](const auto& c) { return take(backend, c, head); }, call);
}

RecurrenceCall part_of(RecurrenceCall call, std::int64_t first, std::int64_t count) {
  const auto cut = [&](const std::initializer_list<Tensor*>& fields) {
    for (Tensor* field : fields) *field = field->range(first, count);
  };
  if (auto* mamba2 = std::get_if<Mamba2Call>(&call)) {
    cut({&mamba2->x, &mamba2->B, &mamba2->C, &mamba2->dt});
  } else {
    auto& delta = std::get<DeltaCall>(call);
    cut({&delta.q, &delta.k, &delta.v, &delta.gate, &delta.beta});
  }
  return call;
}

}  // namespace replayssm
