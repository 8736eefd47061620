// The command kl: its report and its file.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/trace.h"
#include "tests/support/process.h"

namespace replayssm {
namespace {

using Json = nlohmann::json;
using Words = std::vector<string>;

class KlCommandTest : public ProgramTest {
 protected:
  Words kl(const Words& more) const {
    Words words = {"kl", mamba2_, "--tokens", mamba2_golden_};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
};

void expect_numbers(const Json& object, const Words& names) {
  for (const string& name : names) EXPECT_TRUE(object.contains(name) && object[name].is_number()) << name << object;
  EXPECT_EQ(object.size(), names.size()) << object;
}

TEST_F(KlCommandTest, ReportHasEveryField) {
  Words words = kl({"-p", "replay(L=16,read=int8:row)", "-p", "exact", "--threads", "2", "--local"});
  words[3] = write("ids.txt",
                   [] {
                     string text;
                     for (int t = 0; t < 130; ++t) text += std::to_string(t * t % 97) + (t % 10 == 9 ? "\n" : " ");
                     return text;
                   }())
                 .string();
  const Json report = json(words);
  EXPECT_EQ(report["command"], "kl");
  EXPECT_TRUE(report["version"].is_string());
  EXPECT_EQ(report["model"]["path"], mamba2_);
  EXPECT_EQ(report["model"]["type"], "mamba2");
  EXPECT_EQ(report["model"]["layers"], 3);
  EXPECT_EQ(report["model"]["ssm_layers"], 3);
  const Process sum(folder_, {"/bin/sh", "-c", "sha256sum '" + mamba2_ + "/model.safetensors'"});
  EXPECT_EQ(sum.wait(), 0);
  EXPECT_EQ(report["model"]["sha256"], sum.out().substr(0, 64));
  EXPECT_EQ(report["tokens"], 130);
  EXPECT_EQ(report["sequences"], 1);
  EXPECT_EQ(report["reference"], "exact");
  EXPECT_EQ(report["device"], "cpu");
  EXPECT_EQ(report["precision"], "fp64");
  EXPECT_TRUE(report["seconds"].is_number());
  EXPECT_EQ(report["provenance"]["threads"], 2);
  EXPECT_TRUE(report["provenance"]["git"].is_string());
  EXPECT_TRUE(report["provenance"]["build"].is_string());
  EXPECT_TRUE(report["provenance"].contains("seed"));
  ASSERT_EQ(report["results"].size(), 2u);
  EXPECT_EQ(report["results"][0]["policy"], "replay(L=16, anchor=fp32, read=int8:row)");
  EXPECT_EQ(report["results"][1]["policy"], "exact");
  for (const Json& r : report["results"]) {
    expect_numbers(r["kl"], {"mean", "sem", "p50", "p90", "p99", "max", "infinite"});
    expect_numbers(r["kl_reverse"], {"mean", "sem", "p50", "p90", "p99", "max", "infinite"});
    expect_numbers(r["delta_p"], {"rms", "p1", "p99"});
    expect_numbers(r["state"], {"bytes_stored_per_sequence", "bytes_moved_per_token", "flushes", "rounded_reads"});
    for (const string name : {"top1_agreement", "nll", "nll_delta"}) EXPECT_TRUE(r[name].is_number()) << name;
    EXPECT_TRUE(r["top1_ties"].is_number_integer());
    EXPECT_EQ(r["overflows"], 0);
    EXPECT_TRUE(r["first_non_finite"].is_null());
    ASSERT_EQ(r["layers"].size(), 3u);
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(r["layers"][i]["layer"], i);
      EXPECT_EQ(r["layers"][i]["kind"], "mamba2");
      expect_numbers(r["layers"][i]["y_rel_l2"], {"local", "propagated"});
      expect_numbers(r["layers"][i]["state_rel_l2"], {"local", "propagated"});
    }
  }
  EXPECT_EQ(report["results"][0]["state"]["flushes"], 130 / 16);
  EXPECT_EQ(report["results"][0]["control"], false);
  EXPECT_GT(report["results"][0]["kl"]["mean"].get<double>(), 0);
  EXPECT_EQ(report["results"][1]["control"], true);
  EXPECT_EQ(report["results"][1]["kl"]["max"], 0.0);
}

TEST_F(KlCommandTest, TheSameForAnyNumberOfThreads) {
  Json first;
  for (const string threads : {"1", "2", "3"}) {
    Json report = json(kl({"--threads", threads}));  // the default policies
    ASSERT_EQ(report["results"].size(), 9u);
    report.erase("seconds");
    report["provenance"].erase("threads");
    if (first.is_null()) first = report;
    EXPECT_EQ(report, first) << threads;
  }
}

TEST_F(KlCommandTest, TokensAreCutAsAsked) {
  const Words policy = {"-p", "eager(state=bf16)"};
  const auto with = [&](Words more) {
    more.insert(more.end(), policy.begin(), policy.end());
    return json(kl(more));
  };
  Json report = with({"--sequences", "4"});  // 45 ids: four rows of 11, the last id is left
  EXPECT_EQ(report["sequences"], 4);
  EXPECT_EQ(report["tokens"], 11);
  const Json cut = with({"--sequences", "4", "--max-tokens", "8"});
  EXPECT_EQ(cut["sequences"], 4);
  EXPECT_EQ(cut["tokens"], 8);
  const Json short_run = with({"--max-tokens", "11"});
  EXPECT_EQ(short_run["sequences"], 1);
  EXPECT_EQ(short_run["tokens"], 11);
  EXPECT_EQ(with({"--max-tokens", "1000"})["tokens"], 45);

  // The same rows given as rows: the same report.
  const auto ids = values_of<std::int64_t>(read_tensors(golden_file("mamba2")).at("input_ids"));
  write_tensors(folder_ / "rows.safetensors",
                {{"input_ids", stored("I64", {4, 11}, std::vector<std::int64_t>(ids.begin(), ids.begin() + 44))}});
  const Json rows = json({"kl", mamba2_, "--tokens", path("rows.safetensors"), "-p", "eager(state=bf16)"});
  EXPECT_EQ(rows["results"], report["results"]);
  const Json first_row =
      json({"kl", mamba2_, "--tokens", path("rows.safetensors"), "--sequences", "1", "-p", "eager(state=bf16)"});
  EXPECT_EQ(first_row["results"], short_run["results"]);
  expect_refused({"kl", mamba2_, "--tokens", path("rows.safetensors"), "--sequences", "5"}, {"4", "5"});
}

TEST_F(KlCommandTest, TableWithoutJsonAndBothWithAFile) {
  const Outcome o = run(kl({"-p", "eager(state=bf16)", "--json", path("x.json")}));
  EXPECT_EQ(o.code, 0);
  EXPECT_EQ(o.err, "");  // no progress bar where nobody looks
  EXPECT_NE(o.out.find("mean KL"), string::npos);
  EXPECT_NE(o.out.find("\neager(state=bf16) "), string::npos);
  EXPECT_FALSE(Json::accept(o.out));
  EXPECT_EQ(Json::parse(read_text(folder_ / "x.json"))["command"], "kl");
  EXPECT_FALSE(fs::exists(path("x.json.part")));
}

TEST_F(KlCommandTest, ARunThatBreaksIsReported) {
  ModelFiles files("mamba2");
  StoredTensor& conv = files.tensors.at("backbone.layers.1.mixer.conv1d.weight");
  conv = changed(conv, [](std::size_t i, float v) { return i < 96 * 4 ? v * 0x1p17F : v; });  // the x channels
  const string model = files.write(folder_ / "model").string();
  const Json report =
      json({"kl", model, "--tokens", mamba2_golden_, "-p", "eager(state=fp16)", "-p", "eager(state=bf16)"});
  const Json& broken = report["results"][0];
  EXPECT_GT(broken["overflows"].get<int>(), 0);
  EXPECT_EQ(broken["first_non_finite"]["layer"], 1);
  expect_numbers(broken["first_non_finite"], {"token", "layer", "head"});
  EXPECT_EQ(broken["non_finite"].get<int>(), 45 - broken["first_non_finite"]["token"].get<int>() - 1);
  for (const string name : {"mean", "sem", "p50", "p90", "p99", "max"})
    EXPECT_TRUE(broken["kl"][name].is_null()) << name;
  EXPECT_TRUE(broken["nll"].is_null());
  EXPECT_TRUE(report["results"][1]["first_non_finite"].is_null());
  EXPECT_TRUE(report["results"][1]["kl"]["mean"].is_number());
  EXPECT_TRUE(report["results"][1]["layers"][0]["y_rel_l2"]["local"].is_null());  // not asked for
  const Outcome o = run({"kl", model, "--tokens", mamba2_golden_, "-p", "eager(state=fp16)"});
  EXPECT_EQ(o.code, 0);
  EXPECT_NE(o.out.find("not finite from token"), string::npos) << o.out;
}

TEST_F(KlCommandTest, FileHoldsEveryToken) {
  const Words words = kl({"-p", "eager(state=bf16)", "-p", "eager(state=e4m3:row, layers=1-2)", "--sequences", "3",
                          "--local", "--seed", "18446744073709551615", "--output", path("x.h5")});
  const Json report = json(words);
  const TraceReader file(path("x.h5"));
  EXPECT_TRUE(file.complete());
  EXPECT_EQ(std::get<string>(file.attribute("/run", "model_sha256")), report["model"]["sha256"].get<string>());
  EXPECT_EQ(std::get<string>(file.attribute("/run", "seed")), "18446744073709551615");
  EXPECT_EQ(file.shape("/run/input_ids"), (TraceShape{3, 15}));
  const auto ids = values_of<std::int64_t>(read_tensors(golden_file("mamba2")).at("input_ids"));
  const auto stored_ids = file.read<std::int32_t>("/run/input_ids").values;
  EXPECT_TRUE(std::equal(ids.begin(), ids.end(), stored_ids.begin(), stored_ids.end()));
  for (std::size_t i = 0; i < 2; ++i) {
    const string at = "/policies/" + std::to_string(i);
    const Json& r = report["results"][i];
    EXPECT_EQ(std::get<string>(file.attribute(at, "policy")), r["policy"].get<string>());
    const auto mean = [&](const string& name) {  // over the positions that have a value
      long double sum = 0;
      std::int64_t count = 0;
      for (const double x : file.read<double>(at + "/" + name).values) {
        if (std::isnan(x)) continue;
        sum += x;
        ++count;
      }
      EXPECT_EQ(count, name.starts_with("nll") ? 42 : 45) << name;
      return static_cast<double>(sum / count);
    };
    // Sums of 45 values, each good to 44 u of the sum of their magnitudes; those of KL are not negative but for
    // rounding.
    const double rounding = 45 * std::numeric_limits<double>::epsilon();
    EXPECT_NEAR(mean("kl"), r["kl"]["mean"].get<double>(), rounding * mean("kl"));
    EXPECT_NEAR(mean("kl_reverse"), r["kl_reverse"]["mean"].get<double>(), rounding * mean("kl_reverse"));
    EXPECT_NEAR(mean("nll"), r["nll"].get<double>(), rounding * mean("nll"));
    EXPECT_NEAR(mean("nll_reference"), r["nll_reference"].get<double>(), rounding * mean("nll_reference"));
    std::int64_t agree = 0;
    for (const std::uint8_t x : file.read<std::uint8_t>(at + "/top1_agrees").values) agree += x;
    EXPECT_EQ(static_cast<double>(agree) / 45, r["top1_agreement"].get<double>());
    for (std::size_t layer = 0; layer < 3; ++layer) {
      for (const string figure : {"y_rel_l2", "state_rel_l2"}) {
        for (const string kind : {"local", "propagated"}) {
          const string dataset = at + "/layers/" + figure + "_" + kind;
          EXPECT_EQ(file.read<double>(dataset).values[layer], r["layers"][layer][figure][kind].get<double>())
              << dataset;
        }
      }
    }
  }
}

}  // namespace
}  // namespace replayssm
