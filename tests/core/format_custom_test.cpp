// Elements of one's own against the number formula, and rotations against the matrix they are defined by.

#include <gtest/gtest.h>

#include <bit>
#include <random>

#include "core/error.h"
#include "core/policy.h"
#include "tests/core/format_oracle.h"

namespace replayssm {
namespace {

TEST(CustomElement, HoldsTheNumbersOfItsFields) {
  std::mt19937_64 random(2);
  int elements = 0;
  for (int e = 1; e <= 6; ++e) {
    for (int m = 1; m <= 6; ++m) {
      for (const Specials specials :
           {Specials::none, Specials::nan, Specials::infinity_and_nan, Specials::nan_for_minus_zero}) {
        if (specials == Specials::infinity_and_nan && e < 2) continue;
        for (const int shift : {0, -3, 5}) {
          const int bias = (1 << (e - 1)) - 1 + shift;
          const std::uint32_t all = (1U << (e + m)) - 1;
          Definition d{"custom", e, m, bias, all, 0, Definition::nothing};
          if (specials == Specials::nan) d.max_code = all - 1, d.above = Definition::nan;
          if (specials == Specials::infinity_and_nan) d.max_code = all - (1U << m), d.above = Definition::infinity;
          if (specials == Specials::nan_for_minus_zero) d.above = Definition::nan_for_minus_zero;
          d.max = Number(d, d.max_code);
          const Element element =
              custom_element({.exponent_bits = e, .mantissa_bits = m, .bias = bias, .specials = specials});
          for (std::uint32_t code = 0; code <= d.max_code; ++code) {
            ASSERT_EQ(decode<double>(element, code), Number(d, code)) << e << " " << m << " " << bias;
            ASSERT_EQ(encode(element, Number(d, code)), code);
            const double middle = Midpoint(d, code);
            ASSERT_EQ(std::fabs(round_to(element, -middle)),
                      Number(d, std::min(code % 2 == 0 ? code : code + 1, d.max_code)));
          }
          for (int i = 0; i < 50; ++i) {
            const double x = std::ldexp(static_cast<double>(random() >> 11), -52 - static_cast<int>(random() % 12));
            ASSERT_EQ(round_to(element, x), Number(d, std::min(NearestCode(d, x), d.max_code)));
          }
          ASSERT_EQ(std::isnan(round_to(element, std::nan(""))), specials != Specials::none);
          // Through text, and as rows: packed codes of any width.
          const Format format{element};
          ASSERT_EQ(parse_format(format.text()), format) << format.text();
          std::vector<double> row;
          for (std::uint32_t code = 0; code <= std::min(d.max_code, 40U); ++code) row.push_back(-Number(d, code));
          const auto n = std::ssize(row);
          std::vector<std::byte> codes(static_cast<std::size_t>(format.code_bytes(n)));
          std::vector<double> read(row.size());
          encode_rows(format, row.data(), 1, n, codes.data(), nullptr);
          decode_rows(format, codes.data(), nullptr, 1, n, read.data());
          ASSERT_EQ(read, row) << format.text();
          ++elements;
        }
      }
    }
  }
  EXPECT_EQ(elements, 3 * (36 * 4 - 6));
}

TEST(CustomElement, IsTheOneOfAName) {
  for (const auto& [text, name] :
       {std::pair{"custom(e=4,m=3,specials=nan)", "e4m3"}, std::pair{"custom(e=5,m=2,specials=inf)", "e5m2"},
        std::pair{"custom(e=4,m=3,bias=8,specials=fnuz)", "e4m3fnuz"}, std::pair{"custom(e=2,m=1)", "e2m1"},
        std::pair{"custom(e=8,m=7,specials=inf,overflow=inf)", "bf16"}, std::pair{"custom(e=0,m=7):row", "int8:row"}}) {
    Element custom = parse_format(text).element;
    const Element named = parse_format(name).element;
    EXPECT_EQ(parse_format(text).text(), text);
    custom.name = named.name;
    EXPECT_EQ(custom, named) << text;
  }
  EXPECT_EQ(parse_format("custom(m=4, e=3, bias=3)").text(), "custom(e=3,m=4)");
  const char* policy = "replay(L=4, anchor=custom(e=5,m=12,specials=inf), read=custom(e=0,m=4):group8, ring=bf16)";
  EXPECT_EQ(parse_policy(policy).text(), policy);
}

TEST(CustomElement, NamesTheKeyThatIsWrong) {
  const std::pair<const char*, const char*> refused[] = {
      {"custom(e=3)", "'m=' is missing"},
      {"custom()", "'e=' is missing"},
      {"custom(e=9,m=3)", "'e' is 0 to 8, found 9"},
      {"custom(e=3,m=0)", "'m' is 1 to 23, found 0"},
      {"custom(e=3,m=24)", "'m' is 1 to 23"},
      {"custom(e=3,m=x)", "whole number for 'm', found 'x'"},
      {"custom(e=3,m=4,bias=200)", "'bias' 200 gives exponents -199"},
      {"custom(e=8,m=4)", "'bias' 127 gives exponents -126 to 128"},
      {"custom(e=3,m=4,special=nan)", "unknown key 'special'"},
      {"custom(e=3,m=4,specials=all)", "'specials' is one of none, nan, inf, fnuz, found 'all'"},
      {"custom(e=3,m=4,overflow=inf)", "'overflow=inf' needs 'specials=inf'"},
      {"custom(e=3,m=4,overflow=nan)", "'overflow=nan' needs 'specials'"},
      {"custom(e=0,m=4,bias=1):row", "no 'bias'"},
      {"custom(e=0,m=4)", "custom(e=0,m=4) needs a scale"},
      {"custom(e=3,e=3,m=4)", "'e' is given twice"},
      {"custom(e3,m=4)", "expected key=value, found 'e3'"},
      {"custom(e=3,m=4", "expected ')'"},
      {"custom(e=1,m=4,specials=inf)", "'specials=inf' needs 'e' of 2"}};
  for (const auto& [text, why] : refused) {
    try {
      parse_format(text);
      ADD_FAILURE() << text << " accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  }
}

// Blocks of 16, whose factor is 1/4: sums of small integers are exact, and so is all else.
TEST(Hadamard, IsTheSylvesterMatrixBeforeAndAfter) {
  std::mt19937 random(1);
  for (const char* text : {"e4m3", "e3m2", "mxfp4", "bf16"}) {
    std::vector<double> rows(2 * 48);
    for (double& x : rows) x = static_cast<int>(random() % 64) - 32;
    const auto turned = [](const std::vector<double>& x) {
      std::vector<double> out(x.size(), 0.0);
      for (std::size_t i = 0; i < x.size(); ++i) {
        for (std::size_t j = 0; j < 16; ++j) {
          const bool minus = std::popcount(i % 16 & j) % 2 == 1;
          out[i] += (minus ? -0.25 : 0.25) * x[i / 16 * 16 + j];
        }
      }
      return out;
    };
    std::vector<double> expected = turned(rows);
    round_rows(parse_format(text), expected.data(), 2, 48);
    expected = turned(expected);
    const Format format = parse_format(std::string(text) + ":hadamard");
    EXPECT_EQ(format.text(), std::string(text) + ":hadamard");
    std::vector<std::byte> codes(static_cast<std::size_t>(2 * format.code_bytes(48))),
        scales(static_cast<std::size_t>(format.scale_bytes(2, 48)));
    std::vector<double> read(96), narrow_read(96);
    encode_rows(format, rows.data(), 2, 48, codes.data(), scales.data());
    decode_rows(format, codes.data(), scales.data(), 2, 48, read.data());
    EXPECT_EQ(read, expected) << text;
    std::vector<float> narrow(rows.begin(), rows.end());
    round_rows(format, rows.data(), 2, 48);
    EXPECT_EQ(rows, expected) << text;
    round_rows(format, narrow.data(), 2, 48);
    EXPECT_EQ(std::vector<double>(narrow.begin(), narrow.end()), expected) << text;
  }
}

TEST(Hadamard, TurnsAsManyNeighboursAsTheLengthAllows) {
  const Format format = parse_format("bf16:hadamard");
  for (const auto& [n, size] :
       {std::pair{96, 32}, std::pair{192, 64}, std::pair{80, 16}, std::pair{128, 128}, std::pair{7, 1}}) {
    std::vector<double> row(static_cast<std::size_t>(n), 0.0);
    row[0] = 1;
    std::vector<std::byte> codes(static_cast<std::size_t>(format.code_bytes(n)));
    encode_rows(format, row.data(), 1, n, codes.data(), nullptr);
    decode_rows(parse_format("bf16"), codes.data(), nullptr, 1, n, row.data());
    const double part = round_to(ElementNamed("bf16"), 1 / std::sqrt(static_cast<double>(size)));
    for (int i = 0; i < n; ++i) EXPECT_EQ(row[static_cast<std::size_t>(i)], i < size ? part : 0) << n << " " << i;
  }
}

}  // namespace
}  // namespace replayssm
