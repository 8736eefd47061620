#pragma once

// A literal reading of the recurrences and their schedules, for any scalar: in Wide the truth, in float or double the
// naive version whose error says how much error is fair. One head, S [P, N], no lanes, no blocks, no sharing of code
// with the library but the rounding of a row.

#include <boost/multiprecision/cpp_bin_float.hpp>
#include <cmath>
#include <cstddef>
#include <optional>
#include <random>
#include <type_traits>
#include <vector>

#include "core/format.h"
#include "core/recurrence.h"

namespace replayssm::oracle {

using Wide = boost::multiprecision::number<boost::multiprecision::cpp_bin_float<60>, boost::multiprecision::et_off>;

template <class T>
using Vec = std::vector<T>;

template <class To, class From>
Vec<To> convert(const Vec<From>& from) {
  Vec<To> to;
  for (const From& x : from) to.push_back(static_cast<To>(x));
  return to;
}

/// One token of one head: v [P], w and c [N], log decay g [1] or [N]; `rate` where g is rate * gain.
template <class T>
struct Token {
  Vec<T> v, w, c, g;
  T gain;
  std::optional<T> rate;

  template <class To>
  Token<To> as() const {
    return {convert<To>(v), convert<To>(w), convert<To>(c), convert<To>(g), static_cast<To>(gain), {}};
  }
};

/// Q of a row. Wide values pass through double, which leaves far more bits than any format has.
template <class T>
Vec<T> rounded(const Format& format, const Vec<T>& x) {
  if (format.exact()) return x;
  using Real = std::conditional_t<std::is_same_v<T, float>, float, double>;
  Vec<Real> row = convert<Real>(x);
  round_rows(format, row.data(), 1, static_cast<std::int64_t>(row.size()));
  return convert<T>(row);
}

/// The formats of a record, by the names of Record. u is only stored in an open loop.
struct RingAs {
  Format v, w, g, gain, u;
};

/// The record that a ring keeps of a token: each field rounded; where dt is kept, g is formed again from it.
template <class Real>
Token<Real> stored(const Token<Real>& x, const RingAs& ring) {
  Token<Real> r = x;
  r.v = rounded(ring.v, x.v);
  r.w = rounded(ring.w, x.w);
  r.gain = rounded(ring.gain, Vec<Real>{x.gain})[0];
  r.g = x.rate ? Vec<Real>{*x.rate * r.gain} : rounded(ring.g, x.g);
  return r;
}

struct Schedule {
  bool delta;
  std::size_t length;
  bool open;
  Format u;
};

template <class T>
Vec<T> read(const Vec<T>& s, const Vec<T>& c) {
  Vec<T> y(s.size() / c.size(), T(0));
  for (std::size_t i = 0; i < s.size(); ++i) y[i / c.size()] += s[i] * c[i % c.size()];
  return y;
}

/// S decay, the decay given as its logarithm, one for all columns or one for each.
template <class T>
Vec<T> decayed(Vec<T> s, const Vec<T>& g, std::size_t columns) {
  using std::exp;
  Vec<T> a;
  for (const T& x : g) a.push_back(exp(x));
  for (std::size_t i = 0; i < s.size(); ++i) s[i] *= a[g.size() == 1 ? 0 : i % columns];
  return s;
}

/// One step: u = gain v, or beta (v - S' k) of the delta rule.
template <class T>
Vec<T> form_u(bool delta, const Vec<T>& s, const Token<T>& x) {
  Vec<T> u = x.v;
  if (delta) {
    const Vec<T> readout = read(decayed(s, x.g, x.w.size()), x.w);
    for (std::size_t p = 0; p < u.size(); ++p) u[p] -= readout[p];
  }
  for (T& value : u) value *= x.gain;
  return u;
}

/// One step: S <- S decay + u w^T.
template <class T>
void update(Vec<T>& s, const Token<T>& x, const Vec<T>& u) {
  const std::size_t n = x.w.size();
  s = decayed(s, x.g, n);
  for (std::size_t i = 0; i < s.size(); ++i) s[i] += u[i / n] * x.w[i % n];
}

/// A schedule by running the steps again. After a step with flushed(), effective() is what is to be stored; adopt()
/// takes what was stored, so that rounding cannot part the two for ever.
template <class T>
class Steps {
 public:
  Steps(const Schedule& schedule, std::size_t state) : schedule_(schedule), anchor_(state, T(0)), read_(anchor_) {}

  Vec<T> advance(const Token<T>& x, const Token<T>& record) {
    const bool delta = schedule_.delta, open = schedule_.open;
    Vec<T> u = form_u(delta, read_, x);
    flushed_ = ++held_ == schedule_.length;
    if (flushed_) {
      held_ = 0;
      update(anchor_, x, open ? u : form_u(delta, anchor_, x));
      return read(anchor_, x.c);
    }
    Vec<T> met = read_;
    update(met, x, u);
    u = rounded(schedule_.u, u);
    update(read_, record, open ? u : form_u(delta, read_, record));
    update(anchor_, record, open ? u : form_u(delta, anchor_, record));
    return read(met, x.c);
  }

  bool flushed() const { return flushed_; }
  Vec<T> effective() const { return anchor_; }
  template <class Real>
  void adopt(const Vec<Real>& anchor, const Vec<Real>& read) {
    anchor_ = convert<T>(anchor);
    read_ = convert<T>(read);
  }

