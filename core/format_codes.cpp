// The codes of formats: stored and read.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include "core/error.h"
#include "core/own_format.h"
#include "core/rounding.h"

namespace replayssm {

namespace {

void require_codes(const Format& format) {
  if (format.exact()) fail("format 'exact' has no codes: expected one that rounds");
  if (format.own) fail("format '", format.own->name, "' is a function and has no codes");
}

/// Puts a code at its place among those of a row, whose bytes were 0.
void store(std::byte* codes, int storage_bits, std::int64_t i, std::uint32_t code) {
  if (storage_bits < 8) {
    const std::int64_t bit = i * storage_bits, shift = bit % 8;
    codes[bit / 8] |= static_cast<std::byte>(code << shift);
    if (shift + storage_bits > 8) codes[bit / 8 + 1] |= static_cast<std::byte>(code >> (8 - shift));
    return;
  }
  for (int byte = 0; byte < storage_bits / 8; ++byte) {
    codes[i * (storage_bits / 8) + byte] = static_cast<std::byte>(code >> (8 * byte));
  }
}

std::uint32_t load(const std::byte* codes, int storage_bits, std::int64_t i) {
  std::uint32_t code = 0;
  if (storage_bits < 8) {
    const std::int64_t bit = i * storage_bits, shift = bit % 8;
    code = std::to_integer<std::uint32_t>(codes[bit / 8]) >> shift;
    if (shift + storage_bits > 8) code |= std::to_integer<std::uint32_t>(codes[bit / 8 + 1]) << (8 - shift);
    return code;
  }
  for (int byte = 0; byte < storage_bits / 8; ++byte) {
    code |= std::to_integer<std::uint32_t>(codes[i * (storage_bits / 8) + byte]) << (8 * byte);
  }
  return code;
}

// Scales where encode_rows() leaves them: that of the head, then `width` bytes each, then the zero points.
class StoredScales {
 public:
  /// `count` scales beside that of the head.
  StoredScales(const Format& format, const void* scales, std::int64_t count)
      : scales_(static_cast<const std::byte*>(scales)),
        width_(format.scale_width()),
        zero_width_(format.zero_width()),
        head_(format.head_scale_width()),
        zeros_(head_ + count * width_) {}

  float head() const { return head_ == 0 ? 1 : __builtin_bit_cast(float, get(0, head_)); }
  std::uint32_t code(std::int64_t i) const { return get(head_ + i * width_, width_); }
  std::int32_t zero(std::int64_t i) const {
    if (zero_width_ == 0) return 0;
    const auto unused = static_cast<int>(32 - 8 * zero_width_);
    return static_cast<std::int32_t>(get(zeros_ + i * zero_width_, zero_width_) << unused) >> unused;
  }

 private:
  std::uint32_t get(std::int64_t at, std::int64_t width) const {
    std::uint32_t code = 0;
    std::memcpy(&code, scales_ + at, static_cast<std::size_t>(width));
    return code;
  }

