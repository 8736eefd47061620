#pragma once

// Stored states and activations on the device: the closed list of types that the fast kernels know, their conversion to
// fp32 (exact) and from it (rounded once, bit for bit as core/format.h says).

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "core/format.h"
#include "cuda/decode.h"

namespace replayssm::cuda {

__host__ __device__ constexpr int bytes(Scalar type) { return type == Scalar::fp32 ? 4 : 2; }
__host__ __device__ constexpr int bytes(Storage storage) {
  return storage == Storage::fp32 ? 4 : storage == Storage::fp16 || storage == Storage::bf16 ? 2 : 1;
}
__host__ __device__ constexpr bool scaled(Storage storage) { return bytes(storage) == 1; }

// ---- activations and ring records ---------------------------------------------------------------------------------

__device__ inline float load(Scalar type, const void* data, std::int64_t i) {
  if (type == Scalar::bf16) return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
  if (type == Scalar::fp16) return __half2float(static_cast<const __half*>(data)[i]);
  return static_cast<const float*>(data)[i];
}

/// The bits of such a number, which nothing waits for yet.
__device__ inline void load_bits(Scalar type, const void* data, std::int64_t i, std::uint32_t& bits) {
  asm volatile(
      "{\n"
      ".reg .pred wide;\n"
      "setp.ne.s32 wide, %2, 0;\n"
      "@wide ld.global.b32 %0, [%1];\n"
      "@!wide ld.global.u16 %0, [%1];\n"
      "}\n"
      : "+r"(bits)
      : "l"(static_cast<const std::byte*>(data) + i * bytes(type)), "r"(type == Scalar::fp32 ? 1 : 0));
}
__device__ inline float from_bits(Scalar type, std::uint32_t bits) {
  const float half = __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  const float other = __uint_as_float(type == Scalar::bf16 ? bits << 16 : bits);
  return type == Scalar::fp16 ? half : other;
}

/// Element i without a branch, which pays in shared memory only.
__device__ inline float load_either(Scalar type, const std::byte* data, int i) {
  const bool wide = type == Scalar::fp32;
  const auto* p = reinterpret_cast<const std::uint16_t*>(data) + (wide ? 2 * i : i);
  const std::uint32_t low = p[0], high = p[wide ? 1 : 0];
  const float half = __half2float(__ushort_as_half(static_cast<unsigned short>(low)));
  return type == Scalar::fp16 ? half : __uint_as_float(high << 16 | (wide ? low : 0u));
}

/// x rounded to the type, as a float.
__device__ inline float round_to(Scalar type, float x) {
  if (type == Scalar::bf16) return __bfloat162float(__float2bfloat16_rn(x));
  if (type == Scalar::fp16) return __half2float(__float2half_rn(x));
  return x;
}

__device__ inline void store(Scalar type, void* data, std::int64_t i, float x) {
  if (type == Scalar::bf16) {
    static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(x);
  } else if (type == Scalar::fp16) {
    static_cast<__half*>(data)[i] = __float2half_rn(x);
  } else {
    static_cast<float*>(data)[i] = x;
  }
}

// ---- states -------------------------------------------------------------------------------------------------------

/// 4, 8, 16 or 32 bytes in registers.
template <int Bytes>
struct Words {
  std::uint32_t w[Bytes / 4];
};

template <int Bytes>
__device__ inline Words<Bytes> load_words(const std::byte* p) {
  Words<Bytes> r;
  if constexpr (Bytes == 32) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 v = *reinterpret_cast<const uint4*>(p + i * 16);
      r.w[4 * i] = v.x, r.w[4 * i + 1] = v.y, r.w[4 * i + 2] = v.z, r.w[4 * i + 3] = v.w;
    }
  } else if constexpr (Bytes == 16) {
    const uint4 v = *reinterpret_cast<const uint4*>(p);
    r.w[0] = v.x, r.w[1] = v.y, r.w[2] = v.z, r.w[3] = v.w;
  } else if constexpr (Bytes == 8) {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    r.w[0] = v.x, r.w[1] = v.y;
  } else {
    r.w[0] = *reinterpret_cast<const std::uint32_t*>(p);
  }
  return r;
}

