#include "analysis/state_codes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "core/error.h"
#include "core/scales.h"

namespace replayssm {
namespace {

/// Whether decoding gave the value itself, or a NaN for a NaN.
template <class Real>
bool same(Real a, Real b) {
  return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b));
}

/// Scale and zero point of rounded asymmetric elements: some under which all read back, or none.
template <class Real>
std::optional<AffineScale> find_affine(const Format& format, const Real* x, std::int64_t n) {
  const Scaler<Real> scaler(format, 1.0F);
  const Extremes<Real> own = extremes_of(x, n);
  const auto bits = [](float scale) { return __builtin_bit_cast(std::uint32_t, scale); };
  if (std::isnan(own.low)) {
    const bool all = std::all_of(x, x + n, [](Real value) { return std::isnan(value); });
    return all ? std::optional(AffineScale{bits(std::numeric_limits<float>::quiet_NaN()), 0}) : std::nullopt;
  }
  const auto highest = static_cast<std::int32_t>(format.element.max_code), lowest = -highest - 1;
  // Elements are steps of the scale, and those of one sign and the other lie no farther apart than codes do.
  const auto reads_back = [&](float scale) -> std::optional<AffineScale> {
    const auto s = static_cast<Real>(scale);
    const auto steps = [&](Real value) { return std::nearbyint(value / s); };
    if (!(steps(own.high) - steps(own.low) <= static_cast<Real>(highest - lowest))) return {};
    if (!std::all_of(x, x + n, [&](Real value) { return same(steps(value) * s + Real(0), value); })) return {};
    return AffineScale{bits(scale), lowest - static_cast<std::int32_t>(steps(own.low))};
  };
  if (own.low == 0 && own.high == 0) return reads_back(1.0F);
  const Real largest = std::max(-own.low, own.high);
  for (std::int32_t steps = highest - lowest; steps > 0; --steps) {
    const auto near = static_cast<float>(largest / static_cast<Real>(steps));
    for (const float scale :
         {near, std::nextafter(near, 0.0F), std::nextafter(near, std::numeric_limits<float>::infinity())}) {
      if (!(scale > 0) || !std::isfinite(scale)) continue;
      if (const auto found = reads_back(scale)) return found;
    }
  }
  return {};
}

/// The scales of blocks of rounded elements, given the scale of the head.
template <class Real>
class BlockScales {
 public:
  BlockScales(const Format& format, float head_scale) : format_(format), scaler_(format, head_scale) {}

  /// A scale code under which n elements read back, or none.
  std::optional<std::uint32_t> find(const Real* x, std::int64_t n) const {
    const std::uint32_t usual = scaler_.code(largest_magnitude(x, n));
    if (reads_back(x, n, usual)) return usual;
    if (format_.rule == ScaleRule::amax) return find_float(x, n);
    for (std::uint32_t code = 0; code < 256; ++code) {
      if (reads_back(x, n, code)) return code;
    }
    return {};
  }

 private:
  std::optional<std::uint32_t> find_float(const Real* x, std::int64_t n) const {
    Real largest(0);  // of those that did not overflow
    for (std::int64_t i = 0; i < n; ++i) {
      if (std::isfinite(x[i])) largest = std::max(largest, std::abs(x[i]));
    }
    const auto bits = [](float scale) { return __builtin_bit_cast(std::uint32_t, scale); };
    if (reads_back(x, n, bits(1.0F))) return bits(1.0F);  // nothing but zeros and overflows
    // The largest element is one of the codes times the scale, rounded once: that leaves three scales for each code.
    for (std::uint32_t code = format_.element.max_code; code > 0; --code) {
      const Real quotient = largest / decode<Real>(format_.element, code);
      if (!(quotient <= static_cast<Real>(std::numeric_limits<float>::max()))) break;
      const auto near = static_cast<float>(quotient);
      constexpr float up = std::numeric_limits<float>::infinity();
      for (const float candidate : {near, std::nextafter(near, 0.0F), std::nextafter(near, up)}) {
        if (candidate > 0 && reads_back(x, n, bits(candidate))) return bits(candidate);
      }
    }
    return {};
  }

