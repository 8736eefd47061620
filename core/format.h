#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/element.h"
#include "core/random.h"

namespace replayssm {

/// Which elements share a scale.
enum class Scale {
  none,
  row,     // those of a row
  group,   // `extent` neighbours in a row; the last group of a row may be shorter
  tile,    // those of `extent` rows; the last tile of a head may be shorter
  head,    // those of all rows of a head
  tensor,  // those of all heads of the state of a layer and sequence
};

/// What a scale is and how it follows from the elements x that share it. amax = max |x|; max and emax are the largest
/// value of the element and its exponent; quotients are rounded in Real.
enum class ScaleRule {
  amax,   // fp32: float(amax / max), or float(amax / cap); 1 where that is 0, also by underflow
  floor,  // one byte, 2^e in E8M0: e = floor(log2 amax) - emax, so that the largest elements may saturate
  ceil,   // one byte, 2^e in E8M0: the smallest e with amax / 2^e <= max
  nvfp4,  // one e4m3 code b, beside one fp32 s = float(amax of the head / (448 max)) for each head, 1 where that is 0:
          // b = e4m3(amax / max / s), 1 where that is 0; the scale is s b
};

/// Which of its two neighbours among the element's values a number becomes. Scales are rounded to nearest always.
enum class Rounding {
  nearest,      // the nearer one, ties to the even code
  toward_zero,  // the one nearer to 0; finite numbers never become infinite
  stochastic,   // the one farther from 0 with the probability f, the part of the step that the number lies above the
                // other; f is cut to `random_bits` bits. Values of the element, and infinities, stay as they are
};

/// The least and the largest of some numbers and 0; NaN both where one of them is not finite.
template <class Real>
struct Extremes {
  Real low = 0, high = 0;

  void join(const Extremes& other) {
    if (low != low) return;
    low = other.low < low || other.low != other.low ? other.low : low;
    high = other.high > high || other.high != other.high ? other.high : high;
  }
};

/// Elements that a store did not keep.
struct RangeLoss {
  std::int64_t overflows = 0;    ///< finite ones that became infinite or NaN; NaN where the element has none
  std::int64_t saturations = 0;  ///< finite ones beyond the range, by more than rounding, that became the largest value

  RangeLoss& operator+=(const RangeLoss& other) {
    overflows += other.overflows;
    saturations += other.saturations;
    return *this;
  }
  friend bool operator==(const RangeLoss&, const RangeLoss&) = default;
};

struct OwnFormat;

/// How the numbers of a state or a record are stored: an element and what it is scaled by. The default is `exact`.
///
/// Elements x that share a scale s are stored as codes c, in Real (float or double):
///
///     c = round_to(element, x / s)  the quotient rounded in Real, then as `rounding` says
///     value = c s                   rounded in Real only
///
/// With `hadamard` x is not the row but H x, and what is read back H (c s): H is the orthonormal Sylvester matrix of
/// neighbours along the row, as many together as the largest power of two that divides the row's length (32 of 96, 64
/// of 192), its sums by butterflies in Real and then times Real(1 / sqrt(size)). Scales and overflows are those of H x.
///
/// With `asymmetric` (integers of b bits, codes -2^(b-1) .. 2^(b-1) - 1, none left out) an integer zero point z stands
/// beside the scale; low and high are the least and the largest of the elements and 0:
///
///     s = float((high - low) / (2^b - 1)), 1 where that is 0
///     z = -2^(b-1) - low / s, the quotient rounded in Real and the difference to the nearest integer, ties to even
///     c = round(x / s) + z, z and c kept in the range of the codes; value = (c - z) s, of which 0 is always one
///
/// With `residual` a store feeds its error back (error feedback): State keeps r, 0 at first, for every stored state and
///
///     x = S + r, S <- Q(x), r <- Q_residual(x - S), sum and difference rounded in Real; r = 0 where S is not finite.
///
/// Nothing else reads r, and no decay acts on it. The functions below know nothing of it.
///
/// The exponent of a power of two comes from the bits of amax and is kept in [-127, 127]; -127 where amax is 0.
///
/// Elements of which one is NaN or infinite, or whose fp32 scale is beyond the range of float, have the scale NaN and
/// every value NaN (with nvfp4 those of the whole head, which share s): nothing that is not finite is ever turned into
/// a finite value by a scaled format. Unscaled elements do what Element says: those without infinity saturate, those
/// without NaN (e3m2, e2m3, e2m1) make 0 of it, and both are counted.
///
/// Sources: OCP Microscaling Formats (MX) Specification 1.0, sections 5 and 6.3, whose rule is `floor`; `ceil` as in
/// NVIDIA's recipes for MXFP8 training; NVFP4 as in the Blackwell documentation.
struct Format {
  Element element = kExact;
  Scale scale = Scale::none;
  ScaleRule rule = ScaleRule::amax;
  std::int64_t extent = 0;  // with Scale::group and Scale::tile
  Rounding rounding = Rounding::nearest;
  int random_bits = 0;  // with Rounding::stochastic: 1 to 32
  bool hadamard = false;
  double cap = 0;                    // with ScaleRule::amax: what takes the place of max, at most that; 0: max itself
  bool asymmetric = false;           // with ScaleRule::amax and an integer element
  const Format* residual = nullptr;  // how the error that is fed back is kept; see with_residual()
  const OwnFormat* own = nullptr;    // its function rounds in the place of element and scale, see core/own_format.h
  std::string_view given_name = {};  // under which define_format() of core/own_format.h was given it

