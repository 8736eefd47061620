#include "core/state.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

#include "core/error.h"
#include "core/lanes.h"
#include "core/parallel.h"
#include "core/scales.h"

namespace replayssm {
namespace {

template <class Event>
void keep_earlier(std::optional<Event>& first, const std::optional<Event>& other) {
  if (other && (!first || *other < *first)) first = other;
}

template <class Real>
bool all_finite(const Real* x, std::int64_t n) {
  Real sum(0);  // 0 x is 0 for finite x, else NaN
  for (std::int64_t i = 0; i < n; ++i) sum += Real(0) * x[i];
  return sum == Real(0);
}

}  // namespace

void RangeEvents::merge(const RangeEvents& other) {
  overflows += other.overflows;
  saturations += other.saturations;
  overflows_counted = overflows_counted && other.overflows_counted;
  keep_earlier(first_overflow, other.first_overflow);
  keep_earlier(first_non_finite, other.first_non_finite);
}

/// The steps of one head. P rows, N columns. Record i of the ring is the (i + 1)-th token since the checkpoint; the
/// token at hand has index held, computes with its unrounded values and is appended unless it flushes.
template <class Real>
template <bool Delta, bool ColumnDecay>
class State<Real>::Engine {
 public:
  Engine(State& state, Head& head, std::int64_t index, const HeadInputs<Real>& in)
      : state_(state),
        head_(head),
        index_(index),
        in_(in),
        P(state.shape_.head_dim),
        N(state.shape_.state_dim),
        D(state.shape_.decay_dim()),
        L(state.schedule_.length),
        split_(state.schedule_.read.has_value()),
        sequential_(state.policy_.order == Order::sequential),
        open_(Delta && state.policy_.loop == Loop::open) {}

  void run(std::int64_t tokens, Real* y, std::int64_t y_stride) {
    if (L == 1 && !split_) {
      eager(tokens, y, y_stride);
    } else {
      for (std::int64_t t = 0; t < tokens;) {
        const std::int64_t outputs = std::min(L - 1 - head_.held, tokens - t);
        if (outputs > 0) {
          outputs_only(t, outputs, y, y_stride, head_.running);
          head_.held += outputs;
          t += outputs;
        } else {
          sequential_ ? flush_sequential(t, y + t * y_stride) : flush_closed(t, y + t * y_stride);
          ++t;
        }
      }
    }
    keep_earlier(head_.events.first_non_finite, first_non_finite(tokens, y, y_stride));
    head_.steps += tokens;
  }

  /// Outputs of tokens that are appended, but neither held nor counted.
  void verify(std::int64_t tokens, Real* y, std::int64_t y_stride) {
    Vector running = head_.running;
    outputs_only(0, tokens, y, y_stride, running);
    head_.verified_non_finite = first_non_finite(tokens, y, y_stride);
  }

  /// Holds the first `records` of those in the ring, verified ones among them, and counts their tokens alone.
  void hold(std::int64_t records) {
    if (sequential_ && records != head_.held) {
      if (records < head_.held) head_.running = read_copy();
      for (std::int64_t i = records < head_.held ? 0 : head_.held; i < records; ++i) apply(head_.running, i);
    }
    head_.steps += records - head_.held;
    head_.held = records;
    keep_earlier(head_.events.first_non_finite, std::exchange(head_.verified_non_finite, {}));
    // No earlier event was lost: this was the first, and flushes come before the tokens that can be taken back.
    auto& first = head_.events.first_non_finite;
    if (first && first->step >= head_.steps) first.reset();
  }

  Vector effective(std::int64_t records) {
    Vector s = head_.anchor;
    if (records == 0) return s;
    if (sequential_) {
      replay_records(s, records);
    } else {  // the rebuild of a flush, with the newest record in the place of the token at hand
      const std::int64_t last = records - 1;
      const Vector us = flush_updates(last, stored(last), kept_u(last));
      Vector ignored(size(P));
      rebuild(last, stored(last), us.data(), stored(last).w, s.data(), ignored.data());
    }
    return s;
  }

  // ---- stores -------------------------------------------------------------------------------------------------------