  bool reads_back(const Real* x, std::int64_t n, std::uint32_t scale_code) const {
    const Real scale = scaler_.value(scale_code);
    return std::all_of(x, x + n, [&](Real value) {
      const std::uint32_t code = std::isnan(scale) ? 0 : encode(format_.element, value / scale);
      return same(decode<Real>(format_.element, code) * scale, value);
    });
  }

  const Format& format_;
  const Scaler<Real> scaler_;
};

/// The scales of a head laid out as encode_rows() does; none where a block does not read back.
template <class Real>
std::vector<std::byte> scales_of(const Format& format, float head_scale, const Real* data, std::int64_t rows,
                                 std::int64_t n, std::int64_t* bad_row) {
  const BlockScales<Real> blocks(format, head_scale);
  const auto* of_head = reinterpret_cast<const std::byte*>(&head_scale);
  std::vector<std::byte> out(of_head, of_head + format.head_scale_width()), zeros;
  const auto append = [](std::vector<std::byte>& to, const auto& value, std::int64_t width) {
    const auto* bytes = reinterpret_cast<const std::byte*>(&value);
    to.insert(to.end(), bytes, bytes + width);
  };
  *bad_row = -1;
  for_each_block(format, rows, n, [&](std::int64_t first, std::int64_t count) {
    if (*bad_row >= 0) return;
    std::optional<AffineScale> scale;
    if (format.asymmetric) {
      scale = find_affine(format, data + first, count);
    } else if (const auto code = blocks.find(data + first, count)) {
      scale = AffineScale{*code, 0};
    }
    if (!scale) {
      *bad_row = first / n;
      return;
    }
    append(out, scale->code, format.scale_width());
    append(zeros, scale->zero, format.zero_width());
  });
  out.insert(out.end(), zeros.begin(), zeros.end());
  return out;
}

/// What the scale of a head may have been, likeliest first: the largest element of the head is a code times the scale
/// of its block, rounded.
template <class Real>
std::vector<float> head_scales(const Format& format, const Real* data, std::int64_t count) {
  const Scaler<Real> usual(format, data, count);
  std::vector<float> out = {usual.head_scale()};
  const Real largest = Rounder<Real>::value(largest_magnitude(data, count));
  for (std::uint32_t code = format.element.max_code; format.rule == ScaleRule::nvfp4 && code > 0; --code) {
    for (std::uint32_t block = 0x7E; block > 0; --block) {
      const auto near =
          static_cast<float>(largest / decode<Real>(format.element, code) / Scaler<Real>(format, 1.0F).value(block));
      for (int step = -2; step <= 2; ++step) {
        out.push_back(__builtin_bit_cast(float, __builtin_bit_cast(std::int32_t, near) + step));
      }
    }
  }
  return out;
}

}  // namespace

template <class Real>
StoredRows codes_of_rounded(const Format& rounded_to, const Real* data, std::int64_t rows, std::int64_t n) {
  Format format = rounded_to;
  format.rounding = Rounding::nearest;  // to the value next to a quotient, however that was rounded
  StoredRows out;
  out.codes.resize(static_cast<std::size_t>(rows * format.code_bytes(n)));
  if (format.scale != Scale::none) {
    std::int64_t bad_row = 0;
    for (const float head_scale : head_scales(format, data, rows * n)) {
      out.scales = scales_of(format, head_scale, data, rows, n, &bad_row);
      if (bad_row < 0) break;
    }
    if (bad_row >= 0) fail("row ", bad_row, " of a state holds values that ", rounded_to.text(), " does not have");
    encode_scaled(format, data, rows, n, out.scales.data(), out.codes.data());
    return out;
  }
  encode_rows(format, data, rows, n, out.codes.data(), nullptr);
  std::vector<Real> back(static_cast<std::size_t>(rows * n));
  decode_rows(format, out.codes.data(), nullptr, rows, n, back.data());
  for (std::int64_t i = 0; i < rows * n; ++i) {
    if (same(back[static_cast<std::size_t>(i)], data[i])) continue;
    fail("row ", i / n, " of a state holds values that ", rounded_to.text(), " does not have");
  }
  return out;
}

template StoredRows codes_of_rounded(const Format&, const float*, std::int64_t, std::int64_t);
template StoredRows codes_of_rounded(const Format&, const double*, std::int64_t, std::int64_t);

}  // namespace replayssm
