#include <gtest/gtest.h>

#include <bit>

#include "core/safetensors.h"
#include "tests/core/files.h"

namespace replayssm {
namespace {

constexpr const char* index_name = "model.safetensors.index.json";
constexpr const char* first = "model-00001-of-00002.safetensors";
constexpr const char* second = "model-00002-of-00002.safetensors";

/// A file of scalar F32 tensors.
string scalars(const std::vector<std::pair<string, float>>& tensors) {
  string header = "{", data;
  for (const auto& [name, value] : tensors) {
    if (!data.empty()) header += ',';
    header += entry(name, "F32", "[]", data.size(), data.size() + 4);
    data += little_endian(std::bit_cast<std::uint32_t>(value), 4);
  }
  return file_of(header + "}", data);
}

class WeightsFolder : public FilesTest {
 protected:
  void write_shards() const {
    write(first, scalars({{"a", 1}, {"b", 2}}));
    write(second, scalars({{"c", 3}}));
  }

  void write_index(const std::vector<std::pair<string, string>>& map) const {
    string text;
    for (const auto& [name, shard] : map) {
      if (!text.empty()) text += ',';
      text.append("\"").append(name).append("\":\"").append(shard).append("\"");
    }
    write(index_name, R"({"metadata":{"total_size":12},"weight_map":{)" + text + "}}");
  }
};

float value(const Weights& weights, const string& name) {
  float out = 0;
  widen(weights.at(name), 0, 1, &out);
  return out;
}

TEST_F(WeightsFolder, SingleFile) {
  write("model.safetensors", scalars({{"b", 2}, {"a", 1}}));
  write("golden.safetensors", "not read at all");
  Weights opened = Weights::open(folder_);
  const Weights weights = std::move(opened);
  EXPECT_EQ(weights.names(), (std::vector<string>{"a", "b"}));
  EXPECT_TRUE(weights.has("a"));
  EXPECT_FALSE(weights.has("c"));
  EXPECT_EQ(value(weights, "a"), 1);
  EXPECT_EQ(value(weights, "b"), 2);
  EXPECT_EQ(weights.at("a").file, (folder_ / "model.safetensors").string());
  EXPECT_TRUE(weights.notices().empty());
}

TEST_F(WeightsFolder, Shards) {
  write_shards();
  write_index({{"a", first}, {"b", first}, {"c", second}});
  const Weights weights = Weights::open(folder_);
  EXPECT_EQ(weights.names(), (std::vector<string>{"a", "b", "c"}));
  EXPECT_EQ(value(weights, "a"), 1);
  EXPECT_EQ(value(weights, "b"), 2);
  EXPECT_EQ(value(weights, "c"), 3);
  EXPECT_EQ(weights.at("c").file, (folder_ / second).string());
  EXPECT_TRUE(weights.notices().empty());
}

TEST_F(WeightsFolder, MissingShard) {
  write_shards();
  write_index({{"a", first}, {"b", first}, {"c", second}});
  fs::remove(folder_ / second);
  expect_error([&] { Weights::open(folder_); }, {folder_.string(), index_name, "'c'", second, "missing"});
  fs::create_symlink("nowhere", folder_ / second);
  expect_error([&] { Weights::open(folder_); }, {folder_.string(), index_name, "'c'", second, "missing"});
  write_shards();
  fs::remove(folder_ / second);
  write(second, "");  // emptied
  expect_error([&] { Weights::open(folder_); }, {second, "8 bytes", "found 0"});
}

TEST_F(WeightsFolder, TensorNotInItsShard) {
  write_shards();
  write_index({{"a", first}, {"c", second}, {"d", second}});
  expect_error([&] { Weights::open(folder_); }, {index_name, "'d'", second, "not in its shard"});
  write_index({{"a", second}, {"c", second}});  // it is in the other one
  expect_error([&] { Weights::open(folder_); }, {index_name, "'a'", second, "not in its shard"});
}

TEST_F(WeightsFolder, WhatTheIndexDoesNotNameIsLeftOutWithANotice) {
  write_shards();
  write_index({{"a", first}, {"c", second}});
  write("model-00003-of-00002.safetensors", "not read at all");
  write("consolidated.safetensors", scalars({{"a", 100}, {"z", 100}}));
  write("pytorch_model.bin", "no safetensors file");
  const Weights weights = Weights::open(folder_);
  EXPECT_EQ(weights.names(), (std::vector<string>{"a", "c"}));
  EXPECT_EQ(value(weights, "a"), 1);
  ASSERT_EQ(weights.notices().size(), 3u);
  EXPECT_NE(weights.notices()[0].find(string(first) + ": left out: 1 of its tensors"), string::npos);
  EXPECT_NE(weights.notices()[0].find("'b'"), string::npos);
  EXPECT_NE(weights.notices()[1].find("consolidated.safetensors: left out"), string::npos);
  EXPECT_NE(weights.notices()[2].find("model-00003-of-00002.safetensors: left out"), string::npos);
}

TEST_F(WeightsFolder, ATensorInTwoShardsComesFromTheOneTheIndexNames) {
  write(first, scalars({{"a", 1}, {"b", 2}}));
  write(second, scalars({{"a", 10}, {"c", 3}}));
  write_index({{"a", second}, {"b", first}, {"c", second}});
  const Weights weights = Weights::open(folder_);
  EXPECT_EQ(value(weights, "a"), 10);
  ASSERT_EQ(weights.notices().size(), 1u);
  EXPECT_NE(weights.notices()[0].find(first), string::npos);
}

TEST_F(WeightsFolder, ASingleFileWinsOverShards) {
  write_shards();
  write(index_name, "not read at all");
  write("model.safetensors", scalars({{"a", 7}}));
  const Weights weights = Weights::open(folder_);
  EXPECT_EQ(weights.names(), std::vector<string>{"a"});
  EXPECT_EQ(value(weights, "a"), 7);
  ASSERT_EQ(weights.notices().size(), 3u);
  EXPECT_NE(weights.notices()[0].find(string(index_name) + ": left out"), string::npos);
  EXPECT_NE(weights.notices()[1].find(string(first) + ": left out"), string::npos);
  EXPECT_NE(weights.notices()[2].find(string(second) + ": left out"), string::npos);
}

TEST_F(WeightsFolder, MalformedIndex) {
  write_shards();
  const auto with = [](const string& shard) { return R"({"weight_map":{"a":)" + shard + "}}"; };
  const std::vector<std::pair<string, std::vector<string>>> refusals = {
      {"", {"JSON"}},
      {"[]", {"object", "array"}},
      {R"({"weight_map":{"a":)", {"JSON"}},
      {"{}", {"no 'weight_map'"}},
      {R"({"weight_map":[]})", {"'weight_map'", "object", "array"}},
      {R"({"weight_map":{}})", {"'weight_map'", "no tensor"}},
      {R"({"weight_map":{"a":"x","a":"y"}})", {"'a'", "twice"}},
      {with("1"), {"'a'", "number"}},
      {with("null"), {"'a'", "null"}},
      {with(R"("")"), {"'a'", "same folder", "''"}},
      {with(R"(".")"), {"'a'", "same folder", "'.'"}},
      {with(R"("..")"), {"'a'", "same folder", "'..'"}},
      {with(R"("../model.safetensors")"), {"'a'", "same folder", "'../model.safetensors'"}},
      {with(R"("sub/../)" + string(first) + "\""), {"'a'", "same folder"}},
      {with("\"" + (folder_ / first).string() + "\""), {"'a'", "same folder"}},
      {with(R"("absent\n.safetensors")"), {"'a'", "'absent\\x0a.safetensors'", "missing"}},
  };
  for (const auto& [text, parts] : refusals) {
    SCOPED_TRACE(text);
    write(index_name, text);
    expect_error([&] { Weights::open(folder_); }, {(folder_ / index_name).string()});
    expect_error([&] { Weights::open(folder_); }, parts);
  }
}

TEST_F(WeightsFolder, NotAModelFolder) {
  expect_error([&] { Weights::open(folder_); }, {folder_.string(), "model.safetensors", "no safetensors file"});
  write("consolidated.safetensors", scalars({{"a", 1}}));
  expect_error([&] { Weights::open(folder_); }, {folder_.string(), "model.safetensors", "'consolidated.safetensors'"});
  expect_error([&] { Weights::open(folder_ / "absent"); }, {(folder_ / "absent").string(), "nothing there"});
  expect_error([&] { Weights::open(folder_ / "consolidated.safetensors"); }, {"consolidated.safetensors", "a file"});
  fs::create_symlink("nowhere", folder_ / "model.safetensors");
  expect_error([&] { Weights::open(folder_); }, {"model.safetensors", "No such file"});
  fs::remove(folder_ / "model.safetensors");
  fs::create_directory(folder_ / "model.safetensors");
  expect_error([&] { Weights::open(folder_); }, {"model.safetensors", "directory"});
}

TEST_F(WeightsFolder, LinksAreFollowed) {
  fs::create_directory(folder_ / "blobs");
  fs::create_directory(folder_ / "snapshot");
  write("blobs/0123", scalars({{"a", 1}}));
  fs::create_symlink("../blobs/0123", folder_ / "snapshot" / first);
  write("blobs/4567", R"({"weight_map":{"a":")" + string(first) + "\"}}");
  fs::create_symlink("../blobs/4567", folder_ / "snapshot" / index_name);
  fs::create_directory_symlink("snapshot", folder_ / "link");
  const Weights weights = Weights::open(folder_ / "link");
  EXPECT_EQ(value(weights, "a"), 1);
  EXPECT_TRUE(weights.notices().empty());
}