  /// A stored state, or some rows of it, and its residual (null without error feedback).
  struct Copy {
    const Format& format;
    Real *s, *r;
    std::int64_t rows;
  };
  Copy anchor(std::int64_t first, std::int64_t rows) {
    Vector& r = head_.anchor_residual;
    return {state_.schedule_.anchor, head_.anchor.data() + first * N, r.empty() ? nullptr : r.data() + first * N, rows};
  }
  Copy read() {
    Vector& r = head_.read_residual;
    return {*state_.schedule_.read, head_.read.data(), r.empty() ? nullptr : r.data(), P};
  }

  // A store in three parts, between which heads that share a scale tell their extremes. s <- s + r, and r the same.
  void feed_back(const Copy& copy) {
    for (std::int64_t i = 0; copy.r && i < copy.rows * N; ++i) copy.r[i] = copy.s[i] += copy.r[i];
  }

  /// s <- Q(s) and r <- r - s; keeps count of what went out of range at token t. `first` is the first row.
  void round(const Copy& copy, std::int64_t t, std::int64_t first = 0, const Extremes<Real>* tensor = nullptr) {
    const RangeLoss loss = round_rows(copy.format, copy.s, copy.rows, N, draw(t, index_, first * N), tensor);
    if (copy.r) keep_error(copy.s, copy.rows * N, copy.r);
    if (loss == RangeLoss()) return;
    auto& events = head_.events;
    events.saturations += loss.saturations;
    if (loss.overflows == 0) return;
    events.overflows += loss.overflows;
    keep_earlier(events.first_overflow, event(t));
    if (!all_finite(copy.s, copy.rows * N)) keep_earlier(events.first_non_finite, event(t));
  }

  /// r <- Q_residual(r).
  void round_residual(const Copy& copy, std::int64_t t, std::int64_t first = 0,
                      const Extremes<Real>* tensor = nullptr) {
    if (copy.r) round_rows(*copy.format.residual, copy.r, copy.rows, N, draw(t, index_, first * N), tensor);
  }

  void copy_anchor() { head_.read = head_.anchor; }

  /// Ends a flush whose states are stored.
  void start_ring() {
    if (sequential_) head_.running = read_copy();
    head_.origin = slot(head_.held);
    head_.held = 0;
  }

  /// A flush after the last token.
  void fold() {
    if (head_.held == 0) return;
    head_.anchor = effective(head_.held);
    store_checkpoint(-1);
  }

 private:
  static std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }
  std::optional<RangeEvents::Event> event(std::int64_t t) const { return RangeEvents::Event{head_.steps + t, index_}; }
  std::optional<RangeEvents::Event> first_non_finite(std::int64_t tokens, const Real* y, std::int64_t y_stride) const {
    for (std::int64_t t = 0; t < tokens; ++t) {
      if (!all_finite(y + t * y_stride, P)) return event(t);
    }
    return {};
  }

  std::int64_t slot(std::int64_t i) const {
    const std::int64_t straight = head_.origin + i;
    return straight < state_.slots_ ? straight : straight - state_.slots_;
  }
  Record<Real> stored(std::int64_t i) const {
    const Ring& r = head_.ring;
    const std::int64_t at = slot(i);
    return {r.v.data() + at * P, r.w.data() + at * N, r.log_decay.data() + at * D, r.gain[size(at)]};
  }
  Real* kept_u(std::int64_t i) const { return head_.ring.u.data() + slot(i) * P; }
  /// The u of the first `count` records, with room for `more`: [count + more, P].
  Vector kept_updates(std::int64_t count, std::int64_t more) const {
    Vector us(size((count + more) * P));
    for (std::int64_t j = 0; j < count; ++j) std::copy_n(kept_u(j), P, us.data() + j * P);
    return us;
  }
  const Vector& read_copy() const { return split_ ? head_.read : head_.anchor; }

  void decay_of(const Real* log_decay, Real* out) const {
    using std::exp;
    for (std::int64_t d = 0; d < D; ++d) out[d] = exp(log_decay[d]);
  }

  /// a[n] * x[n]; a view of x itself where the decay is one scalar, which is then applied after the dot product.
  const Real* decayed(const Real* a, const Real* x, Real* scratch) const {
    if constexpr (!ColumnDecay) return x;
    for (std::int64_t n = 0; n < N; ++n) scratch[n] = a[n] * x[n];
    return scratch;
  }

