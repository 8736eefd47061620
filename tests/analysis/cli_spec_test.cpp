// The command spec: its report, its exit codes, what it refuses.

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "tests/support/process.h"

namespace replayssm {
namespace {

using Json = nlohmann::json;
using Words = std::vector<string>;

class SpecTest : public ProgramTest {
 protected:
  /// The 45 golden tokens as prompts of 8 with 12 new ones.
  Words spec(const string& model, const Words& more = {}) const {
    Words words = {"spec",   model, "--tokens",        golden(model), "--prompts",    "2", "--window", "4",
                   "--ring", "6",   "--prompt-tokens", "8",           "--new-tokens", "12"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  string golden(const string& model) const { return model == hybrid_ ? hybrid_golden_ : mamba2_golden_; }
};

TEST_F(SpecTest, ReportsWhatItDid) {
  for (const string& model : {mamba2_, hybrid_}) {
    const Json report = json(spec(model, {"--accept", "0.6", "--seed", "3", "--batch", "1,64", "-p",
                                          "replay(L=8, state=bf16)", "-p", "replay(L=8, state=exact)"}));
    EXPECT_EQ(report["command"], "spec");
    EXPECT_EQ(report["reference"], "plain decoding");
    EXPECT_EQ(report["sequences"], 2);
    EXPECT_EQ(report["window"], 4);
    EXPECT_EQ(report["prompt_tokens"], 8);
    EXPECT_EQ(report["new_tokens"], 12);
    EXPECT_EQ(report["teacher_forced"], false);
    EXPECT_EQ(report["drafts"], "the model with an exact state, each right with probability 0.6");
    EXPECT_EQ(report["provenance"]["seed"], 3);
    EXPECT_EQ(report["passed"], true);
    ASSERT_EQ(report["results"].size(), 2u);
    for (const Json& r : report["results"]) {
      EXPECT_EQ(r["ring"], 6);
      EXPECT_EQ(r["tokens"], 24);
      const auto sum = [](const Json& counts, bool weighted) {
        std::int64_t all = 0, i = 0;
        for (const Json& count : counts) all += (weighted ? i++ : 1) * count.get<std::int64_t>();
        return all;
      };
      EXPECT_EQ(sum(r["steps_by_committed_tokens"], false), r["steps"]);
      EXPECT_EQ(sum(r["steps_by_committed_tokens"], true), 24);
      EXPECT_EQ(sum(r["steps_by_ring_occupancy"], false), r["steps"]);
      EXPECT_EQ(sum(r["steps_by_rollback_depth"], true), r["drafts"].get<int>() - r["accepted"].get<int>());
      EXPECT_GT(r["rollbacks"], 0);
      EXPECT_GT(r["flushes"], 0);
      EXPECT_TRUE(r["flush_spacing"]["mean"].is_number());
      EXPECT_EQ(r["plain_decoding"]["same_flushes"]["demand"], "bits");
      EXPECT_EQ(r["plain_decoding"]["same_flushes"]["same_logits"], 24);
      EXPECT_EQ(r["plain_decoding"]["same_flushes"]["first_divergence"], nullptr);
      EXPECT_EQ(r["predicted"].size(), 2u);
      const Json& state = r["state"];
      EXPECT_LT(state["speculative"]["bytes_moved_per_token"], state["snapshots"]["bytes_moved_per_token"]);
    }
    EXPECT_EQ(report["results"][0]["plain_decoding"]["own_schedule"]["demand"], "nothing");
    EXPECT_EQ(report["results"][1]["plain_decoding"]["own_schedule"]["demand"], "tokens");
  }
}

TEST_F(SpecTest, TheBytesOfARingAndOfSnapshots) {
  const Json state = json(spec(mamba2_, {"-p", "replay(L=8, state=bf16)"}))["results"][0]["state"];
  const double bf16 = 3 * 6 * 16 * 24 * 2, record = 3 * (6 * 16 * 2 + 2 * 24 * 2 + 6 * 4);
  EXPECT_EQ(state["eager"]["bytes_stored_per_sequence"], bf16);
  EXPECT_EQ(state["eager"]["bytes_moved_per_token"], 2 * bf16);
  EXPECT_EQ(state["replay"]["bytes_stored_per_sequence"], bf16 + 7 * record);
  EXPECT_EQ(state["speculative"]["bytes_stored_per_sequence"], bf16 + (6 + 4) * record);
  EXPECT_EQ(state["snapshots"]["bytes_stored_per_sequence"], (1 + 4) * bf16);
}

TEST_F(SpecTest, TakesDraftsFromEverywhere) {
  const string counts = write("counts.txt", "4 1 0 2\n").string();
  const auto steps = [&](const Words& more) { return json(spec(mamba2_, more))["results"][0]["steps"].get<int>(); };
  // The model's own drafts are all right, under its own exact state: windows of 4 tokens, three of each text.
  EXPECT_EQ(steps({"--draft", mamba2_, "-p", "replay(L=8, state=exact)"}), 6);
  EXPECT_EQ(steps({"--accept", "1", "--teacher-forced"}), 6);
  EXPECT_EQ(steps({"--accept", "0", "--teacher-forced"}), 24);
  EXPECT_EQ(steps({"--accept", counts, "--teacher-forced"}), 2 * 6);  // 4, 1, none, 2, 4 and 1 tokens
  EXPECT_GT(steps({"--ngram", "1"}), 0);
}

TEST_F(SpecTest, TheRingIsAsLongAsTheReplayAndTheWindow) {
  Words words = spec(mamba2_);
  words.erase(std::ranges::find(words, "--ring"), std::ranges::find(words, "--ring") + 2);
  words.insert(words.end(), {"-p", "replay(L=7, state=fp32)", "-p", "replay(L=3, state=fp32)", "-p", "exact"});
  const Json results = json(words)["results"];
  EXPECT_EQ(results[0]["ring"], 7);
  EXPECT_EQ(results[1]["ring"], 4);
  EXPECT_EQ(results[2]["ring"], 4);
}

TEST_F(SpecTest, ThreadsAndPrecision) {
  Json one = json(spec(hybrid_, {"--threads", "1"})), four = json(spec(hybrid_, {"--threads", "4"}));
  EXPECT_EQ(one["results"], four["results"]);
  EXPECT_EQ(one["results"].size(), 3u);
  const Json fp32 = json(spec(hybrid_, {"--precision", "fp32"}));
  EXPECT_EQ(fp32["precision"], "fp32");
  EXPECT_EQ(fp32["passed"], true);
}

TEST_F(SpecTest, TextForPeople) {
  const Outcome o = run(spec(mamba2_, {"--json", path("report.json")}));
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(o.err, "");
  for (const string part : {"2 x 12 tokens", "prompt lookup of 3-grams", "replay(L=16, state=exact), ring of 6",
                            "accepted", "rolled back", "flushes", "passed: ", "snapshots", "x eager"}) {
    EXPECT_NE(o.out.find(part), string::npos) << part;
  }
  EXPECT_EQ(Json::parse(read_text(folder_ / "report.json"))["passed"], true);
}

TEST_F(SpecTest, RefusesBadInput) {
  const string counts = write("counts.txt", "5").string();
  expect_refused({"spec", mamba2_}, {"--tokens"});
  for (const string option : {"--window", "--ring", "--prompts", "--prompt-tokens", "--new-tokens", "--ngram"}) {
    for (const string value : {"0", "-1", "many"}) expect_refused(spec(mamba2_, {option, value}), {option});
  }
  expect_refused(spec(mamba2_, {"--accept", "1.5"}), {"--accept 1.5", "0..1"});
  expect_refused(spec(mamba2_, {"--accept", path("none")}), {path("none")});
  expect_refused(spec(mamba2_, {"--accept", counts}), {counts, "5", "4"});
  expect_refused(spec(mamba2_, {"--accept", "0.5", "--ngram", "2"}), {"--accept", "--ngram"});
  expect_refused(spec(mamba2_, {"--accept", "0.5", "--draft", mamba2_}), {"--accept", "--draft"});
  expect_refused(spec(mamba2_, {"--bandwidth", "nan"}), {"--bandwidth", "nan"});
  expect_refused(spec(mamba2_, {"--batch", "0"}), {"--batch", "0"});
  expect_refused(spec(mamba2_, {"--json", path("no/such/x.json")}), {path("no/such/x.json")});
  expect_refused(spec(mamba2_, {"-p", "replay(L=8, state=bf17)"}), {"bf17"});
  expect_refused(spec(mamba2_, {"-p", "eager(state=bf16, layers=7)"}), {"layers=7"});
  Words words = spec(mamba2_, {"-p", "replay(L=8, state=bf16)"});
  *(std::ranges::find(words, "--ring") + 1) = "19";
  expect_refused(words, {"replay(L=8, state=bf16)", "19"});
  *(std::ranges::find(words, "--ring") + 1) = "3";
  expect_refused(words, {"ring", "4", "3"});
  *(std::ranges::find(words, "--prompt-tokens") + 1) = "23";
  expect_refused(words, {mamba2_golden_, "22", "23"});  // half of 45 tokens

  words = spec(mamba2_);
  *(std::ranges::find(words, "--prompts") + 1) = "46";
  expect_refused(words, {mamba2_golden_, "45", "--prompts 46"});

  ModelFiles files("mamba2");
  files.config["vocab_size"] = 96;
  for (const string name : {"backbone.embeddings.weight", "lm_head.weight"}) {
    StoredTensor& tensor = files.tensors.at(name);
    tensor.shape[0] = 96;
    tensor.bytes.resize(tensor.bytes.size() / 97 * 96);
  }
  expect_refused(spec(mamba2_, {"--draft", files.write(folder_ / "other").string()}), {"--draft", "96", "97"});
}

TEST_F(SpecTest, EndsOnInterrupt) {
  const string model = string(REPLAYSSM_DATA) + "/mamba2-5m";
  const Process process = start({"spec", model, "--tokens", string(REPLAYSSM_DATA) + "/sherlock.safetensors",
                                 "--new-tokens", "100000", "--json", path("x.json")});
  while (!fs::exists(path("stdout.txt")) || process.out().empty())
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  process.send(SIGINT);
  EXPECT_EQ(process.wait(), 130);
  EXPECT_EQ(std::ranges::count(process.err(), '\n'), 1) << process.err();
  EXPECT_NE(process.err().find("interrupted after"), string::npos) << process.err();
  EXPECT_FALSE(fs::exists(path("x.json")));
}

}  // namespace
}  // namespace replayssm