TEST_F(WeightsFolder, AMissingTensorIsNamedWithSimilarOnes) {
  write("model.safetensors", scalars({{"backbone.layers.0.mixer.A_log", 1},
                                      {"backbone.layers.1.mixer.A_log", 2},
                                      {"backbone.layers.0.mixer.D", 3},
                                      {"backbone.layers.0.mixer.dt_bias", 4},
                                      {"lm_head.weight", 5}}));
  const Weights weights = Weights::open(folder_);
  expect_error([&] { weights.at("backbone.layers.0.mixer.a_log"); },
               {folder_.string(), "'backbone.layers.0.mixer.a_log'", "among its 5",
                "similar names: 'backbone.layers.0.mixer.A_log', 'backbone.layers.1.mixer.A_log', "});
  expect_error([&] { weights.at("model.layers.0.mixer.dt_bias"); },
               {"similar names: 'backbone.layers.0.mixer.dt_bias'"});
  try {
    weights.at("x");
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(string(e.what()).find("similar"), string::npos) << e.what();
  }
}

TEST_F(WeightsFolder, HeaderLimit) {
  write("model.safetensors", file_of("{}" + string(98, ' ')));
  EXPECT_NO_THROW(Weights::open(folder_, 100));
  expect_error([&] { Weights::open(folder_, 99); }, {"model.safetensors", "100 bytes", "limit of 99"});
  fs::remove(folder_ / "model.safetensors");
  write_shards();
  write_index({{"a", first}});
  expect_error([&] { Weights::open(folder_, 10); }, {first, "limit of 10"});
}

// Digests of the same bytes by Python's hashlib.
TEST_F(WeightsFolder, Sha256OfTheFilesInUse) {
  write("model.safetensors", file_of("{}"));
  EXPECT_EQ(Weights::open(folder_).sha256(), "411a485216e432ece6b9af94fa32154cf79a2a56d4f81266baa50063f45092bd");
  fs::remove(folder_ / "model.safetensors");

  // In the order of names, whatever the order of tensors; a file that is not used does not count.
  write("10.safetensors", scalars({{"z", 1}}));
  write("9.safetensors", scalars({{"a", 2}}));
  write("1.safetensors", scalars({{"unused", 2}}));
  write_index({{"a", "9.safetensors"}, {"z", "10.safetensors"}});
  EXPECT_EQ(Weights::open(folder_).sha256(), "e45e259f702bc4be6fb615629a849f1317bae442fa86460bf74186554b122354");
}

}  // namespace
}  // namespace replayssm
