#pragma once

// One idea for Mamba-2, Gated DeltaNet and KDA: S <- S decay + u w^T, then readouts S c (Katharopoulos et al. 2020;
// Dao & Gu 2024; Yang et al. 2024). The recurrences differ in where u, w and decay come from.

#include <cstdint>
#include <string_view>
#include <vector>

namespace replayssm {

enum class Recurrence { mamba2, gated_delta, kda };

/// The delta rule forms u = beta (v - S' w) from a readout of the decayed state; otherwise u = gain v.
constexpr bool is_delta_rule(Recurrence r) { return r != Recurrence::mamba2; }
/// One decay per state column instead of one per head.
constexpr bool has_column_decay(Recurrence r) { return r == Recurrence::kda; }

constexpr std::string_view name(Recurrence r) {
  switch (r) {
    case Recurrence::mamba2:
      return "mamba2";
    case Recurrence::gated_delta:
      return "gated_delta";
    case Recurrence::kda:
      return "kda";
  }
  return "";
}

/// The recurrent state of a layer is [heads, head_dim, state_dim], state_dim contiguous. `groups` sets of w and c are
/// shared by heads / groups consecutive heads each.
struct RecurrenceShape {
  Recurrence recurrence = Recurrence::mamba2;
  std::int64_t heads = 0, groups = 0, head_dim = 0, state_dim = 0;

  std::int64_t decay_dim() const { return has_column_decay(recurrence) ? state_dim : 1; }
  std::int64_t group(std::int64_t head) const { return head / (heads / groups); }
};

/// Rows of scalars, row t at data + t * stride.
template <class Real>
struct Rows {
  const Real* data = nullptr;
  std::int64_t stride = 0;
  const Real* operator[](std::int64_t t) const { return data + t * stride; }
};

/// What one token brings to one head. `v` is x (Mamba-2) or v (delta rule) [P]; `gain` is dt or beta; `w` is B or k
/// [N]; `log_decay` [1] or [N].
template <class Real>
struct Record {
  const Real* v;
  const Real* w;
  const Real* log_decay;
  Real gain;
};

/// The inputs of one head over some tokens, all gates applied, nothing rounded.
template <class Real>
struct HeadInputs {
  Rows<Real> v, w, c, log_decay, gain;
  /// Where the record holds dt instead of the decay (Mamba-2): log_decay = *rate * dt.
  const Real* rate = nullptr;

  Record<Real> record(std::int64_t t) const { return {v[t], w[t], log_decay[t], *gain[t]}; }
  /// Those from token t on.
  HeadInputs from(std::int64_t t) const {
    HeadInputs out = *this;
    for (Rows<Real>* rows : {&out.v, &out.w, &out.c, &out.log_decay, &out.gain}) rows->data = (*rows)[t];
    return out;
  }
};

/// How prepare() goes over the tokens of a layer, each by itself: in order. A backend passes its own to use threads.
struct TokensInOrder {
  template <class Body>
  void operator()(std::int64_t tokens, Body&& body) const {
    for (std::int64_t t = 0; t < tokens; ++t) body(t);
  }
};

/// The inputs of one layer over `tokens` tokens in Real, with the storage that they need beyond the raw inputs.
template <class Real>
struct LayerInputs {
  std::int64_t tokens = 0;
  std::vector<HeadInputs<Real>> heads;
  std::vector<std::vector<Real>> storage;
};

}  // namespace replayssm
