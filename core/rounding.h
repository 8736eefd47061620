#pragma once

// Private to core. The rounding of single elements in any mode, and of asymmetric integers.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/scales.h"

namespace replayssm {

/// The rounding of single elements in any mode, counting those beyond the range; element i of those that are stored.
template <class Real>
class AnyRounder {
 public:
  using Int = typename Rounder<Real>::Int;

  AnyRounder(const Format& format, const Draw& draw) : AnyRounder(format, format.element, draw) {}
  /// To another element than the format's.
  AnyRounder(const Format& format, const Element& element, const Draw& draw)
      : format_(format), element_(element), draw_(draw), rounder_(element) {}

  Real operator()(Real x, std::int64_t i) {
    using R = Rounder<Real>;
    if (format_.rounding == Rounding::nearest) return rounder_.round(x);
    const bool cut = format_.rounding == Rounding::toward_zero;
    const Int a = R::magnitude_of(x);
    const Int r = cut ? rounder_.cut(a) : rounder_.drawn(a, word(draw_.first + i), format_.random_bits);
    const Real result = rounder_.limited(x, r, cut);
    if (r > rounder_.largest() && a < R::kInfinity) ++(std::isfinite(result) ? loss_.saturations : loss_.overflows);
    loss_.overflows += a > R::kInfinity && !element_.has_nan();
    return result;
  }
  const RangeLoss& loss() const { return loss_; }

 private:
  std::uint32_t word(std::int64_t element) {
    if (element / 4 != quarter_) {
      quarter_ = element / 4;
      words_ = draw_.words(quarter_);
    }
    return words_.word[element % 4];
  }

  const Format& format_;
  const Element element_;
  const Draw& draw_;
  const Rounder<Real> rounder_;
  RangeLoss loss_;
  std::int64_t quarter_ = -1;
  Words4 words_ = {};
};

/// The codes of an asymmetric integer format, as Format describes them. The zero point leaves numbers up to half a step
/// beyond the codes, and the rounding of scale and quotient 2^-24 of a number each; what is farther beyond is counted
/// as saturated.
template <class Real>
class AffineRounder {
 public:
  AffineRounder(const Format& format, const Draw& draw)
      : round_(format, wide(format.element), draw),
        lowest_(-std::ldexp(Real(1), format.element.mantissa_bits)),
        highest_(-lowest_ - 1),
        rounding_(Real(0.5) + (highest_ - lowest_) * Real(0x1p-23)) {}

  /// c of element i, whose quotient is x / s.
  Real code(Real quotient, Real zero, std::int64_t i) {
    const Real q = round_(quotient, i) + zero, c = std::clamp(q, lowest_, highest_);
    saturations_ += c != q && std::abs(quotient - (c - zero)) > rounding_;
    return c;
  }
  std::int64_t saturations() const { return saturations_; }

 private:
  /// With room for 2 (2^b - 1): no quotient is larger.
  static Element wide(Element e) {
    e.mantissa_bits += 2;
    e.emin += 2;
    e.max_code = (1U << e.mantissa_bits) - 1;
    return e;
  }

  AnyRounder<Real> round_;
  const Real lowest_, highest_, rounding_;
  std::int64_t saturations_ = 0;
};

}  // namespace replayssm