  /// u of one token on `rows` rows from `first`, from the state s that it meets, before its decay.
  void form_u(const Real* s, std::int64_t first, std::int64_t rows, const Record<Real>& r, const Real* decay, Real* u) {
    if constexpr (Delta) {
      scratch_.resize(size(N));
      const Real* w = decayed(decay, r.w, scratch_.data());
      dots(s, rows, N, &w, 1, u);
      for (std::int64_t p = 0; p < rows; ++p) {
        const Real readout = ColumnDecay ? u[p] : Real(decay[0] * u[p]);
        u[p] = r.gain * (r.v[first + p] - readout);
      }
    } else {
      for (std::int64_t p = 0; p < rows; ++p) u[p] = r.gain * r.v[first + p];
    }
  }

  /// What stochastic rounding draws from at token t.
  Draw draw(std::int64_t t, std::int64_t head, std::int64_t first = 0) const {
    return {state_.place_, static_cast<std::uint32_t>(head_.steps + t), static_cast<std::uint32_t>(head), first};
  }

  void store(const Copy& copy, std::int64_t t, std::int64_t first = 0) {
    if (copy.format.exact()) return;
    feed_back(copy);
    round(copy, t, first);
    round_residual(copy, t, first);
  }

  void store_checkpoint(std::int64_t t) {
    if (!state_.joins_heads_) {  // else State does, once all heads are here
      store(anchor(0, P), t);
      if (split_) {
        copy_anchor();
        store(read(), t);
      }
    }
    start_ring();
  }

  /// Appends the raw fields of token t as record i, each rounded into its ring format.
  void append(std::int64_t t, std::int64_t i) {
    Ring& ring = head_.ring;
    const auto& formats = state_.ring_;
    const std::int64_t at = slot(i);
    const auto put = [&](const Format& format, const Real* from, std::int64_t n, Real* to, bool shared = false) {
      std::copy(from, from + n, to);
      const std::int64_t per_group = state_.shape_.heads / state_.shape_.groups;
      if (!format.exact()) round_rows(format, to, 1, n, draw(t, shared ? index_ / per_group * per_group : index_));
    };
    put(formats.v, in_.v[t], P, ring.v.data() + at * P);
    put(formats.w, in_.w[t], N, ring.w.data() + at * N, true);
    put(formats.gain, in_.gain[t], 1, ring.gain.data() + at);
    if (in_.rate) {
      ring.log_decay[size(at)] = *in_.rate * ring.gain[size(at)];
    } else {
      put(formats.log_decay, in_.log_decay[t], D, ring.log_decay.data() + at * D);
    }
  }

  // ---- eager ------------------------------------------------------------------------------------------------------

  /// Row blocks outermost: the rows of a block stay in the first-level cache over all tokens.
  void eager(std::int64_t tokens, Real* y, std::int64_t y_stride) {
    Vector decays(size(tokens * D)), u(size(P));
    for (std::int64_t t = 0; t < tokens; ++t) decay_of(in_.log_decay[t], decays.data() + t * D);
    const auto in_blocks_of = [&](auto block) {
      for (std::int64_t first = 0; first < P; first += block) {
        const std::int64_t rows = std::min<std::int64_t>(block, P - first);
        Real* s = head_.anchor.data() + first * N;
        for (std::int64_t t = 0; t < tokens; ++t) {
          const Real* decay = decays.data() + t * D;
          form_u(s, first, rows, in_.record(t), decay, u.data());
          update_and_read<ColumnDecay>(s, rows, N, decay, u.data(), in_.w[t], in_.c[t], y + t * y_stride + first);
          if (!state_.joins_heads_) store(anchor(first, rows), t, first);
        }
      }
    };
    // Loops of a length that the compiler knows are faster.
    state_.schedule_.anchor.joins_rows() ? in_blocks_of(P) : in_blocks_of(std::integral_constant<std::int64_t, 16>());
  }

  // ---- closed form --------------------------------------------------------------------------------------------------

  /// Decays that token i sees: out[j] = e^{g_{j+1} + ... + g_i} for the records j <= i, out[i + 1] = e^{g_0 + ... +
  /// g_i} for the checkpoint; [i + 2, D]. Suffix sums, newest first: differences of prefix sums would cancel.
  void suffix_decays(std::int64_t i, const Real* current, Real* out) const {
    using std::exp;
    const Real* ring = head_.ring.log_decay.data();
    for (std::int64_t d = 0; d < D; ++d) {
      Real sum(0);
      for (std::int64_t j = i; j >= 0; --j) {
        out[j * D + d] = exp(sum);
        sum += j == i ? current[d] : ring[slot(j) * D + d];
      }
      out[(i + 1) * D + d] = exp(sum);
    }
  }

