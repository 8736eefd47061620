#include "core/format.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <mutex>
#include <vector>

#include "core/error.h"
#include "core/own_format.h"
#include "core/rounding.h"

namespace replayssm {

namespace {

template <class Real>
using Int = typename Rounder<Real>::Int;

// Rounder::round for values in range, by two additions. m = 2^(e + M - m), e the exponent of x but at least the
// element's emin, M and m the mantissa bits of Real and of the element, makes the last bit of |x| + m the last that the
// element has; the hardware rounds the sum to nearest even, and subtracting m is exact. This is half the operations of
// the integer source, of which it gives the same bits in the default rounding mode; the codes themselves are always
// made by that.
template <class Real>
class Adder {
 public:
  explicit Adder(const Element& element)
      : emin_((Int<Real>{element.emin} + bias) << mantissa),
        shift_(Int<Real>{mantissa - element.mantissa_bits} << mantissa),
        zero_sign_(element.has_minus_zero() ? Rounder<Real>::kSign : 0),
        identity_(mantissa == element.mantissa_bits) {}

  bool identity() const { return identity_; }

  // The largest magnitude whose m is finite.
  Int<Real> most() const { return Rounder<Real>::kInfinity - shift_ - 1; }

  Real round(Real x) const {
    using R = Rounder<Real>;
    const Int<Real> a = R::magnitude_of(x), exponent = a & R::kInfinity;
    const Real m = R::value((exponent > emin_ ? exponent : emin_) + shift_);
    const Real r = (R::value(a) + m) - m;
    return R::value(R::bits(r) | (R::bits(x) & (R::bits(r) > 0 ? R::kSign : zero_sign_)));
  }

