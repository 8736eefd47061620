#pragma once

// Formats written out literally, and what goes wrong in those that people write: one defect each.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/own_format.h"

namespace replayssm {

constexpr double kInf = std::numeric_limits<double>::infinity(), kNotANumber = std::numeric_limits<double>::quiet_NaN();

/// A float type of m bits of mantissa, smallest exponent emin and largest value `top`, or with m = 0 whole numbers up
/// to `top`; beyond that Inf or, with `saturates`, `top`. What shares a scale: rows of `block`, 0 for the whole head,
/// -1 for nothing. `power`: the scale is the smallest power of two under which amax is at most `top`, else float(amax /
/// top).
struct LiteralFormat {
  int m, emin;
  double top;
  bool saturates;
  std::int64_t block;
  bool power = false, stochastic = false;
};

enum class Defect {
  none,
  truncates,
  ties_away,
  twice_through_float,
  scale_one_up,
  scale_one_down,
  floor_for_ceil,
  row_for_head,
  saturates_for_inf,
  flushes_subnormals,
  noise_without_carry,
};

/// x >= 0, finite, in units of the type's last place.
inline double rounded_units(double units, Defect defect, bool stochastic, std::uint32_t random) {
  const double below = std::floor(units);
  if (stochastic) {
    // Up where the first 32 bits of the fraction and the random ones carry. A carry that is lost takes the value down
    // to its power of two, as adding to the mantissa alone does.
    const bool up = std::floor((units - below) * 0x1p32) + random >= 0x1p32;
    const bool leaves_binade = below > 0 && std::ilogb(below + 1) > std::ilogb(below);
    if (up && leaves_binade && defect == Defect::noise_without_carry) return std::ldexp(1, std::ilogb(below));
    return up ? below + 1 : below;
  }
  if (defect == Defect::truncates) return below;
  if (units - below != 0.5) return units - below > 0.5 ? below + 1 : below;
  const bool odd = std::fmod(below, 2) == 1;
  return odd || defect == Defect::ties_away ? below + 1 : below;
}

inline double rounded_element(const LiteralFormat& f, Defect defect, double x, std::uint32_t random) {
  if (defect == Defect::twice_through_float) x = static_cast<double>(static_cast<float>(x));
  if (std::isnan(x)) return x;
  const double size = std::abs(x), saturated = f.saturates || defect == Defect::saturates_for_inf ? f.top : kInf;
  if (std::isinf(x)) return std::copysign(defect == Defect::saturates_for_inf || f.saturates ? f.top : kInf, x);
  if (defect == Defect::flushes_subnormals && size < std::ldexp(1, f.emin)) return std::copysign(0.0, x);
  const int last = f.m == 0 ? 0 : std::max(size == 0 ? f.emin : std::ilogb(size), f.emin) - f.m;
  const double r = std::ldexp(rounded_units(std::ldexp(size, -last), defect, f.stochastic, random), last);
  const double limited = r > f.top ? saturated : r;
  return f.m == 0 && limited == 0 ? 0 : std::copysign(limited, x);  // whole numbers have no -0
}

inline double scale_of(const LiteralFormat& f, Defect defect, double amax) {
  if (!std::isfinite(amax)) return kNotANumber;
  const int step = defect == Defect::scale_one_up ? 1 : defect == Defect::scale_one_down ? -1 : 0;
  if (f.power) {
    if (amax == 0) return 0x1p-127;
    int e = std::ilogb(amax) - std::ilogb(f.top);
    if (defect != Defect::floor_for_ceil && std::ldexp(amax, -e) > f.top) ++e;
    return std::ldexp(1, std::clamp(e + step, -127, 127));
  }
  const auto scale = static_cast<float>(amax / f.top);
  if (!std::isfinite(scale)) return kNotANumber;
  if (scale == 0) return 1;
  return step == 0 ? scale : std::nextafter(scale, step > 0 ? std::numeric_limits<float>::infinity() : 0.0F);
}

inline RoundFunction literal_function(LiteralFormat f, Defect defect) {
  return [f, defect](double* data, std::int64_t rows, std::int64_t n, const Draw& draw) {
    const auto random = [&](std::int64_t i) {
      return f.stochastic ? draw.words((draw.first + i) / 4).word[(draw.first + i) % 4] : 0;
    };
    if (f.block < 0) {
      for (std::int64_t i = 0; i < rows * n; ++i) data[i] = rounded_element(f, defect, data[i], random(i));
      return;
    }
    const std::int64_t together = f.block > 0 ? f.block : defect == Defect::row_for_head ? n : rows * n;
    for (std::int64_t first = 0; first < rows * n;) {  // a block ends where its row does
      const std::int64_t end = std::min(first + together, f.block > 0 ? (first / n + 1) * n : rows * n);
      double amax = 0;
      for (std::int64_t i = first; i < end; ++i) {
        amax = std::isnan(data[i]) || std::isnan(amax) ? kNotANumber : std::max(amax, std::abs(data[i]));
      }
      const double scale = scale_of(f, defect, amax);
      for (; first < end; ++first) {
        data[first] =
            std::isnan(scale) ? scale : rounded_element(f, defect, data[first] / scale, random(first)) * scale;
      }
    }
  };
}

/// What reads a copy that is one flush old: what was stored before, zeros at first. For one thread.
inline RoundFunction one_flush_stale(RoundFunction round) {
  struct Kept {
    std::uint32_t token = 0;
    std::vector<double> rows;
  };
  auto kept = std::make_shared<std::map<std::pair<std::uint32_t, std::uint32_t>, Kept>>();
  return [round = std::move(round), kept](double* data, std::int64_t rows, std::int64_t n, const Draw& draw) {
    round(data, rows, n, draw);
    const std::vector<double> fresh(data, data + rows * n);
    Kept& before = (*kept)[{draw.place.layer, draw.head}];
    if (before.rows.empty() || draw.token <= before.token) before.rows.assign(fresh.size(), 0.0);  // another run
    std::copy(before.rows.begin(), before.rows.end(), data);
    before = {draw.token, fresh};
  };
}

}  // namespace replayssm
