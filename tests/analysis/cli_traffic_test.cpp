// The commands about bytes and speed.

#include <gtest/gtest.h>

#include "tests/support/process.h"

namespace replayssm {
namespace {

using Json = nlohmann::json;
using Words = std::vector<string>;
using TrafficCommand = ProgramTest;
using BenchCommand = ProgramTest;

const string tiny = "mamba2:heads=2,head_dim=4,state_dim=8,groups=1";

TEST_F(TrafficCommand, CountsByHand) {
  // As in roofline_test.cpp: state 128 bytes, record 40, inputs and y 68; a cycle of 4 steps reads 4 states and 0 + 1 +
  // 2 + 3 records, writes 1 state and appends 3 records.
  const Json all = json({"traffic", "--shape", tiny + ",layers=3", "-p", "replay(L=4, state=bf16)", "--batch", "1,7",
                         "--bandwidth", "2", "--launch", "5", "--replay-launch", "1", "--longest", "4"});
  EXPECT_EQ(all["command"], "traffic");
  EXPECT_EQ(all["ssm_layers"], 3);
  const Json& result = all["results"][0];
  EXPECT_EQ(result["policy"], "replay(L=4, state=bf16)");
  EXPECT_EQ(result["bytes_stored_per_sequence"], 3 * (128 + 3 * 40));
  const Json expected = {{"state_read", 128}, {"state_write", 32}, {"scales", 0},       {"residuals", 0},
                         {"ring_read", 60},   {"ring_append", 30}, {"activations", 68}, {"total", 250 + 68.0}};
  EXPECT_EQ(result["bytes_per_token_and_layer"], expected);
  ASSERT_EQ(result["batches"].size(), 2U);
  const Json& batch = result["batches"][1];
  EXPECT_EQ(batch["batch"], 7);
  // 2 GB/s are 2000 bytes a microsecond. Multiples of a microsecond come out of sums of seconds: nearly equal.
  EXPECT_DOUBLE_EQ(batch["step_us"].get<double>(), 3 * (7 * 318 / 2000.0 + 5 + 1));
  EXPECT_DOUBLE_EQ(batch["eager_over_step"].get<double>(), (7 * (256 + 68) / 2000.0 + 5) / (7 * 318 / 2000.0 + 6));
  EXPECT_DOUBLE_EQ(batch["eager_fp32_over_step"].get<double>(), (7 * (512 + 68) / 2000.0 + 5) / (7 * 318 / 2000.0 + 6));
  EXPECT_EQ(batch["best_length"], 1);  // a microsecond is more than what a replay saves here
  EXPECT_EQ(batch["fastest"], "eager(state=bf16)");
}

TEST_F(TrafficCommand, OfAModelCountsItsLayers) {
  // Layers 0, 1 and 2 of the fixture are Mamba-2, 6 heads of 16 x 24 (tests/data): 3 states of 2304 elements.
  const Json all = json({"traffic", mamba2_, "-p", "eager(state=fp32)", "-p", "eager(state=fp32, layers=1)"});
  const Json inspect = json({"inspect", mamba2_});
  EXPECT_EQ(all["results"][0]["bytes_stored_per_sequence"], inspect["state_bytes_fp32"]);
  const double one = inspect["layers"][1]["state_bytes_fp32"], three = inspect["state_bytes_fp32"];
  EXPECT_EQ(all["results"][1]["bytes_stored_per_sequence"], one + 2 * (three - one));  // the others in fp64
}

TEST_F(TrafficCommand, PublishedFloorsAsATable) {
  const Outcome o = run({"traffic", "--shape", "mamba2:heads=128,head_dim=64,state_dim=128,groups=8", "--batch", "256",
                         "--bandwidth", "4520", "-p", "replay(L=16, state=fp32)"});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.out.find(" 263.6 "), string::npos) << o.out;
}

TEST_F(TrafficCommand, HelpNamesEveryOption) {
  const auto names = [&](const string& command, const Words& options) {
    const Outcome o = run({command, "--help"});
    EXPECT_EQ(o.code, 0);
    for (const string& option : options) EXPECT_NE(o.out.find(option), string::npos) << command << " " << option;
  };
  names("traffic", {"MODEL", "--shape", "heads=128", "--policy", "--batch", "--bandwidth", "--launch",
                    "--replay-launch", "--longest", "--activations", "--json"});
  names("bench", {"--suite", "quick", "table", "sweep", "--kernel", "--shape", "--batch", "--length", "--storage",
                  "--read", "--policy", "--activations", "--ring", "--ring-u", "--variant", "--json"});
}

TEST_F(TrafficCommand, Refuses) {
  const auto shape = [&](const string& text, const Words& parts) {
    Words named = parts;
    named.push_back("--shape");
    expect_refused({"traffic", "--shape", text}, named);
  };
  expect_refused({"traffic"}, {"MODEL", "--shape"});
  expect_refused({"traffic", mamba2_, "--shape", tiny}, {"MODEL", "--shape"});
  expect_refused({"traffic", path("none")}, {path("none")});
  shape("mamba3:heads=2", {"'mamba3'"});
  shape("mamba2", {"groups", "missing"});
  shape("mamba2:heads=2,head_dim=4,groups=1", {"state_dim", "missing"});
  shape("mamba2:heads=2,heads=2,head_dim=4,state_dim=8,groups=1", {"'heads=2'"});
  shape("mamba2:heads=0,head_dim=4,state_dim=8,groups=1", {"heads", "'0'"});
  shape("mamba2:heads=two,head_dim=4,state_dim=8,groups=1", {"heads", "'two'"});
  shape("mamba2:heads=3,head_dim=4,state_dim=8,groups=2", {"groups", "3"});
  shape("mamba2:heads=2,head_dim=4,state_dim=8,groups=1,depth=2", {"'depth=2'"});
  const auto with = [&](const Words& more, const Words& parts) {
    Words all = {"traffic", "--shape", tiny};
    all.insert(all.end(), more.begin(), more.end());
    expect_refused(all, parts);
  };
  for (const string value : {"0", "-1", "many", "1.5"}) with({"--batch", value}, {"--batch", value});
  for (const string value : {"0", "-4", "fast", "nan"}) with({"--bandwidth", value}, {"--bandwidth", value});
  for (const string value : {"-1", "nan"}) with({"--launch", value}, {"--launch", value});
  with({"--longest", "0"}, {"--longest", "0"});
  with({"-p", "eager(state=bf17)"}, {"'bf17'"});
  with({"-p", "eager(state=bf16, layers=1)"}, {"layers=1", "layer 1"});
  with({"--json", path("none/x.json")}, {path("none/x.json")});
}

TEST_F(BenchCommand, Refuses) {  // with a device and without
  for (const Words& words : {Words{"--suite", "huge"},
                             {"--kernel", "mamba3"},
                             {"--batch", "0"},
                             {"--length", "1"},
                             {"--storage", "tf32"},
                             {"--read", "int4:row"},
                             {"--activations", "fp64"},
                             {"--ring", "int8"},
                             {"--variant", "quick"}}) {
    Words all = words;
    all.insert(all.begin(), "bench");
    expect_refused(all, {words[0], words[1]});
  }
  expect_refused({"bench", "--shape", "mamba2:heads=2"}, {"--shape", "missing"});
  expect_refused({"bench", "-p", "eager(state=bf17)"}, {"'bf17'"});
}

}  // namespace
}  // namespace replayssm