  /// out = e^G (S0 x) + sum_{j < i} e^{g_{j+1} + ...} (w_j . x) u_j, given z = S0 x (S0 (e^G x) for column decays).
  void readout(std::int64_t i, const Real* decays, const Real* z, const Real* x, const Real* us, Real* out) {
    scratch_.resize(size(N));
    products_.resize(size(i));
    const Real* w = head_.ring.w.data();
    if constexpr (ColumnDecay) {
      for (std::int64_t j = 0; j < i; ++j) {
        products_[size(j)] = dot(w + slot(j) * N, decayed(decays + j * D, x, scratch_.data()), N);
      }
      add_products(z, Real(1), products_.data(), us, i, P, out);
    } else {
      const std::int64_t straight = std::min(i, state_.slots_ - head_.origin);
      dots(w + head_.origin * N, straight, N, &x, 1, products_.data());
      dots(w, i - straight, N, &x, 1, products_.data() + straight);
      for (std::int64_t j = 0; j < i; ++j) products_[size(j)] *= decays[j];
      add_products(z, decays[i + 1], products_.data(), us, i, P, out);
    }
  }

  /// u of token i of the delta rule given the u of the records before it, its decays and z as in readout().
  void solve_u(std::int64_t i, const Record<Real>& r, const Real* decays, const Real* z, const Real* us, Real* u) {
    readout(i, decays, z, r.w, us, u);
    for (std::int64_t p = 0; p < P; ++p) u[p] = r.gain * (r.v[p] - u[p]);
  }

  /// u of tokens first .. last of the delta rule from the checkpoint s: us [last + 1, P], of which the first are known.
  /// `record(i)` is what token i computes with.
  template <class RecordOf>
  void solve_all(const Real* s, std::int64_t first, std::int64_t last, RecordOf&& record, Real* us) {
    const std::int64_t count = last - first + 1, row = (last + 2) * D;
    Vector decays(size(count * row)), scaled(size(ColumnDecay ? count * N : 0)), z(size(count * P));
    std::vector<const Real*> x(size(count));
    for (std::int64_t m = 0; m < count; ++m) {
      const Record<Real> r = record(first + m);
      suffix_decays(first + m, r.log_decay, decays.data() + m * row);
      x[size(m)] = decayed(decays.data() + m * row + (first + m + 1) * D, r.w, scaled.data() + m * N);
    }
    dots(s, P, N, x.data(), count, z.data());
    for (std::int64_t m = 0; m < count; ++m) {
      solve_u(first + m, record(first + m), decays.data() + m * row, z.data() + m * P, us, us + (first + m) * P);
    }
  }

  /// Output-only steps: appends tokens t0 .. t0 + count behind the records that are held and reads them. In sequential
  /// order `running` is moved on.
  void outputs_only(std::int64_t t0, std::int64_t count, Real* y, std::int64_t y_stride, Vector& running) {
    sequential_ ? outputs_sequential(t0, count, y, y_stride, running) : outputs_closed(t0, count, y, y_stride);
  }

