#pragma once

#include <cstdint>
#include <span>
#include <string_view>

// One source for host and device: the functions on single elements use integer operations only, so that no rounding
// mode, flush-to-zero setting or contraction of either side can change a code.
#ifdef __CUDACC__
#define REPLAYSSM_HOST_DEVICE __host__ __device__
#else
#define REPLAYSSM_HOST_DEVICE
#endif

namespace replayssm {

/// What a value beyond the range of an element becomes: a finite one that rounds past the largest, or an infinity. An
/// element without infinities turns `infinity` into NaN, one without NaN saturates in every mode.
enum class Overflow { infinity, saturate, nan };

/// What the codes above the largest finite one mean: nothing, NaN, or first infinity and then NaN; or that there are
/// none, and the code of -0 is the only NaN ("fnuz").
enum class Specials { none, nan, infinity_and_nan, nan_for_minus_zero };

/// How one number is stored: a row of data.
///
/// A code is sign, exponent field and mantissa, from the top; with m = mantissa_bits and c the code without its sign
///
///     value = +-(c mod 2^m) 2^(emin - m)                          exponent field 0
///     value = +-(2^m + c mod 2^m) 2^(emin - m + field - 1)        otherwise
///
/// An integer type is the same with m bits of magnitude and no exponent field, which makes every value subnormal, a
/// multiple of the step 2^(emin - m): 1 but for the fixed-point element of mxint8. Its codes are two's complement and
/// have no negative zero.
struct Element {
  std::string_view name;
  int exponent_bits;
  int mantissa_bits;
  int emin;                // exponent of the smallest normal value
  std::uint32_t max_code;  // code of the largest finite value
  int storage_bits;        // in memory, codes packed; more than bits() only for tf32
  Specials specials;
  bool integer;
  Overflow overflow;

  /// Bits of a code: sign, exponent field, mantissa.
  REPLAYSSM_HOST_DEVICE constexpr int bits() const { return 1 + exponent_bits + mantissa_bits; }

  /// Whether it rounds nothing, as kExact: only elements whose codes fit in 32 bits do.
  REPLAYSSM_HOST_DEVICE constexpr bool exact() const { return bits() > 32; }

  /// Whether NaN and -0 are among its values. What has no NaN gives 0 for one.
  REPLAYSSM_HOST_DEVICE constexpr bool has_nan() const { return specials != Specials::none; }
  REPLAYSSM_HOST_DEVICE constexpr bool has_minus_zero() const {
    return !integer && specials != Specials::nan_for_minus_zero;
  }

  friend bool operator==(const Element&, const Element&) = default;
};

/// Every element format but `exact`: floats, widest first, then integers.
inline constexpr Element kElements[] = {
    {"fp32", 8, 23, -126, 0x7F7FFFFF, 32, Specials::infinity_and_nan, false, Overflow::infinity},
    {"tf32", 8, 10, -126, 0x3FBFF, 32, Specials::infinity_and_nan, false, Overflow::infinity},
    {"fp16", 5, 10, -14, 0x7BFF, 16, Specials::infinity_and_nan, false, Overflow::infinity},
    {"bf16", 8, 7, -126, 0x7F7F, 16, Specials::infinity_and_nan, false, Overflow::infinity},
    {"e4m3", 4, 3, -6, 0x7E, 8, Specials::nan, false, Overflow::saturate},
    {"e5m2", 5, 2, -14, 0x7B, 8, Specials::infinity_and_nan, false, Overflow::saturate},
    {"e4m3fnuz", 4, 3, -7, 0x7F, 8, Specials::nan_for_minus_zero, false, Overflow::saturate},
    {"e5m2fnuz", 5, 2, -15, 0x7F, 8, Specials::nan_for_minus_zero, false, Overflow::saturate},
    {"e3m2", 3, 2, -2, 0x1F, 6, Specials::none, false, Overflow::saturate},
    {"e2m3", 2, 3, 0, 0x1F, 6, Specials::none, false, Overflow::saturate},
    {"e2m1", 2, 1, 0, 0x7, 4, Specials::none, false, Overflow::saturate},
    {"int16", 0, 15, 15, 0x7FFF, 16, Specials::none, true, Overflow::saturate},
    {"int8", 0, 7, 7, 0x7F, 8, Specials::none, true, Overflow::saturate},
    {"int4", 0, 3, 3, 0x7, 4, Specials::none, true, Overflow::saturate},
};

/// The element of mxint8: 8 bits of two's complement in steps of 2^-6.
inline constexpr Element kFixed8{"fixed8", 0, 7, 1, 0x7F, 8, Specials::none, true, Overflow::saturate};

/// The element of `exact`: a double as it is. It has no codes of its own.
inline constexpr Element kExact{"exact", 11, 52, -1022, 0, 64, Specials::infinity_and_nan, false, Overflow::infinity};

/// The element of a name in kElements; null where there is none.
constexpr const Element* find_element(std::string_view name) {
  for (const Element& element : kElements) {
    if (element.name == name) return &element;
  }
  return nullptr;
}

namespace detail {

template <class Float>
struct Binary;  // the IEEE layout of Float; Int holds its bits, signed because vector units compare signed integers

template <>
struct Binary<float> {
  using Int = std::int32_t;
  using Word = std::uint32_t;
  static constexpr int kWidth = 32, kMantissa = 23, kBias = 127;
};

template <>
struct Binary<double> {
  using Int = std::int64_t;
  using Word = std::uint64_t;
  static constexpr int kWidth = 64, kMantissa = 52, kBias = 1023;
};

}  // namespace detail

/// Rounds to one Element; everything that does not depend on the value is worked out once, in the constructor.
///
/// Float is float or double; the element is one of 32 bits or less whose values Float has. A magnitude is the bits of a
/// Float without the sign: ordered as integers, magnitudes are ordered as values, with infinity and then NaN on top.
template <class Float>
class Rounder {
 public:
  using Int = typename detail::Binary<Float>::Int;
  using Word = typename detail::Binary<Float>::Word;
  static constexpr int kMantissa = detail::Binary<Float>::kMantissa;
  static constexpr int kWidth = detail::Binary<Float>::kWidth;
  static constexpr Int kSign = static_cast<Int>(Word{1} << (kWidth - 1));
  static constexpr Int kLeading = Int{1} << kMantissa;
  static constexpr Int kInfinity = Int{2 * detail::Binary<Float>::kBias + 1} << kMantissa;
  static constexpr Int kNan = kInfinity | kLeading >> 1;

