#pragma once

// Codes of stored states and records, element by element and row by row, for host and device alike: the slow, exact
// source that faster conversions are tested against. Plain C++, so that a test can run it without a GPU.

#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>

#include "core/format.h"
#include "cuda/decode.h"
#ifdef __CUDACC__
#include <cuda_fp16.h>
#endif

namespace replayssm::cuda {

namespace detail {

constexpr int element_index(std::string_view name) {
  int i = 0;
  while (kElements[i].name != name) ++i;
  return i;
}
inline constexpr int kFp16 = element_index("fp16"), kBf16 = element_index("bf16"), kE4m3 = element_index("e4m3"),
                     kInt8 = element_index("int8");

/// core's encode() and decode() of one row of the table.
template <int index>
REPLAYSSM_HOST_DEVICE inline std::uint32_t encode_element(float x) {
  constexpr Element element = kElements[index];
  return encode(element, x);
}
template <int index>
REPLAYSSM_HOST_DEVICE inline float decode_element(std::uint32_t code) {
  constexpr Element element = kElements[index];
  return decode<float>(element, code);
}

REPLAYSSM_HOST_DEVICE inline std::int32_t magnitude(float x) {
  return __builtin_bit_cast(std::int32_t, x) & 0x7FFFFFFF;
}
inline constexpr std::int32_t kInfinity = 0x7F800000;

/// The IEEE quotient, rounded once.
REPLAYSSM_HOST_DEVICE inline float divide(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

REPLAYSSM_HOST_DEVICE inline float quiet_nan() { return __builtin_bit_cast(float, std::uint32_t{0x7FC00000}); }

}  // namespace detail

/// Bytes of one number.
constexpr int bytes_of(Scalar type) { return type == Scalar::fp32 ? 4 : 2; }
constexpr int bytes_of(Storage type) {
  return type == Storage::fp32 ? 4 : type == Storage::fp16 || type == Storage::bf16 ? 2 : 1;
}
/// Whether each row has an fp32 scale.
REPLAYSSM_HOST_DEVICE constexpr bool has_scale(Storage type) {
  return type == Storage::e4m3_row || type == Storage::int8_row;
}

/// x to fp16, nearest even, as encode(): NaN keeps its sign and the leading bits of its payload.
REPLAYSSM_HOST_DEVICE inline std::uint16_t to_fp16(float x) {
#ifdef __CUDA_ARCH__
  if (detail::magnitude(x) <= detail::kInfinity) return __half_as_ushort(__float2half_rn(x));
#endif
  return static_cast<std::uint16_t>(detail::encode_element<detail::kFp16>(x));
}

REPLAYSSM_HOST_DEVICE inline float from_fp16(std::uint16_t code) {
#ifdef __CUDA_ARCH__
  if ((code & 0x7FFF) <= 0x7C00) return __half2float(__ushort_as_half(code));
#endif
  return detail::decode_element<detail::kFp16>(code);
}

/// x to bf16, nearest even, as encode().
REPLAYSSM_HOST_DEVICE inline std::uint16_t to_bf16(float x) {
  return static_cast<std::uint16_t>(detail::encode_element<detail::kBf16>(x));
}

REPLAYSSM_HOST_DEVICE inline float from_bf16(std::uint16_t code) {
  return __builtin_bit_cast(float, std::uint32_t{code} << 16);
}

/// Element i of an array of `type`, exact.
REPLAYSSM_HOST_DEVICE inline float load(Scalar type, const void* data, std::int64_t i) {
  if (type == Scalar::fp32) return static_cast<const float*>(data)[i];
  const std::uint16_t code = static_cast<const std::uint16_t*>(data)[i];
  return type == Scalar::fp16 ? from_fp16(code) : from_bf16(code);
}

/// Element i <- x, rounded to nearest even.
REPLAYSSM_HOST_DEVICE inline void store(Scalar type, void* data, std::int64_t i, float x) {
  if (type == Scalar::fp32) {
    static_cast<float*>(data)[i] = x;
  } else {
    static_cast<std::uint16_t*>(data)[i] = type == Scalar::fp16 ? to_fp16(x) : to_bf16(x);
  }
}

/// What load() gives after store().
REPLAYSSM_HOST_DEVICE inline float rounded(Scalar type, float x) {
  if (type == Scalar::fp32) return x;
  return type == Scalar::fp16 ? from_fp16(to_fp16(x)) : from_bf16(to_bf16(x));
}

/// The scale of a row whose largest magnitude, as bits, is `largest`: float(amax / max), 1 where that is 0, NaN where
/// the row holds an infinity or a NaN.
REPLAYSSM_HOST_DEVICE inline float row_scale(Storage type, std::int32_t largest) {
  if (largest >= detail::kInfinity) return detail::quiet_nan();
  const float scale = detail::divide(__builtin_bit_cast(float, largest), type == Storage::e4m3_row ? 448.0F : 127.0F);
  return scale == 0 ? 1.0F : scale;
}

/// Element i of codes, without its scale.
REPLAYSSM_HOST_DEVICE inline float load_code(Storage type, const void* codes, std::int64_t i) {
  switch (type) {
    case Storage::fp32:
      return static_cast<const float*>(codes)[i];
    case Storage::fp16:
      return from_fp16(static_cast<const std::uint16_t*>(codes)[i]);
    case Storage::bf16:
      return from_bf16(static_cast<const std::uint16_t*>(codes)[i]);
    case Storage::e4m3_row:
      return detail::decode_element<detail::kE4m3>(static_cast<const std::uint8_t*>(codes)[i]);
    case Storage::int8_row:
      break;
  }
  return static_cast<float>(static_cast<const std::int8_t*>(codes)[i]);
}

/// Reads the n elements from `first` on, with the scale *scale where there are scales: code times scale, rounded once.
REPLAYSSM_HOST_DEVICE inline void decode_row(Storage type, const void* codes, std::int64_t first, const float* scale,
                                             std::int64_t n, float* out) {
  const float factor = has_scale(type) ? *scale : 1.0F;
  for (std::int64_t i = 0; i < n; ++i) {
    const float x = load_code(type, codes, first + i);
    out[i] = has_scale(type) ? x * factor : x;
  }
}

/// Stores n elements from `first` on, as encode_rows() in core/format.h stores a row: the same bits.
REPLAYSSM_HOST_DEVICE inline void encode_row(Storage type, const float* x, std::int64_t n, void* codes,
                                             std::int64_t first, float* scale) {
  if (!has_scale(type)) {
    for (std::int64_t i = 0; i < n; ++i) {
      if (type == Storage::fp32) {
        static_cast<float*>(codes)[first + i] = x[i];
      } else {
        static_cast<std::uint16_t*>(codes)[first + i] = type == Storage::fp16 ? to_fp16(x[i]) : to_bf16(x[i]);
      }
    }
    return;
  }
  std::int32_t largest = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int32_t a = detail::magnitude(x[i]);
    largest = a > largest ? a : largest;
  }
  const float s = row_scale(type, largest);
  *scale = s;
  const bool lost = largest >= detail::kInfinity;
  for (std::int64_t i = 0; i < n; ++i) {
    std::uint32_t code = 0;
    if (!lost) {
      const float q = detail::divide(x[i], s);
      code = type == Storage::e4m3_row ? detail::encode_element<detail::kE4m3>(q)
                                       : detail::encode_element<detail::kInt8>(q);
    }
    static_cast<std::uint8_t*>(codes)[first + i] = static_cast<std::uint8_t>(code);
  }
}

}  // namespace replayssm::cuda