  /// From checkpoint and ring, without a state.
  void outputs_closed(std::int64_t t0, std::int64_t count, Real* y, std::int64_t y_stride) {
    const std::int64_t held = head_.held;
    Vector us = kept_updates(held, count);
    for (std::int64_t m = 0; m < count; ++m) append(t0 + m, held + m);

    // All readouts of the read copy at once: it is streamed once for the whole block of tokens.
    const std::int64_t row = (held + count + 1) * D, vectors = Delta ? 2 : 1;
    Vector decays(size(count * row)), scaled(size(ColumnDecay ? count * vectors * N : 0)), z(size(count * vectors * P));
    std::vector<const Real*> x(size(count * vectors));
    for (std::int64_t m = 0; m < count; ++m) {
      Real* d = decays.data() + m * row;
      suffix_decays(held + m, in_.log_decay[t0 + m], d);
      const Real* whole = d + (held + m + 1) * D;
      x[size(m)] = decayed(whole, in_.c[t0 + m], scaled.data() + m * N);
      if constexpr (Delta) x[size(count + m)] = decayed(whole, in_.w[t0 + m], scaled.data() + (count + m) * N);
    }
    dots(read_copy().data(), P, N, x.data(), count * vectors, z.data());

    Vector u(size(P));
    for (std::int64_t m = 0; m < count; ++m) {
      const std::int64_t t = t0 + m, i = held + m;
      const Record<Real> r = in_.record(t);
      const Real* d = decays.data() + m * row;
      if constexpr (Delta) {
        solve_u(i, r, d, z.data() + (count + m) * P, us.data(), u.data());
      } else {
        for (std::int64_t p = 0; p < P; ++p) u[size(p)] = r.gain * r.v[p];
      }
      Real* out = y + t * y_stride;
      readout(i, d, z.data() + m * P, in_.c[t], us.data(), out);
      add_scaled(out, dot(r.w, in_.c[t], N), u.data(), P);
      keep_u(t, i, u, us.data());
    }
  }

  /// The u of record i, token t, that later outputs use: of the record as it is stored; in an open loop u itself,
  /// rounded. us [i + 1, P]: those of the records before it, behind which it is put too.
  void keep_u(std::int64_t t, std::int64_t i, const Vector& u, Real* us) {
    Real* kept = us + i * P;
    if (open_) {
      std::copy(u.begin(), u.end(), kept);
      if (!state_.ring_.u.exact()) round_rows(state_.ring_.u, kept, 1, P, draw(t, index_));
    } else if (state_.ring_.exact) {
      std::copy(u.begin(), u.end(), kept);
    } else if constexpr (Delta) {
      const auto record = [this](std::int64_t j) { return stored(j); };
      solve_all(read_copy().data(), i, i, record, us);
    } else {
      form_u(nullptr, 0, P, stored(i), nullptr, kept);
    }
    std::copy_n(kept, P, kept_u(i));
  }

  /// The u that a flush folds in, of records 0 .. i - 1 and of r, the token at hand: [i + 1, P]. `known`: u of r.
  Vector flush_updates(std::int64_t i, const Record<Real>& r, const Real* known) {
    const bool recompute = Delta && split_ && !open_;
    Vector us = kept_updates(recompute ? 0 : i, recompute ? i + 1 : 1);
    if (!recompute && known) {
      std::copy_n(known, P, us.data() + i * P);
    } else if constexpr (Delta) {
      // Closed loop: nothing that was computed from the read copy may enter the anchor.
      const Real* s = recompute ? head_.anchor.data() : read_copy().data();
      const auto record = [&](std::int64_t j) { return j == i ? r : stored(j); };
      solve_all(s, recompute ? 0 : i, i, record, us.data());
    } else {
      form_u(nullptr, 0, P, r, nullptr, us.data() + i * P);
    }
    return us;
  }

  /// s <- e^G s + sum_{j < i} e^{...} u_j w_j^T + u_i w_i^T in place, then y = s c; token i is r.
  void rebuild(std::int64_t i, const Record<Real>& r, const Real* us, const Real* c, Real* s, Real* y) {
    using Lane = Lanes<Real>;
    const std::int64_t count = i + 1;
    Vector decays(size((i + 2) * D)), scaled(size(ColumnDecay ? count * N : 0)), factors(size(P * count));
    suffix_decays(i, r.log_decay, decays.data());
    std::vector<const Real*> w(size(count));
    for (std::int64_t j = 0; j < count; ++j) {
      const Real* raw = j == i ? r.w : stored(j).w;
      w[size(j)] = decayed(decays.data() + j * D, raw, scaled.data() + j * N);
      for (std::int64_t p = 0; p < P; ++p) {
        factors[size(p * count + j)] = ColumnDecay ? us[j * P + p] : Real(decays[size(j)] * us[j * P + p]);
      }
    }
    const Real* whole = decays.data() + (i + 1) * D;
    const auto block = [&]<int R>(std::int64_t first) {
      typename Lane::Vector acc[R];
      for (auto& a : acc) a = Lane::splat(Real(0));
      const Real* f = factors.data() + first * count;
      for_lanes<Real>(N, [&, base = s + first * N](auto load, auto put, auto valid) {
        typename Lane::Vector next[R];
        const auto e = ColumnDecay ? load(whole) : Lane::splat(whole[0]);
        for (int q = 0; q < R; ++q) next[q] = e * load(base + q * N);
        for (std::int64_t j = 0; j < count; ++j) {
          const auto wj = load(w[size(j)]);
          for (int q = 0; q < R; ++q) next[q] = mul_add(Lane::splat(f[q * count + j]), wj, next[q]);
        }
        const auto ck = load(c);
        for (int q = 0; q < R; ++q) {
          put(base + q * N, next[q]);
          acc[q] = mul_add(valid(next[q]), ck, acc[q]);
        }
      });
      for (int q = 0; q < R; ++q) y[first + q] = Lane::sum(acc[q]);
    };
    std::int64_t p = 0;
    for (; p + 8 <= P; p += 8) block.template operator()<8>(p);
    for (; p < P; ++p) block.template operator()<1>(p);
  }