  /// Whether nothing is rounded.
  bool exact() const { return element.exact(); }

  /// Elements that share a scale, of a head of `rows` rows of n elements, as far as there are so many: n without
  /// scales.
  std::int64_t block(std::int64_t rows, std::int64_t n) const {
    const bool all = scale == Scale::head || scale == Scale::tensor;
    return scale == Scale::group ? extent : scale == Scale::tile ? extent * n : all ? rows * n : n;
  }
  /// Whether the rows of a head have to be rounded together, those of its residual included.
  bool joins_rows() const {
    return scale == Scale::tile || scale == Scale::head || scale == Scale::tensor || rule == ScaleRule::nvfp4 || own ||
           (residual && residual->joins_rows());
  }
  /// Whether the heads of a state have to be.
  bool joins_heads() const { return scale == Scale::tensor || (residual && residual->joins_heads()); }
  /// Scales of `rows` rows of n elements, beside the one of a head (nvfp4). That of a tensor counts here as one, and in
  /// what several heads take only once.
  std::int64_t scales(std::int64_t rows, std::int64_t n) const;
  /// Bytes of one scale, 0 without scales, of its zero point, and of the one of a head.
  std::int64_t scale_width() const;
  std::int64_t zero_width() const { return !asymmetric ? 0 : element.storage_bits <= 8 ? 1 : element.storage_bits / 8; }
  std::int64_t head_scale_width() const { return rule == ScaleRule::nvfp4 ? 4 : 0; }

  /// Bytes of the codes of a row of n elements: ceil(n storage_bits / 8). `exact` counts the 8 bytes of a double.
  std::int64_t code_bytes(std::int64_t n) const { return (n * element.storage_bits + 7) / 8; }
  /// Bytes of the scales and zero points of `rows` rows of n elements of one head.
  std::int64_t scale_bytes(std::int64_t rows, std::int64_t n) const;
  /// Bytes of codes and of scales of the states of `heads` heads; those of the residual are not among them.
  std::int64_t state_code_bytes(std::int64_t heads, std::int64_t rows, std::int64_t n) const {
    return heads * rows * code_bytes(n);
  }
  std::int64_t state_scale_bytes(std::int64_t heads, std::int64_t rows, std::int64_t n) const {
    return (scale == Scale::tensor ? 1 : heads) * scale_bytes(rows, n);
  }

  /// The name that parse_format() reads: "bf16", "e4m3:row", "mxfp4:ceil", "exact".
  std::string text() const;

