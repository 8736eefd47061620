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
static_assert(encode(*find_element("e4m3"), -448.0F) == 0xFE && decode<double>(*find_element("int8"), 0x81) == -127);

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
      const Definition& d = DefinitionOf(element);
      if (d.above == Definition::nothing) {
        EXPECT_EQ(rounded, 0) << element.name;
        EXPECT_EQ(std::signbit(rounded), bits >> 31 == 1 && d.has_minus_zero()) << element.name;
        EXPECT_EQ(decode<float>(element, encode(element, FloatOf(bits))), 0) << element.name;
        continue;
      }
      EXPECT_TRUE(std::isnan(rounded)) << element.name;
      EXPECT_EQ(std::signbit(rounded), bits >> 31 == 1 && d.has_minus_zero()) << element.name;
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
    for (int exponent = element.emin + 1; std::ldexp(1.0, exponent) < std::min(256.0, DefinitionOf(element).max);
         ++exponent) {
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
      const bool signed_zero = DefinitionOf(element).has_minus_zero();
      EXPECT_EQ(std::signbit(round_to(element, x)), signed_zero) << element.name;
      EXPECT_EQ(encode(element, x), signed_zero ? 1U << (element.bits() - 1) : 0U) << element.name;
    }
    EXPECT_FALSE(std::signbit(round_to(element, 0.0)));
  }
}

TEST(ParseFormat, ReadsWhatTextPrints) {
  for (const char* text : {"exact",
                           "fp32",
                           "tf32",
                           "fp16",
                           "bf16",
                           "e4m3",
                           "e5m2",
                           "tf32:row",
                           "fp16:row",
                           "bf16:row",
                           "e4m3:row",
                           "e5m2:row",
                           "int8:row",
                           "int4:row",
                           "int16:row",
                           "e4m3fnuz",
                           "e5m2fnuz",
                           "e3m2",
                           "e2m3",
                           "e2m1",
                           "e2m1:row",
                           "int8:group32",
                           "e4m3:group1",
                           "e4m3:row:floor",
                           "int8:group16:ceil",
                           "int8:head",
                           "e4m3:tile16",
                           "e4m3:row:cap=240",
                           "fp16:sr",
                           "bf16:sr=16",
                           "fp16:rz",
                           "int8:row:hadamard",
                           "nvfp4:sr:hadamard",
                           "mxfp4:ceil:sr=8",
                           "int8:row:cap=99:rz",
                           "int8:group8:cap=99.5",
                           "int4:tile3:floor",
                           "mxfp8_e4m3",
                           "mxfp8_e5m2",
                           "mxfp6_e2m3",
                           "mxfp6_e3m2",
                           "mxfp4",
                           "mxint8",
                           "nvfp4",
                           "mxfp4:ceil",
                           "mxint8:ceil"}) {
    const Format format = parse_format(text);
    EXPECT_EQ(format.text(), text);
    EXPECT_EQ(parse_format(format.text()), format);
    EXPECT_EQ(format.exact(), format == Format());
  }
  EXPECT_EQ(parse_format("e4m3:row").element, ElementNamed("e4m3"));
  EXPECT_EQ(parse_format("e4m3:row").scale, Scale::row);
  EXPECT_NE(parse_format("e4m3:row"), parse_format("e4m3"));
  EXPECT_EQ(parse_format("mxfp8_e4m3:floor").text(), "mxfp8_e4m3");
  EXPECT_EQ(parse_format("e4m3:group32:floor").text(), "mxfp8_e4m3");
  EXPECT_EQ(parse_format("e2m1:ceil:group32"), parse_format("mxfp4:ceil"));
  EXPECT_EQ(parse_format("mxint8:ceil").extent, 32);
  EXPECT_EQ(parse_format("bf16:sr=32").text(), "bf16:sr");
  EXPECT_EQ(parse_format("int8:sr=3:row").text(), "int8:row:sr=3");
  EXPECT_EQ(parse_format("e4m3:row:cap=448"), parse_format("e4m3:row"));
}