 private:
  static constexpr int mantissa = Rounder<Real>::kMantissa;
  static constexpr Int<Real> bias = detail::Binary<Real>::kBias;
  Int<Real> emin_, shift_, zero_sign_;
  bool identity_;
};

template <class Real>
RangeLoss round_row(const Element& element, const Rounder<Real>& rounder, const Adder<Real>& adder, Real* x,
                    std::int64_t n) {
  // Hardly ever is anything out of range; so the loop that nearly all the time goes to need not look.
  const Int<Real> most = std::min(rounder.overflow_above(), adder.most());
  Int<Real> outside = 0;
  for (std::int64_t i = 0; i < n; ++i) outside += Rounder<Real>::magnitude_of(x[i]) > most;
  if (outside == 0) {
    if (adder.identity()) return {};
    for (std::int64_t i = 0; i < n; ++i) x[i] = adder.round(x[i]);
    return {};
  }
  RangeLoss loss;
  for (std::int64_t i = 0; i < n; ++i) {
    const Int<Real> a = Rounder<Real>::magnitude_of(x[i]);
    x[i] = rounder.round(x[i]);
    if (a > rounder.overflow_above() && a < Rounder<Real>::kInfinity) {
      ++(std::isfinite(x[i]) ? loss.saturations : loss.overflows);
    }
    loss.overflows += a > Rounder<Real>::kInfinity && !element.has_nan();
  }
  return loss;
}

// What becomes of elements whose scale is NaN.
template <class Real>
RangeLoss lose(Real* x, std::int64_t n) {
  const RangeLoss loss{.overflows = std::count_if(x, x + n, [](Real value) { return std::isfinite(value); })};
  std::fill_n(x, n, std::numeric_limits<Real>::quiet_NaN());
  return loss;
}

// Elements that share a scale.
template <class Real>
RangeLoss round_block(const Rounder<Real>& rounder, const Adder<Real>& adder, Real max, const Scaler<Real>& scaler,
                      Real* x, std::int64_t n) {
  const Int<Real> largest = largest_magnitude(x, n);
  const Real scale = scaler.value(scaler.code(largest));
  if (std::isnan(scale)) return lose(x, n);
  // Division and product keep the order, so the largest element speaks for all. With an amax scale it can be out of
  // range, but only by the rounding of a scale that is subnormal or of a product next to the largest float.
  const Real top = Rounder<Real>::value(largest) / scale;
  if (Rounder<Real>::magnitude_of(top) <= std::min(rounder.overflow_above(), adder.most()) &&
      std::isfinite(max * scale)) {
    for (std::int64_t i = 0; i < n; ++i) x[i] = adder.round(x[i] / scale) * scale;
    return {};
  }
  RangeLoss loss;
  for (std::int64_t i = 0; i < n; ++i) {
    const Real quotient = x[i] / scale;
    x[i] = rounder.round(quotient) * scale;
    if (!std::isfinite(x[i])) {
      ++loss.overflows;
    } else {
      loss.saturations += Rounder<Real>::magnitude_of(quotient) > rounder.overflow_above();
    }
  }
  return loss;
}

// round_rows() of scaled elements in another mode than to nearest: element by element.
template <class Real>
RangeLoss round_scaled(const Format& format, const Scaler<Real>& scaler, Real* data, std::int64_t rows, std::int64_t n,
                       const Draw& draw) {
  AnyRounder<Real> round(format, draw);
  RangeLoss loss;
  for_each_block(format, rows, n, [&](std::int64_t first, std::int64_t count) {
    const Real scale = scaler.value(scaler.code(largest_magnitude(data + first, count)));
    if (std::isnan(scale)) {
      loss += lose(data + first, count);
      return;
    }
    for (std::int64_t i = first; i < first + count; ++i) {
      const RangeLoss before = round.loss();
      data[i] = round(data[i] / scale, i) * scale;
      loss.overflows += round.loss() == before && !std::isfinite(data[i]);
    }
  });
  return loss += round.loss();
}

template <class Real>
RangeLoss round_affine(const Format& format, const Scaler<Real>& scaler, Real* data, std::int64_t rows, std::int64_t n,
                       const Draw& draw) {
  AffineRounder<Real> round(format, draw);
  RangeLoss loss;
  for_each_block(format, rows, n, [&](std::int64_t first, std::int64_t count) {
    const auto [code, zero] = scaler.affine(extremes_of(data + first, count));
    const Real scale = scaler.value(code), z = static_cast<Real>(zero);
    if (std::isnan(scale)) {
      loss += lose(data + first, count);
      return;
    }
    for (std::int64_t i = first; i < first + count; ++i) {
      data[i] = (round.code(data[i] / scale, z, i) - z) * scale;
      loss.overflows += !std::isfinite(data[i]);
    }
  });
  loss.saturations += round.saturations();
  return loss;
}

template <class Real>
RangeLoss round_by_function(const RoundFunction& function, Real* data, std::int64_t rows, std::int64_t n,
                            const Draw& draw) {
  std::vector<double> wide(data, data + rows * n);
  function(wide.data(), rows, n, draw);
  RangeLoss loss;
  for (std::int64_t i = 0; i < rows * n; ++i) {
    const Real before = data[i];
    data[i] = static_cast<Real>(wide[static_cast<std::size_t>(i)]);
    loss.overflows += std::isfinite(before) && !std::isfinite(data[i]);
  }
  return loss;
}

}  // namespace

std::int64_t Format::scales(std::int64_t rows, std::int64_t n) const {
  switch (scale) {
    case Scale::none:
      return 0;
    case Scale::row:
      return rows;
    case Scale::group:
      return rows * ((n + extent - 1) / extent);
    case Scale::tile:
      return (rows + extent - 1) / extent;
    case Scale::head:
    case Scale::tensor:
      return 1;
  }
  return 0;
}

std::int64_t Format::scale_width() const {
  if (scale == Scale::none) return 0;
  return rule == ScaleRule::amax ? 4 : 1;
}

std::int64_t Format::scale_bytes(std::int64_t rows, std::int64_t n) const {
  return head_scale_width() + scales(rows, n) * (scale_width() + zero_width());
}

Format with_residual(const Format& format, const Format& residual) {
  if (format.exact()) fail("error feedback of 'exact', of which nothing is rounded");
  if (residual.residual) fail("the residual ", residual.text(), ": it has no error feedback of its own");
  static std::mutex mutex;
  static std::deque<Format> kept;  // one of each, which stay where they are: pointers compare as formats do
  const std::lock_guard lock(mutex);
  auto found = std::ranges::find(kept, residual);
  if (found == kept.end()) found = kept.insert(kept.end(), residual);
  Format out = format;
  out.residual = &*found;
  return out;
}

std::span<const Element> elements() { return kElements; }

template <class Real>
void hadamard_rows(Real* data, std::int64_t rows, std::int64_t n) {
  const std::int64_t size = n & -n;  // the largest power of two in n
  const Real factor = 1 / std::sqrt(static_cast<Real>(size));
  for (Real* x = data; x < data + rows * n; x += size) {
    for (std::int64_t half = 1; half < size; half *= 2) {
      for (std::int64_t first = 0; first < size; first += 2 * half) {
        for (std::int64_t i = first; i < first + half; ++i) {
          const Real a = x[i], b = x[i + half];
          x[i] = a + b;
          x[i + half] = a - b;
        }
      }
    }
    for (std::int64_t i = 0; i < size; ++i) x[i] *= factor;
  }
}

template <class Real>
Extremes<Real> extremes(const Format& format, const Real* data, std::int64_t rows, std::int64_t n) {
  if (!format.hadamard) return extremes_of(data, rows * n);
  std::vector<Real> turned(data, data + rows * n);
  hadamard_rows(turned.data(), rows, n);
  return extremes_of(turned.data(), rows * n);
}

template <class Real>
RangeLoss round_rows(const Format& format, Real* data, std::int64_t rows, std::int64_t n, const Draw& draw,
                     const Extremes<Real>* tensor) {
  if (format.exact()) return {};
  if (format.hadamard) {
    hadamard_rows(data, rows, n);
    const RangeLoss loss = round_rows(unrotated(format), data, rows, n, draw, tensor);
    hadamard_rows(data, rows, n);
    return loss;
  }
  if (format.own) return round_by_function(format.own->function, data, rows, n, draw);
  const Rounder<Real> rounder(format.element);
  const Adder<Real> adder(format.element);
  RangeLoss loss;
  if (format.scale == Scale::none) {
    if (format.rounding != Rounding::nearest) {
      AnyRounder<Real> round(format, draw);
      for (std::int64_t i = 0; i < rows * n; ++i) data[i] = round(data[i], i);
      return round.loss();
    }
    for (std::int64_t row = 0; row < rows; ++row) loss += round_row(format.element, rounder, adder, data + row * n, n);
    return loss;
  }
  const Scaler<Real> scaler(format, data, rows * n, tensor);
  if (format.asymmetric) return round_affine(format, scaler, data, rows, n, draw);
  if (format.rounding != Rounding::nearest) return round_scaled(format, scaler, data, rows, n, draw);
  const Real max = decode<Real>(format.element, format.element.max_code);
  for_each_block(format, rows, n, [&](std::int64_t first, std::int64_t count) {
    loss += round_block(rounder, adder, max, scaler, data + first, count);
  });
  return loss;
}

template void hadamard_rows(float*, std::int64_t, std::int64_t);
template void hadamard_rows(double*, std::int64_t, std::int64_t);
template Extremes<float> extremes(const Format&, const float*, std::int64_t, std::int64_t);
template Extremes<double> extremes(const Format&, const double*, std::int64_t, std::int64_t);
template RangeLoss round_rows(const Format&, float*, std::int64_t, std::int64_t, const Draw&, const Extremes<float>*);
template RangeLoss round_rows(const Format&, double*, std::int64_t, std::int64_t, const Draw&, const Extremes<double>*);

}  // namespace replayssm
