#pragma once

// The generic decode step, private to cuda/: one row of one head's state by one thread, the records of the ring run
// again one after another on the row in fp32. Simple and right rather than fast, for every shape and type. Plain C++:
// the kernel in decode_generic.cu and the tests that have no GPU run the same functions. cuda/generic_window.h makes
// speculative steps of the same parts.
//
// With exact formats a step that runs the records again has the state that an eager step has, so that the two agree
// bit for bit.

#include <cmath>
#include <cstdint>

#include "cuda/codes.cuh"
#include "cuda/decode.h"

namespace replayssm::cuda::generic {

/// The largest head_dim and state_dim.
inline constexpr int kMaxDim = 256;

/// A step of any recurrence.
struct Problem {
  Step step;
  Activations v, w, c;  ///< x, B, C of Mamba-2; v, k, q of the delta rule
  Activations gate;     ///< dt; the gate of the delta rule
  Activations beta;     ///< delta rule only
  const float *A_log = nullptr, *dt_bias = nullptr, *D = nullptr;
  float dt_min = 0, dt_max = 0, beta_scale = 1;
  bool closed_loop = false;
};

inline Problem problem(const Mamba2Step& in) {
  return {in, in.x, in.B, in.C, in.dt, {}, in.A_log, in.dt_bias, in.D, in.dt_min, in.dt_max, 1, false};
}

inline Problem problem(const DeltaStep& in) {
  return {in, in.v, in.k, in.q, in.gate, in.beta, in.A_log, in.dt_bias, nullptr, 0, 0, in.beta_scale, in.closed_loop};
}

/// What a token brings to all rows of one head, in fp32 and unrounded; of Mamba-2 `gain` is dt and log_decay[0] alone
/// is used, as it is of Gated DeltaNet.
struct Token {
  float w[kMaxDim], c[kMaxDim], log_decay[kMaxDim];
  float gain;
};

/// One row of the step: a sequence and its slot.
struct Place {
  std::int64_t row, slot, head, group;
  std::int64_t held;
  bool flush;
  std::int64_t origin = 0;  ///< the ring's entry that record 0 lies in
};

/// Where row `row` of the batch and head `head` work; false where the row is padding.
REPLAYSSM_HOST_DEVICE inline bool find_place(const Step& step, std::int64_t row, std::int64_t head, Place& place) {
  const std::int64_t slot = step.slot[row];
  if (slot < 0 || slot >= step.slots) return false;
  const std::int64_t held = step.held ? step.held[row] : 0;
  place = {row, slot, head, head / (step.shape.heads / step.shape.groups), held, held == step.length - 1};
  return true;
}

// ---- inputs ---------------------------------------------------------------------------------------------------------

REPLAYSSM_HOST_DEVICE inline float input(const Activations& a, std::int64_t row, std::int64_t i) {
  return load(a.type, a.data, row * a.stride + i);
}

/// log(1 + e^z), stable.
REPLAYSSM_HOST_DEVICE inline float softplus(float z) { return z > 0 ? z + log1pf(expf(-z)) : log1pf(expf(z)); }

REPLAYSSM_HOST_DEVICE inline float sigmoid(float z) {
  if (z >= 0) return detail::divide(1.0F, 1.0F + expf(-z));
  const float e = expf(z);
  return detail::divide(e, 1.0F + e);
}

/// sqrt(sum x^2 + 1e-6) over the n inputs from `first` on.
REPLAYSSM_HOST_DEVICE inline float norm(const Activations& a, std::int64_t row, std::int64_t first, int n) {
  float part[4] = {};
  for (int i = 0; i < n; ++i) {
    const float x = input(a, row, first + i);
    float& sum = part[i % 4];
    sum = fmaf(x, x, sum);
  }
  return sqrtf((part[0] + part[1]) + (part[2] + part[3]) + 1e-6F);
}

/// Mamba-2: dt after bias, softplus and clamp.
REPLAYSSM_HOST_DEVICE inline float time_step(const Problem& in, std::int64_t row, std::int64_t head) {
  float dt = softplus(input(in.gate, row, head) + in.dt_bias[head]);
  if (dt < in.dt_min) dt = in.dt_min;
  if (dt > in.dt_max) dt = in.dt_max;
  return dt;
}

/// Fills elements lane, lane + lanes, ... of the token; the sums that an element needs are taken by every lane, in the
/// same order.
template <bool delta, bool columns>
REPLAYSSM_HOST_DEVICE void prepare(const Problem& in, const Place& at, int lane, int lanes, Token& token) {
  const int N = static_cast<int>(in.step.shape.state_dim), D = columns ? N : 1;
  const std::int64_t first = at.group * N;
  const float rate = -expf(in.A_log[at.head]);
  if constexpr (delta) {
    const float w_norm = norm(in.w, at.row, first, N), c_norm = norm(in.c, at.row, first, N);
    const float scale = detail::divide(1.0F, sqrtf(static_cast<float>(N)));
    for (int n = lane; n < N; n += lanes) {
      token.w[n] = detail::divide(input(in.w, at.row, first + n), w_norm);
      token.c[n] = detail::divide(input(in.c, at.row, first + n), c_norm) * scale;
    }
    for (int d = lane; d < D; d += lanes) {
      const std::int64_t i = at.head * D + d;
      token.log_decay[d] = rate * softplus(input(in.gate, at.row, i) + in.dt_bias[i]);
    }
    if (lane == 0) token.gain = in.beta_scale * sigmoid(input(in.beta, at.row, at.head));
  } else {
    for (int n = lane; n < N; n += lanes) {
      token.w[n] = input(in.w, at.row, first + n);
      token.c[n] = input(in.c, at.row, first + n);
    }
    if (lane == 0) {
      token.gain = time_step(in, at.row, at.head);
      token.log_decay[0] = rate * token.gain;
    }
  }
}

// ---- records --------------------------------------------------------------------------------------------------------

/// The entry of the ring that record j lies in.
REPLAYSSM_HOST_DEVICE inline std::int64_t entry(const Ring& ring, const Place& at, std::int64_t j) {
  const std::int64_t e = at.origin + j;
  return e < ring.capacity ? e : e - ring.capacity;
}

/// Index of element i of entry j in a field of the given width; `unit` is the head or group.
REPLAYSSM_HOST_DEVICE inline std::int64_t at_record(const Step& step, const RingField& field, std::int64_t slot,
                                                    std::int64_t unit, std::int64_t j, std::int64_t width,
                                                    std::int64_t i) {
  return slot * field.slot_stride + (unit * step.ring.capacity + j) * width + i;
}

/// An entry of the ring as row p of the state sees it.
template <bool delta, bool columns>
struct Stored {
  const Problem& in;
  const Place& at;
  std::int64_t entry;
  int p;

