#pragma once

// One step of one head as the definition has it, in closed form and for any scalar: in double the truth, in float the
// naive version whose error says how much error is fair. It starts from what is stored, so that a value on the edge
// between two codes, which may go either way, parts nothing. No code shared with the kernels.

#include <cmath>
#include <cstddef>
#include <vector>

namespace replayssm::cuda::tests::oracle {

template <class T>
using Vec = std::vector<T>;

template <class To, class From>
Vec<To> as(const Vec<From>& from) {
  return Vec<To>(from.begin(), from.end());
}

/// v, u [P], w [N], g [1] or [N].
template <class T>
struct Record {
  Vec<T> v, w, u, g;
  T gain = 0;
};

/// Raw inputs of a token, in fp32 as the kernel widens them.
struct Raw {
  Vec<float> v, w, c, gate, dt_bias;
  float beta = 0, A_log = 0, D = 0, dt_min = 0, dt_max = 0, beta_scale = 1;
};

template <class T>
T softplus(T z) {
  return z > 0 ? z + std::log1p(std::exp(-z)) : std::log1p(std::exp(z));
}

template <class T>
Vec<T> normalised(const Vec<float>& x, T scale) {
  T sum(0);
  for (const float value : x) sum += T(value) * T(value);
  Vec<T> out;
  for (const float value : x) out.push_back(T(value) / std::sqrt(sum + T(1e-6)) * scale);
  return out;
}

/// What the token brings, and c.
template <class T>
struct Prepared : Record<T> {
  Vec<T> c;
};

template <class T>
Prepared<T> prepared(bool delta, const Raw& raw) {
  Prepared<T> out;
  out.v = as<T>(raw.v);
  const T rate = -std::exp(T(raw.A_log));
  if (delta) {
    out.w = normalised<T>(raw.w, T(1));
    out.c = normalised<T>(raw.c, T(1) / std::sqrt(T(raw.c.size())));
    for (std::size_t d = 0; d < raw.gate.size(); ++d) {
      out.g.push_back(rate * softplus(T(raw.gate[d]) + T(raw.dt_bias[d])));
    }
    out.gain = T(raw.beta_scale) / (T(1) + std::exp(-T(raw.beta)));
  } else {
    out.w = as<T>(raw.w);
    out.c = as<T>(raw.c);
    out.gain = std::fmin(std::fmax(softplus(T(raw.gate[0]) + T(raw.dt_bias[0])), T(raw.dt_min)), T(raw.dt_max));
    out.g = {rate * out.gain};
  }
  return out;
}

/// A head at a step: stored states [P, N] and the live records, exact values of what is stored.
template <class T>
struct Head {
  bool delta = false, open = false, flush = false;
  Vec<T> anchor, read;
  Vec<Record<T>> ring;
  T rate = 0;  ///< Mamba-2: g = rate * gain
};

template <class T>
struct Result {
  Vec<T> y, u, state;  ///< u: of the token (delta rule); state: rebuilt, of a flush
};

template <class T>
class Step {
 public:
  Step(const Head<T>& head, const Prepared<T>& token) : head_(head), all_(head.ring) {
    all_.push_back(token);
    for (auto& r : all_) {
      if (!head.delta) r.g = {head.rate * r.gain};
    }
    c_ = token.c;
  }

  Result<T> run() const {
    const std::size_t h = head_.ring.size();
    Result<T> out;
    Vec<Vec<T>> us;
    for (const auto& r : head_.ring) us.push_back(head_.delta ? r.u : scaled(r));
    out.u = head_.delta ? solve(head_.read, us, all_[h], h) : scaled(all_[h]);
    if (!head_.flush) {
      out.y = readout(head_.read, us, c_, h);
      for (std::size_t p = 0; p < out.y.size(); ++p) out.y[p] += inner(all_[h].w, c_) * out.u[p];
      return out;
    }
    if (head_.delta && !head_.open) {
      us.clear();
      for (std::size_t j = 0; j < h; ++j) us.push_back(solve(head_.anchor, us, all_[j], j));
      out.u = solve(head_.anchor, us, all_[h], h);
    }
    us.push_back(out.u);
    const std::size_t N = c_.size();
    out.state = rebuilt(us);
    for (std::size_t p = 0; p < out.state.size() / N; ++p) {
      out.y.push_back(inner(Vec<T>(out.state.begin() + static_cast<std::ptrdiff_t>(p * N),
                                   out.state.begin() + static_cast<std::ptrdiff_t>((p + 1) * N)),
                            c_));
    }
    return out;
  }