  friend bool operator==(const Format&, const Format&) = default;
};

/// Reads an element, which its scale and rule may follow: `bf16`, `int8:row`, `int8:group32`, `e4m3:tile16`,
/// `int8:head`, `int8:tensor`, `e4m3:group32:ceil`, `e4m3:row:cap=240`, `int8:row:asym`; then `rz` (toward zero), `sr`
/// or `sr=B` (stochastic, with 32 or B bits), `hadamard` and `ef=F` or `ef=(F)` (error feedback, the residual in the
/// format F; without parentheses F is a name, and an integer or an element of 8 bits or less is scaled as the format
/// itself, with fp32 for nvfp4); a name may be custom(e=E,m=M) with bias=B, specials=none|nan|inf|fnuz,
/// overflow=saturate|inf|nan as CustomElement has them; or the name of a format with scales, which `:floor` or `:ceil`
/// may follow where it begins with mx; or one of core/own_format.h. Throws Error if a name or modifier is unknown, for
/// an integer without a scale, and for `exact` and `fp32` with one.
Format parse_format(std::string_view text);

/// The format with error feedback whose residual is kept in `residual`.
Format with_residual(const Format& format, const Format& residual);

/// Every element format but `exact` and those of one's own.
std::span<const Element> elements();

/// What an element of one's own is made of, beside the sign.
struct CustomElement {
  int exponent_bits = 0;      ///< 0 to 8; 0 makes an integer type, of mantissa_bits bits of magnitude
  int mantissa_bits = 0;      ///< 1 to 23
  std::optional<int> bias{};  ///< where not given 2^(exponent_bits - 1) - 1
  Specials specials = Specials::none;
  Overflow overflow = Overflow::saturate;
};

/// The element, named `custom`; codes of less than 8 bits are stored packed, others in 8, 16 or 32 bits. Throws Error,
/// naming the field as `custom(...)` does, for one outside its range, for values that a float does not have, for an
/// integer type with a bias or specials, and for an overflow to what the element lacks.
Element custom_element(const CustomElement& custom);

/// A format that has scales and a name of its own.
struct NamedFormat {
  std::string_view name;
  Format format;
};

/// mxfp8_e4m3, mxfp8_e5m2, mxfp6_e2m3, mxfp6_e3m2, mxfp4, mxint8 (rule floor, groups of 32), nvfp4 (groups of 16).
std::span<const NamedFormat> named_formats();

/// Stores and reads back, in place, `rows` contiguous rows of n elements of one head: data <- Q(data), as Format
/// describes.
///
/// Returns how many elements were not kept. Real is float or double. The bits are those of
/// decode_rows(encode_rows(data)). `exact` changes nothing. `draw` is what stochastic rounding draws from, and looked
/// at by nothing else. `tensor` are the extremes() of all heads, joined, that Scale::tensor takes its scale from; where
/// it is null, those of this one.
template <class Real>
RangeLoss round_rows(const Format& format, Real* data, std::int64_t rows, std::int64_t n, const Draw& draw = {},
                     const Extremes<Real>* tensor = nullptr);

/// The extremes of `rows` rows of n elements of one head, of H x with `hadamard`.
template <class Real>
Extremes<Real> extremes(const Format& format, const Real* data, std::int64_t rows, std::int64_t n);

/// Stores `rows` contiguous rows of n elements of one head.
///
/// codes: [rows, format.code_bytes(n)], packed from the lowest bit up: a code of 16 bits or more is little-endian, two
/// 4-bit codes share a byte, the earlier one in the low half, four 6-bit codes three bytes. scales: format.scale_bytes
/// (rows, n) bytes, the scale of the head first (fp32), then one scale after the other: fp32, E8M0 or e4m3, then the
/// zero points in two's complement of zero_width() bytes; may be null where there are none. The codes of elements whose
/// scale is NaN are 0. Throws Error for `exact` and for a function, which have no codes.
template <class Real>
void encode_rows(const Format& format, const Real* data, std::int64_t rows, std::int64_t n, std::byte* codes,
                 void* scales, const Draw& draw = {}, const Extremes<Real>* tensor = nullptr);

/// Reads what encode_rows() stored. Throws Error for what has no codes.
template <class Real>
void decode_rows(const Format& format, const std::byte* codes, const void* scales, std::int64_t rows, std::int64_t n,
                 Real* data);

}  // namespace replayssm