  REPLAYSSM_HOST_DEVICE float field(const RingField& f, std::int64_t unit, std::int64_t width, std::int64_t i) const {
    return load(f.type, f.data, at_record(in.step, f, at.slot, unit, entry, width, i));
  }
  REPLAYSSM_HOST_DEVICE float w(int n) const { return field(in.step.ring.w, at.group, in.step.shape.state_dim, n); }
  REPLAYSSM_HOST_DEVICE float v() const { return field(in.step.ring.v, at.head, in.step.shape.head_dim, p); }
  REPLAYSSM_HOST_DEVICE float u() const { return field(in.step.ring.u, at.head, in.step.shape.head_dim, p); }
  REPLAYSSM_HOST_DEVICE float gain() const { return field(in.step.ring.gain, at.head, 1, 0); }
  REPLAYSSM_HOST_DEVICE float log_decay(int d) const {
    if constexpr (!delta) return -expf(in.A_log[at.head]) * gain();
    return field(in.step.ring.log_decay, at.head, columns ? in.step.shape.state_dim : 1, d);
  }
};

/// The token at hand with its unrounded values.
struct Fresh {
  const Token& token;
  float value;  // v of the row

  REPLAYSSM_HOST_DEVICE float w(int n) const { return token.w[n]; }
  REPLAYSSM_HOST_DEVICE float v() const { return value; }
  REPLAYSSM_HOST_DEVICE float gain() const { return token.gain; }
  REPLAYSSM_HOST_DEVICE float log_decay(int d) const { return token.log_decay[d]; }
};

REPLAYSSM_HOST_DEVICE inline Fresh fresh_row(const Problem& in, const Place& at, const Token& token, int p) {
  return {token, input(in.v, at.row, at.head * in.step.shape.head_dim + p)};
}

/// The token at hand as its record will hold it.
struct Rounded {
  const Token& token;
  const Ring& ring;
  float value;