  const std::byte* scales_;
  std::int64_t width_, zero_width_, head_, zeros_;
};

void put_bytes(void* to, std::int64_t at, const void* from, std::int64_t bytes) {
  std::memcpy(static_cast<std::byte*>(to) + at, from, static_cast<std::size_t>(bytes));
}

/// each(first, count, scale, zero point) for every block of the rows of a head, with what is stored for it.
template <class Real, class Each>
void for_each_stored_block(const Format& format, const void* scales, std::int64_t rows, std::int64_t n, Each&& each) {
  const StoredScales stored(format, scales, format.scales(rows, n));
  const Scaler<Real> scaler(format, stored.head());
  std::int64_t next = 0;
  for_each_block(format, rows, n, [&](std::int64_t first, std::int64_t count) {
    each(first, count, scaler.value(stored.code(next)), static_cast<Real>(stored.zero(next)));
    ++next;
  });
}

/// Writes the scales that the elements of a head ask for.
template <class Real>
void store_scales(const Format& format, const Real* data, std::int64_t rows, std::int64_t n,
                  const Extremes<Real>* tensor, void* scales) {
  const Scaler<Real> scaler(format, data, rows * n, tensor);
  const float of_head = scaler.head_scale();
  const std::int64_t head = format.head_scale_width(), width = format.scale_width(), zero_width = format.zero_width();
  put_bytes(scales, 0, &of_head, head);
  std::int64_t next = 0;
  const std::int64_t zeros = head + format.scales(rows, n) * width;
  for_each_block(format, rows, n, [&](std::int64_t first, std::int64_t count) {
    AffineScale scale{.code = 0, .zero = 0};
    if (format.asymmetric) {
      scale = scaler.affine(extremes_of(data + first, count));
    } else {
      scale.code = scaler.code(largest_magnitude(data + first, count));
    }
    put_bytes(scales, head + next * width, &scale.code, width);
    put_bytes(scales, zeros + next * zero_width, &scale.zero, zero_width);
    ++next;
  });
}

}  // namespace

template <class Real>
void encode_scaled(const Format& format, const Real* data, std::int64_t rows, std::int64_t n, const void* scales,
                   std::byte* codes, const Draw& draw) {
  const std::int64_t row_codes = format.code_bytes(n);
  std::fill_n(codes, rows * row_codes, std::byte{0});
  AnyRounder<Real> round(format, draw);
  std::optional<AffineRounder<Real>> round_affine;
  if (format.asymmetric) round_affine.emplace(format, draw);
  const auto put = [&](std::int64_t i, std::uint32_t code) {
    store(codes + i / n * row_codes, format.element.storage_bits, i % n, code);
  };
  if (format.scale == Scale::none) {
    for (std::int64_t i = 0; i < rows * n; ++i) put(i, encode(format.element, round(data[i], i)));
    return;
  }
  const std::uint32_t mask = 0xFFFFFFFFU >> (32 - format.element.bits());
  for_each_stored_block<Real>(format, scales, rows, n, [&](std::int64_t first, std::int64_t count, Real scale, Real z) {
    if (std::isnan(scale)) return;
    for (std::int64_t i = first; i < first + count; ++i) {
      const Real quotient = data[i] / scale;
      put(i, format.asymmetric
                 ? static_cast<std::uint32_t>(static_cast<std::int32_t>(round_affine->code(quotient, z, i))) & mask
                 : encode(format.element, round(quotient, i)));
    }
  });
}

template <class Real>
void encode_rows(const Format& format, const Real* data, std::int64_t rows, std::int64_t n, std::byte* codes,
                 void* scales, const Draw& draw, const Extremes<Real>* tensor) {
  require_codes(format);
  if (format.hadamard) {
    std::vector<Real> turned(data, data + rows * n);
    hadamard_rows(turned.data(), rows, n);
    return encode_rows(unrotated(format), turned.data(), rows, n, codes, scales, draw, tensor);
  }
  if (format.scale != Scale::none) store_scales(format, data, rows, n, tensor, scales);
  encode_scaled(format, data, rows, n, scales, codes, draw);
}

template <class Real>
void decode_rows(const Format& format, const std::byte* codes, const void* scales, std::int64_t rows, std::int64_t n,
                 Real* data) {
  require_codes(format);
  if (format.hadamard) {
    decode_rows(unrotated(format), codes, scales, rows, n, data);
    return hadamard_rows(data, rows, n);
  }
  const std::int64_t row_codes = format.code_bytes(n);
  const auto get = [&](std::int64_t i) { return load(codes + i / n * row_codes, format.element.storage_bits, i % n); };
  if (format.scale == Scale::none) {
    for (std::int64_t i = 0; i < rows * n; ++i) data[i] = decode<Real>(format.element, get(i));
    return;
  }
  const int unused = 32 - format.element.bits();
  for_each_stored_block<Real>(format, scales, rows, n, [&](std::int64_t first, std::int64_t count, Real scale, Real z) {
    for (std::int64_t i = first; i < first + count; ++i) {
      const std::uint32_t code = get(i);
      const Real c = format.asymmetric ? static_cast<Real>(static_cast<std::int32_t>(code << unused) >> unused) - z
                                       : decode<Real>(format.element, code);
      data[i] = c * scale;
    }
  });
}

template void encode_rows(const Format&, const float*, std::int64_t, std::int64_t, std::byte*, void*, const Draw&,
                          const Extremes<float>*);
template void encode_rows(const Format&, const double*, std::int64_t, std::int64_t, std::byte*, void*, const Draw&,
                          const Extremes<double>*);
template void encode_scaled(const Format&, const float*, std::int64_t, std::int64_t, const void*, std::byte*,
                            const Draw&);
template void encode_scaled(const Format&, const double*, std::int64_t, std::int64_t, const void*, std::byte*,
                            const Draw&);
template void decode_rows(const Format&, const std::byte*, const void*, std::int64_t, std::int64_t, float*);
template void decode_rows(const Format&, const std::byte*, const void*, std::int64_t, std::int64_t, double*);

}  // namespace replayssm
