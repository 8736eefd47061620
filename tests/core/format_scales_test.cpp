// Scales of whole tensors, zero points, and the text of error feedback: against literal readings written here.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>

#include "analysis/state_codes.h"
#include "core/policy.h"
#include "tests/core/format_oracle.h"

namespace replayssm {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

template <class Real>
std::vector<Real> Random(std::mt19937_64& random, std::int64_t n, double shift, int exponent = 0) {
  std::normal_distribution<double> normal(shift);
  std::vector<Real> out;
  for (std::int64_t i = 0; i < n; ++i) out.push_back(static_cast<Real>(std::ldexp(normal(random), exponent)));
  return out;
}

/// Numbers that share a scale and a zero point.
struct Affine {
  float scale;
  std::int32_t zero;
  std::vector<std::int32_t> codes;
};

/// Code by code: of all there are the one whose number is nearest to x / s, of two the even number.
template <class Real>
Affine ByHand(int bits, const std::vector<Real>& x) {
  const std::int32_t lowest = -(1 << (bits - 1)), highest = -lowest - 1;
  Real low = 0, high = 0;
  for (const Real v : x) low = std::min(low, v), high = std::max(high, v);
  Affine out{static_cast<float>((high - low) / static_cast<Real>(highest - lowest)), 0, {}};
  if (out.scale == 0) out.scale = 1;
  const auto nearest = [&](double wanted, auto&& number) {
    std::int32_t best = lowest;
    for (std::int32_t c = lowest; c <= highest; ++c) {
      const double mine = std::fabs(wanted - number(c)), other = std::fabs(wanted - number(best));
      if (mine < other || (mine == other && number(c) % 2 == 0)) best = c;
    }
    return best;
  };
  const auto s = static_cast<Real>(out.scale);
  const Real zero = static_cast<Real>(lowest) - low / s;
  out.zero = nearest(static_cast<double>(zero), [](std::int32_t c) { return c; });
  for (const Real v : x) {
    out.codes.push_back(nearest(static_cast<double>(v / s), [&](std::int32_t c) { return c - out.zero; }));
  }
  return out;
}

template <class Real>
class Scales : public testing::Test {};
using Reals = testing::Types<float, double>;
TYPED_TEST_SUITE(Scales, Reals);

TYPED_TEST(Scales, WithZeroPointsAreThoseByHand) {
  using Real = TypeParam;
  std::mt19937_64 random(3);
  for (const auto& [element, bits] : {std::pair{"int8", 8}, {"int4", 4}, {"custom(e=0,m=5)", 6}}) {
    const Format format = parse_format(std::string(element) + ":row:asym");
    for (int i = 0; i < 200; ++i) {
      // Some rows of one sign, one of them with halves of a step: 2^bits - 1 steps of 1/2 from 0.
      std::vector<Real> row = Random<Real>(random, 17, i % 5 - 2, static_cast<int>(random() % 60) - 40);
      if (i == 0) row = std::vector<Real>(17, 0);
      if (i == 1) {
        for (std::size_t k = 0; k < 17; ++k) row[k] = static_cast<Real>(static_cast<double>(k) / 4 - 1);
        row[0] = static_cast<Real>((1 << bits) - 1) / 2 - 1;
      }
      const Affine expected = ByHand(bits, row);
      std::vector<std::byte> codes(static_cast<std::size_t>(format.code_bytes(17)), std::byte{0xFF}),
          scales(static_cast<std::size_t>(format.scale_bytes(1, 17)), std::byte{0xFF});
      ASSERT_EQ(scales.size(), 5U);
      encode_rows(format, row.data(), 1, 17, codes.data(), scales.data());
      float scale = 0;
      std::memcpy(&scale, scales.data(), 4);
      ASSERT_EQ(scale, expected.scale) << i;
      ASSERT_EQ(static_cast<std::int8_t>(scales[4]), expected.zero) << i;
      std::vector<Real> read(17), rounded = row;
      decode_rows(format, codes.data(), scales.data(), 1, 17, read.data());
      EXPECT_EQ(round_rows(format, rounded.data(), 1, 17), RangeLoss());
      for (std::size_t k = 0; k < 17; ++k) {
        std::uint32_t code = 0;
        for (int bit = 0; bit < bits; ++bit) {
          const std::size_t at = k * static_cast<std::size_t>(bits) + static_cast<std::size_t>(bit);
          if ((codes[at / 8] >> (at % 8) & std::byte{1}) != std::byte{0}) code |= 1U << bit;
        }
        ASSERT_EQ(code, static_cast<std::uint32_t>(expected.codes[k]) & ((1U << bits) - 1)) << i << " " << k;
        const Real value = static_cast<Real>(expected.codes[k] - expected.zero) * static_cast<Real>(expected.scale);
        ASSERT_EQ(Bits(read[k]), Bits(value)) << i << " " << k;
        ASSERT_EQ(Bits(rounded[k]), Bits(value)) << i << " " << k;
      }
    }
  }
}

TYPED_TEST(Scales, WithZeroPointsUseEveryCode) {
  using Real = TypeParam;
  std::vector<Real> row;  // 0, 1, .. 255 and -55, .. 200 are all there
  for (int i = 0; i < 256; ++i) row.push_back(static_cast<Real>(i));
  for (const int shift : {0, 55, 255}) {
    std::vector<Real> x = row;
    for (Real& v : x) v -= static_cast<Real>(shift);
    const std::vector<Real> before = x;
    EXPECT_EQ(round_rows(parse_format("int8:row:asym"), x.data(), 1, 256), RangeLoss());
    EXPECT_EQ(x, before) << shift;
  }
}

TYPED_TEST(Scales, WithZeroPointsLoseWhatIsNotFinite) {
  using Real = TypeParam;
  for (const double bad : {kNan, kInf, -kInf}) {
    std::vector<Real> rows = {1, static_cast<Real>(bad), 3, 4, 5, 6}, back(6);
    const Format format = parse_format("int8:row:asym");
    std::byte codes[6], scales[10];
    encode_rows(format, rows.data(), 2, 3, codes, scales);
    decode_rows(format, codes, scales, 2, 3, back.data());
    EXPECT_EQ(round_rows(format, rows.data(), 2, 3), (RangeLoss{2, 0}));
    for (std::size_t i = 0; i < 6; ++i) {
      EXPECT_EQ(std::isnan(rows[i]), i < 3);
      EXPECT_EQ(std::isnan(back[i]), i < 3);
    }
  }
}

// Toward zero and stochastic: the quotient as x / 1 would be, for a scale of 1 and a zero point of 0.
TYPED_TEST(Scales, WithZeroPointsRoundAsTheFormatSays) {
  using Real = TypeParam;
  std::vector<Real> row = {-128, 127, Real(2.75), Real(-2.75), Real(0.5)};
  round_rows(parse_format("int8:row:asym:rz"), row.data(), 1, 5);
  EXPECT_EQ(row, (std::vector<Real>{-128, 127, 2, -2, 0}));
  // 4000 draws of 2 + 1/4: 3 with the probability 1/4, within 5 standard errors (false alarm 6e-7).
  std::vector<Real> many(4002, Real(2.25));
  many[0] = -128, many[1] = 127;
  round_rows(parse_format("int8:row:asym:sr"), many.data(), 1, 4002);
  const auto up = std::count(many.begin(), many.end(), Real(3));
  EXPECT_EQ(up + std::count(many.begin(), many.end(), Real(2)), 4000);
  EXPECT_NEAR(static_cast<double>(up), 1000, 5 * std::sqrt(4000 * 0.25 * 0.75));
}

TYPED_TEST(Scales, OfATensorAreThoseOfAllHeads) {
  using Real = TypeParam;
  std::mt19937_64 random(6);
  for (const char* rest : {"int8:", "e4m3:", "int4:asym:", "e4m3:cap=240:", "e2m1:floor:", "e4m3:ceil:", "int8:rz:"}) {
    const std::string text(rest);
    const auto colon = text.find(':');
    const Format tensor = parse_format(text.substr(0, colon) + ":tensor" + text.substr(colon, text.size() - colon - 1));
    const Format row = parse_format(text.substr(0, colon) + ":row" + text.substr(colon, text.size() - colon - 1));
    EXPECT_TRUE(tensor.joins_heads() && tensor.joins_rows());
    std::vector<Real> heads = Random<Real>(random, 3 * 4 * 5, 0.5), one_row = heads;
    round_rows(row, one_row.data(), 1, 60);
    Extremes<Real> all;
    for (std::int64_t h = 0; h < 3; ++h) all.join(extremes(tensor, heads.data() + 20 * h, 4, 5));
    for (std::int64_t h = 0; h < 3; ++h) {
      std::vector<Real> read(20);
      std::vector<std::byte> codes(20), scales(8);
      encode_rows(tensor, heads.data() + 20 * h, 4, 5, codes.data(), scales.data(), {}, &all);
      decode_rows(tensor, codes.data(), scales.data(), 4, 5, read.data());
      round_rows(tensor, heads.data() + 20 * h, 4, 5, {}, &all);
      EXPECT_EQ(read, std::vector<Real>(heads.begin() + 20 * h, heads.begin() + 20 * h + 20)) << tensor.text();
    }
    EXPECT_EQ(heads, one_row) << tensor.text();
  }
}

TEST(ExtremesOfHeads, AreNanWhereOneIs) {
  const auto joined = [](double a, double b) {
    Extremes<double> all;
    for (const double x : {a, b}) all.join(extremes(parse_format("int8:tensor"), &x, 1, 1));
    return all;
  };
  EXPECT_EQ(joined(-3, 5).low, -3);
  EXPECT_EQ(joined(-3, 5).high, 5);
  EXPECT_EQ(joined(2, 5).low, 0);
  for (const double bad : {kNan, kInf, -kInf}) {
    EXPECT_TRUE(std::isnan(joined(bad, 1).low) && std::isnan(joined(bad, 1).high));
    EXPECT_TRUE(std::isnan(joined(1, bad).low) && std::isnan(joined(1, bad).high));
  }
}

TEST(FormatText, OfFeedbackZeroPointsAndTensors) {
  for (const char* text : {"int8:tensor", "int8:row:asym", "int4:group32:asym:sr=8:hadamard", "int8:row:ef=int4",
                           "int8:row:ef=(int4:group32)", "e4m3:row:cap=240:ef=bf16", "bf16:ef=e4m3",
                           "bf16:ef=(int4:row)", "e4m3:row:ef=(e4m3)", "e4m3:row:ef=e4m3", "mxfp4:ef=mxfp4",
                           "mxfp8_e4m3:ef=mxfp4", "nvfp4:ef=e2m1", "int8:tensor:ef=(bf16:sr)", "int8:row:ef=exact",
                           "fp16:sr:ef=fp16", "int8:row:ef=custom(e=0,m=2)", "int8:row:ef=(int4:row:asym)"}) {
    const Format format = parse_format(text);
    EXPECT_EQ(format.text(), text);
    EXPECT_EQ(parse_format(format.text()), format);
    const std::string policy = "eager(state=" + std::string(text) + ")";
    EXPECT_EQ(parse_policy(policy).text(), policy);
  }
  const auto residual = [](const char* text) { return *parse_format(text).residual; };
  EXPECT_EQ(residual("int8:row:ef=int4"), parse_format("int4:row"));
  EXPECT_EQ(residual("int8:group32:ceil:ef=int4"), parse_format("int4:group32:ceil"));
  EXPECT_EQ(residual("e4m3:tile16:cap=9:ef=e4m3"), parse_format("e4m3:tile16"));
  EXPECT_EQ(residual("nvfp4:ef=e2m1"), parse_format("e2m1:group16"));
  EXPECT_EQ(residual("int8:row:ef=bf16"), parse_format("bf16"));
  EXPECT_EQ(residual("int8:row:ef=(e4m3)"), parse_format("e4m3"));
  EXPECT_EQ(residual("int8:ef=int4:row"), parse_format("int4:row"));  // modifiers come in any order
  EXPECT_EQ(parse_format("int8:ef=int4:row").text(), "int8:row:ef=int4");
  EXPECT_EQ(parse_format("int8:row:asymmetric").text(), "int8:row:asym");
  EXPECT_NE(parse_format("int8:row:ef=int4"), parse_format("int8:row"));
}

TEST(StateCodes, OfZeroPointsAndTensorsReadBack) {
  std::mt19937_64 random(2);
  for (const char* text :
       {"int8:row:asym", "int4:group8:asym", "int8:tensor", "int4:tensor:asym", "int8:head:asym:rz"}) {
    const Format format = parse_format(text);
    for (int i = 0; i < 300; ++i) {
      std::vector<double> x = Random<double>(random, 3 * 21, i % 4 - 1, static_cast<int>(random() % 200) - 130),
                          back = x;
      if (i == 0) std::fill(x.begin(), x.end(), 0.0);
      if (i == 1) x[5] = kNan;
      round_rows(format, x.data(), 3, 21);
      const StoredRows stored = codes_of_rounded(format, x.data(), 3, 21);
      decode_rows(format, stored.codes.data(), stored.scales.data(), 3, 21, back.data());
      for (std::size_t k = 0; k < x.size(); ++k) {
        ASSERT_TRUE(Bits(back[k]) == Bits(x[k]) || (std::isnan(x[k]) && std::isnan(back[k]))) << text << " " << i;
      }
    }
    std::vector<double> x = {1, 1.0 / 3, -2, 0.1};
    EXPECT_ANY_THROW(codes_of_rounded(format, x.data(), 1, 4)) << text;
  }
}

}  // namespace
}  // namespace replayssm