 private:
  Schedule schedule_;
  Vec<T> anchor_, read_;  // with the records of the ring applied
  std::size_t held_ = 0;
  bool flushed_ = false;
};

/// The same by the closed form, with every exponent a sum over j + 1 .. i.
template <class T>
class Sums {
 public:
  Sums(const Schedule& schedule, std::size_t state) : schedule_(schedule), anchor_(state, T(0)), read_(anchor_) {}

  Vec<T> advance(const Token<T>& x, const Token<T>& record) {
    records_.push_back(x);
    const std::size_t i = records_.size() - 1;
    const Vec<T> u = solve(read_, us_, i);
    flushed_ = records_.size() == schedule_.length;
    if (flushed_) {
      us_.push_back(u);
      anchor_ = effective();
      records_.clear();
      us_.clear();
      return read(anchor_, x.c);
    }
    Vec<T> y = readout(read_, us_, x.c, i);
    const T wc = read(x.w, x.c)[0];
    for (std::size_t p = 0; p < y.size(); ++p) y[p] += wc * u[p];
    records_.back() = record;
    us_.push_back(schedule_.open ? rounded(schedule_.u, u) : solve(read_, us_, i));
    return y;
  }

  bool flushed() const { return flushed_; }
  Vec<T> effective() const {
    Vec<Vec<T>> us;
    for (std::size_t j = 0; j < records_.size(); ++j) us.push_back(schedule_.open ? us_[j] : solve(anchor_, us, j));
    Vec<T> s = anchor_;
    if (records_.empty()) return s;
    const std::size_t n = records_[0].w.size(), last = records_.size() - 1;
    s = decayed(s, log_decay(0, last), n);
    for (std::size_t j = 0; j <= last; ++j) {
      Vec<T> term(s.size());
      for (std::size_t k = 0; k < s.size(); ++k) term[k] = us[j][k / n] * records_[j].w[k % n];
      term = decayed(term, log_decay(j + 1, last), n);
      for (std::size_t k = 0; k < s.size(); ++k) s[k] += term[k];
    }
    return s;
  }
  template <class Real>
  void adopt(const Vec<Real>& anchor, const Vec<Real>& read) {
    anchor_ = convert<T>(anchor);
    read_ = convert<T>(read);
  }

 private:
  /// g_first + ... + g_last.
  Vec<T> log_decay(std::size_t first, std::size_t last) const {
    Vec<T> sum(records_[0].g.size(), T(0));
    for (std::size_t j = first; j <= last; ++j) {
      for (std::size_t d = 0; d < sum.size(); ++d) sum[d] += records_[j].g[d];
    }
    return sum;
  }

  Vec<T> readout(const Vec<T>& s, const Vec<Vec<T>>& us, const Vec<T>& x, std::size_t i) const {
    Vec<T> y = read(decayed(s, log_decay(0, i), x.size()), x);
    for (std::size_t j = 0; j < i; ++j) {
      const T wx = read(decayed(records_[j].w, log_decay(j + 1, i), x.size()), x)[0];
      for (std::size_t p = 0; p < y.size(); ++p) y[p] += wx * us[j][p];
    }
    return y;
  }

  Vec<T> solve(const Vec<T>& s, const Vec<Vec<T>>& us, std::size_t i) const {
    const Token<T>& x = records_[i];
    Vec<T> u = x.v;
    if (schedule_.delta) {
      const Vec<T> met = readout(s, us, x.w, i);
      for (std::size_t p = 0; p < u.size(); ++p) u[p] -= met[p];
    }
    for (T& value : u) value *= x.gain;
    return u;
  }

  Schedule schedule_;
  Vec<T> anchor_, read_;
  Vec<Token<T>> records_;
  Vec<Vec<T>> us_;  // as outputs use them
  bool flushed_ = false;
};

/// Tokens of a contracting recurrence: keys of the delta rule have norm 1, half-lives run from below one token to
/// hundreds, gates use every bit of Real.
template <class Real>
Vec<Token<Real>> random_tokens(const RecurrenceShape& shape, std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  const auto uniform = [&](double low, double high) {
    return static_cast<Real>(std::uniform_real_distribution<double>(low, high)(random));
  };
  const auto row = [&](std::int64_t n) {
    Vec<Real> x(static_cast<std::size_t>(n));
    for (Real& value : x) value = uniform(-1, 1);
    return x;
  };
  const bool delta = is_delta_rule(shape.recurrence);
  const Real rate = -std::exp(uniform(-1, 2));
  Vec<Token<Real>> tokens;
  for (std::size_t t = 0; t < count; ++t) {
    Token<Real> x{row(shape.head_dim), row(shape.state_dim), row(shape.state_dim), {}, Real(0), {}};
    if (delta) {
      x.gain = uniform(0.05, 1);
      for (std::int64_t d = 0; d < shape.decay_dim(); ++d) x.g.push_back(-std::exp(uniform(-6, 0.5)));
      Real norm = 0;
      for (const Real& k : x.w) norm += k * k;
      for (Real& k : x.w) k /= std::sqrt(norm);
    } else {
      x.gain = std::exp(uniform(-6, 0));
      x.rate = rate;
      x.g.push_back(rate * x.gain);
    }
    tokens.push_back(x);
  }
  return tokens;
}

}  // namespace replayssm::oracle
