// Formats whose neighbours share a scale, against a slow, literal reading of the OCP Microscaling Formats (MX)
// Specification 1.0 and of NVFP4, written apart from core/: values compared, nothing looked up in bits.

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "core/format.h"
#include "tests/core/format_oracle.h"

namespace replayssm {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// A row as the standards store it: codes one by one, one byte for each scale.
struct Literal {
  std::vector<std::uint32_t> codes;
  std::vector<std::uint32_t> scales;
  std::vector<double> values;
};

std::uint32_t SignedCode(const Definition& d, double x) {
  const std::uint32_t code = std::min(NearestCode(d, x), d.max_code), sign = 1U << (d.exponent + d.mantissa);
  if (!std::signbit(x) || (code == 0 && !d.has_minus_zero())) return code;
  return d.integer() ? (2 * sign - code) % (2 * sign) : code | sign;
}

struct Mx {
  const char* name;
  const char* element;
  int emax;
  double step;  // what the integer element counts in
};
constexpr Mx kMx[] = {{"mxfp8_e4m3", "e4m3", 8, 1}, {"mxfp8_e5m2", "e5m2", 15, 1}, {"mxfp6_e2m3", "e2m3", 2, 1},
                      {"mxfp6_e3m2", "e3m2", 4, 1}, {"mxfp4", "e2m1", 2, 1},       {"mxint8", "int8", 0, 0x1p-6}};

Definition Named(const std::string& name) {
  return *std::find_if(Definitions().begin(), Definitions().end(), [&](const auto& d) { return d.name == name; });
}

/// Section 6.3 with X = 2^e, and with e the least that avoids saturation; [-127, 127] as E8M0 has it.
Literal ByTheStandard(const Mx& mx, bool ceil, const std::vector<double>& row) {
  const Definition d = Named(mx.element);
  Literal out;
  for (std::size_t first = 0; first < row.size(); first += 32) {
    const std::size_t end = std::min(first + 32, row.size());
    double amax = 0;
    bool bad = false;
    for (std::size_t i = first; i < end; ++i) {
      bad = bad || !std::isfinite(row[i]);
      amax = std::max(amax, std::fabs(row[i]));
    }
    int e = -127;
    if (ceil) {
      while (e < 127 && std::ldexp(amax, -e) > d.max * mx.step) ++e;
    } else {
      while (e < 127 && std::ldexp(1.0, e + 1 + mx.emax) <= amax) ++e;
    }
    out.scales.push_back(bad ? 255 : static_cast<std::uint32_t>(e + 127));
    for (std::size_t i = first; i < end; ++i) {
      const double x = std::ldexp(row[i], -e) / mx.step;
      out.codes.push_back(bad ? 0 : SignedCode(d, x));
      double value = std::ldexp(Number(d, std::min(NearestCode(d, x), d.max_code)) * mx.step, e);
      if (value != 0 || d.has_minus_zero()) value = std::copysign(value, x);
      out.values.push_back(bad ? kNan : value);
    }
  }
  return out;
}

/// Code i of a row, bits taken one by one from the lowest up.
std::uint32_t CodeAt(const std::byte* row, int bits, std::int64_t i) {
  std::uint32_t code = 0;
  for (int bit = 0; bit < bits; ++bit) {
    const std::int64_t at = i * bits + bit;
    if ((row[at / 8] >> (at % 8) & std::byte{1}) != std::byte{0}) code |= 1U << bit;
  }
  return code;
}

template <class Real>
struct Stored {
  std::vector<std::byte> codes, scales;
  std::vector<Real> read;