  REPLAYSSM_HOST_DEVICE constexpr explicit Rounder(const Element& element)
      : mantissa_(element.mantissa_bits),
        dropped_(kMantissa - mantissa_),
        emin_(element.emin + detail::Binary<Float>::kBias),
        zero_sign_(element.has_minus_zero() ? kSign : 0),
        unit_(Word{1} << dropped_),
        // With all bits kept there are no ties and nothing to be even.
        odd_(kLeading | (dropped_ == 0 ? 1 : 0)),
        // Subnormals of Float have the exponent field 0 but the step of field 1, so an element that shares them has the
        // same unit everywhere.
        normal_((emin_ == 1 ? 0 : emin_) << kMantissa | (kLeading - 1)),
        max_code_(static_cast<Int>(element.max_code)),
        specials_(element.specials),
        smallest_(magnitude(1)),
        half_smallest_(emin_ == 1 ? smallest_ >> 1 : smallest_ - kLeading),
        largest_(magnitude(max_code_)),
        overflow_above_(largest_),
        beyond_(largest_),
        // A NaN keeps the part of its payload that fits; where nothing is left of it the least one keeps it a NaN.
        nan_mask_(specials_ == Specials::infinity_and_nan ? -static_cast<Int>(unit_) : 0),
        nan_least_(specials_ == Specials::infinity_and_nan ? kInfinity + static_cast<Int>(unit_)
                   : element.has_nan()                     ? kNan
                                                           : 0) {
    // The midpoint between the largest value and the next, had there been one, goes to the even one of the two.
    const Int half = static_cast<Int>(unit(overflow_above_) >> 1);
    if (half > 0) overflow_above_ += half - (max_code_ & 1);
    if (element.overflow == Overflow::infinity && specials_ == Specials::infinity_and_nan) {
      beyond_ = kInfinity;
    } else if (element.overflow != Overflow::saturate && element.has_nan()) {
      beyond_ = kNan;
    }
  }

  REPLAYSSM_HOST_DEVICE static constexpr Int bits(Float x) { return __builtin_bit_cast(Int, x); }
  REPLAYSSM_HOST_DEVICE static constexpr Float value(Int bits) { return __builtin_bit_cast(Float, bits); }
  REPLAYSSM_HOST_DEVICE static constexpr Int magnitude_of(Float x) { return bits(x) & ~kSign; }

  /// The magnitude of the element's largest value.
  REPLAYSSM_HOST_DEVICE constexpr Int largest() const { return largest_; }

  /// The largest magnitude that stays in range when rounded to nearest; NaN and infinity are above it.
  REPLAYSSM_HOST_DEVICE constexpr Int overflow_above() const { return overflow_above_; }

