// replayssm check on a tiny model: its baseline, what it finds, and what it refuses.

#include <gtest/gtest.h>

#include <boost/property_tree/xml_parser.hpp>
#include <chrono>
#include <thread>

#include "analysis/check.h"
#include "tests/support/process.h"

namespace replayssm {
namespace {

using Json = nlohmann::ordered_json;
using Words = std::vector<string>;

class CheckTest : public ProgramTest {
 protected:
  void SetUp() override {
    ProgramTest::SetUp();
    const Outcome made = run(with({"--update", "--tokens", mamba2_golden_, "--states", states(1), "-p", sr_, "-p",
                                   "replay(L=4, state=e4m3:row)", "-p", "replay(L=4, state=int8:row)"}));
    ASSERT_EQ(made.code, 0) << made.err;
    text_ = read_text(baseline_);
  }

  Words with(const Words& more, const string& model = "") const {
    Words all = {"check", model.empty() ? mamba2_ : model, "--baseline", baseline_.string()};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  /// A file of one state, of which the values depend on `seed`.
  string states(int seed, const string& name = "layer.1.head.2") const {
    std::vector<double> values;
    for (int i = 0; i < 16 * 24; ++i) values.push_back(std::sin(i * seed));
    write_tensors(folder_ / "states.safetensors", {{name, stored<double>("F64", {16, 24}, values)}});
    return path("states.safetensors");
  }
  /// The baseline with something in it changed.
  template <class Change>
  void change(Change&& how) const {
    Json json = Json::parse(text_);
    how(json);
    write_bytes(baseline_, json.dump());
  }
  Json report(const Words& more = {}) const {
    const Outcome o = run(with([&] {
      Words all = {"--json", "-"};
      all.insert(all.end(), more.begin(), more.end());
      return all;
    }()));
    Json json = Json::parse(o.out);
    json.erase("seconds");
    return json;
  }

  const fs::path baseline_ = folder_ / "baseline.json";
  const string sr_ = "eager(state=int8:row:sr)";
  string text_;
};

TEST_F(CheckTest, TheSameBuildFindsTheSameBits) {
  const Outcome o = run(with({}));
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.out.find(" 0 within their margins, 0 outside\n"), string::npos) << o.out;
  EXPECT_EQ(std::count(o.out.begin(), o.out.end(), '\n'), 1) << o.out;  // nothing moved, no table

  const Json once = report({"--threads", "1"});
  EXPECT_EQ(once["passed"], true);
  EXPECT_EQ(once["outside"], 0);
  EXPECT_EQ(once["findings"].size(), once["same"]);
  Json again = report({"--threads", "3"});
  again["provenance"] = once["provenance"];  // says how many threads
  EXPECT_EQ(again, once);