  void flush_closed(std::int64_t t, Real* y) {
    const Record<Real> r = in_.record(t);
    const Vector us = flush_updates(head_.held, r, nullptr);
    rebuild(head_.held, r, us.data(), in_.c[t], head_.anchor.data(), y);
    store_checkpoint(t);
  }

  // ---- sequential order ---------------------------------------------------------------------------------------------

  void advance_one(Vector& s, const Record<Real>& r, const Real* u, const Real* c, Real* y) {
    Vector decay(size(D));
    decay_of(r.log_decay, decay.data());
    update_and_read<ColumnDecay>(s.data(), P, N, decay.data(), u, r.w, c, y);
  }

  Vector u_from(const Vector& s, const Record<Real>& r) {
    Vector decay(size(D)), u(size(P));
    decay_of(r.log_decay, decay.data());
    form_u(s.data(), 0, P, r, decay.data(), u.data());
    return u;
  }

  void outputs_sequential(std::int64_t t0, std::int64_t count, Real* y, std::int64_t y_stride, Vector& s) {
    Vector met;
    for (std::int64_t m = 0; m < count; ++m) {
      const std::int64_t t = t0 + m, i = head_.held + m;
      append(t, i);
      Real* kept = kept_u(i);
      const Vector u = u_from(s, in_.record(t));
      if (state_.ring_.exact) {
        std::copy(u.begin(), u.end(), kept);
        advance_one(s, in_.record(t), u.data(), in_.c[t], y + t * y_stride);
        continue;
      }
      met = s;
      advance_one(met, in_.record(t), u.data(), in_.c[t], y + t * y_stride);
      const Vector u_stored = open_ ? u : u_from(s, stored(i));
      std::copy(u_stored.begin(), u_stored.end(), kept);
      if (open_ && !state_.ring_.u.exact()) round_rows(state_.ring_.u, kept, 1, P, draw(t, index_));
      apply(s, i);
    }
  }

  /// Brings s over record i with the u that was kept of it.
  void apply(Vector& s, std::int64_t i) {
    Vector ignored(size(P));
    const Record<Real> r = stored(i);
    advance_one(s, r, kept_u(i), r.w, ignored.data());
  }

  /// Runs the first `count` records of the ring again, from s.
  void replay_records(Vector& s, std::int64_t count) {
    Vector ignored(size(P));
    for (std::int64_t j = 0; j < count; ++j) {
      const Record<Real> r = stored(j);
      const Vector u = open_ ? Vector(kept_u(j), kept_u(j) + P) : u_from(s, r);
      advance_one(s, r, u.data(), r.w, ignored.data());
    }
  }

  void flush_sequential(std::int64_t t, Real* y) {
    const Record<Real> r = in_.record(t);
    if (split_) {
      replay_records(head_.anchor, head_.held);
    } else {
      head_.anchor = head_.running;
    }
    const Vector u = u_from(open_ ? head_.running : head_.anchor, r);
    advance_one(head_.anchor, r, u.data(), in_.c[t], y);
    store_checkpoint(t);
  }

  State& state_;
  Head& head_;
  const std::int64_t index_;
  const HeadInputs<Real>& in_;
  const std::int64_t P, N, D, L;
  const bool split_, sequential_, open_;
  Vector scratch_, products_;
};