  /// The state behind all records, of which the token is the last: what a fold stores.
  Vec<T> folded() const {
    Vec<Vec<T>> us;
    for (std::size_t j = 0; j < all_.size(); ++j) {
      us.push_back(!head_.delta ? scaled(all_[j]) : head_.open ? all_[j].u : solve(head_.anchor, us, all_[j], j));
    }
    return rebuilt(us);
  }

  /// u of a record in the place of the token, as outputs form it.
  Vec<T> u_of(const Record<T>& r) const {
    Vec<Vec<T>> us;
    for (const auto& record : head_.ring) us.push_back(record.u);
    return solve(head_.read, us, r, head_.ring.size());
  }

 private:
  static T inner(const Vec<T>& a, const Vec<T>& b) {
    T sum(0);
    for (std::size_t n = 0; n < a.size(); ++n) sum += a[n] * b[n];
    return sum;
  }
  static Vec<T> scaled(const Record<T>& r) {
    Vec<T> u = r.v;
    for (T& value : u) value *= r.gain;
    return u;
  }
  /// g_first + ... + g_last of column n.
  T decay(std::size_t first, std::size_t last, std::size_t n) const {
    T sum(0);
    for (std::size_t j = last + 1; j-- > first;) sum += all_[j].g[all_[j].g.size() == 1 ? 0 : n];
    return sum;
  }
  Vec<T> decayed(const Vec<T>& x, std::size_t first, std::size_t last) const {
    Vec<T> out = x;
    const bool columns = all_[0].g.size() > 1;
    const T one = std::exp(decay(first, last, 0));
    for (std::size_t n = 0; n < x.size(); ++n) out[n] *= columns ? std::exp(decay(first, last, n)) : one;
    return out;
  }
  Vec<T> rebuilt(const Vec<Vec<T>>& us) const {
    const std::size_t N = c_.size(), last = us.size() - 1;
    Vec<T> state = head_.anchor;
    const Vec<T> ones(N, T(1)), whole = decayed(ones, 0, last);
    Vec<Vec<T>> left;  // of each record
    for (std::size_t j = 0; j <= last; ++j) left.push_back(decayed(ones, j + 1, last));
    for (std::size_t i = 0; i < state.size(); ++i) {
      const std::size_t p = i / N, n = i % N;
      T sum = whole[n] * head_.anchor[i];
      for (std::size_t j = 0; j <= last; ++j) sum += left[j][n] * us[j][p] * all_[j].w[n];
      state[i] = sum;
    }
    return state;
  }
  Vec<T> readout(const Vec<T>& s, const Vec<Vec<T>>& us, const Vec<T>& x, std::size_t i) const {
    const Vec<T> whole = decayed(x, 0, i);
    Vec<T> out(s.size() / x.size(), T(0));
    for (std::size_t k = 0; k < s.size(); ++k) out[k / x.size()] += s[k] * whole[k % x.size()];
    for (std::size_t j = 0; j < i; ++j) {
      const T product = inner(all_[j].w, decayed(x, j + 1, i));
      for (std::size_t p = 0; p < out.size(); ++p) out[p] += product * us[j][p];
    }
    return out;
  }
  Vec<T> solve(const Vec<T>& s, const Vec<Vec<T>>& us, const Record<T>& r, std::size_t i) const {
    Vec<T> u = readout(s, us, r.w, i);
    for (std::size_t p = 0; p < u.size(); ++p) u[p] = r.gain * (r.v[p] - u[p]);
    return u;
  }

  const Head<T>& head_;
  Vec<Record<T>> all_;  // with the token last
  Vec<T> c_;
};

}  // namespace replayssm::cuda::tests::oracle
