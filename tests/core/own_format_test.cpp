// Functions as formats: in policies they do what the function does, to whole heads, and nothing else.

#include "core/own_format.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "analysis/bound.h"
#include "analysis/state_codes.h"
#include "analysis/traffic.h"
#include "core/error.h"
#include "tests/core/state_helpers.h"

namespace replayssm {
namespace {

void expect_refused(const std::function<void()>& act, const std::string& why) {
  try {
    act();
    ADD_FAILURE() << "accepted, expected: " << why;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
  }
}

/// Half a bf16's place is added to the bits of a double, which are then cut: to nearest, ties to even.
double to_bf16(double x) {
  auto bits = __builtin_bit_cast(std::uint64_t, x);
  bits += (std::uint64_t{1} << 44) - 1 + (bits >> 45 & 1);
  return __builtin_bit_cast(double, bits & ~((std::uint64_t{1} << 45) - 1));
}

void all_to_bf16(double* x, std::int64_t rows, std::int64_t n, const Draw&) {
  std::transform(x, x + rows * n, x, to_bf16);
}

void to_int8_of_head(double* x, std::int64_t rows, std::int64_t n, const Draw&) {
  double amax = 0;
  for (std::int64_t i = 0; i < rows * n; ++i) amax = std::max(amax, std::fabs(x[i]));
  const auto scale = static_cast<double>(static_cast<float>(amax / 127));
  for (std::int64_t i = 0; i < rows * n && scale > 0; ++i) x[i] = std::nearbyint(x[i] / scale) * scale;
}

/// Registered once: names last as long as the program.
const Format& mine() {
  static const Format format = register_format("my-bf16", 16, all_to_bf16);
  return format;
}
const Format& of_head() {
  static const Format format = register_format("my_int8", 9, to_int8_of_head);
  return format;
}

TEST(OwnFormat, ActsInEveryPolicyAsTheBuiltInItRepeats) {
  mine(), of_head();
  const std::pair<const char*, const char*> pairs[] = {
      {"eager(state=my-bf16)", "eager(state=bf16)"},
      {"eager(state=my-bf16:hadamard)", "eager(state=bf16:hadamard)"},
      {"replay(L=4, state=my-bf16, ring=my-bf16)", "replay(L=4, state=bf16, ring=bf16)"},
      {"replay(L=3, anchor=fp32, read=my-bf16, loop=open)", "replay(L=3, anchor=fp32, read=bf16, loop=open)"},
      {"eager(state=my_int8)", "eager(state=int8:head)"},
      {"replay(L=4, state=my_int8, order=sequential)", "replay(L=4, state=int8:head, order=sequential)"}};
  const RecurrenceShape shape{Recurrence::gated_delta, 2, 1, 24, 16};  // more rows than an eager state takes at once
  const Stream<double> stream = RandomStream<double>(shape, 9);
  for (const auto& [own, built_in] : pairs) {
    SCOPED_TRACE(own);
    const Policy policy = parse_policy(own);
    EXPECT_EQ(policy.text(), own);
    EXPECT_FALSE(policy.exact());
    State<double> a(shape, policy), b(shape, parse_policy(built_in));
    std::vector<double> ya(9 * 2 * 24), yb(ya);
    a.advance(Inputs(stream, 0, 9), ya.data());
    b.advance(Inputs(stream, 0, 9), yb.data());
    EXPECT_EQ(ya, yb);
    for (const std::int64_t h : {0, 1}) {
      EXPECT_EQ(a.checkpoint(h), b.checkpoint(h));
      EXPECT_EQ(a.read_copy(h), b.read_copy(h));
    }
  }
}

TEST(OwnFormat, NarrowsOnceAndCountsWhatIsLost) {
  static const Format doubling =
      register_format("doubling", 32, [](double* x, std::int64_t rows, std::int64_t n, const Draw&) {
        for (std::int64_t i = 0; i < rows * n; ++i) x[i] *= 2 + 0x1p-23;
      });
  // 1 + 2^-23 doubled is 2 + 2^-22 + 2^-23 + 2^-46: past the tie between neighbours that are 2^-22 apart.
  float narrow[] = {1, 1 + 0x1p-23F, std::numeric_limits<float>::max(), -HUGE_VALF};
  EXPECT_EQ(round_rows(doubling, narrow, 2, 2), (RangeLoss{1, 0}));
  EXPECT_EQ(narrow[0], 2);  // a tie, to even
  EXPECT_EQ(narrow[1], 2 + 0x1p-21F);
  EXPECT_EQ(narrow[2], HUGE_VALF);
  EXPECT_EQ(narrow[3], -HUGE_VALF);
}

TEST(OwnFormat, IsHandedTheDraw) {
  static const Format token = register_format("token", 8, [](double* x, std::int64_t, std::int64_t, const Draw& draw) {
    x[0] = draw.token + 100.0 * draw.head + static_cast<double>(draw.place.seed);
  });
  double x[] = {0, 5};
  round_rows(token, x, 1, 2, {.place = {.seed = 7000}, .token = 3, .head = 2});
  EXPECT_EQ(x[0], 7203);
  EXPECT_EQ(x[1], 5);
}

TEST(OwnFormat, CostsTheBitsThatItStates) {
  mine(), of_head();
  const RecurrenceShape shape{Recurrence::mamba2, 2, 1, 4, 6};
  EXPECT_EQ(LayerTraffic(shape, parse_policy("eager(state=my-bf16)")).stored(), 2 * 4 * 6 * 2);
  EXPECT_EQ(LayerTraffic(shape, parse_policy("eager(state=my_int8)")).stored(), 2 * 4 * 7);  // 54 bits a row
}

TEST(OwnFormat, IsBoundedByWhatItDoes) {
  const double rows[] = {1 + 0x1p-9, 3, 1 - 0x1p-10, -1};
  double out[2] = {};
  add_rounding_errors(mine(), rows, 2, 2, out);
  EXPECT_EQ(out[0], 0x1p-18 + 0x1p-20);
  EXPECT_EQ(out[1], 0);
}

TEST(OwnFormat, SaysWhatIsWrong) {
  mine();
  for (const char* name : {"", "8bit", "a b", "a:b", "a,b", "my_{}"}) {
    expect_refused([&] { register_format(name, 8, all_to_bf16); }, "expected letters, digits");
  }
  for (const char* name : {"exact", "custom", "bf16", "int8", "mxfp4", "nvfp4"}) {
    expect_refused([&] { register_format(name, 8, all_to_bf16); },
                   std::string(name) + "' is that of a built-in format");
  }
  expect_refused([] { register_format("my-bf16", 8, all_to_bf16); }, "'my-bf16' is taken");
  expect_refused([] { register_format("none", 8, {}); }, "'none': no function");
  expect_refused([] { register_format("wide", 33, all_to_bf16); }, "1 to 32 bits an element, found 33");
  expect_refused([] { parse_format("none"); }, "unknown name 'none'");
  for (const char* modifier : {"row", "sr", "cap=3", "floor"}) {
    expect_refused([&] { parse_format(std::string("my-bf16:") + modifier); },
                   "takes no modifier but hadamard and ef=F");
  }
  double x[] = {1, 2};
  std::byte codes[8];
  expect_refused([&] { encode_rows(mine(), x, 1, 2, codes, nullptr); }, "'my-bf16' is a function and has no codes");
  expect_refused([&] { decode_rows(mine(), codes, nullptr, 1, 2, x); }, "'my-bf16' is a function and has no codes");
  expect_refused([&] { codes_of_rounded(mine(), x, 1, 2); }, "'my-bf16' is a function and has no codes");
}

}  // namespace
}  // namespace replayssm