template <class Real>
State<Real>::State(const RecurrenceShape& shape, const Policy& policy, const StatePlace& place)
    : State(shape, policy, place, policy.as_replay().length - 1, 0) {}

template <class Real>
State<Real>::State(const RecurrenceShape& shape, const Policy& policy, const StatePlace& place, std::int64_t slots,
                   std::int64_t origin)
    : shape_(shape), policy_(policy), place_(place), slots_(slots) {
  if (shape.heads < 1 || shape.groups < 1 || shape.head_dim < 1 || shape.state_dim < 1 ||
      shape.heads % shape.groups != 0) {
    fail("state of ", shape.heads, " heads, ", shape.groups, " groups, head_dim ", shape.head_dim, ", state_dim ",
         shape.state_dim, ": all must be positive and heads a multiple of groups");
  }
  schedule_ = policy.as_replay();
  joins_heads_ = schedule_.anchor.joins_heads() || (schedule_.read && schedule_.read->joins_heads());
  const RingFormats& ring = schedule_.ring;
  const bool delta = is_delta_rule(shape.recurrence);
  ring_ = {ring.of(delta ? "v" : "x"),  ring.of(delta ? "k" : "B"),     ring.of("u"),
           ring.of(delta ? "g" : "dt"), ring.of(delta ? "beta" : "dt"), true};
  ring_.exact = ring_.v.exact() && ring_.w.exact() && ring_.log_decay.exact() && ring_.gain.exact() &&
                !(delta && policy.loop == Loop::open && !ring_.u.exact());

  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  const std::size_t state = size(shape.head_dim * shape.state_dim), records = size(slots);
  constexpr Real unwritten = std::numeric_limits<Real>::quiet_NaN();
  heads_.resize(size(shape.heads));
  for (Head& head : heads_) {
    head.origin = origin;
    head.anchor.assign(state, Real(0));
    if (schedule_.read) head.read.assign(state, Real(0));
    if (schedule_.anchor.residual) head.anchor_residual.assign(state, Real(0));
    if (schedule_.read && schedule_.read->residual) head.read_residual.assign(state, Real(0));
    if (policy.order == Order::sequential) head.running.assign(state, Real(0));
    head.ring.v.assign(records * size(shape.head_dim), unwritten);
    head.ring.u.assign(records * size(shape.head_dim), unwritten);
    head.ring.w.assign(records * size(shape.state_dim), unwritten);
    head.ring.log_decay.assign(records * size(shape.decay_dim()), unwritten);
    head.ring.gain.assign(records, unwritten);
  }
}

template <class Real>
template <class Use>
auto State<Real>::with_engine(std::int64_t head, const HeadInputs<Real>& in, Use&& use) {
  Head& h = heads_[static_cast<std::size_t>(head)];
  switch (shape_.recurrence) {
    case Recurrence::mamba2:
      return use(Engine<false, false>(*this, h, head, in));
    case Recurrence::gated_delta:
      return use(Engine<true, false>(*this, h, head, in));
    case Recurrence::kda:
      break;
  }
  return use(Engine<true, true>(*this, h, head, in));
}

template <class Real>
void State<Real>::advance_head(std::int64_t head, const LayerInputs<Real>& inputs, Real* y, std::int64_t y_stride) {
  if (joins_heads_) fail("policy '", policy_.text(), "': its heads share a scale, so that one cannot advance alone");
  with_engine(head, inputs.heads[static_cast<std::size_t>(head)],
              [&](auto engine) { engine.run(inputs.tokens, y, y_stride); });
}

template <class Real>
void State<Real>::advance(const LayerInputs<Real>& inputs, Real* y, std::int64_t y_stride, int threads) {
  if (!joins_heads_) {
    parallel_for(shape_.heads, threads,
                 [&](std::int64_t h) { advance_head(h, inputs, y + h * shape_.head_dim, y_stride); });
    return;
  }
  for (std::int64_t t = 0; t < inputs.tokens;) {
    const std::int64_t to_flush = schedule_.length - held(), steps = std::min(to_flush, inputs.tokens - t);
    parallel_for(shape_.heads, threads, [&](std::int64_t h) {
      const HeadInputs<Real> in = inputs.heads[static_cast<std::size_t>(h)].from(t);
      with_engine(h, in, [&](auto engine) { engine.run(steps, y + t * y_stride + h * shape_.head_dim, y_stride); });
    });
    if (steps == to_flush) store_together(threads);
    t += steps;
  }
}

