#pragma once

// Steps of a layer beside the oracle: what of a run is compared, and with what errors it passes.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "tests/cuda/layer.h"
#include "tests/cuda/step_oracle.h"

namespace replayssm::cuda::tests {

using oracle::Vec;

inline std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

template <class T>
Vec<T> part(const Vec<T>& x, std::int64_t first, std::int64_t n) {
  return Vec<T>(x.begin() + first, x.begin() + first + n);
}

/// Errors of one kind of value, summed as squares over a run. What is fair: twice the error of the naive fp32 version,
/// and half an ulp of fp32, for an operation that the naive version happens to have exact.
class Errors {
 public:
  Errors(std::string what, Format format) : what_(std::move(what)), format_(format) {}

  /// Rows of n: values as stored, the naive version's before they are stored, and the true ones.
  void add(const Vec<float>& stored, const Vec<float>& naive, const Vec<double>& truth, std::size_t n) {
    ASSERT_EQ(stored.size(), truth.size()) << what_;
    ASSERT_EQ(naive.size(), truth.size()) << what_;
    for (std::size_t i = 0; i < truth.size(); ++i) {
      add(found_, double{stored[i]} - truth[i]);
      add(naive_, double{naive[i]} - truth[i]);
      add(norm_, truth[i]);
    }
    if (format_.element.mantissa_bits != 23) kept_.push_back({stored, truth, n});
  }
  double allowed() const { return 2 * std::sqrt(naive_) + std::ldexp(std::sqrt(norm_), -24); }

  void check() const {
    if (format_.element.mantissa_bits == 23) {
      EXPECT_LE(std::sqrt(found_), allowed()) << what_;
    }
    for (const auto& kept : kept_) check_rounded(kept);
  }

 private:
  struct Kept {
    Vec<float> stored;
    Vec<double> truth;
    std::size_t n;
  };
  // NaN, too, is an error.
  static void add(double& sum, double error) { sum += std::isnan(error) ? HUGE_VAL : error * error; }

  /// By the monotony of rounding, what was stored lies between the rounded ends of where arithmetic may have moved the
  /// value. The scale of a row moves with its largest element, and by half an ulp of fp32, which it is rounded to.
  void check_rounded(const Kept& kept) const {
    const double error = allowed();
    int wrong = 0;
    for (std::size_t row = 0; row < kept.truth.size(); row += kept.n) {
      double scale = 1, slack = 0;
      if (format_.scale == Scale::row) {
        double largest = 0;
        for (std::size_t i = row; i < row + kept.n; ++i) largest = std::max(largest, std::abs(kept.truth[i]));
        scale = static_cast<float>(largest / decode<double>(format_.element, format_.element.max_code));
        if (scale == 0) scale = 1;
        slack = error + std::ldexp(largest, -24);
      }
      for (std::size_t i = row; i < row + kept.n; ++i) {
        const auto end = [&](double sign) {
          const double moved = (kept.truth[i] + sign * (error + slack)) / scale;
          return round_to(format_.element, moved) * scale + sign * slack;
        };
        wrong += !(end(-1) <= double{kept.stored[i]} && double{kept.stored[i]} <= end(+1));
      }
    }
    EXPECT_EQ(wrong, 0) << what_ << ": elements that are not the rounded truth, of " << kept.truth.size();
  }

  std::string what_;
  Format format_;
  double found_ = 0, naive_ = 0, norm_ = 0;
  std::vector<Kept> kept_;
};

/// The memory of a layer before a step, and what of it the step may change.
class Untouched {
 public:
  explicit Untouched(const Layer& layer) {
    for (const Stored* stored : all(layer)) {
      bytes_.push_back(stored->bytes.here);
      scales_.push_back(stored->scales.here);
    }
  }
  /// Takes over elements of a field from after the step.
  void allow(const Layer& layer, const Stored& stored, std::int64_t first, std::int64_t n, std::int64_t bytes) {
    for (std::size_t i = 0; i < bytes_.size(); ++i) {
      if (all(layer)[i] != &stored) continue;
      std::copy_n(stored.bytes.here.begin() + first * bytes, n * bytes, bytes_[i].begin() + first * bytes);
    }
  }
  void allow_scales(const Layer& layer, const Stored& stored, std::int64_t first, std::int64_t n) {
    for (std::size_t i = 0; i < bytes_.size(); ++i) {
      if (all(layer)[i] != &stored || scales_[i].empty()) continue;
      std::copy_n(stored.scales.here.begin() + first, n, scales_[i].begin() + first);
    }
  }
  void check(const Layer& layer) const {
    const char* names[] = {"state", "read copy", "v", "u", "w", "gain", "log_decay"};
    for (std::size_t i = 0; i < bytes_.size(); ++i) {
      EXPECT_TRUE(bytes_[i] == all(layer)[i]->bytes.here) << "bytes of " << names[i] << " that no step may write";
      const auto& scales = all(layer)[i]->scales.here;
      EXPECT_TRUE(scales.empty() || std::memcmp(scales_[i].data(), scales.data(), 4 * scales.size()) == 0)
          << "scales of " << names[i] << " that no step may write";
    }
  }

