// Formats from TOML files: what they mean, and that errors name file, line and key.

#include "core/format_file.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "core/error.h"
#include "core/own_format.h"
#include "core/policy.h"

namespace replayssm {
namespace {

class FormatFile : public testing::Test {
 protected:
  void SetUp() override {
    if (!reads_format_files()) GTEST_SKIP() << "built without toml++";
  }
  void TearDown() override { std::filesystem::remove(path_); }

  std::vector<Format> read(const std::string& text) {
    std::ofstream(path_) << text;
    return read_formats(path_);
  }
  void expect_refused(const std::string& text, const std::vector<std::string>& parts) {
    try {
      read(text);
      ADD_FAILURE() << "accepted:\n" << text;
    } catch (const Error& error) {
      const std::string what = error.what();
      EXPECT_NE(what.find(path_), std::string::npos) << what;
      for (const std::string& part : parts)
        EXPECT_NE(what.find(part), std::string::npos) << what << "\nlacks: " << part;
    }
  }

  const std::string path_ =
      (std::filesystem::temp_directory_path() /
       (std::string("replayssm_formats_") + testing::UnitTest::GetInstance()->current_test_info()->name() + ".toml"))
          .string();
};

TEST_F(FormatFile, DefinesWhatTheTextOfAFormatWould) {
  const auto formats = read(R"(
[f_group]
element = {e = 3, m = 4, specials = "nan"}
scale = "group32"
rule = "ceil"
[f_plain]
element = "bf16"
[f_row]
element = "int8"
scale = "row"
asymmetric = true
rounding = "stochastic"
random_bits = 16
hadamard = true
[f_capped]
element = "e4m3"
scale = "tensor"
cap = 240
rounding = "toward_zero"
rule = "amax"
[f_tile]
element = {e = 0, m = 4}
scale = "tile16"
cap = 7.5
asymmetric = false
rounding = "nearest"
[f_bias]
element = {e = 4, m = 3, bias = 8, specials = "fnuz", overflow = "nan"}
)");
  const std::pair<const char*, const char*> expected[] = {
      {"f_bias", "custom(e=4,m=3,bias=8,specials=fnuz,overflow=nan)"},
      {"f_capped", "e4m3:tensor:cap=240:rz"},
      {"f_group", "custom(e=3,m=4,specials=nan):group32:ceil"},
      {"f_plain", "bf16"},
      {"f_row", "int8:row:asym:sr=16:hadamard"},
      {"f_tile", "custom(e=0,m=4):tile16:cap=7.5"}};
  ASSERT_EQ(formats.size(), std::size(expected));
  for (std::size_t i = 0; i < formats.size(); ++i) {
    EXPECT_EQ(formats[i].text(), expected[i].first);
    EXPECT_EQ(definition_of(formats[i]), parse_format(expected[i].second)) << expected[i].first;
    EXPECT_EQ(parse_format(expected[i].first), formats[i]);
  }
  // In policies under their names, which are printed; with what they do not say themselves.
  for (const char* text : {"eager(state=f_group)", "replay(L=4, anchor=f_plain:sr, read=f_row:ef=int4, ring=f_plain)",
                           "eager(state=f_group:rz:hadamard:ef=f_plain)", "eager(state=int8:row:ef=f_group)"}) {
    EXPECT_EQ(parse_policy(text).text(), text);
  }
  double named[] = {0.3, -7, 1e-3, 100}, spelt[] = {0.3, -7, 1e-3, 100};
  round_rows(parse_format("f_group"), named, 1, 4);
  round_rows(parse_format("custom(e=3,m=4,specials=nan):group32:ceil"), spelt, 1, 4);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(named[i], spelt[i]);
  for (const char* text :
       {"f_group:row", "f_plain:cap=3", "f_group:floor", "f_tile:asym", "f_row:sr", "f_row:hadamard"}) {
    EXPECT_THROW(parse_format(text), Error) << text;
  }
}

TEST_F(FormatFile, MayBeReadAgainButNotOtherwise) {
  read("[f_again]\nelement = \"e5m2\"\n");
  EXPECT_EQ(read("[f_again]\nelement = \"e5m2\"\n[f_other]\nelement = \"e4m3\"\n").size(), 2U);
  expect_refused("[f_new]\nelement = \"e4m3\"\n[f_again]\nelement = \"e4m3\"\n", {"line 3", "'f_again' is taken"});
  EXPECT_EQ(find_own_format("f_new"), nullptr);  // nothing of a file that is wrong
}

TEST_F(FormatFile, NamesWhatIsWrong) {
  const std::pair<const char*, std::vector<std::string>> refused[] = {
      {"", {"holds no formats"}},
      {"[x\n", {"line 1"}},
      {"[x]\nelement = \"e4m3\"\nelement = \"e5m2\"\n", {"line 3"}},
      {"[x]\nelement = \"e4m3\"\n[x]\n", {"line 3"}},
      {"x = 3\n", {"line 1", "key 'x'", "expected a table"}},
      {"[bf16]\nelement = \"e4m3\"\n", {"line 1", "'bf16' is that of a built-in format"}},
      {"[mxfp4]\nelement = \"e4m3\"\n", {"'mxfp4' is that of a built-in format"}},
      {"[\"a:b\"]\nelement = \"e4m3\"\n", {"'a:b': expected letters"}},
      {"[x]\nscale = \"row\"\n", {"format 'x'", "'element' is missing"}},
      {"[x]\nelement = \"e9m9\"\n", {"line 2", "'element'", "e9m9"}},
      {"[x]\nelement = 3\n", {"line 2", "'element'"}},
      {"[x]\nelement = {e = 9, m = 3}\n", {"line 2", "'element'", "'e' is 0 to 8, found 9"}},
      {"[x]\nelement = {e = 3, q = 3}\n", {"'element'", "unknown key 'q'"}},
      {"[x]\nelement = {e = 3, m = 3.5}\n", {"'element.m'", "whole number"}},
      {"[x]\nelement = \"e4m3\"\nscales = \"row\"\n", {"line 3", "unknown key 'scales'"}},
      {"[x]\nelement = \"e4m3\"\nscale = \"hadamard\"\n", {"line 3", "'scale'", "'hadamard'"}},
      {"[x]\nelement = \"e4m3\"\nscale = \"group0\"\n", {"line 3", "'scale'", "1..1048576"}},
      {"[x]\nelement = \"e4m3\"\nscale = 32\n", {"line 3", "'scale': expected a string"}},
      {"[x]\nelement = \"int8\"\n", {"line 1", "'scale' is missing"}},
      {"[x]\nelement = \"e4m3\"\nrule = \"ceil\"\n", {"line 3", "'rule'", "no scales"}},
      {"[x]\nelement = \"e4m3\"\nscale = \"row\"\nrule = \"round\"\n",
       {"line 4", "'rule'", "amax, floor, ceil", "'round'"}},
      {"[x]\nelement = \"e4m3\"\nscale = \"row\"\ncap = 449\n", {"line 4", "'cap'", "at most 448"}},
      {"[x]\nelement = \"e4m3\"\nscale = \"row\"\ncap = -1\n", {"line 4", "'cap'", "above 0"}},
      {"[x]\nelement = \"e4m3\"\nscale = \"row\"\ncap = \"big\"\n", {"line 4", "'cap': expected a number"}},
      {"[x]\nelement = \"e4m3\"\nscale = \"row\"\nasymmetric = true\n", {"line 4", "'asymmetric'", "for integers"}},
      {"[x]\nelement = \"e4m3\"\nhadamard = 1\n", {"line 3", "'hadamard': expected true or false"}},
      {"[x]\nelement = \"e4m3\"\nrounding = \"up\"\n", {"line 3", "'rounding'", "'up'"}},
      {"[x]\nelement = \"e4m3\"\nrandom_bits = 3\n", {"line 3", "'random_bits'", "stochastic"}},
      {"[x]\nelement = \"e4m3\"\nrounding = \"stochastic\"\nrandom_bits = 33\n",
       {"line 4", "'random_bits'", "1 to 32"}}};
  for (const auto& [text, parts] : refused) expect_refused(text, parts);
  EXPECT_EQ(find_own_format("x"), nullptr);
  try {
    read_formats("/nowhere/formats.toml");
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("/nowhere/formats.toml"), std::string::npos);
  }
}

}  // namespace
}  // namespace replayssm