/// body(engine, head) for the engines of all heads, without inputs.
template <class Real>
template <class Body>
void State<Real>::for_heads(int threads, Body&& body) {
  const HeadInputs<Real> in;
  parallel_for(shape_.heads, threads, [&](std::int64_t h) {
    with_engine(h, in, [&](auto engine) { body(engine, static_cast<std::size_t>(h)); });
  });
}

/// What flushes of all heads, of which some share a scale, have left to store.
template <class Real>
void State<Real>::store_together(int threads) {
  std::vector<Extremes<Real>> by_head(heads_.size());
  const auto joined = [&] {
    Extremes<Real> all;
    for (const Extremes<Real>& one : by_head) all.join(one);
    return all;
  };
  const auto store = [&](const Format& format, auto&& copy_of) {
    if (format.exact()) return;
    // Engines count tokens from the next one on: the flush was that of token -1.
    for_heads(threads, [&](auto& engine, std::size_t head) {
      const auto copy = copy_of(engine);
      engine.feed_back(copy);
      if (format.scale == Scale::tensor) by_head[head] = extremes(format, copy.s, copy.rows, shape_.state_dim);
    });
    const Extremes<Real> of_state = joined();
    for_heads(threads, [&](auto& engine, std::size_t head) {
      const auto copy = copy_of(engine);
      engine.round(copy, -1, 0, &of_state);
      if (copy.r && format.residual->scale == Scale::tensor) {
        by_head[head] = extremes(*format.residual, copy.r, copy.rows, shape_.state_dim);
      }
    });
    const Extremes<Real> of_residual = joined();
    for_heads(threads, [&](auto& engine, std::size_t) { engine.round_residual(copy_of(engine), -1, 0, &of_residual); });
  };
  store(schedule_.anchor, [&](auto& engine) { return engine.anchor(0, shape_.head_dim); });
  if (schedule_.read) {
    for_heads(threads, [](auto& engine, std::size_t) { engine.copy_anchor(); });
    store(*schedule_.read, [](auto& engine) { return engine.read(); });
  }
  for_heads(threads, [](auto& engine, std::size_t) { engine.start_ring(); });
}

template <class Real>
void State<Real>::fold(int threads) {
  const bool together = joins_heads_ && held() > 0;
  for_heads(threads, [](auto& engine, std::size_t) { engine.fold(); });
  if (together) store_together(threads);
}

template <class Real>
void State<Real>::verify(const LayerInputs<Real>& inputs, Real* y, std::int64_t y_stride, int threads) {
  parallel_for(shape_.heads, threads, [&](std::int64_t h) {
    with_engine(h, inputs.heads[static_cast<std::size_t>(h)],
                [&](auto engine) { engine.verify(inputs.tokens, y + h * shape_.head_dim, y_stride); });
  });
}

template <class Real>
void State<Real>::hold(std::int64_t records) {
  for_heads(1, [&](auto& engine, std::size_t) { engine.hold(records); });
}

template <class Real>
RangeEvents State<Real>::events() const {
  RangeEvents all;
  for (const Head& head : heads_) all.merge(head.events);
  return all;
}

template <class Real>
const std::vector<Real>& State<Real>::read_copy(std::int64_t head) const {
  const Head& h = heads_[static_cast<std::size_t>(head)];
  return schedule_.read ? h.read : h.anchor;
}

template <class Real>
void State<Real>::set(const Real* state) {
  for (Head& head : heads_) {
    std::copy_n(state, head.anchor.size(), head.anchor.begin());
    state += head.anchor.size();
    if (schedule_.read) head.read = head.anchor;
    std::ranges::fill(head.anchor_residual, Real(0));
    std::ranges::fill(head.read_residual, Real(0));
    if (policy_.order == Order::sequential) head.running = head.anchor;
    head.held = 0;
    head.verified_non_finite.reset();
  }
}

template <class Real>
std::vector<Real> State<Real>::effective(std::int64_t head, std::int64_t records) {
  const HeadInputs<Real> in;
  return with_engine(head, in, [&](auto engine) { return engine.effective(records); });
}

template class State<float>;
template class State<double>;

}  // namespace replayssm