  /// x to the nearest value, ties to the even code; the whole line of numbers, infinities and NaN.
  REPLAYSSM_HOST_DEVICE constexpr Float round(Float x) const {
    const Int a = magnitude_of(x);
    const Int nan = (a & nan_mask_) > nan_least_ ? (a & nan_mask_) : nan_least_;
    Int r = a > half_smallest_ ? nearest(a) : 0;
    r = a > overflow_above_ ? beyond_ : r;
    r = a > kInfinity ? nan : r;
    return value(r | (bits(x) & (r > 0 && r <= kInfinity ? kSign : zero_sign_)));
  }

  /// The magnitude a cut to the next value toward zero, as if there were no largest.
  REPLAYSSM_HOST_DEVICE constexpr Int cut(Int a) const {
    return a < smallest_ ? 0 : static_cast<Int>(static_cast<Word>(a) & (0 - unit(a)));
  }

  /// The magnitude a to the value below or the one above it, as if there were no largest: up with the probability
  /// floor(f 2^bits) / 2^bits, where f is the part of the step that a lies above the lower one. Of `random`, uniform in
  /// 32 bits, the first `bits` (1 to 32) are added to those of a step. A value of the element stays where it is.
  REPLAYSSM_HOST_DEVICE constexpr Int drawn(Int a, std::uint32_t random, int bits) const {
    const Word r = random >> (32 - bits);
    if (a < smallest_ && emin_ != 1) {
      const Int shift = kMantissa - bits + (smallest_ >> kMantissa) - (a >> kMantissa);
      const auto significand = static_cast<std::uint64_t>((a & (kLeading - 1)) | kLeading);
      const std::uint64_t f = shift > kMantissa ? 0 : shift >= 0 ? significand >> shift : significand << -shift;
      return (f + r) >> bits != 0 ? smallest_ : 0;
    }
    // Added before anything is cut off, so that a carry runs into the exponent.
    const Word noise = unit_log2(a) >= bits ? r << (unit_log2(a) - bits) : r >> (bits - unit_log2(a));
    return static_cast<Int>((static_cast<Word>(a) + noise) & (0 - unit(a)));
  }

  /// x with the magnitude r that it was rounded to, or what lies beyond the range. `finite`: a finite x that is beyond
  /// becomes the largest value and never infinity, as rounding toward zero has it (IEEE 754-2019, 7.4).
  REPLAYSSM_HOST_DEVICE constexpr Float limited(Float x, Int r, bool finite) const {
    const Int a = magnitude_of(x);
    if (a > kInfinity) return round(x);
    if (r > largest_) r = finite && a < kInfinity ? largest_ : beyond_;
    return value(r | (bits(x) & (r > 0 && r <= kInfinity ? kSign : zero_sign_)));
  }

  /// The code, without sign, of a magnitude that is a value of the element; for the NaN that stands for -0 all of it.
  REPLAYSSM_HOST_DEVICE constexpr Int code(Int a) const {
    if (a == 0) return 0;
    if (a >= kInfinity) {
      return max_code_ + 1 + (specials_ == Specials::infinity_and_nan ? (a - kInfinity) >> dropped_ : 0);
    }
    const Int exponent = a >> kMantissa;
    if (exponent >= emin_ || emin_ == 1) return (a >> dropped_) - ((emin_ - 1) << mantissa_);
    return ((a & (kLeading - 1)) | kLeading) >> (dropped_ + emin_ - exponent);
  }

  /// The magnitude of a code without sign.
  REPLAYSSM_HOST_DEVICE constexpr Int magnitude(Int code) const {
    if (code == 0) return 0;
    if (code > max_code_ && specials_ == Specials::infinity_and_nan) {
      return kInfinity + ((code - max_code_ - 1) << dropped_);
    }
    if (code > max_code_ && specials_ != Specials::none) return kNan;
    // A subnormal code becomes a normal Float where Float has the exponent for it.
    Int exponent = emin_;
    for (; code < Int{1} << mantissa_ && exponent > 1; --exponent) code <<= 1;
    // The leading bit of a normal value adds the 1 that is subtracted here, and the exponent field of the code its own.
    return ((exponent - 1) << kMantissa) + (code << dropped_);
  }

 private:
  /// The place of the last bit that the element has in the magnitude a >= smallest_: unit_ in the normal range, twice
  /// as much for each exponent below it. Written for GCC to make vector code of: exponents are subtracted where they
  /// lie, so that the count is shifted down last, and what it shifts is a variable.
  REPLAYSSM_HOST_DEVICE constexpr Word unit(Int a) const {
    const Int below = normal_ - a;
    return unit_ << (static_cast<Word>(below > 0 ? below : 0) >> kMantissa);
  }