template <int Bytes>
__device__ inline void store_words(std::byte* p, const Words<Bytes>& r) {
  if constexpr (Bytes == 16) {
    *reinterpret_cast<uint4*>(p) = make_uint4(r.w[0], r.w[1], r.w[2], r.w[3]);
  } else if constexpr (Bytes == 8) {
    *reinterpret_cast<uint2*>(p) = make_uint2(r.w[0], r.w[1]);
  } else if constexpr (Bytes == 4) {
    *reinterpret_cast<std::uint32_t*>(p) = r.w[0];
  }
}

/// The codes of `Bytes` bytes as floats, without their scale.
template <Storage S, int Bytes>
__device__ inline void decode_words(const Words<Bytes>& r, float* out) {
#pragma unroll
  for (int i = 0; i < Bytes / 4; ++i) {
    const std::uint32_t w = r.w[i];
    if constexpr (S == Storage::fp32) {
      out[i] = __uint_as_float(w);
    } else if constexpr (S == Storage::bf16) {
      out[2 * i] = __uint_as_float(w << 16);
      out[2 * i + 1] = __uint_as_float(w & 0xFFFF0000u);
    } else if constexpr (S == Storage::fp16) {
      const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&w));
      out[2 * i] = f.x, out[2 * i + 1] = f.y;
    } else if constexpr (S == Storage::e4m3_row) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(w >> (16 * k)), __NV_E4M3);
        const float2 f = __half22float2(__half2(h));
        out[4 * i + 2 * k] = f.x, out[4 * i + 2 * k + 1] = f.y;
      }
    } else {
      // A byte in the low mantissa of 2^23 is 2^23 + byte, exactly; the sign bit is flipped to count from -128.
      const std::uint32_t u = w ^ 0x80808080u;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        out[4 * i + k] = __uint_as_float(__byte_perm(u, 0x4B000000u, 0x7440 + k)) - 8388736.0f;
      }
    }
  }
}

/// The parts in which vectors are multiplied with states of a format: of bf16 three, whose 24 bits hold a float; where
/// the other operand is fp16 two, which hold 22 bits.
template <Storage S>
inline constexpr int kParts = S == Storage::fp32   ? 0
                              : S == Storage::bf16 ? 3
                                                   : 2;

/// Four codes of a chunk of a row, those with number 4 k and after it, as pairs of fp16 (of bf16 as they are).
template <Storage S, int Bytes>
__device__ inline uint2 operand(const Words<Bytes>& chunk, int k) {
  if constexpr (bytes(S) == 2) {
    return make_uint2(chunk.w[2 * k], chunk.w[2 * k + 1]);
  } else if constexpr (S == Storage::e4m3_row) {
    const auto pair = [&](int i) {
      const __half2_raw h =
          __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(chunk.w[k] >> (16 * i)), __NV_E4M3);
      return static_cast<std::uint32_t>(h.x) | static_cast<std::uint32_t>(h.y) << 16;
    };
    return make_uint2(pair(0), pair(1));
  } else {
    // A byte in the low mantissa of 1024 is 1024 + byte, exactly; the sign bit is flipped to count from -128.
    const std::uint32_t u = chunk.w[k] ^ 0x80808080u;
    const __half2 base = __float2half2_rn(1152.0f);
    const auto pair = [&](int order) {
      const std::uint32_t bits = __byte_perm(u, 0x64646464u, order);
      const __half2 h = __hsub2(*reinterpret_cast<const __half2*>(&bits), base);
      return *reinterpret_cast<const std::uint32_t*>(&h);
    };
    return make_uint2(pair(0x4140), pair(0x4342));
  }
}

/// Division by one number many times, correctly rounded.
///
/// q = fma(-e, r, q0) with q0 = x r, e = fma(q0, d, -x) and r the rounded reciprocal is the rounded quotient where no
/// step leaves the normal range (Markstein 1990, theorem 5; Muller et al., Handbook of Floating-Point Arithmetic, 4.7).
/// With 2^-80 <= d <= 2^80 that holds for quotients from 2^-20 up; below, both q and the true quotient are under any
/// half step of the codes it is rounded to. A zero keeps its sign: -e is then -0. x = Inf gives NaN.
struct Divider {
  float d, r;
  bool quick;
  __device__ explicit Divider(float divisor) {
    d = divisor;
    r = __frcp_rn(divisor);
    quick = divisor >= 0x1p-80f && divisor <= 0x1p80f;
  }
  __device__ float quick_quotient(float x) const {
    const float q = __fmul_rn(x, r);
    return __fmaf_rn(-__fmaf_rn(q, d, -x), r, q);
  }
};

