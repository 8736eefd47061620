// The command oracle: its report, its exit codes, its messages.

#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

#include "analysis/oracle.h"
#include "core/tokens.h"
#include "cuda/decode.h"
#include "tests/support/process.h"

namespace replayssm {
namespace {

using OracleCommand = ProgramTest;
using Words = std::vector<string>;

TEST_F(OracleCommand, ReportsEveryRun) {
  for (const auto& [folder, tokens, layer] : {std::tuple{mamba2_, mamba2_golden_, 1}, {hybrid_, hybrid_golden_, 2}}) {
    const auto report = json({"oracle", folder, "--layer", std::to_string(layer), "--tokens", tokens, "--digits", "50",
                              "--heads", "0,3-5", "--max-tokens", "20", "-L", "4", "-L", "16", "--threads", "2"});
    EXPECT_EQ(report["command"], "oracle");
    EXPECT_EQ(report["tokens"], 20);
    EXPECT_EQ(report["layer"], layer);
    EXPECT_EQ(report["heads"], (std::vector<int>{0, 3, 4, 5}));
    EXPECT_EQ(report["provenance"]["threads"], 2);
    EXPECT_EQ(report["oracle"]["digits"], 50);
    EXPECT_EQ(report["oracle"]["passed"], true);
    EXPECT_GE(report["oracle"]["confirmed"], 50);
    ASSERT_EQ(report["results"].size(), 10u);
    const auto model = Model::open(folder);
    const auto backend = reference_backend(Precision::fp64, 1);
    std::vector<std::int32_t> ids = read_tokens(tokens).ids;
    ids.resize(20);
    const OracleResult right =
        run_oracle(*model, *backend, ids, {.layer = layer, .heads = {0, 3, 4, 5}, .lengths = {4, 16}});
    for (std::size_t r = 0; r < 10; ++r) {
      const auto& found = report["results"][r];
      EXPECT_EQ(found["policy"], right.runs[r].policy.text());
      EXPECT_EQ(found["precision"], right.runs[r].precision == Precision::fp64 ? "fp64" : "fp32");
      EXPECT_EQ(found["device"], "cpu");
      std::vector<double> y = right.runs[r].y;
      const auto least = static_cast<std::size_t>(std::ranges::min_element(y) - y.begin());
      EXPECT_EQ(found["y"]["least"], y[least]);
      EXPECT_EQ(found["y"]["worst"]["token"], least / 4);
      EXPECT_EQ(found["y"]["worst"]["head"], right.heads[least % 4]);
      ASSERT_EQ(found["y"]["least_of_heads"].size(), 20u);
      for (std::size_t t = 0; t < 20; ++t) {
        EXPECT_EQ(found["y"]["tokens"][t], t);
        EXPECT_EQ(found["y"]["least_of_heads"][t], std::min({y[4 * t], y[4 * t + 1], y[4 * t + 2], y[4 * t + 3]}));
      }
      std::ranges::sort(y);
      EXPECT_EQ(found["y"]["median"], (y[39] + y[40]) / 2);
      EXPECT_EQ(found["state"]["tokens"], std::vector<int>{19});
      EXPECT_EQ(found["state"]["least"], std::ranges::min(right.runs[r].state));
    }
  }
  const auto often =
      json({"oracle", mamba2_, "--layer", "0", "--tokens", mamba2_golden_, "--max-tokens", "7", "--state-every", "2"});
  EXPECT_EQ(often["results"][0]["state"]["tokens"], (std::vector<int>{1, 3, 5, 6}));
  const string table = run({"oracle", mamba2_, "--layer", "0", "--tokens", mamba2_golden_, "--digits", "20"}).out;
  for (const string part : {"20 digits confirmed", "replay(L=16, state=exact, order=sequential)", "fp32"}) {
    EXPECT_NE(table.find(part), string::npos) << part << "\n" << table;
  }
}

TEST_F(OracleCommand, FailsWhereDigitsAreNotConfirmed) {
  const Words words = {"oracle",   mamba2_, "--layer", "1", "--tokens", mamba2_golden_,
                       "--digits", "33",    "--guard", "0", "--json",   path("x.json")};
  const Outcome o = run(words);
  EXPECT_EQ(o.code, 1);
  EXPECT_EQ(o.err, "");
  EXPECT_NE(o.out.find("33 digits NOT CONFIRMED"), string::npos) << o.out;
  const auto report = nlohmann::json::parse(read_text(path("x.json")));  // written all the same
  EXPECT_EQ(report["oracle"]["passed"], false);
  EXPECT_LT(report["oracle"]["confirmed"], 33);
}

TEST_F(OracleCommand, UsageErrors) {
  const auto refused = [&](const Words& more, const Words& parts) {
    Words all = {"oracle", hybrid_, "--tokens", hybrid_golden_};
    all.insert(all.end(), more.begin(), more.end());
    expect_refused(all, parts);
  };
  const string most = std::to_string(max_oracle_digits());
  refused({}, {"--layer"});
  refused({"--layer", "3"}, {"layer 3", "attention"});
  refused({"--layer", "4"}, {"layer 4", "0 .. 3"});
  refused({"--layer", "-1"}, {"--layer", "-1"});
  for (const string& value : {string("0"), string("-5"), string("many"), std::to_string(max_oracle_digits() + 1)}) {
    refused({"--layer", "0", "--digits", value}, {"--digits", value});
  }
  refused({"--layer", "0", "--digits", most}, {"digits " + most, "20 guard"});
  refused({"--layer", "0", "--guard", "-1"}, {"--guard", "-1"});
  refused({"--layer", "0", "--heads", "2,6"}, {"head 6", "0 .. 5", "layer 0"});
  for (const string value : {"x", "1,", "3-1", "-2", "0-", "99999999999", "1 2"}) {
    refused({"--layer", "0", "--heads", value}, {"--heads", value});
  }
  refused({"--layer", "0", "-L", "0"}, {"L", "0"});
  refused({"--layer", "0", "--threads", "0"}, {"--threads", "0"});
  for (const string value : {"0", "48"}) refused({"--layer", "0", "--state-every", value}, {"--state-every", value});
  if (!cuda::available()) refused({"--layer", "0", "--device", "cuda"}, {"--device cuda", "no CUDA"});
  refused({"--layer", "3", "--device", "cuda"}, {"layer 3", "attention"});
  refused({"--layer", "0", "--device", "cuda", "-p", "exact"}, {"'exact'", "fp32"});
  refused({"--layer", "0", "--device", "tpu"}, {"--device", "tpu"});
  refused({"--layer", "0", "--activations", "bf16"}, {"--activations bf16", "--device cuda"});
  refused({"--layer", "0", "-p", "eager(state=fp32)"}, {"--policy eager(state=fp32)", "--device cuda"});
  refused({"--layer", "0", "--max-tokens", "0"}, {"--max-tokens", "0"});
  refused({"--layer", "0", "--json", path("no/such/x.json")}, {path("no/such/x.json")});
  expect_refused({"oracle", mamba2_, "--layer", "0", "--tokens", write("large.txt", "1 2 97").string()}, {"97", "2"});

  // Inputs that binary64 holds and binary32 does not.
  ModelFiles files("mamba2");
  const string conv = "backbone.layers.0.mixer.conv1d.";
  files.tensors[conv + "weight"] = changed(files.tensors.at(conv + "weight"), [](std::size_t, float) { return 3e38F; });
  expect_refused({"oracle", files.write(folder_ / "large").string(), "--layer", "0", "--tokens", mamba2_golden_},
                 {"layer 0", "head 0", "token", "finite"});
}

}  // namespace
}  // namespace replayssm