 private:
  static std::vector<const Stored*> all(const Layer& l) {
    return {&l.pool, &l.copy, &l.v, &l.u, &l.w, &l.gain, &l.log_decay};
  }
  std::vector<std::vector<std::uint8_t>> bytes_;
  std::vector<std::vector<float>> scales_;
};

/// The steps of a layer, compared: from what was stored before a step, in double as the truth and in float as what is
/// fair.
class Follow {
 public:
  explicit Follow(Layer& the_layer)
      : setup(the_layer.setup),
        s(setup.shape),
        delta(is_delta(setup)),
        layer(the_layer),
        outputs("outputs", format_of(setup.y)),
        states("stored states", format_of(setup.state)),
        keys("appended w", format_of(setup.ring)),
        updates("appended u", format_of(setup.u_type())),
        gates("appended gates", format_of(Scalar::fp32)) {}

  void check() const {
    for (const Errors* e : {&outputs, &states, &keys, &updates, &gates}) e->check();
  }

  const Case& setup;
  const RecurrenceShape s;
  const bool delta;
  Layer& layer;
  Errors outputs, states, keys, updates, gates;

 protected:
  template <class T>
  using Head = oracle::Head<T>;

  /// What is stored of a head, without records.
  template <class T>
  Head<T> stored_head(std::int64_t at, std::int64_t h) const {
    const std::int64_t P = s.head_dim, N = s.state_dim;
    Head<T> out;
    out.delta = delta;
    out.open = delta && !setup.closed;
    out.anchor = oracle::as<T>(part(layer.state(at), h * P * N, P * N));
    out.read = oracle::as<T>(part(layer.read_copy(at), h * P * N, P * N));
    out.rate = -std::exp(T(layer.parameters.A_log[size(h)]));
    return out;
  }

  /// The record in an entry of the ring.
  template <class T>
  oracle::Record<T> record(std::int64_t at, std::int64_t h, std::int64_t entry) const {
    const auto field = [&](const Stored& stored, Scalar type, std::int64_t units, std::int64_t unit,
                           std::int64_t width) {
      if (stored.bytes.here.empty()) return Vec<T>(size(width), T(0));
      return oracle::as<T>(part(layer.record(stored, type, units, width, at, entry), unit * width, width));
    };
    oracle::Record<T> r;
    r.v = field(layer.v, setup.ring, s.heads, h, s.head_dim);
    r.w = field(layer.w, setup.ring, s.groups, s.group(h), s.state_dim);
    r.u = field(layer.u, setup.u_type(), s.heads, h, s.head_dim);
    r.g = field(layer.log_decay, Scalar::fp32, s.heads, h, s.decay_dim());
    r.gain = field(layer.gain, Scalar::fp32, s.heads, h, 1)[0];
    return r;
  }

  /// Raw inputs of a token.
  oracle::Raw raw(const TokenInputs& in, std::int64_t token, std::int64_t h) const {
    const std::int64_t N = s.state_dim, D = s.decay_dim(), g = token * s.groups + s.group(h), i = token * s.heads + h;
    const Parameters& p = layer.parameters;
    return {part(in.v, i * s.head_dim, s.head_dim),
            part(in.w, g * N, N),
            part(in.c, g * N, N),
            part(in.gate, i * D, D),
            part(p.dt_bias, h * D, D),
            delta ? in.beta[size(i)] : 0.0F,
            p.A_log[size(h)],
            p.D.empty() ? 0.0F : p.D[size(h)],
            setup.dt_min,
            setup.dt_max,
            setup.beta_scale};
  }