  EXPECT_EQ(run(with({"--update"})).code, 0);
  EXPECT_EQ(read_text(baseline_), text_);  // margins too
}

TEST_F(CheckTest, WhatMovesTooFarFails) {
  const string policy = "replay(L=4, state=e4m3:row)";
  double within = 0;
  change([&](Json& json) {
    Json& figures = json["policies"][policy]["figures"];
    const double kl = figures["mean KL"][0], margin = figures["mean KL"][1];
    ASSERT_GT(margin, 0);
    within = kl + margin / 2;
    figures["mean KL"][0] = within;
    figures["p99 KL"][0] = 2 * figures["p99 KL"][0].get<double>();
    figures["layer 1 y local"] = {1.0, 0.0};
    figures["bytes moved"][0] = figures["bytes moved"][0].get<double>() - 1;
    figures["top-1 agreements"] = {46, 0};
    json["formats"]["e4m3:row"]["fingerprints"]["ties"] = "0000";
    json["formats"]["e4m3:row"]["fingerprints"].erase("range");
    json["formats"]["int8:row"]["figures"]["overflows in the states"][0] = nullptr;
  });
  const Outcome o = run(with({"--json", path("r.json"), "--junit", path("r.xml")}));
  EXPECT_EQ(o.code, 1) << o.err;
  const std::map<std::pair<string, string>, string> expected = {
      {{policy, "mean KL"}, "within"},         {{policy, "p99 KL"}, "BETTER"},
      {{policy, "layer 1 y local"}, "BETTER"}, {{policy, "bytes moved"}, "WORSE"},
      {{policy, "top-1 agreements"}, "WORSE"}, {{"e4m3:row", "ties"}, "DIFFERS"},
      {{"e4m3:row", "range"}, "DIFFERS"},      {{"int8:row", "overflows in the states"}, "DIFFERS"}};
  std::map<std::pair<string, string>, string> found;
  const Json json = Json::parse(read_text(path("r.json")));
  for (const Json& f : json["findings"]) {
    if (f["verdict"] != "same") found[{f["subject"], f["name"]}] = f["verdict"];
  }
  EXPECT_EQ(found, expected);
  EXPECT_EQ(json["passed"], false);
  EXPECT_EQ(json["within"], 1);
  EXPECT_EQ(json["outside"], 7);
  for (const auto& [what, verdict] : expected) {
    EXPECT_NE(o.out.find(what.second), string::npos) << o.out;
  }

  boost::property_tree::ptree xml;
  boost::property_tree::read_xml(path("r.xml"), xml);
  const auto& suite = xml.get_child("testsuites.testsuite");
  EXPECT_EQ(suite.get<std::size_t>("<xmlattr>.tests"), json["findings"].size());
  EXPECT_EQ(suite.get<int>("<xmlattr>.failures"), 7);
  std::size_t cases = 0;
  for (const auto& [tag, test] : suite) {
    if (tag != "testcase") continue;
    ++cases;
    const auto at = expected.find({test.get<string>("<xmlattr>.classname"), test.get<string>("<xmlattr>.name")});
    const bool fails = at != expected.end() && at->second != "within";
    EXPECT_EQ(test.get_child_optional("failure").has_value(), fails) << test.get<string>("<xmlattr>.name");
  }
  EXPECT_EQ(cases, json["findings"].size());

  EXPECT_EQ(run(with({"--update"})).code, 0);
  EXPECT_EQ(read_text(baseline_), text_);
}

TEST_F(CheckTest, JudgesANewFormat) {
  const Json report = json(with({"--format", "e4m3:row:cap=240"}));
  ASSERT_EQ(report["comparisons"].size(), 2u);
  EXPECT_EQ(report["comparisons"][0]["schedule"], "eager(state=F)");
  const Json rows = report["comparisons"][1]["standings"];
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0]["format"], "e4m3:row:cap=240");
  EXPECT_EQ(rows[1]["format"], "e4m3:row");  // as many bytes
  EXPECT_EQ(rows[2]["format"], "int8:row");
  EXPECT_EQ(rows[1]["bytes_stored_per_sequence"], rows[0]["bytes_stored_per_sequence"]);
  EXPECT_EQ(rows[0]["kl_difference"]["mean"], 0);
  EXPECT_EQ(rows[1]["kl_difference"]["mean"].get<double>(),
            rows[1]["kl"]["mean"].get<double>() - rows[0]["kl"]["mean"].get<double>());
  // A format of the baseline is as far from the reference as it was there.
  EXPECT_EQ(rows[1]["kl"]["mean"],
            Json::parse(text_)["policies"]["replay(L=4, state=e4m3:row)"]["figures"]["mean KL"][0]);
  EXPECT_NE(run(with({"--format", "int4:row"})).out.find("too few tokens"), string::npos);
  // Half the bytes, which no format of the baseline has: the nearest with more, in two batches of tokens.
  string ids;
  for (int i = 0; i < 192; ++i) ids += std::to_string(i * i % 97) + " ";
  const string table =
      run(with({"--format", "int4:row", "--tokens", write("ids.txt", ids).string(), "--max-tokens", "192"})).out;
  EXPECT_NE(table.find("times farther for fewer bytes"), string::npos) << table;
}

