#include "core/format.h"

#include <gtest/gtest.h>

#include <limits>

#include "core/error.h"
#include "tests/core/format_oracle.h"

namespace replayssm {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// One source for host and device means that everything on elements is also a constant expression.
static_assert(round_to(kElements[3], 1 + 0x1p-8) == 1 && round_to(kElements[3], 1 + 0x3p-8F) == 1 + 0x1p-6F);
static_assert(encode(kElements[4], -448.0F) == 0xFE && decode<double>(kElements[6], 0x81) == -127);

Element With(const std::string& name, Overflow overflow) {
  Element element = ElementNamed(name);
  element.overflow = overflow;
  return element;
}

TEST(Overflow, OfE4m3InBothConventions) {
  const Element saturating = ElementNamed("e4m3"), strict = With("e4m3", Overflow::nan);
  ASSERT_EQ(saturating.overflow, Overflow::saturate);
  for (const Element& element : {saturating, strict}) {
    EXPECT_EQ(encode(element, 448.0), 0x7EU);
    EXPECT_EQ(encode(element, 464.0), 0x7EU);  // a tie with 480, had there been one, goes to the even code
    EXPECT_EQ(encode(element, kNan), 0x7FU);
    EXPECT_EQ(encode(element, -kNan), 0xFFU);
  }
  EXPECT_EQ(round_to(saturating, 465.0), 448);
  EXPECT_EQ(round_to(saturating, -1000.0), -448);
  EXPECT_EQ(round_to(saturating, kInf), 448);
  EXPECT_EQ(round_to(saturating, -kInf), -448);
  EXPECT_EQ(encode(strict, 465.0), 0x7FU);
  EXPECT_EQ(encode(strict, -1000.0F), 0xFFU);
  EXPECT_EQ(encode(strict, kInf), 0x7FU);
  EXPECT_EQ(encode(strict, -kInf), 0xFFU);
  EXPECT_TRUE(std::isnan(round_to(strict, std::nextafter(464.0, kInf))));
  EXPECT_TRUE(std::isnan(round_to(With("e4m3", Overflow::infinity), 465.0)));  // it has no infinity
}

TEST(Overflow, OfE5m2InBothConventions) {
  const Element saturating = ElementNamed("e5m2"), strict = With("e5m2", Overflow::infinity);
  ASSERT_EQ(saturating.overflow, Overflow::saturate);
  for (const Element& element : {saturating, strict}) {
    EXPECT_EQ(encode(element, 57344.0), 0x7BU);
    EXPECT_EQ(encode(element, 61439.0), 0x7BU);
    EXPECT_TRUE(std::isnan(round_to(element, kNan)));
  }
  EXPECT_EQ(round_to(saturating, 61440.0), 57344);
  EXPECT_EQ(round_to(saturating, kInf), 57344);
  EXPECT_EQ(encode(strict, 61440.0), 0x7CU);  // the tie goes to the even code, which is infinity
  EXPECT_EQ(encode(strict, -kInf), 0xFCU);
  EXPECT_EQ(encode(strict, -1e300), 0xFCU);
}

TEST(Overflow, OfTheWideFormatsIsInfinityUnlessTheySaturate) {
  for (const char* name : {"fp32", "tf32", "fp16", "bf16"}) {
    const Element element = ElementNamed(name), saturating = With(name, Overflow::saturate);
    const double max = DefinitionOf(element).max, middle = Midpoint(DefinitionOf(element), element.max_code);
    EXPECT_EQ(round_to(element, std::nextafter(middle, 0)), max) << name;
    EXPECT_EQ(round_to(element, middle), kInf) << name;
    EXPECT_EQ(round_to(element, -kInf), -kInf) << name;
    EXPECT_EQ(round_to(saturating, -1e300), -max) << name;
    EXPECT_EQ(round_to(saturating, kInf), max) << name;
    EXPECT_EQ(static_cast<double>(round_to(saturating, -HUGE_VALF)), -max) << name;
    EXPECT_TRUE(std::isnan(round_to(With(name, Overflow::nan), kInf))) << name;
  }
}

TEST(NotANumber, StaysOneWhateverItsPayload) {
  for (const std::uint32_t bits : {0x7FFF8C22U, 0x7F800001U, 0xFF800001U, 0x7FFFFFFFU, 0xFFFFFFFFU, 0x7FC00000U}) {
    for (const Element& element : elements()) {
      const float rounded = round_to(element, FloatOf(bits));
      if (element.integer) {
        EXPECT_EQ(Bits(rounded), 0U) << element.name;  // +0, the scale of the row tells
        EXPECT_EQ(encode(element, FloatOf(bits)), 0U) << element.name;
        continue;
      }
      EXPECT_TRUE(std::isnan(rounded)) << element.name;
      EXPECT_EQ(std::signbit(rounded), bits >> 31 == 1) << element.name;
      EXPECT_EQ(Bits(decode<float>(element, encode(element, FloatOf(bits)))), Bits(rounded)) << element.name;
    }
  }
  const Element bf16 = ElementNamed("bf16");
  EXPECT_EQ(encode(bf16, FloatOf(0x7FFF8C22)), 0x7FFFU);
  EXPECT_EQ(encode(bf16, FloatOf(0x7F800001)), 0x7F81U);
  EXPECT_EQ(encode(bf16, HUGE_VALF), 0x7F80U);
  EXPECT_EQ(encode(bf16, -HUGE_VALF), 0xFF80U);
  // A payload in the low half of a double's mantissa alone.
  EXPECT_TRUE(std::isnan(round_to(ElementNamed("fp32"), __builtin_bit_cast(double, 0x7FF0000000000001))));
}

TEST(Rounding, CarriesIntoTheNextBinade) {
  EXPECT_EQ(round_to(ElementNamed("fp16"), -1.9999911), -2);
  EXPECT_EQ(round_to(ElementNamed("fp16"), -1.9999911F), -2);
  for (const Element& element : elements()) {
    if (element.integer) continue;
    for (int exponent = element.emin + 1; exponent < 8; ++exponent) {
      const double power = std::ldexp(1.0, exponent);
      EXPECT_EQ(round_to(element, std::nextafter(power, 0)), power) << element.name;
      EXPECT_EQ(round_to(element, -std::nextafter(power, 0)), -power) << element.name;
    }
  }
}

TEST(Rounding, HappensOnceFromTheDouble) {
  EXPECT_EQ(round_to(ElementNamed("fp16"), 1.5249285751529568e-05), 1.52587890625e-05);
  // Less than half an ulp of a float above a midpoint: by way of a float each would be a tie, and go down.
  EXPECT_EQ(round_to(ElementNamed("bf16"), 1 + 0x1p-8 + 0x1p-40), 1 + 0x1p-7);
  EXPECT_EQ(round_to(ElementNamed("fp16"), 1 + 0x1p-11 + 0x1p-40), 1 + 0x1p-10);
  EXPECT_EQ(round_to(ElementNamed("tf32"), 1 + 0x1p-11 + 0x1p-40), 1 + 0x1p-10);
  EXPECT_EQ(round_to(ElementNamed("e4m3"), 1 + 0x1p-4 + 0x1p-40), 1 + 0x1p-3);
  EXPECT_EQ(round_to(ElementNamed("e5m2"), 1 + 0x1p-3 + 0x1p-40), 1 + 0x1p-2);
  EXPECT_EQ(round_to(ElementNamed("int8"), 2.5 + 0x1p-40), 3);
  EXPECT_EQ(round_to(ElementNamed("int4"), 0.5 + 0x1p-40), 1);
}

TEST(Rounding, KeepsTheSignOfZeroWhereTheElementHasIt) {
  for (const Element& element : elements()) {
    for (const double x : {-0.0, -0x1p-200, -std::numeric_limits<double>::denorm_min()}) {
      EXPECT_EQ(round_to(element, x), 0) << element.name;
      EXPECT_EQ(std::signbit(round_to(element, x)), !element.integer) << element.name;
      EXPECT_EQ(encode(element, x), element.integer ? 0U : 1U << (element.bits() - 1)) << element.name;
    }
    EXPECT_FALSE(std::signbit(round_to(element, 0.0)));
  }
}

TEST(ParseFormat, ReadsWhatTextPrints) {
  for (const char* text : {"exact", "fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2", "tf32:row", "fp16:row", "bf16:row",
                           "e4m3:row", "e5m2:row", "int8:row", "int4:row"}) {
    const Format format = parse_format(text);
    EXPECT_EQ(format.text(), text);
    EXPECT_EQ(parse_format(format.text()), format);
    EXPECT_EQ(format.exact(), format == Format());
  }
  EXPECT_EQ(parse_format("e4m3:row").element, ElementNamed("e4m3"));
  EXPECT_EQ(parse_format("e4m3:row").scale, Scale::row);
  EXPECT_NE(parse_format("e4m3:row"), parse_format("e4m3"));
}

std::string Refusal(const std::string& text) {
  try {
    parse_format(text);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(ParseFormat, TellsWhatIsNotSupportedYetFromWhatIsUnknown) {
  for (const char* text : {"e4m3fnuz",
                           "e5m2fnuz",
                           "e3m2",
                           "e2m3",
                           "e2m1",
                           "int16",
                           "int16:row",
                           "mxfp8_e4m3",
                           "mxfp8_e5m2",
                           "mxfp6_e2m3",
                           "mxfp6_e3m2",
                           "mxfp4",
                           "mxfp4:ceil",
                           "mxint8",
                           "nvfp4",
                           "custom(e=3,m=4)",
                           "int8:group32",
                           "int8:tensor",
                           "e4m3:head",
                           "e4m3:tile32",
                           "fp16:sr",
                           "int8:row:hadamard",
                           "int8:row:ef=int4",
                           "e4m3:row:cap=240"}) {
    EXPECT_NE(Refusal(text).find(text), std::string::npos) << Refusal(text);
    EXPECT_NE(Refusal(text).find("not supported yet"), std::string::npos) << Refusal(text);
  }
  for (const char* text : {"", ":row", "bf17", "BF16", " bf16", "fp8", "e4m3fn", "float16", "exact "}) {
    EXPECT_NE(Refusal(text).find("unknown name"), std::string::npos) << Refusal(text);
    for (const Element& element : elements()) {
      EXPECT_NE(Refusal(text).find(element.name), std::string::npos) << Refusal(text);
    }
  }
  for (const char* text : {"bf16:", "e4m3:rows", "e4m3:row:", "e4m3::row", "int8:group", "int8:tile", "fp16:row:ROW"}) {
    EXPECT_NE(Refusal(text).find("unknown modifier"), std::string::npos) << Refusal(text);
  }
  EXPECT_NE(Refusal("int8").find("expected int8:row"), std::string::npos) << Refusal("int8");
  EXPECT_NE(Refusal("int4").find("expected int4:row"), std::string::npos) << Refusal("int4");
  EXPECT_NE(Refusal("e4m3:row:row").find("given twice"), std::string::npos) << Refusal("e4m3:row:row");
  EXPECT_NE(Refusal("exact:row").find("takes no scale"), std::string::npos) << Refusal("exact:row");
  EXPECT_NE(Refusal("fp32:row").find("takes no scale"), std::string::npos) << Refusal("fp32:row");
}

TEST(FormatBytes, CountCodesAndScales) {
  EXPECT_EQ(parse_format("exact").row_bytes(64), 512);
  EXPECT_EQ(parse_format("fp32").row_bytes(64), 256);
  EXPECT_EQ(parse_format("tf32").row_bytes(64), 256);
  EXPECT_EQ(parse_format("fp16").row_bytes(80), 160);
  EXPECT_EQ(parse_format("bf16").row_bytes(0), 0);
  EXPECT_EQ(parse_format("e5m2").row_bytes(64), 64);
  EXPECT_EQ(parse_format("e4m3:row").row_bytes(64), 68);
  EXPECT_EQ(parse_format("int4:row").row_bytes(64), 36);
  EXPECT_EQ(parse_format("int4:row").row_bytes(7), 8);
}

}  // namespace
}  // namespace replayssm
