// A dense stride of what prove_formats compares whole, and that what it found is written down for every element.

#include <gtest/gtest.h>

#include <string>

#include "tests/proof/proof.h"

namespace replayssm {
namespace {

class Proof : public testing::TestWithParam<Definition> {
 protected:
  const Definition d = GetParam();
  const std::uint32_t stride = d.max_code > 1000 ? 97 : 1;
};

INSTANTIATE_TEST_SUITE_P(Formats, Proof, testing::ValuesIn(Definitions().begin() + 1, Definitions().end()),
                         [](const auto& row) { return row.param.name; });

TEST_P(Proof, OfFloatsInAStride) {
  for (const bool toward_zero : {false, true}) {
    // Prime to every power of two, so that all low bits come up.
    const proof::Count count = proof::Floats(d, toward_zero, 0, std::uint64_t{1} << 31, 2003);
    EXPECT_EQ(count.wrong, 0) << toward_zero;
    EXPECT_EQ(count.compared, 2 * ((std::int64_t{1} << 31) / 2003 + 1));
  }
}

TEST_P(Proof, OfDoublesBesideValuesAndMidpoints) {
  for (const bool toward_zero : {false, true}) {
    const proof::Count count = proof::Doubles(d, toward_zero, stride);
    EXPECT_EQ(count.wrong, 0) << toward_zero;
    EXPECT_GT(count.compared, 20 * d.max_code / stride);
  }
}

TEST_P(Proof, OfItsOracleByRationals) {
  const proof::Count count = proof::OracleItself(d, stride);
  EXPECT_EQ(count.wrong, 0);
  EXPECT_GT(count.compared, 0);
}

struct Row {
  std::string element, rounding;
  std::int64_t floats, doubles, rationals, wrong;
  std::string date;
};

TEST_P(Proof, OfAllFloatsIsWrittenDown) {
  const Row rows[] = {
#include "analysis/cli/format_proofs.inc"
  };
  for (const char* rounding : {"nearest", "toward zero"}) {
    const auto row = std::find_if(std::begin(rows), std::end(rows),
                                  [&](const Row& r) { return r.element == d.name && r.rounding == rounding; });
    ASSERT_NE(row, std::end(rows)) << rounding;
    EXPECT_EQ(row->floats, std::int64_t{1} << 32);
    EXPECT_EQ(row->wrong, 0);
    // Both signs of each, but of fp16 down to int4 nothing is left out.
    EXPECT_GE(row->doubles, 2 * 2 * (d.max_code + 1));
    EXPECT_GE(row->rationals, 2 * 2 * (d.max_code + 1));
  }
}

// The proof can fail: the same floats with ties away from zero, and with halves cut.
TEST(ProofItself, SeesAWrongRounding) {
  Definition off = Definitions()[4];
  ASSERT_EQ(off.name, "e4m3");
  off.mantissa = 2;  // another element's code values
  EXPECT_GT(proof::Floats(off, false, 0x3F800000, 0x3F900000, 101).wrong, 0);
  const Definition& d = Definitions()[4];
  proof::Oracle nearest(d, false), cut(d, true);
  EXPECT_EQ(nearest.code(1.0625), cut.code(1.0625));  // the tie above an even code
  EXPECT_EQ(nearest.code(1.1875), cut.code(1.1875) + 1);
}

}  // namespace
}  // namespace replayssm