  /// A token of a head: y, and the state that it leaves or the record in `entry`.
  void compare(const oracle::Raw& x, std::int64_t at, std::int64_t h, std::int64_t entry, const Head<double>& wide,
               const Head<float>& narrow, const std::vector<float>& y) {
    const std::int64_t P = s.head_dim, N = s.state_dim;
    const auto token = oracle::prepared<double>(delta, x);
    const auto naive_token = oracle::prepared<float>(delta, x);
    const oracle::Step<double> step(wide, token);
    const oracle::Step<float> naive_step(narrow, naive_token);
    auto truth = step.run();
    auto naive = naive_step.run();
    for (std::size_t p = 0; p < x.v.size(); ++p) {
      truth.y[p] += double{x.D} * double{x.v[p]};
      naive.y[p] += x.D * x.v[p];
    }
    outputs.add(y, naive.y, truth.y, size(P));
    if (wide.flush) {
      compare_state(at, h, naive.state, truth.state);
      return;
    }
    const auto kept = record<double>(at, h, entry);
    const auto kept_naive = record<float>(at, h, entry);
    keys.add(kept_naive.w, naive_token.w, token.w, size(N));
    if (!delta || setup.closed) {
      Vec<float> v = x.v;
      round_rows(format_of(setup.ring), v.data(), 1, P);
      EXPECT_EQ(kept_naive.v, v) << "appended v";
      gates.add({kept_naive.gain}, {naive_token.gain}, {token.gain}, 1);
    }
    if (!delta) return;
    gates.add(kept_naive.g, naive_token.g, token.g, size(s.decay_dim()));
    if (setup.closed) {  // of the record as it is stored, with the gates of the token
      const auto as_stored = [](const auto& record, auto with) {
        with.v = record.v;
        with.w = record.w;
        return with;
      };
      updates.add(kept_naive.u, naive_step.u_of(as_stored(kept_naive, naive_token)), step.u_of(as_stored(kept, token)),
                  size(P));
    } else {
      updates.add(kept_naive.u, naive.u, truth.u, size(P));
    }
  }

  void compare_state(std::int64_t at, std::int64_t h, const Vec<float>& naive, const Vec<double>& truth) {
    const std::int64_t elements = s.head_dim * s.state_dim;
    states.add(part(layer.state(at), h * elements, elements), naive, truth, size(s.state_dim));
  }

  /// What a flush of a slot may have written, and a step that appends.
  void allow_state(Untouched& rest, std::int64_t at) const {
    const std::int64_t rows = s.heads * s.head_dim;
    const auto whole = [&](const Stored& to, Storage storage) {
      rest.allow(layer, to, at * to.stride, rows * s.state_dim, format_of(storage).code_bytes(1));
      rest.allow_scales(layer, to, at * to.scale_stride, rows);
    };
    whole(layer.pool, setup.state);
    if (setup.read) whole(layer.copy, *setup.read);
  }
  void allow_entry(Untouched& rest, std::int64_t at, std::int64_t entry) const {
    const auto one = [&](const Stored& to, Scalar type, std::int64_t units, std::int64_t width) {
      if (to.bytes.here.empty()) return;
      for (std::int64_t i = 0; i < units; ++i) {
        const std::int64_t first = at * to.stride + (i * layer.capacity + entry) * width;
        rest.allow(layer, to, first, width, type == Scalar::fp32 ? 4 : 2);
      }
    };
    one(layer.v, setup.ring, s.heads, s.head_dim);
    one(layer.u, setup.u_type(), s.heads, s.head_dim);
    one(layer.w, setup.ring, s.groups, s.state_dim);
    one(layer.gain, Scalar::fp32, s.heads, 1);
    one(layer.log_decay, Scalar::fp32, s.heads, s.decay_dim());
  }

  /// The read copy holds the bits of the rounded anchor as it is stored.
  void check_copy(std::int64_t at) const {
    const std::int64_t rows = s.heads * s.head_dim;
    const Format format = format_of(*setup.read);
    const std::vector<float> anchor = layer.state(at);
    std::vector<std::byte> codes(size(rows * format.code_bytes(s.state_dim)));
    std::vector<float> scales(size(rows));
    replayssm::encode_rows(format, anchor.data(), rows, s.state_dim, codes.data(), scales.data());
    EXPECT_EQ(std::memcmp(codes.data(), layer.copy.bytes.here.data() + format.code_bytes(at * layer.copy.stride),
                          codes.size()),
              0)
        << "codes of the read copy";
    if (format.scale == Scale::row) {
      EXPECT_EQ(part(layer.copy.scales.here, at * layer.copy.scale_stride, rows), scales);
    }
  }
};

}  // namespace replayssm::cuda::tests