TEST_F(CheckTest, AnotherModelTextOrStateIsRefused) {
  ModelFiles files("mamba2");
  files.tensors["backbone.layers.1.mixer.D"] =
      changed(files.tensors.at("backbone.layers.1.mixer.D"), [](std::size_t, float v) { return 2 * v; });
  expect_refused(with({}, files.write(folder_ / "other").string()), {"baseline.json", "model", "SHA-256"});
  expect_refused(with({"--tokens", write("ids.txt", "1 2 3 4 5 6 7 8 9").string()}),
                 {"baseline.json", "1 x 45 tokens", "1 x 9"});
  string ids;
  for (int i = 0; i < 45; ++i) ids += "7 ";
  expect_refused(with({"--tokens", write("ids.txt", ids).string()}), {"baseline.json", "tokens", "SHA-256"});
  states(2);
  expect_refused(with({}), {"baseline.json", "states", "SHA-256"});
  fs::remove(folder_ / "states.safetensors");
  expect_refused(with({}), {"states.safetensors"});
}

TEST_F(CheckTest, BadInputIsRefused) {
  for (const Words& words :
       {Words{"--max-tokens", "3"}, {"--sequences", "2"}, {"-p", "exact"}, {"--seed", "1"}, {"--states", states(1)}}) {
    expect_refused(with(words), {"--update"});
  }
  expect_refused(with({"--update", "--format", "bf16"}), {"--format", "--update"});
  expect_refused(with({"--junit", "x.xml", "--format", "bf16"}), {"--format", "--junit"});
  expect_refused(with({"--junit", "-", "--json", "-"}), {"--json -", "--junit -"});
  expect_refused(with({"--format", "bf17"}), {"bf17"});
  expect_refused(with({"--junit", path("no/such/x.xml")}), {"no/such/x.xml"});
  expect_refused(with({"--update", "-p", "eager(state=bf17)"}), {"bf17"});
  EXPECT_EQ(read_text(baseline_), text_);

  expect_refused(with({"--update", "--states", states(1, "x")}), {"states.safetensors", "'x'", "layer.I.head.H"});
  states(1);
  const auto broken = [&](const auto& how, const Words& parts) {
    change(how);
    expect_refused(with({}), parts);
  };
  broken([](Json& j) { j["baseline"] = 2; }, {"baseline.json", "layout 1", "2"});
  broken([](Json& j) { j.erase("seed"); }, {"baseline.json", "'seed'"});
  broken([](Json& j) { j["tokens"]["length"] = -1; }, {"tokens.length", "-1"});
  broken([](Json& j) { j["model"] = "x"; }, {"model", "an object"});
  broken([](Json& j) { j["policies"] = Json::object(); }, {"policies"});
  broken([&](Json& j) { j["policies"][sr_]["figures"]["mean KL"] = {1}; }, {"mean KL", "[value, margin]"});
  broken([&](Json& j) { j["policies"][sr_]["figures"]["mean KL"] = {1, -1}; }, {"mean KL", "margin"});
  broken([](Json& j) { j["policies"]["eager(state=bf17)"] = j["policies"].front(); }, {"bf17"});
  write_bytes(baseline_, "{");
  expect_refused(with({}), {"baseline.json", "JSON"});
  fs::remove(baseline_);
  expect_refused(with({}), {"baseline.json", "--update"});
  expect_refused(with({"--update"}), {"--tokens"});
  EXPECT_FALSE(fs::exists(baseline_));
}

TEST_F(CheckTest, AnInterruptLeavesTheBaselineAsItIs) {
  const string data = REPLAYSSM_DATA;
  // A study of some twenty seconds, by when even a busy machine has come to the point where interrupts are noted.
  int code = 0;
  for (int wait = 100; wait <= 6400 && code != 130; wait *= 4) {
    const Process process = start({"check", data + "/mamba2-5m", "--update", "--baseline", path("new.json"), "--tokens",
                                   data + "/sherlock.safetensors", "--max-tokens", "256", "--threads", "1"});
    std::this_thread::sleep_for(std::chrono::milliseconds(wait));
    process.send(SIGINT);
    code = process.wait();
    if (code == 130) {
      EXPECT_NE(process.err().find("interrupted in layer"), string::npos) << process.err();
    }
  }
  EXPECT_EQ(code, 130);
  EXPECT_FALSE(fs::exists(path("new.json")));
}

}  // namespace
}  // namespace replayssm