/// The same where the divisor is out of that range; apart, so that it does not fill the instruction cache.
__device__ __noinline__ inline float careful_quotient(float x, float d) { return __fdiv_rn(x, d); }

template <Storage S>
__host__ __device__ constexpr float max_code() {
  return S == Storage::e4m3_row ? 448.0f : 127.0f;
}

/// The scale of a row whose largest magnitude is `largest`, which is NaN or Inf where an element is.
template <Storage S>
__device__ inline float row_scale(float largest) {
  const Divider by_max(max_code<S>());
  const float scale = largest >= 0x1p-80f ? by_max.quick_quotient(largest) : careful_quotient(largest, max_code<S>());
  if (!(scale <= 3.402823466e38f)) return __uint_as_float(0x7FC00000u);
  return scale == 0 ? 1.0f : scale;
}

/// The larger magnitude; NaN if either is.
__device__ inline float larger(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

/// Codes of 4 numbers in bytes(S) words of 8 bits each, where the instructions that round are right: none is NaN,
/// whose sign and payload they lose, or of scaled storages, quotients by a scale that is Divider::quick.
template <Storage S>
__device__ inline Words<4 * bytes(S)> encode_four(const float* q) {
  Words<4 * bytes(S)> r;
  if constexpr (S == Storage::fp32) {
#pragma unroll
    for (int i = 0; i < 4; ++i) r.w[i] = __float_as_uint(q[i]);
  } else if constexpr (S == Storage::fp16) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const __half2 h = __floats2half2_rn(q[2 * i], q[2 * i + 1]);
      r.w[i] = *reinterpret_cast<const std::uint32_t*>(&h);
    }
  } else if constexpr (S == Storage::bf16) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const __nv_bfloat162 h = __floats2bfloat162_rn(q[2 * i], q[2 * i + 1]);
      r.w[i] = *reinterpret_cast<const std::uint32_t*>(&h);
    }
  } else if constexpr (S == Storage::e4m3_row) {
    const std::uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(q[0], q[1]), __NV_SATFINITE, __NV_E4M3);
    const std::uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(q[2], q[3]), __NV_SATFINITE, __NV_E4M3);
    r.w[0] = low | high << 16;
  } else {
    // 2^23 + 2^22 + q has q, rounded to nearest even, in its low byte.
    std::uint32_t u[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) u[i] = __float_as_uint(q[i] + 12582912.0f);
    r.w[0] = __byte_perm(__byte_perm(u[0], u[1], 0x0040), __byte_perm(u[2], u[3], 0x0040), 0x5410);
  }
  return r;
}

/// The codes of any four numbers, or of their quotients by a scale, 0 where that is NaN. Apart, so that it does not
/// fill the instruction cache, and with its operands in registers: in memory they would be written there every time.
template <Storage S>
__device__ __noinline__ uint2 encode_carefully(float a, float b, float c, float d, float scale) {
  const float x[4] = {a, b, c, d};
  if constexpr (S == Storage::fp16 || S == Storage::bf16) {
    // Keeps the sign and payload of a NaN, which the instructions do not.
    constexpr Element element = kElements[S == Storage::fp16 ? 2 : 3];
    std::uint32_t code[4];
    for (int i = 0; i < 4; ++i) code[i] = encode(element, x[i]);
    return make_uint2(code[0] | code[1] << 16, code[2] | code[3] << 16);
  } else {
    // A scale below the smallest normal float is inexact, and quotients by it go beyond the largest code.
    float q[4];
    for (int i = 0; i < 4; ++i) q[i] = fminf(fmaxf(__fdiv_rn(x[i], scale), -max_code<S>()), max_code<S>());
    return make_uint2(scale != scale ? 0 : encode_four<S>(q).w[0], 0);
  }
}

}  // namespace replayssm::cuda