  REPLAYSSM_HOST_DEVICE constexpr Int unit_log2(Int a) const {
    const Int below = normal_ - a;
    return dropped_ + ((below > 0 ? below : 0) >> kMantissa);
  }

  /// A magnitude above half_smallest_ to the nearest, as if there were no largest.
  REPLAYSSM_HOST_DEVICE constexpr Int nearest(Int a) const {
    // Below the smallest value, where the caller settles it, the unit would be above all bits of a.
    const Int b = a > smallest_ ? a : smallest_;
    // Adding half a unit, or a little less when the unit's bit is even, and cutting rounds to nearest even; a carry out
    // of the mantissa raises the exponent, as it should. The leading bit is put in to be the unit's bit where a single
    // bit of the value is left.
    const Word u = unit(b);
    const bool even = (static_cast<Word>(b | odd_) & u) == 0;
    return static_cast<Int>((static_cast<Word>(b) + (u >> 1) - Word{even}) & (0 - u));
  }

  Int mantissa_;
  Int dropped_;    // bits of a mantissa of Float beyond the element's
  Int emin_;       // exponent field in Float of the element's smallest normal value
  Int zero_sign_;  // the sign bit where the element has -0, and with it NaN of both signs
  Word unit_;
  Int odd_;     // bits that count as set where a tie looks at the unit's bit
  Int normal_;  // emin_ in the place of the exponent field, above ones
  Int max_code_;
  Specials specials_;
  Int smallest_;
  Int half_smallest_;
  Int largest_;
  Int overflow_above_;
  Int beyond_;     // what lies above overflow_above_ becomes
  Int nan_mask_;   // the bits a NaN keeps ...
  Int nan_least_;  // ... and the least it becomes
};

/// x rounded once to the element, nearest even: the value of the code encode(element, x).
///
/// Float is float or double; the result is exact in it. A double is rounded from its own bits, never by way of a
/// float. For another Real (arbitrary precision), round it to odd into a double first - toward zero, then set the last
/// bit if anything was cut off - and pass that: two bits of slack over every element make the result the single
/// rounding of the Real.
///
/// Beyond the range (above the midpoint between the largest value and the next step; on it where the largest code is
/// odd) finite values and infinities become what element.overflow says. NaN keeps its sign and the leading bits of its
/// payload, as far as the element has them; an element without NaN gives 0, which is why a scale carries it. A negative
/// value that rounds to 0 gives -0 if the element has it. kExact returns x.
template <class Float>
REPLAYSSM_HOST_DEVICE constexpr Float round_to(const Element& element, Float x) {
  return element.exact() ? x : Rounder<Float>(element).round(x);
}

/// The code of x rounded as by round_to(), in the low element.bits() bits; integers are two's complement and never
/// -2^(bits - 1).
template <class Float>
REPLAYSSM_HOST_DEVICE constexpr std::uint32_t encode(const Element& element, Float x) {
  using R = Rounder<Float>;
  const Float rounded = round_to(element, x);
  const auto code = static_cast<std::uint32_t>(R(element).code(R::magnitude_of(rounded)));
  const std::uint32_t sign = std::uint32_t{1} << (element.bits() - 1);
  if (R::bits(rounded) >= 0) return code;
  return element.integer ? (0 - code) & (2 * sign - 1) : code | sign;
}

/// The value of a code, exact in Float; bits above element.bits() are ignored. encode() gives the code back, except for
/// two that it never makes: the most negative integer, and infinity where the element saturates.
template <class Float>
REPLAYSSM_HOST_DEVICE constexpr Float decode(const Element& element, std::uint32_t code) {
  using R = Rounder<Float>;
  const std::uint32_t sign = std::uint32_t{1} << (element.bits() - 1);
  const bool negative = (code & sign) != 0;
  code &= sign - 1;
  if (element.specials == Specials::nan_for_minus_zero && negative && code == 0) return R::value(R::kNan);
  if (element.integer && negative) code = sign - code;
  return R::value(R(element).magnitude(static_cast<typename R::Int>(code)) | (negative ? R::kSign : 0));
}

/// Codes of a power of two, one byte (E8M0 of the OCP MX standard, version 1.0): code 0 is 2^-127, 254 is 2^127, 255 is
/// NaN. Exact in a float, of which 2^-127 is a subnormal.
REPLAYSSM_HOST_DEVICE constexpr float decode_e8m0(std::uint32_t code) {
  const std::uint32_t bits = code == 0 ? 0x00400000 : code == 255 ? 0x7FC00000 : code << 23;
  return __builtin_bit_cast(float, bits);
}

}  // namespace replayssm
