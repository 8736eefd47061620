#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <type_traits>

#include "core/error.h"
#include "core/format.h"
#include "tests/core/format_oracle.h"

namespace replayssm {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr float kFloatMax = std::numeric_limits<float>::max();

const char* const kTexts[] = {"fp32",     "tf32",     "fp16",      "bf16",        "e4m3",     "e5m2",
                              "tf32:row", "fp16:row", "bf16:row",  "e4m3:row",    "e5m2:row", "int8:row",
                              "int4:row", "e4m3fnuz", "e5m2fnuz",  "e3m2",        "e2m3",     "e2m1",
                              "e3m2:row", "e2m1:row", "int16:row", "e4m3fnuz:row"};

template <class Real>
struct Stored {
  std::vector<std::byte> codes;
  std::vector<float> scales;  // fp32 ones
  std::vector<Real> read;     // decode_rows of the two
};

template <class Real>
Stored<Real> Store(const Format& format, const std::vector<Real>& data, std::int64_t rows) {
  const auto n = static_cast<std::int64_t>(data.size()) / rows;
  Stored<Real> stored;
  stored.codes.assign(static_cast<std::size_t>(rows * format.code_bytes(n)), std::byte{0xFF});
  stored.scales.assign(static_cast<std::size_t>(rows), -1.0F);
  stored.read.resize(data.size());
  encode_rows(format, data.data(), rows, n, stored.codes.data(), stored.scales.data());
  decode_rows(format, stored.codes.data(), stored.scales.data(), rows, n, stored.read.data());
  return stored;
}

/// Rounds in place, checks that storing and reading gives the same bits, and returns how many elements were lost, by
/// overflow to what is not finite or, where all that is left is, by saturation.
template <class Real>
std::int64_t Round(const Format& format, std::vector<Real>& data, std::int64_t rows = 1) {
  const Stored<Real> stored = Store(format, data, rows);
  const auto n = static_cast<std::int64_t>(data.size()) / rows;
  const std::vector<Real> before = data;
  const RangeLoss loss = round_rows(format, data.data(), rows, n);
  std::int64_t overflows = 0;  // finite to infinite, or NaN to a number
  for (std::size_t i = 0; i < data.size(); ++i) {
    overflows += std::isfinite(before[i]) ? !std::isfinite(data[i]) : std::isnan(before[i]) && !std::isnan(data[i]);
  }
  EXPECT_EQ(loss.overflows, overflows) << format.text();
  for (std::size_t i = 0; i < data.size(); ++i) {
    EXPECT_EQ(Bits(data[i]), Bits(stored.read[i])) << format.text() << " element " << i << ": " << data[i];
  }
  return loss.overflows + loss.saturations;
}

template <class Real>
class Rows : public testing::Test {};
using Reals = testing::Types<float, double>;
TYPED_TEST_SUITE(Rows, Reals);

// Random rows over many magnitudes, at lengths that leave the vector loop a remainder, against the table oracle and the
// scale worked out here.
TYPED_TEST(Rows, HoldTheNearestValues) {
  using Real = TypeParam;
  std::mt19937_64 random(7);
  std::normal_distribution<double> normal;
  for (const char* text : kTexts) {
    const Format format = parse_format(text);
    const Definition& d = DefinitionOf(format.element);
    for (const int n : {1, 2, 7, 64, 79}) {
      for (int exponent = -30; exponent <= 20; exponent += 5) {
        std::vector<Real> row(static_cast<std::size_t>(n));
        for (Real& x : row) {
          x = static_cast<Real>(std::ldexp(normal(random), exponent - static_cast<int>(random() % 12)));
        }
        Real amax = 0;
        for (const Real x : row) amax = std::max(amax, std::abs(x));
        auto scale = static_cast<Real>(static_cast<float>(amax / static_cast<Real>(d.max)));
        if (scale == 0) scale = 1;  // tf32 and bf16, with a largest value of 3e38
        const bool scaled = format.scale == Scale::row;
        std::vector<Real> expected = row;
        std::int64_t beyond = 0;
        for (Real& x : expected) {
          const Real quotient = scaled ? x / scale : x;
          beyond += NearestCode(d, static_cast<double>(quotient)) > d.max_code;
          x = static_cast<Real>(Nearest(d, static_cast<double>(quotient)));
          if (scaled) x *= scale;
        }
        EXPECT_EQ(Round(format, row), beyond) << text;
        for (std::size_t i = 0; i < row.size(); ++i) ASSERT_EQ(Bits(row[i]), Bits(expected[i])) << text << " " << i;
      }
    }
  }
}

TYPED_TEST(Rows, ReadBackTheSameBitsWhateverTheyHold) {
  using Real = TypeParam;
  using Word = decltype(Bits(Real{}));
  std::mt19937_64 random(11);
  using Limits = std::numeric_limits<Real>;
  const Real nasty[] = {0,
                        -Real{0},
                        Limits::denorm_min(),
                        -Limits::denorm_min(),
                        Limits::min(),
                        kFloatMax,
                        -kFloatMax,
                        Limits::max(),
                        Limits::lowest(),
                        Limits::infinity(),
                        -Limits::infinity(),
                        Limits::quiet_NaN(),
                        448,
                        465,
                        Real{65519.5},
                        65520,
                        1,
                        -127};
  for (const char* text : kTexts) {
    for (int repeat = 0; repeat < 200; ++repeat) {
      std::vector<Real> rows(3 * 37);
      // Any bits at all; only the infinite and the nasty values; and mostly ordinary ones.
      for (Real& x : rows) {
        x = __builtin_bit_cast(Real, static_cast<Word>(random()));
        const std::uint64_t kind = random() % 37;
        if (repeat % 3 == 1 || (repeat % 3 == 2 && kind == 0)) {
          x = nasty[random() % std::size(nasty)];
        } else if (repeat % 3 == 2) {
          x = static_cast<Real>(random() % 1000) / 8;
        }
      }
      Round(parse_format(text), rows, 3);
    }
  }
}

TYPED_TEST(Rows, CountFiniteElementsThatOverflow) {
  using Real = TypeParam;
  const auto inf = static_cast<Real>(kInf), nan = static_cast<Real>(kNan);
  std::vector<Real> row = {1, 70000, nan, -inf, -70000, 65504, inf, 65519, -65520};
  EXPECT_EQ(Round(parse_format("fp16"), row), 3);
  EXPECT_EQ(row[1], inf);
  EXPECT_EQ(row[4], -inf);
  EXPECT_EQ(row[7], 65504);
  row = {449, 464, 465, -500, inf, nan};
  EXPECT_EQ(Round(parse_format("e4m3"), row), 2);
  EXPECT_EQ(row[2], 448);
  EXPECT_EQ(row[4], 448);
  EXPECT_TRUE(std::isnan(row[5]));
  Format strict = parse_format("e4m3");
  strict.element.overflow = Overflow::nan;
  row = {449, 464, 465, -500, inf, nan};
  EXPECT_EQ(Round(strict, row), 2);
  EXPECT_TRUE(std::isnan(row[2]));
  // Two rows: the count is of both, and the quiet one is rounded all the same.
  row = {1 + Real{0x1p-8}, 2, 70000, 1 + Real{0x1p-8}};
  EXPECT_EQ(Round(parse_format("fp16"), row, 2), 1);
  EXPECT_EQ(Round(parse_format("bf16"), row, 2), 0);
  EXPECT_EQ(row[0], 1);
  EXPECT_EQ(row[3], 1);
}

TYPED_TEST(Rows, OfExactStayAsTheyAre) {
  using Real = TypeParam;
  std::vector<Real> row = {static_cast<Real>(0.1), static_cast<Real>(kNan), static_cast<Real>(-kInf)};
  const std::vector<Real> before = row;
  EXPECT_EQ(round_rows(Format(), row.data(), 1, 3), RangeLoss());
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(Bits(row[i]), Bits(before[i]));
  std::byte code;
  EXPECT_THROW(encode_rows(Format(), row.data(), 1, 1, &code, nullptr), Error);
  EXPECT_THROW(decode_rows(Format(), &code, nullptr, 1, 1, row.data()), Error);
}

TYPED_TEST(Rows, WithAPowerOfTwoScaleAreExact) {
  using Real = TypeParam;
  std::vector<Real> row = {56, 0.125, -0.25, 3.5, -0.0, 0x1p-12, 0.1328125};  // amax 56 = 448 / 8; then codes * 8
  EXPECT_EQ(Store(parse_format("e4m3:row"), row, 1).scales[0], 0.125F);
  EXPECT_EQ(Round(parse_format("e4m3:row"), row), 0);
  EXPECT_EQ(row, (std::vector<Real>{56, 0.125, -0.25, 3.5, 0, 0x1p-12, 0.125}));  // 1.0625 is a tie, to 1
  EXPECT_TRUE(std::signbit(row[4]));
  row = {-127, 62.5, 63.5, -0.5, -0.0, 0.75, 126.5};
  EXPECT_EQ(Store(parse_format("int8:row"), row, 1).scales[0], 1.0F);
  EXPECT_EQ(Round(parse_format("int8:row"), row), 0);
  EXPECT_EQ(row, (std::vector<Real>{-127, 62, 64, 0, 0, 1, 126}));
  EXPECT_FALSE(std::signbit(row[3]) || std::signbit(row[4]));
  row = {14, 1, 3, -5, 2};  // scale 2: every odd number is a tie
  EXPECT_EQ(Round(parse_format("int4:row"), row), 0);
  EXPECT_EQ(row, (std::vector<Real>{14, 0, 4, -4, 2}));
}

TYPED_TEST(Rows, ScaleIsTheQuotientRoundedToFloat) {
  using Real = TypeParam;
  std::vector<Real> row = {1, -0.5};
  const float scale = 1.0F / 127.0F;  // the float nearest to 1/127: 1/127 in double is far from a tie of floats
  EXPECT_EQ(Store(parse_format("int8:row"), row, 1).scales[0], scale);
  EXPECT_EQ(Round(parse_format("int8:row"), row), 0);
  EXPECT_EQ(row[0], 127 * static_cast<Real>(scale));  // the product is not rounded to anything but Real
  // 0.5 / scale is 63.5 (1 + e), |e| <= 2^-24: e decides between 63 and 64, and so does the sign of the scale's error.
  const int tie = 0.5 / static_cast<double>(scale) > 63.5 ? 64 : 63;
  if (std::is_same_v<Real, double>) {
    EXPECT_EQ(row[1], -tie * static_cast<Real>(scale));
  }
}

TYPED_TEST(Rows, OfZerosHaveTheScaleOne) {
  using Real = TypeParam;
  std::vector<Real> row = {0, -0.0, 0};
  for (const char* text : {"e4m3:row", "int8:row"}) {
    const auto stored = Store(parse_format(text), row, 1);
    EXPECT_EQ(stored.scales[0], 1.0F);
    EXPECT_EQ(stored.read, (std::vector<Real>{0, 0, 0}));
    EXPECT_EQ(std::signbit(stored.read[1]), std::string(text) == "e4m3:row");
  }
}

TYPED_TEST(Rows, WhoseScaleUnderflowsHaveTheScaleOne) {
  using Real = TypeParam;
  // 2^-149 / 127 is 0 as a float, in whatever precision it was computed.
  std::vector<Real> row = {static_cast<Real>(0x1p-149), -static_cast<Real>(0x1p-149)};
  EXPECT_EQ(Store(parse_format("int8:row"), row, 1).scales[0], 1.0F);
  EXPECT_EQ(Round(parse_format("int8:row"), row), 0);
  EXPECT_EQ(row, (std::vector<Real>{0, 0}));
}

TYPED_TEST(Rows, WithASubnormalScaleStayFiniteAndCountTheirSaturation) {
  using Real = TypeParam;
  // 600 * 2^-149 / 448 = 1.34 * 2^-149 becomes the scale 2^-149: 600 saturates, the rest is as with scale 1.
  std::vector<Real> row = {600, -17, 448, -600, 1};
  for (Real& x : row) x *= static_cast<Real>(0x1p-149);
  EXPECT_EQ(Store(parse_format("e4m3:row"), row, 1).scales[0], 0x1p-149F);
  EXPECT_EQ(Round(parse_format("e4m3:row"), row), 2);
  for (Real& x : row) x *= static_cast<Real>(0x1p100);
  EXPECT_EQ(row, (std::vector<Real>{Real{448} * Real{0x1p-49}, Real{-16} * Real{0x1p-49}, Real{448} * Real{0x1p-49},
                                    Real{-448} * Real{0x1p-49}, Real{0x1p-49}}));
}

TYPED_TEST(Rows, ThatHoldNanOrInfinityBecomeNanAloneAndWhole) {
  using Real = TypeParam;
  for (const double bad : {kNan, -kNan, kInf, -kInf}) {
    for (const char* text : {"e4m3:row", "e5m2:row", "int8:row", "int4:row", "fp16:row"}) {
      std::vector<Real> rows = {1, 2, 7, 1, static_cast<Real>(bad), 7, 1, 2, 7};
      EXPECT_TRUE(std::isnan(Store(parse_format(text), rows, 3).scales[1]));
      EXPECT_EQ(Round(parse_format(text), rows, 3), 2) << text;
      for (std::size_t i = 0; i < 9; ++i) EXPECT_EQ(std::isnan(rows[i]), i / 3 == 1) << text << " " << i;
    }
  }
}

TEST(RowsOfDoubles, BeyondTheRangeOfTheScaleBecomeNan) {
  std::vector<double> row = {1e300, 1, -2};
  EXPECT_TRUE(std::isnan(Store(parse_format("int8:row"), row, 1).scales[0]));
  EXPECT_EQ(Round(parse_format("int8:row"), row), 3);
  for (const double x : row) EXPECT_TRUE(std::isnan(x));
}

TEST(RowsOfFloats, NextToTheLargestCountWhatTheProductMakesInfinite) {
  int infinite = 0;
  for (std::uint32_t step = 0; step < 200; ++step) {
    const float amax = FloatOf(Bits(kFloatMax) - step);
    for (const char* text : {"e4m3:row", "e5m2:row", "int8:row", "int4:row", "fp16:row"}) {
      std::vector<float> row = {amax, -amax, 1, amax / 2};
      const std::int64_t overflowed = Round(parse_format(text), row);
      const std::int64_t lost = std::count_if(row.begin(), row.end(), [](float x) { return !std::isfinite(x); });
      EXPECT_EQ(overflowed, lost) << text << " " << amax;
      infinite += lost > 0;
    }
  }
  EXPECT_GT(infinite, 0);  // int8:row at the largest float: 127 * float(max / 127) rounds to infinity
}

TEST(StoredRows, LieLittleEndianAndTwoFourBitCodesToAByte) {
  const auto bytes = [](const char* text, const std::vector<double>& row) {
    std::vector<int> result;
    for (const std::byte b : Store(parse_format(text), row, 1).codes) result.push_back(std::to_integer<int>(b));
    return result;
  };
  EXPECT_EQ(bytes("int4:row", {1, -2, 7}), (std::vector<int>{0xE1, 0x07}));
  EXPECT_EQ(bytes("int8:row", {1, -2, 127}), (std::vector<int>{0x01, 0xFE, 0x7F}));
  EXPECT_EQ(bytes("e4m3", {1, -448}), (std::vector<int>{0x38, 0xFE}));
  EXPECT_EQ(bytes("bf16", {1, -2}), (std::vector<int>{0x80, 0x3F, 0x00, 0xC0}));
  EXPECT_EQ(bytes("fp32", {1}), (std::vector<int>{0x00, 0x00, 0x80, 0x3F}));
  EXPECT_EQ(bytes("tf32", {1}), (std::vector<int>{0x00, 0xFC, 0x01, 0x00}));  // 127 << 10
}

}  // namespace
}  // namespace replayssm
