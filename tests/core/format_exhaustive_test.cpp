// Every code, every midpoint, and the whole line of floats, against the literal reading of the formats.

#include <gtest/gtest.h>

#include "core/format.h"
#include "tests/core/format_oracle.h"

namespace replayssm {
namespace {

class EveryElement : public testing::TestWithParam<Definition> {
 protected:
  const Definition d = GetParam();
  const Element element = ElementNamed(d.name);
  const std::uint32_t sign = 1U << (d.exponent + d.mantissa);
  // fp32 has too many codes for a test: a prime stride meets every exponent field and all low bits.
  const std::uint32_t stride = d.name == "fp32" ? 1009 : 1;

  std::uint32_t Signed(std::uint32_t magnitude) const {
    return d.exponent == 0 ? (0U - magnitude) & (2 * sign - 1) : magnitude | sign;
  }
};

INSTANTIATE_TEST_SUITE_P(Formats, EveryElement, testing::ValuesIn(Definitions()),
                         [](const auto& row) { return row.param.name; });

// fp32 left out, which is the identity on floats.
class NarrowElement : public EveryElement {};

INSTANTIATE_TEST_SUITE_P(Formats, NarrowElement, testing::ValuesIn(Definitions().begin() + 1, Definitions().end()),
                         [](const auto& row) { return row.param.name; });

TEST(ElementList, IsTheListOfDefinitions) {
  ASSERT_EQ(elements().size(), Definitions().size());
  for (std::size_t i = 0; i < elements().size(); ++i) {
    EXPECT_EQ(elements()[i].name, Definitions()[i].name);
    EXPECT_EQ(elements()[i].bits(), 1 + Definitions()[i].exponent + Definitions()[i].mantissa);
  }
}

TEST_P(EveryElement, FiniteCodesReadAsDefinedAndComeBack) {
  EXPECT_EQ(Number(d, d.max_code), d.max);
  for (std::uint32_t code = 0; code <= d.max_code; code += std::min(stride, std::max(1U, d.max_code - code))) {
    const double value = Number(d, code);
    ASSERT_EQ(Bits(decode<double>(element, code)), Bits(value)) << code;
    ASSERT_EQ(Bits(decode<float>(element, code)), Bits(static_cast<float>(value))) << code;
    ASSERT_EQ(encode(element, value), code);
    ASSERT_EQ(encode(element, static_cast<float>(value)), code);
    if (code == 0 && !d.has_minus_zero()) continue;
    ASSERT_EQ(Bits(decode<double>(element, Signed(code))), Bits(-value)) << code;
    ASSERT_EQ(Bits(decode<float>(element, Signed(code))), Bits(static_cast<float>(-value))) << code;
    ASSERT_EQ(encode(element, -value), Signed(code));
    ASSERT_EQ(encode(element, static_cast<float>(-value)), Signed(code));
    if (code == d.max_code) break;
  }
}

TEST_P(EveryElement, CodesAboveTheLargestReadAsDefinedAndComeBack) {
  for (std::uint32_t code = d.max_code + 1; code < sign; code += stride) {
    for (const std::uint32_t c : {code, code | sign}) {
      const double value = decode<double>(element, c);
      if (d.above == Definition::infinity && code == d.max_code + 1) {
        ASSERT_EQ(value, c < sign ? HUGE_VAL : -HUGE_VAL);
        if (element.overflow == Overflow::saturate) continue;  // infinity is written as the largest value
      } else {
        ASSERT_TRUE(std::isnan(value)) << c;
        ASSERT_EQ(std::signbit(value), c >= sign) << c;
      }
      ASSERT_EQ(encode(element, value), c);
      ASSERT_EQ(encode(element, decode<float>(element, c)), c);
    }
  }
}

// Open Compute's fnuz types and ONNX's: one NaN, at 0x80, and no -0.
TEST(FnuzElement, HasOneNanInThePlaceOfMinusZero) {
  for (const char* name : {"e4m3fnuz", "e5m2fnuz"}) {
    const Element saturating = ElementNamed(name);
    Element strict = saturating;
    strict.overflow = Overflow::nan;
    for (const Element& element : {saturating, strict}) {
      EXPECT_TRUE(std::isnan(decode<double>(element, 0x80)) && std::isnan(decode<float>(element, 0x80))) << name;
      for (const double nan : {std::nan(""), -std::nan("")}) {
        EXPECT_EQ(encode(element, nan), 0x80U) << name;
        EXPECT_FALSE(std::signbit(round_to(element, nan))) << name;
      }
      for (const double tiny : {-1e-5 * 0x1p-9, -0.0, -0x1p-1000}) EXPECT_EQ(encode(element, tiny), 0U) << name;
      for (std::uint32_t code = 0; code < 256; ++code) {
        EXPECT_EQ(encode(element, decode<double>(element, code)), code) << name;
        EXPECT_EQ(encode(element, decode<float>(element, code)), code) << name;
      }
    }
    EXPECT_EQ(encode(strict, HUGE_VAL), 0x80U) << name;
    EXPECT_EQ(encode(strict, -HUGE_VAL), 0x80U) << name;
    EXPECT_EQ(encode(strict, -1e30F), 0x80U) << name;
    EXPECT_EQ(encode(saturating, -HUGE_VAL), 0xFFU) << name;
  }
  const Element e4m3 = ElementNamed("e4m3fnuz");
  Element strict = e4m3;
  strict.overflow = Overflow::nan;
  EXPECT_EQ(encode(e4m3, -1e-5), 0U);
  EXPECT_EQ(round_to(e4m3, 247.0), 240);
  EXPECT_EQ(round_to(strict, 247.0), 240);
  EXPECT_EQ(round_to(e4m3, 248.0), 240);
  EXPECT_TRUE(std::isnan(round_to(strict, 248.0)));
}

TEST(PowersOfTwo, ReadAsTheOcpStandardSays) {
  for (std::uint32_t code = 0; code < 255; ++code) {
    EXPECT_EQ(static_cast<double>(decode_e8m0(code)), std::ldexp(1.0, static_cast<int>(code) - 127));
  }
  EXPECT_TRUE(std::isnan(decode_e8m0(255)));
}

TEST(IntegerElement, MostNegativeCodeReadsAsTwosComplementAndIsNeverMade) {
  EXPECT_EQ(decode<double>(ElementNamed("int8"), 0x80), -128);
  EXPECT_EQ(decode<float>(ElementNamed("int4"), 0x8), -8);
  EXPECT_EQ(encode(ElementNamed("int8"), -128.0), 0x81U);
  EXPECT_EQ(encode(ElementNamed("int4"), -8.0F), 0x9U);
}

// The neighbours of a double midpoint are also what a rounding by way of float gets wrong.
TEST_P(EveryElement, MidpointsGoToTheEvenCodeAndTheirNeighboursToTheNearest) {
  for (std::uint32_t code = 0; code <= d.max_code; code += std::min(stride, std::max(1U, d.max_code - code))) {
    const double below = Number(d, code), middle = Midpoint(d, code);
    const double above = code < d.max_code ? Number(d, code + 1) : Nearest(d, HUGE_VAL);
    const double even = code % 2 == 0 ? below : above;
    const double down = std::nextafter(middle, 0), up = std::nextafter(middle, HUGE_VAL);
    ASSERT_EQ(round_to(element, middle), even) << code;
    ASSERT_EQ(round_to(element, -middle), -even) << code;
    ASSERT_EQ(round_to(element, down), below) << code;
    ASSERT_EQ(round_to(element, -down), -below) << code;
    ASSERT_EQ(round_to(element, up), above) << code;
    ASSERT_EQ(round_to(element, -up), -above) << code;
    ASSERT_EQ(round_to(element, std::nextafter(below, HUGE_VAL)), below) << code;
    if (code > 0) {
      ASSERT_EQ(round_to(element, std::nextafter(below, 0)), below) << code;
    }
    const auto narrow = static_cast<float>(middle);
    if (static_cast<double>(narrow) == middle) {  // all but those of fp32
      ASSERT_EQ(static_cast<double>(round_to(element, narrow)), even) << code;
      ASSERT_EQ(static_cast<double>(round_to(element, std::nextafter(narrow, 0.0F))), below) << code;
      ASSERT_EQ(static_cast<double>(round_to(element, std::nextafter(narrow, HUGE_VALF))), above) << code;
    }
    if (code == d.max_code) break;
  }
}

TEST(Fp32Element, IsTheCastOfADoubleAndTheIdentityOfAFloat) {
  const Element fp32 = ElementNamed("fp32");
  for (std::uint64_t bits = 0; bits < std::uint64_t{0x7FF} << 52; bits += 0x1FFFFFFFFFFF) {
    const auto x = __builtin_bit_cast(double, bits);
    ASSERT_EQ(round_to(fp32, x), static_cast<double>(static_cast<float>(x))) << x;
  }
  for (std::uint64_t bits = 0; bits >> 32 == 0; bits += 65521) {
    const float x = FloatOf(static_cast<std::uint32_t>(bits));
    ASSERT_EQ(Bits(round_to(fp32, x)), bits);
  }
}

TEST(Fp32Element, TakesEveryExponentOfADouble) {
  const Element fp32 = ElementNamed("fp32");
  for (int exponent = -1074; exponent < 1024; ++exponent) {
    for (const double fraction : {1.0, 0x1.000001p0, 0x1.0000010000001p0, 0x1.fffffefffffffp0, 0x1.ffffffp0}) {
      const double x = std::ldexp(fraction, exponent);
      ASSERT_EQ(round_to(fp32, x), static_cast<double>(static_cast<float>(x))) << x;
    }
  }
}

// Upward along the floats the code only grows, so the oracle is a walk over the midpoints.
TEST_P(NarrowElement, FollowsTheLineOfFloats) {
  std::uint32_t code = 0;
  double edge = Midpoint(d, 0);
  for (std::uint32_t bits = 0; bits < 0x7F800000; bits += 509) {
    const float x = FloatOf(bits);
    const double wide = static_cast<double>(x);
    while (code <= d.max_code && (wide > edge || (wide == edge && code % 2 == 1))) edge = Midpoint(d, ++code);
    const double expected = code <= d.max_code ? Number(d, code) : Nearest(d, HUGE_VAL);
    ASSERT_EQ(static_cast<double>(round_to(element, x)), expected) << x;
    ASSERT_EQ(round_to(element, -wide), -expected) << x;
    if (code <= d.max_code && (code > 0 || d.has_minus_zero())) {
      ASSERT_EQ(encode(element, -x), Signed(code)) << x;
    }
  }
}

TEST_P(EveryElement, FloatAndDoubleSourcesAgreeInEveryBit) {
  for (std::uint64_t bits = 0; bits >> 32 == 0; bits += 4093) {
    const float x = FloatOf(static_cast<std::uint32_t>(bits));
    if (std::isnan(x)) continue;  // a cast makes it quiet
    const float rounded = round_to(element, x);
    ASSERT_EQ(Bits(static_cast<double>(rounded)), Bits(round_to(element, static_cast<double>(x)))) << x;
    ASSERT_EQ(Bits(rounded), Bits(decode<float>(element, encode(element, x)))) << x;
    ASSERT_EQ(encode(element, x), encode(element, static_cast<double>(x))) << x;
  }
}

}  // namespace
}  // namespace replayssm
