// How config.json is read: the spellings that are in use, and one line for everything else.

#include "core/config.h"

#include <gtest/gtest.h>

#include <limits>

#include "tests/core/files.h"

namespace replayssm {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
using Range = std::pair<double, double>;
using Names = std::vector<string>;

class ConfigTest : public FilesTest {
 protected:
  Config config(const string& text) const {
    write("config.json", text);
    return Config::open(folder_);
  }
  /// Expects an error that names config.json and the parts.
  template <class Use>
  void expect_wrong(const string& text, const Use& use, Names parts) const {
    parts.push_back("config.json");
    expect_error([&] { use(config(text)); }, parts);
  }
};

TEST_F(ConfigTest, SpellingsOfInfinity) {
  for (const string limit :
       {"Infinity", R"("Infinity")", R"("inf")", R"({"__float__": "Infinity"})", R"({"__float__": "inf"})"}) {
    const Config c = config(R"({"time_step_limit": [0.0, )" + limit + "]}");
    EXPECT_EQ(c.range("time_step_limit", {}), Range(0.0, infinity)) << limit;
  }
  EXPECT_EQ(config(R"({"a": [-Infinity, 1e308]})").range("a", {}), Range(-infinity, 1e308));
  EXPECT_EQ(config(R"({"a": ["-Infinity", 3]})").range("a", {}), Range(-infinity, 3));
  EXPECT_EQ(config(R"({"a": Infinity})").number("a"), infinity);
  EXPECT_EQ(config(R"({"a": {"__float__": "-Infinity"}})").number("a"), -infinity);
  EXPECT_EQ(config(R"({"other": 1})").range("a", {0.5, 2}), Range(0.5, 2));
}

TEST_F(ConfigTest, WordsInsideStringsStayAsTheyAre) {
  const Config c = config(R"({"a": "Infinity \" NaN \\", "b": Infinity, "c": "-Infinity", "NaN": 4})");
  EXPECT_EQ(c.text("a"), "Infinity \" NaN \\");
  EXPECT_EQ(c.number("b"), infinity);
  EXPECT_EQ(c.text("c"), "-Infinity");
  EXPECT_EQ(c.size("NaN"), 4);
}

TEST_F(ConfigTest, GettersAndFallbacks) {
  const Config c = config(R"({"n": 3, "x": 1e-6, "yes": true, "text": "silu", "none": null})");
  EXPECT_EQ(c.size("n"), 3);
  EXPECT_EQ(c.number("n"), 3);
  EXPECT_EQ(c.number("x"), 1e-6);
  EXPECT_TRUE(c.flag("yes", false));
  EXPECT_EQ(c.text("text"), "silu");
  // null, as Python's None, is the same as a missing key.
  EXPECT_FALSE(c.has("none"));
  EXPECT_EQ(c.size("none", 7), 7);
  EXPECT_EQ(c.number("none", 0.5), 0.5);
  EXPECT_FALSE(c.flag("none", false));
  EXPECT_EQ(c.text("none", "relu"), "relu");
}

TEST_F(ConfigTest, NestedObjects) {
  const Config c = config(R"({"a": 1, "text_config": {"a": 2}, "list": [1]})");
  EXPECT_EQ(c.nested("text_config").size("a"), 2);
  EXPECT_EQ(c.nested("vision_config").size("a"), 1);
  expect_wrong(R"({"list": [1]})", [](const Config& wrong) { wrong.nested("list"); }, {"'list'"});
  expect_wrong(R"({"t": {}})", [](const Config& wrong) { wrong.nested("t").size("depth"); }, {"'depth'", "missing"});
}

TEST_F(ConfigTest, LayerKindsInEverySpelling) {
  EXPECT_EQ(config(R"({"layer_types": ["linear_attention", "full_attention"]})").layer_kinds(),
            (Names{"linear_attention", "full_attention"}));
  EXPECT_EQ(config(R"({"layers_block_type": ["mamba", "attention", "moe"]})").layer_kinds(),
            (Names{"mamba", "attention", "moe"}));
  EXPECT_EQ(config(R"({"hybrid_override_pattern": "M-M*|E"})").layer_kinds(),
            (Names{"mamba", "mlp", "mamba", "attention", "moe"}));
  EXPECT_EQ(config(R"({"layer_types": null})").layer_kinds(), Names{});
  EXPECT_EQ(config("{}").layer_kinds(), Names{});
  const auto kinds = [](const Config& c) { c.layer_kinds(); };
  expect_wrong(R"({"hybrid_override_pattern": "MXM"})", kinds, {"'hybrid_override_pattern'", "'X'"});
  expect_wrong(R"({"hybrid_override_pattern": 3})", kinds, {"'hybrid_override_pattern'", "3"});
  expect_wrong(R"({"layer_types": "MM"})", kinds, {"'layer_types'"});
  expect_wrong(R"({"layers_block_type": ["mamba", 1]})", kinds, {"'layers_block_type'", "1"});
}

TEST_F(ConfigTest, WrongValuesAreNamed) {
  const auto size = [](const Config& c) { c.size("n"); };
  expect_wrong("{}", size, {"'n'", "missing"});
  for (const string value : {"0", "-1", "1.5", "2147483649", "18446744073709551615", R"("3")", "true", "[1]"}) {
    expect_wrong(R"({"n": )" + value + "}", size, {"'n'", value});
  }
  const auto number = [](const Config& c) { c.number("n"); };
  for (const string value : {R"("one")", "true", "[1]", R"({"__float__":"one"})"}) {
    expect_wrong(R"({"n": )" + value + "}", number, {"'n'", value});
  }
  expect_wrong(R"({"n": NaN})", number, {"'n'", "NaN"});
  const auto range = [](const Config& c) { c.range("n", {}); };
  for (const string value : {"[1]", "[1,2,3]", "2", "[2,1]", R"([0,"x"])"}) {
    expect_wrong(R"({"n": )" + value + "}", range, {"'n'"});
  }
  expect_wrong(R"({"n": [0, NaN]})", range, {"'n'", "NaN"});
  expect_wrong(R"({"n": "yes"})", [](const Config& c) { c.flag("n", false); }, {"'n'", "yes"});
  expect_wrong(R"({"n": 1})", [](const Config& c) { c.text("n"); }, {"'n'", "1"});
}

TEST_F(ConfigTest, FilesThatAreNoConfig) {
  const auto open = [](const Config&) {};
  for (const string text : {"", "{", "{\"a\": }\n", "{\"a\": 1,}", "{\"a\": 1e999}"}) {
    expect_wrong(text, open, {});
  }
  expect_wrong("[1]", open, {"object", "array"});
  expect_wrong("3", open, {"object", "number"});
  fs::remove(folder_ / "config.json");
  expect_error([&] { Config::open(folder_); }, {"config.json"});
  expect_error([&] { Config::open(folder_ / "nowhere"); }, {"nowhere", "folder"});
}

}  // namespace
}  // namespace replayssm
