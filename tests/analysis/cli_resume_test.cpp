// Studies that Ctrl-C or SIGKILL ends half way, and that go on.

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "tests/support/process.h"
#include "tests/support/trace_contents.h"

namespace replayssm {
namespace {

using Json = nlohmann::json;
using Words = std::vector<string>;

struct End {
  const char* command;
  int signal;
};

class ResumeTest : public ProgramTest {
 protected:
  /// A second or so of work on one thread, in 8 layers; its file is `name`.
  Words study(const string& command, const string& name, const Words& more = {}) const {
    const string data = REPLAYSSM_DATA;
    Words words = {command, data + "/mamba2-5m", "--tokens", data + "/sherlock.safetensors", "--max-tokens", "320",
                   "--threads", "1", "-p", "eager(state=e4m3:row)", "-p", "replay(L=16, anchor=fp32, read=int8:row)",
                   "--output", path(name), "--json", path(name + ".json")};
    if (command == "layers") {  // slower: fewer tokens, in two chunks even so, and no stream for every layer
      words[5] = "144";
      words.insert(words.end(), {"--no-attribution", "--trace", "u,w,decay,y,state", "--trace-layers", "0+4+7"});
    }
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  /// Layers that are done according to what the run has saved: behind the seconds.
  std::int64_t layers_done(const string& name) const {
    std::ifstream state(path(name) + ".parts/state", std::ios::binary);
    char bytes[16] = {};
    std::int64_t done = 0;
    if (state.read(bytes, sizeof bytes)) std::memcpy(&done, bytes + 8, sizeof done);
    return done;
  }

  void expect_resumed(const string& command, const string& name) const {
    const Outcome done = run(study(command, name, {"--resume"}));
    EXPECT_EQ(done.code, 0) << done.err;
    EXPECT_FALSE(fs::exists(path(name) + ".parts"));
    expect_same_contents(path(name), path("whole.h5"));
    const auto report = [&](const string& file) {
      Json json = Json::parse(read_text(path(file)));
      json.erase("seconds");
      return json;
    };
    EXPECT_EQ(report(name + ".json"), report("whole.h5.json"));
  }
};

class ResumeAfter : public ResumeTest, public testing::WithParamInterface<End> {};

TEST_P(ResumeAfter, AnyLayerGivesTheSameFile) {
  const auto [command, signal] = GetParam();
  ASSERT_EQ(run(study(command, "whole.h5")).code, 0);
  for (const std::int64_t layers : {0, 4, 8}) {
    SCOPED_TRACE(layers);
    const Process process = start(study(command, "x.h5"));
    while (!fs::exists(path("x.h5")) &&
           (!fs::exists(path("x.h5.parts/identity")) || layers_done("x.h5") < layers)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    process.send(signal);
    const int code = process.wait();
    if (layers > 0 && fs::exists(path("x.h5"))) {  // it was quicker, or saved nothing more because saving is slow
      expect_resumed(command, "x.h5");
      continue;
    }
    EXPECT_EQ(code, signal == SIGINT ? 130 : -SIGKILL);
    EXPECT_FALSE(fs::exists(path("x.h5"))) << "looks whole";
    EXPECT_FALSE(fs::exists(path("x.h5.json")));
    const bool kept = fs::exists(path("x.h5.parts/state"));
    EXPECT_TRUE(kept || layers == 0);
    if (signal == SIGINT) {
      const int notes = command == string("layers") ? 1 : 0;  // the size of the trace
      EXPECT_EQ(std::ranges::count(process.err(), '\n'), 1 + notes) << process.err();
      EXPECT_NE(process.err().find("interrupted"), string::npos);
      EXPECT_NE(process.err().find(kept ? "--resume" : "nothing is kept"), string::npos) << process.err();
      EXPECT_EQ(fs::exists(path("x.h5.parts")), kept);
    }
    if (kept) expect_refused(study(command, "x.h5"), {path("x.h5.parts"), "--resume"});
    expect_resumed(command, "x.h5");
    fs::remove(path("x.h5"));
    fs::remove(path("x.h5.json"));
  }
}

TEST_P(ResumeAfter, ManyInterruptionsGiveTheSameFile) {
  const auto [command, signal] = GetParam();
  ASSERT_EQ(run(study(command, "whole.h5")).code, 0);
  int code = -1;
  for (double milliseconds = 80; code != 0; milliseconds *= 1.5) {
    const Process process = start(study(command, "x.h5", {"--resume"}));
    std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(milliseconds));
    process.send(signal);
    code = process.wait();
    // A run that has not come to its study yet ends as any program does.
    ASSERT_TRUE(code == 0 || code == 130 || code == -signal) << code << process.err();
  }
  expect_resumed(command, "x.h5");
}

INSTANTIATE_TEST_SUITE_P(Signals, ResumeAfter,
                         testing::Values(End{"kl", SIGINT}, End{"kl", SIGKILL}, End{"layers", SIGINT},
                                         End{"layers", SIGKILL}),
                         [](const auto& end) {
                           return string(end.param.command) + (end.param.signal == SIGKILL ? "Kill" : "Interrupt");
                         });

TEST_F(ResumeTest, AnotherRunIsRefused) {
  const Process process = start(study("kl", "x.h5"));
  while (layers_done("x.h5") < 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  expect_refused(study("kl", "x.h5", {"--resume"}), {path("x.h5.parts"), "another process"});
  process.send(SIGINT);
  ASSERT_EQ(process.wait(), 130);
  const string parts = path("x.h5.parts");
  expect_refused(study("kl", "x.h5", {"--resume", "--local"}), {parts, "local", "'yes'", "'no'"});
  expect_refused(study("kl", "x.h5", {"--resume", "--precision", "fp32"}), {parts, "precision", "'fp32'", "'fp64'"});
  expect_refused(study("kl", "x.h5", {"--resume", "-p", "exact"}), {parts, "policies", "'3'", "'2'"});
  expect_refused(study("kl", "x.h5", {"--resume", "--sequences", "2"}), {parts, "sequences", "'2'", "'1'"});
  expect_refused(study("layers", "x.h5", {"--resume"}), {parts, "command", "'layers'", "'kl'"});
  Words words = study("kl", "x.h5", {"--resume"});
  words[5] = "319";
  expect_refused(words, {parts, "tokens", "'319", "'320"});
  words = study("kl", "x.h5", {"--resume"});
  words[9] = "eager(state=int8:row)";
  expect_refused(words, {parts, "policy 0", "'eager(state=int8:row)'", "'eager(state=e4m3:row)'"});
  words = study("kl", "x.h5", {"--resume"});
  words[1] = string(REPLAYSSM_DATA) + "/gdn-hybrid-8m";
  expect_refused(words, {parts, "model", "qwen3_5", "mamba2"});
  words = study("kl", "x.h5", {"--resume"});
  words[7] = "2";  // threads change nothing
  EXPECT_EQ(run(words).code, 0);
}

TEST_F(ResumeTest, WithoutAFileThereIsNothingToResume) {
  Words words = study("kl", "x.h5");
  words.resize(words.size() - 4);
  words.insert(words.end(), {"--max-tokens", "20000"});
  words.erase(words.begin() + 4, words.begin() + 6);
  const Process process = start(words);
  std::this_thread::sleep_for(std::chrono::milliseconds(500));  // reading and checking take a few
  process.send(SIGINT);
  EXPECT_EQ(process.wait(), 130);
  EXPECT_EQ(std::ranges::count(process.err(), '\n'), 1) << process.err();
  EXPECT_NE(process.err().find("nothing is kept"), string::npos) << process.err();
  words.push_back("--resume");
  expect_refused(words, {"--resume", "--output"});
  words.insert(words.end(), {"--json", "-"});
  expect_refused(words, {"--resume", "--output"});
}

TEST_F(ResumeTest, ASecondInterruptEndsAtOnce) {
  Words words = study("kl", "x.h5");
  words[5] = "20000";
  words.erase(words.begin() + 8, words.begin() + 12);  // nine policies: a chunk takes a third of a second or more
  const Process process = start(words);
  while (!fs::exists(path("x.h5.parts/identity"))) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  for (int i = 0; i < 20; ++i) {  // a signal that waits to be delivered swallows the next
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    process.send(SIGINT);
  }
  EXPECT_EQ(process.wait(), -SIGINT);
}

TEST_F(ResumeTest, TracesThatCannotBeMadeAreRefused) {
  const Words layers = {"layers", mamba2_, "--tokens", mamba2_golden_, "-p", "eager(state=bf16)"};
  const auto with = [&](const Words& more) {
    Words words = layers;
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  expect_refused(with({"--trace", "y"}), {"--trace", "--output"});
  expect_refused(with({"--trace-layers", "0", "--output", path("x.h5")}), {"--trace-layers", "--trace"});
  expect_refused(with({"--trace", "y,z", "--output", path("x.h5")}), {"'y,z'", "'z'", "u, w, decay, y or state"});
  expect_refused(with({"--trace", "y", "--trace-layers", "0,1", "--output", path("x.h5")}), {"0-3+7", "'0,1'"});
  expect_refused(with({"--trace", "y", "--trace-layers", "2-5", "--output", path("x.h5")}), {"no layer 3", "0-2"});
  EXPECT_FALSE(fs::exists(path("x.h5.parts")));
}

TEST_F(ResumeTest, NothingSavedStartsAnewAndSaysSo) {
  const Outcome o = run({"kl", mamba2_, "--tokens", mamba2_golden_, "-p", "eager(state=bf16)", "--resume", "--json",
                         path("x.json")});
  EXPECT_EQ(o.code, 0);
  EXPECT_NE(o.err.find(path("x.json.parts") + " holds nothing to resume"), string::npos) << o.err;
  EXPECT_TRUE(fs::exists(path("x.json")));
  EXPECT_FALSE(fs::exists(path("x.json.parts")));
}

TEST_F(ResumeTest, AFileThatCannotBeWrittenIsRefusedBeforeTheWork) {
  const string notes = write("notes.h5", "not ours").string();
  expect_refused({"kl", mamba2_, "--tokens", mamba2_golden_, "--output", notes}, {notes, "left as it is"});
  EXPECT_EQ(read_text(notes), "not ours");
  EXPECT_FALSE(fs::exists(notes + ".parts"));
  expect_refused({"kl", mamba2_, "--tokens", mamba2_golden_, "--output", path("none/x.h5")}, {path("none/x.h5")});
}

}  // namespace
}  // namespace replayssm