  Stored(const Format& format, const std::vector<Real>& data, std::int64_t rows)
      : codes(static_cast<std::size_t>(rows * format.code_bytes(Width(data, rows))), std::byte{0xFF}),
        scales(static_cast<std::size_t>(format.scale_bytes(rows, Width(data, rows))), std::byte{0xFF}),
        read(data.size()) {
    encode_rows(format, data.data(), rows, Width(data, rows), codes.data(), scales.data());
    decode_rows(format, codes.data(), scales.data(), rows, Width(data, rows), read.data());
    // Rounding in place is storing and reading back, bit for bit.
    std::vector<Real> rounded = data;
    loss = round_rows(format, rounded.data(), rows, Width(data, rows));
    for (std::size_t i = 0; i < data.size(); ++i) {
      EXPECT_EQ(Bits(rounded[i]), Bits(read[i])) << format.text() << " element " << i << ": " << data[i];
    }
  }
  static std::int64_t Width(const std::vector<Real>& data, std::int64_t rows) {
    return static_cast<std::int64_t>(data.size()) / rows;
  }
  std::uint32_t scale(std::size_t i) const { return std::to_integer<std::uint32_t>(scales[i]); }
  RangeLoss loss;
};

template <class Real>
class Blocks : public testing::Test {};
using Reals = testing::Types<float, double>;
TYPED_TEST_SUITE(Blocks, Reals);

template <class Real>
std::vector<Real> RandomRow(std::mt19937_64& random, int n, int exponent) {
  std::normal_distribution<double> normal;
  std::vector<Real> row;
  for (int i = 0; i < n; ++i) {
    row.push_back(static_cast<Real>(std::ldexp(normal(random), exponent - static_cast<int>(random() % 12))));
  }
  return row;
}

TYPED_TEST(Blocks, OfMxAreThoseOfTheStandard) {
  using Real = TypeParam;
  std::mt19937_64 random(5);
  for (const Mx& mx : kMx) {
    for (const bool ceil : {false, true}) {
      const Format format = parse_format(std::string(mx.name) + (ceil ? ":ceil" : ""));
      ASSERT_EQ(format.element.storage_bits, 1 + Named(mx.element).exponent + Named(mx.element).mantissa);
      for (const int n : {1, 31, 32, 33, 64, 80, 96}) {
        // Past both ends of the scale, where a double goes on; a float's own products stay below its largest value.
        for (int exponent = -170; exponent <= (sizeof(Real) == 4 ? 110 : 170); exponent += 7) {
          std::vector<Real> row = RandomRow<Real>(random, n, exponent);
          if (random() % 4 == 0) row[0] = 0;
          if (random() % 8 == 0) row.back() = static_cast<Real>(random() % 2 ? kNan : -kInf);
          if (random() % 8 == 0) std::fill_n(row.begin(), std::min(n, 32), Real(-0.0));
          const Stored<Real> stored(format, row, 1);
          const Literal literal = ByTheStandard(mx, ceil, {row.begin(), row.end()});
          ASSERT_EQ(stored.scales.size(), literal.scales.size());
          for (std::size_t b = 0; b < literal.scales.size(); ++b) ASSERT_EQ(stored.scale(b), literal.scales[b]);
          for (std::size_t i = 0; i < row.size(); ++i) {
            const int bits = format.element.storage_bits;
            ASSERT_EQ(CodeAt(stored.codes.data(), bits, static_cast<std::int64_t>(i)), literal.codes[i])
                << format.text() << " " << row[i];
            if (std::isnan(literal.values[i])) {
              ASSERT_TRUE(std::isnan(stored.read[i]));
            } else {
              ASSERT_EQ(Bits(static_cast<double>(stored.read[i])), Bits(literal.values[i])) << format.text();
            }
          }
        }
      }
    }
  }
}

// Largest elements at and next to what either rule turns on, midpoints and powers of two among them.
TYPED_TEST(Blocks, OfMxTurnWhereTheStandardSays) {
  using Real = TypeParam;
  for (const Mx& mx : kMx) {
    const Definition d = Named(mx.element);
    for (const bool ceil : {false, true}) {
      const Format format = parse_format(std::string(mx.name) + (ceil ? ":ceil" : ":floor"));
      for (const int exponent : {-127, -126, -20, 0, 20, 100}) {
        for (const double edge : {d.max * mx.step, d.max * mx.step / 2, std::ldexp(1.0, mx.emax),
                                  Midpoint(d, d.max_code) * mx.step, std::ldexp(1.0, mx.emax + 1)}) {
          const auto x = static_cast<Real>(std::ldexp(edge, exponent));
          for (const Real amax : {std::nextafter(x, Real(0)), x, std::nextafter(x, std::numeric_limits<Real>::max())}) {
            const std::vector<Real> row = {amax / 3, -amax, amax / 64};
            const Stored<Real> stored(format, row, 1);
            const Literal literal = ByTheStandard(mx, ceil, {row.begin(), row.end()});
            ASSERT_EQ(stored.scale(0), literal.scales[0]) << format.text() << " " << amax;
            for (std::size_t i = 0; i < 3; ++i) {
              ASSERT_EQ(static_cast<double>(stored.read[i]), literal.values[i]) << format.text() << " " << row[i];
            }
          }
        }
      }
    }
  }
}

TYPED_TEST(Blocks, OfMxfp8UnderBothRules) {
  using Real = TypeParam;
  struct Case {
    double amax;
    const char* format;
    std::uint32_t scale;
    double value;
    std::int64_t saturations;
  };
  for (const Case& c : {Case{957, "mxfp8_e4m3", 128, 896, 1}, Case{500, "mxfp8_e4m3", 127, 448, 1},
                        Case{150, "mxfp8_e4m3", 126, 144, 0}, Case{957, "mxfp8_e4m3:ceil", 129, 960, 0},
                        Case{500, "mxfp8_e4m3:ceil", 128, 512, 0}, Case{448, "mxfp8_e4m3:ceil", 127, 448, 0},
                        Case{449, "mxfp8_e4m3:ceil", 128, 448, 0}, Case{150, "mxfp8_e4m3:ceil", 126, 144, 0},
                        Case{448, "mxfp8_e4m3", 127, 448, 0},
                        // Saturated within half a step is rounding, as it is without a scale.
                        Case{464, "mxfp8_e4m3", 127, 448, 0}, Case{465, "mxfp8_e4m3", 127, 448, 1}}) {
    std::vector<Real> row(32, 1);
    row[7] = static_cast<Real>(c.amax);
    const Stored<Real> stored(parse_format(c.format), row, 1);
    EXPECT_EQ(stored.scale(0), c.scale) << c.format << " " << c.amax;
    EXPECT_EQ(static_cast<double>(stored.read[7]), c.value) << c.format << " " << c.amax;
    EXPECT_EQ(stored.loss, (RangeLoss{0, c.saturations})) << c.format << " " << c.amax;
  }
  // Scale bytes 0 and 255 with the element 1.0.
  const std::byte one{0x38}, least{0}, nan{255};
  Real value = 0;
  decode_rows(parse_format("mxfp8_e4m3"), &one, &least, 1, 1, &value);
  EXPECT_EQ(static_cast<double>(value), 0x1p-127);
  decode_rows(parse_format("mxfp8_e4m3"), &one, &nan, 1, 1, &value);
  EXPECT_TRUE(std::isnan(value));
}

TYPED_TEST(Blocks, ThatAreNotFiniteZeroOrSubnormal) {
  using Real = TypeParam;
  for (const char* text : {"mxfp4", "mxfp8_e4m3", "mxfp8_e5m2:ceil", "mxint8", "mxfp6_e3m2"}) {
    const Format format = parse_format(text);
    for (const double bad : {kNan, kInf, -kInf}) {
      std::vector<Real> row(96, 1);
      row[40] = static_cast<Real>(bad);
      const Stored<Real> stored(format, row, 1);
      EXPECT_EQ(stored.scale(1), 255U) << text;
      EXPECT_EQ(stored.loss, (RangeLoss{31, 0})) << text;
      for (std::size_t i = 0; i < 96; ++i) EXPECT_EQ(std::isnan(stored.read[i]), i / 32 == 1) << text << " " << i;
    }
    const Stored<Real> zero(format, std::vector<Real>(32, 0), 1);
    EXPECT_EQ(zero.scale(0), 0U) << text;
    EXPECT_EQ(zero.read, std::vector<Real>(32, 0)) << text;
    const Stored<Real> tiny(format, std::vector<Real>(32, static_cast<Real>(1e-40)), 1);
    EXPECT_EQ(tiny.scale(0), 0U) << text;
    for (const Real x : tiny.read) EXPECT_TRUE(std::isfinite(x)) << text;
  }
}

TYPED_TEST(Blocks, DoNotCrossTheEndsOfRows) {
  using Real = TypeParam;
  for (const char* text : {"mxfp4", "nvfp4", "int8:group32", "mxfp6_e2m3", "e4m3:group7:ceil"}) {
    std::vector<Real> rows(80, 1);
    std::fill(rows.begin() + 40, rows.end(), Real(1024));
    const Format format = parse_format(text);
    const Stored<Real> stored(format, rows, 2);
    EXPECT_EQ(format.scales(2, 40), 2 * ((40 + format.extent - 1) / format.extent));
    // amax / 127 is no float, and neither the head's 1024 / 2688 nor a block's 1 / 6 over it: all but those are exact.
    const double slack = std::string(text) == "nvfp4" ? 0.07 : 0x1p-23;
    for (std::size_t i = 0; i < 80; ++i) {
      const double expected = i < 40 ? 1 : 1024;
      EXPECT_NEAR(static_cast<double>(stored.read[i]), expected, text[0] == 'm' ? 0 : slack * expected) << text;
    }
  }
}

/// codes, block scales and values of one head, from the sentence that defines them, in Real.
template <class Real>
void ByTheDefinitionOfNvfp4(const std::vector<Real>& head, std::size_t n, float* s, Literal* out) {
  const Definition e2m1 = Named("e2m1"), e4m3 = Named("e4m3");
  const auto largest = [](auto first, auto last) {
    Real amax = 0;
    for (; first != last; ++first) amax = std::max(amax, std::abs(*first));
    return amax;
  };
  *s = static_cast<float>(largest(head.begin(), head.end()) / Real(448 * 6));
  if (*s == 0) *s = 1;
  for (std::size_t row = 0; row < head.size(); row += n) {
    for (std::size_t first = row; first < row + n; first += 16) {
      const auto begin = head.begin() + static_cast<std::ptrdiff_t>(first);
      const auto count = static_cast<std::ptrdiff_t>(std::min<std::size_t>(16, row + n - first));
      const Real quotient = largest(begin, begin + count) / Real(6) / static_cast<Real>(*s);
      std::uint32_t b = std::min(NearestCode(e4m3, static_cast<double>(quotient)), e4m3.max_code);
      if (b == 0) b = 0x38;  // 1
      out->scales.push_back(b);
      const Real scale = static_cast<Real>(*s) * static_cast<Real>(Number(e4m3, b));
      for (auto x = begin; x != begin + count; ++x) {
        const Real ratio = *x / scale;
        out->codes.push_back(SignedCode(e2m1, static_cast<double>(ratio)));
        const auto value = static_cast<Real>(Number(e2m1, out->codes.back() & 7)) * scale;
        out->values.push_back(static_cast<double>(std::copysign(value, ratio)));
      }
    }
  }
}

TYPED_TEST(Blocks, OfNvfp4AreThoseOfItsDefinition) {
  using Real = TypeParam;
  const Format format = parse_format("nvfp4");
  std::mt19937_64 random(6);
  for (const int n : {1, 15, 16, 17, 40, 64}) {
    for (int exponent = -160; exponent <= 120; exponent += 4) {
      std::vector<Real> head;
      for (int row = 0; row < 3; ++row) {
        for (const Real x : RandomRow<Real>(random, n, exponent - 4 * row)) head.push_back(x);
      }
      float s = 0;
      Literal literal;
      ByTheDefinitionOfNvfp4(head, static_cast<std::size_t>(n), &s, &literal);
      const Stored<Real> stored(format, head, 3);
      float found = 0;
      std::memcpy(&found, stored.scales.data(), 4);
      ASSERT_EQ(Bits(found), Bits(s)) << exponent;
      for (std::size_t b = 0; b < literal.scales.size(); ++b) ASSERT_EQ(stored.scale(4 + b), literal.scales[b]);
      for (std::size_t i = 0; i < head.size(); ++i) {
        const auto row = static_cast<std::int64_t>(i) / n, column = static_cast<std::int64_t>(i) % n;
        ASSERT_EQ(CodeAt(stored.codes.data() + row * format.code_bytes(n), 4, column), literal.codes[i]) << exponent;
        ASSERT_EQ(Bits(static_cast<double>(stored.read[i])), Bits(literal.values[i])) << exponent;
      }
    }
  }
  for (const double bad : {kNan, kInf}) {
    std::vector<Real> head(96, 1);
    head[50] = static_cast<Real>(bad);
    const Stored<Real> stored(format, head, 3);
    EXPECT_EQ(stored.loss, (RangeLoss{95, 0}));  // the scale of the head is theirs too
    for (const Real x : stored.read) EXPECT_TRUE(std::isnan(x));
  }
}

TYPED_TEST(Blocks, OfFp32ScalesAreRowsOfTheirOwn) {
  using Real = TypeParam;
  std::mt19937_64 random(8);
  for (const auto& [groups, rows] :
       {std::pair{"int8:group8", "int8:row"}, std::pair{"e4m3:group8:ceil", "e4m3:row:ceil"},
        std::pair{"e2m1:group8:floor", "e2m1:row:floor"}}) {
    std::vector<Real> data = RandomRow<Real>(random, 80, 0), by_row = data;
    const Stored<Real> stored(parse_format(groups), data, 2);  // rows of 40 in groups of 8
    round_rows(parse_format(rows), by_row.data(), 10, 8);
    for (std::size_t i = 0; i < data.size(); ++i) EXPECT_EQ(Bits(stored.read[i]), Bits(by_row[i])) << groups;
  }
}

// The elements of a tile, or of a head, are one after the other: a row of all of them has the same scale.
TYPED_TEST(Blocks, OfRowsAreOneLongRow) {
  using Real = TypeParam;
  std::mt19937_64 random(9);
  for (const char* rest : {"", ":floor", ":ceil", ":cap=3.5"}) {
    for (const std::string element : {"e4m3", "int8"}) {
      const std::vector<Real> data = RandomRow<Real>(random, 7 * 9, 0);
      std::vector<Real> tiles, head = data;
      for (int row = 0; row < 7; row += 3) {  // of 3, 3 and 1 rows
        std::vector<Real> tile(data.begin() + row * 9, data.begin() + std::min(row + 3, 7) * 9);
        round_rows(parse_format(element + ":row" + rest), tile.data(), 1, std::ssize(tile));
        tiles.insert(tiles.end(), tile.begin(), tile.end());
      }
      round_rows(parse_format(element + ":row" + rest), head.data(), 1, 7 * 9);
      const Stored<Real> by_tile(parse_format(element + ":tile3" + rest), data, 7);
      const Stored<Real> by_head(parse_format(element + ":head" + rest), data, 7);
      for (std::size_t i = 0; i < data.size(); ++i) {
        EXPECT_EQ(Bits(by_tile.read[i]), Bits(tiles[i])) << element << rest;
        EXPECT_EQ(Bits(by_head.read[i]), Bits(head[i])) << element << rest;
      }
    }
  }
}

TYPED_TEST(Blocks, UnderACapUseWhatLiesBelowIt) {
  using Real = TypeParam;
  const Stored<Real> stored(parse_format("e4m3:row:cap=240"), {60, -30, 1, 0.01F}, 1);  // scale 1/4
  float scale = 0;
  std::memcpy(&scale, stored.scales.data(), 4);
  EXPECT_EQ(scale, 0.25F);
  EXPECT_EQ(stored.read[0], 60);
  EXPECT_EQ(stored.read[3], static_cast<Real>(0x5p-9));  // 0.04 is 10.24 steps of 2^-8
  EXPECT_EQ(stored.loss, RangeLoss());
}

TEST(Packing, OfSixBitCodesIsFourToThreeBytes) {
  const Format format = parse_format("e2m3");
  const std::vector<double> row = {0.125, -0.125, 7.5, -7.5, 1};  // codes 0x01, 0x21, 0x1F, 0x3F, 0x08
  const Stored<double> stored(format, row, 1);
  std::vector<int> bytes;
  for (const std::byte b : stored.codes) bytes.push_back(std::to_integer<int>(b));
  // 0x01 | 0x21 << 6 | 0x1F << 12 | 0x3F << 18, then 0x08
  EXPECT_EQ(bytes, (std::vector<int>{0x41, 0xF8, 0xFD, 0x08}));
  EXPECT_EQ(stored.read, row);
}

TEST(Elements, WithoutNanCountOneAsLost) {
  for (const char* text : {"e3m2", "e2m3", "e2m1"}) {
    const std::vector<double> row = {1, kNan, kInf, -100, 2};
    const Stored<double> stored(parse_format(text), row, 1);
    EXPECT_EQ(stored.read[1], 0) << text;
    EXPECT_EQ(stored.read[2], DefinitionOf(ElementNamed(text)).max) << text;
    EXPECT_EQ(stored.loss, (RangeLoss{1, 1})) << text;
  }
}

}  // namespace
}  // namespace replayssm