  REPLAYSSM_HOST_DEVICE float w(int n) const { return rounded(ring.w.type, token.w[n]); }
  REPLAYSSM_HOST_DEVICE float v() const { return rounded(ring.v.type, value); }
  REPLAYSSM_HOST_DEVICE float gain() const { return token.gain; }
};

// ---- one row of the state -------------------------------------------------------------------------------------------

template <bool columns, class Record>
REPLAYSSM_HOST_DEVICE void decay(const Record& r, int N, float* s) {
  if constexpr (columns) {
    for (int n = 0; n < N; ++n) s[n] *= expf(r.log_decay(n));
  } else {
    const float a = expf(r.log_decay(0));
    for (int n = 0; n < N; ++n) s[n] *= a;
  }
}

/// s . w, in eight sums.
template <class Row, class Vector>
REPLAYSSM_HOST_DEVICE float dot(const Row& s, const Vector& w, int N) {
  float part[8] = {};
  int n = 0;
  for (; n + 8 <= N; n += 8) {
    for (int k = 0; k < 8; ++k) part[k] = fmaf(s[n + k], w(n + k), part[k]);
  }
  for (; n < N; ++n) part[0] = fmaf(s[n], w(n), part[0]);
  return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
}

template <class Record>
struct KeyOf {
  const Record& r;
  REPLAYSSM_HOST_DEVICE float operator()(int n) const { return r.w(n); }
};

/// u of a record that meets the row s, already decayed.
template <bool delta, class Record>
REPLAYSSM_HOST_DEVICE float form_u(const Record& r, const float* s, int N) {
  if constexpr (delta) return r.gain() * (r.v() - dot(s, KeyOf<Record>{r}, N));
  return r.gain() * r.v();
}

template <class Record>
REPLAYSSM_HOST_DEVICE void add(float u, const Record& r, int N, float* s) {
  for (int n = 0; n < N; ++n) s[n] = fmaf(u, r.w(n), s[n]);
}

/// y of row p of a token, from the row s that it met, decayed, and the token itself.
REPLAYSSM_HOST_DEVICE inline void put_y(const Problem& in, const Place& at, const Fresh& token, int p, float u,
                                        const float* s) {
  const struct {
    const float *s, *w;
    float u;
    REPLAYSSM_HOST_DEVICE float operator[](int n) const { return fmaf(u, w[n], s[n]); }
  } row{s, token.token.w, u};
  const struct {
    const float* c;
    REPLAYSSM_HOST_DEVICE float operator()(int n) const { return c[n]; }
  } readout{token.token.c};
  const Step& step = in.step;
  float y = dot(row, readout, static_cast<int>(step.shape.state_dim));
  if (in.D) y = fmaf(in.D[at.head], token.value, y);
  store(step.y_type, step.y, at.row * step.y_stride + at.head * step.shape.head_dim + p, y);
}

REPLAYSSM_HOST_DEVICE inline void load_row(const Step& step, const StatePool& pool, const Place& at, int p, float* s) {
  const std::int64_t row = at.head * step.shape.head_dim + p;
  const float* scale = has_scale(pool.storage) ? pool.scales + at.slot * pool.scale_slot_stride + row : nullptr;
  decode_row(pool.storage, pool.codes, at.slot * pool.slot_stride + row * step.shape.state_dim, scale,
             step.shape.state_dim, s);
}

/// Stores the row and replaces s by what was stored.
REPLAYSSM_HOST_DEVICE inline void store_row(const Step& step, const StatePool& pool, const Place& at, int p, float* s) {
  const std::int64_t row = at.head * step.shape.head_dim + p;
  float* scale = has_scale(pool.storage) ? pool.scales + at.slot * pool.scale_slot_stride + row : nullptr;
  encode_row(pool.storage, s, step.shape.state_dim, pool.codes, at.slot * pool.slot_stride + row * step.shape.state_dim,
             scale);
  load_row(step, pool, at, p, s);
}

/// Runs all records of the ring on the row. `recompute`: u from the row itself and the raw record.
template <bool delta, bool columns>
REPLAYSSM_HOST_DEVICE void run_records(const Problem& in, const Place& at, int p, bool recompute, float* s) {
  const int N = static_cast<int>(in.step.shape.state_dim);
  for (std::int64_t j = 0; j < at.held; ++j) {
    const Stored<delta, columns> r{in, at, entry(in.step.ring, at, j), p};
    decay<columns>(r, N, s);
    add(recompute || !delta ? form_u<delta>(r, s, N) : r.u(), r, N, s);
  }
}

/// Appends what belongs to row p of the record. `u`: of the token at hand; s: the row that it met, decayed. Returns the
/// u that later outputs find there.
template <bool delta>
REPLAYSSM_HOST_DEVICE float append_row(const Problem& in, const Place& at, const Token& token, int p, float v, float u,
                                       const float* s) {
  const Ring& ring = in.step.ring;
  const std::int64_t P = in.step.shape.head_dim, e = entry(ring, at, at.held);
  const Rounded record{token, ring, v};
  if (!delta || in.closed_loop) {
    store(ring.v.type, ring.v.data, at_record(in.step, ring.v, at.slot, at.head, e, P, p), v);
  }
  if constexpr (delta) {
    // Later outputs of a closed loop read the u of the record as it is stored, those of an open loop the token's own.
    if (in.closed_loop) u = form_u<true>(record, s, static_cast<int>(in.step.shape.state_dim));
    store(ring.u.type, ring.u.data, at_record(in.step, ring.u, at.slot, at.head, e, P, p), u);
    return rounded(ring.u.type, u);
  } else {
    return form_u<false>(record, s, 0);
  }
}

/// Appends what belongs to the whole head; w once for all heads of a group.
template <bool delta, bool columns>
REPLAYSSM_HOST_DEVICE void append_head(const Problem& in, const Place& at, const Token& token, int lane, int lanes) {
  const Ring& ring = in.step.ring;
  const int N = static_cast<int>(in.step.shape.state_dim), D = columns ? N : 1;
  const std::int64_t heads_per_group = in.step.shape.heads / in.step.shape.groups, e = entry(ring, at, at.held);
  if (at.head % heads_per_group == 0) {
    for (int n = lane; n < N; n += lanes) {
      store(ring.w.type, ring.w.data, at_record(in.step, ring.w, at.slot, at.group, e, N, n), token.w[n]);
    }
  }
  if (lane == 0 && (!delta || in.closed_loop)) {
    store(Scalar::fp32, ring.gain.data, at_record(in.step, ring.gain, at.slot, at.head, e, 1, 0), token.gain);
  }
  if constexpr (delta) {
    for (int d = lane; d < D; d += lanes) {
      store(Scalar::fp32, ring.log_decay.data, at_record(in.step, ring.log_decay, at.slot, at.head, e, D, d),
            token.log_decay[d]);
    }
  }
}

/// The whole step for row p of the state of one head. Rows need nothing of each other.
template <bool delta, bool columns>
REPLAYSSM_HOST_DEVICE void step_row(const Problem& in, const Place& at, const Token& token, int p) {
  const Step& step = in.step;
  const int N = static_cast<int>(step.shape.state_dim);
  const bool split = step.read.codes != nullptr, open = delta && !in.closed_loop;
  const Fresh fresh = fresh_row(in, at, token, p);
  float s[kMaxDim];

  float u = 0;
  const bool from_copy = at.flush && split && open;
  if (from_copy) {  // an open loop takes every u from what outputs read
    load_row(step, step.read, at, p, s);
    run_records<delta, columns>(in, at, p, false, s);
    decay<columns>(fresh, N, s);
    u = form_u<delta>(fresh, s, N);
  }
  load_row(step, at.flush || !split ? step.state : step.read, at, p, s);
  run_records<delta, columns>(in, at, p, at.flush && !open, s);
  decay<columns>(fresh, N, s);
  if (!from_copy) u = form_u<delta>(fresh, s, N);
  if (!at.flush) append_row<delta>(in, at, token, p, fresh.value, u, s);
  put_y(in, at, fresh, p, u, s);
  if (at.flush) {
    add(u, fresh, N, s);
    store_row(step, step.state, at, p, s);
    if (split) store_row(step, step.read, at, p, s);
  }
}

/// A step on host memory, one row after another.
template <bool delta, bool columns>
void step_on_host(const Problem& in) {
  for (std::int64_t row = 0; row < in.step.rows; ++row) {
    for (std::int64_t head = 0; head < in.step.shape.heads; ++head) {
      Place at;
      if (!find_place(in.step, row, head, at)) continue;
      Token token;
      prepare<delta, columns>(in, at, 0, 1, token);
      for (int p = 0; p < in.step.shape.head_dim; ++p) step_row<delta, columns>(in, at, token, p);
      if (!at.flush) append_head<delta, columns>(in, at, token, 0, 1);
    }
  }
}

}  // namespace replayssm::cuda::generic