std::string Refusal(const std::string& text) {
  try {
    parse_format(text);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(ParseFormat, TellsWhatIsUnknown) {
  for (const char* text : {"", ":row", "bf17", "BF16", " bf16", "fp8", "e4m3fn", "float16", "exact "}) {
    EXPECT_NE(Refusal(text).find("unknown name"), std::string::npos) << Refusal(text);
    for (const Element& element : elements()) {
      EXPECT_NE(Refusal(text).find(element.name), std::string::npos) << Refusal(text);
    }
  }
  for (const char* text : {"bf16:", "e4m3:rows", "e4m3:row:", "e4m3::row", "int8:group", "int8:tile", "fp16:row:ROW",
                           "int8:group-", "int8:group3x", "int8:group32:round"}) {
    EXPECT_NE(Refusal(text).find("unknown modifier"), std::string::npos) << Refusal(text);
  }
  EXPECT_NE(Refusal("int8").find("expected int8:row"), std::string::npos) << Refusal("int8");
  EXPECT_NE(Refusal("int4").find("expected int4:row"), std::string::npos) << Refusal("int4");
  EXPECT_NE(Refusal("e4m3:row:row").find("given twice"), std::string::npos) << Refusal("e4m3:row:row");
  const std::pair<const char*, const char*> refused[] = {{"mxfp4:row", "its name says"},
                                                         {"nvfp4:group32", "its name says"},
                                                         {"nvfp4:ceil", "no powers of two"},
                                                         {"mxfp4:ceil:floor", "another rule"},
                                                         {"e4m3:ceil", "no scales"},
                                                         {"int8:floor", "needs a scale"},
                                                         {"int8:row:group32", "another scale"},
                                                         {"int8:group0", "1..1048576"},
                                                         {"int8:group1048577", "1..1048576"},
                                                         {"int8:group-4", "1..1048576"},
                                                         {"fp32:group32", "takes no scale"},
                                                         {"exact:group32", "takes no modifiers"},
                                                         {"int8:row:hadamard:hadamard", "given twice"},
                                                         {"int8:tensor:row", "another scale"},
                                                         {"int8:row:asym:asym", "given twice"},
                                                         {"e4m3:row:asym", "asym is for integers"},
                                                         {"int8:asym", "asym is for integers"},
                                                         {"int8:row:asym:floor", "asym is for integers"},
                                                         {"int8:row:cap=9:asym", "asym is for integers"},
                                                         {"mxint8:asym", "asym is for integers"},
                                                         {"int8:row:ef=", "behind 'ef='"},
                                                         {"int8:row:ef=int4:ef=int4", "given twice"},
                                                         {"int8:row:ef=int5", "ef=int5: format 'int5': unknown name"},
                                                         {"int8:row:ef=(int4)", "int4 needs a scale"},
                                                         {"bf16:ef=int4", "the residual int4 needs a scale"},
                                                         {"int8:row:ef=(bf16:ef=bf16)", "no error feedback of its own"},
                                                         {"exact:ef=bf16", "takes no modifiers"},
                                                         {"e4m3:row:cap=449", "at most 448"},
                                                         {"e4m3:row:cap=0", "above 0"},
                                                         {"e4m3:row:cap=nan", "above 0"},
                                                         {"e4m3:cap=4", "none of these"},
                                                         {"mxfp4:cap=4", "none of these"},
                                                         {"int8:row:cap=9:cap=9", "given twice"},
                                                         {"fp16:sr=0", "1 to 32"},
                                                         {"fp16:sr=33", "1 to 32"},
                                                         {"fp16:sr:rz", "another rounding"},
                                                         {"fp16:sr=", "unknown modifier"},
                                                         {"exact:sr", "takes no modifiers"},
                                                         {"int8:tile0", "1..1048576"},
                                                         {"int8:head:row", "another scale"},
                                                         {"fixed8:row", "unknown name"}};
  for (const auto& [text, why] : refused) EXPECT_NE(Refusal(text).find(why), std::string::npos) << Refusal(text);
  EXPECT_NE(Refusal("exact:row").find("takes no modifiers"), std::string::npos) << Refusal("exact:row");
  EXPECT_NE(Refusal("fp32:row").find("takes no scale"), std::string::npos) << Refusal("fp32:row");
}

TEST(FormatBytes, CountCodesAndScales) {
  struct Row {
    const char* text;
    std::int64_t n, codes, scales;  // of one row; scales: of three rows of a head
  };
  for (const Row& row : {Row{"exact", 64, 512, 0},
                         Row{"fp32", 64, 256, 0},
                         Row{"tf32", 64, 256, 0},
                         Row{"fp16", 80, 160, 0},
                         Row{"bf16", 0, 0, 0},
                         Row{"e5m2", 64, 64, 0},
                         Row{"e4m3:row", 64, 64, 12},
                         Row{"int4:row", 64, 32, 12},
                         Row{"int4:row", 7, 4, 12},
                         Row{"e3m2", 64, 48, 0},
                         Row{"e2m3", 5, 4, 0},
                         Row{"int8:group32", 80, 80, 36},
                         Row{"mxfp8_e4m3", 64, 64, 6},
                         Row{"mxfp4", 40, 20, 6},
                         Row{"mxfp6_e2m3", 33, 25, 6},
                         Row{"nvfp4", 40, 20, 4 + 9},
                         Row{"int8:row:ceil", 64, 64, 3},
                         Row{"int8:head", 64, 64, 4},
                         Row{"int8:tile2", 64, 64, 8},
                         Row{"int8:tile3:ceil", 64, 64, 1}}) {
    EXPECT_EQ(parse_format(row.text).code_bytes(row.n), row.codes) << row.text;
    EXPECT_EQ(parse_format(row.text).scale_bytes(3, row.n), row.scales) << row.text;
  }
}

}  // namespace
}  // namespace replayssm
