// Agreement with a framework: the golden models pass, planted faults do not.

#include "analysis/verify.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "tests/support/forward.h"
#include "tests/support/model_files.h"

namespace replayssm {
namespace {

constexpr double required = 1e-5;  // of logits in relative L2: the project's requirement

Verification run_verify(const fs::path& folder, const fs::path& golden, Precision precision = Precision::fp64) {
  const auto backend = reference_backend(precision, 1);
  return verify(*Model::open(folder), *backend, golden);
}

/// The error of the framework's own fp32 run against its run in binary64, where norms, gates and scans stay in fp32: no
/// run in better arithmetic may be further away than that, no other run in fp32 further than twice as far.
double framework_in_fp32(const string& name) {
  const StoredTensors golden = read_tensors(golden_file(name));
  const std::vector<float> fp32 = values_of<float>(golden.at("logits"));
  return relative_l2({fp32.begin(), fp32.end()}, values_of<double>(golden.at("logits_f64")));
}

class VerifyGoldenTest : public testing::TestWithParam<const char*> {};

TEST_P(VerifyGoldenTest, LogitsAgree) {
  const Verification v = run_verify(golden_folder(GetParam()), golden_file(GetParam()));
  EXPECT_EQ(v.tokens, 45);
  EXPECT_EQ(v.sequences, 1);
  ASSERT_EQ(v.logits.size(), 2u);
  EXPECT_EQ(v.logits[0].name, "logits_f64");
  EXPECT_EQ(v.logits[1].name, "logits");
  for (const Agreement& a : v.logits) {
    EXPECT_EQ(a.matches, "logits");
    EXPECT_LE(a.rel_l2, required) << a.name;
    EXPECT_GT(a.rel_l2, 0) << a.name;  // equal to the last bit would be another program's numbers
    EXPECT_EQ(a.argmax_agreement, 1) << a.name;
  }
  EXPECT_LE(v.logits[0].rel_l2, framework_in_fp32(GetParam()));
  EXPECT_LE(v.worst(), required);
  EXPECT_TRUE(v.others.empty());
}

TEST_P(VerifyGoldenTest, Fp32AgreesAsFarAsFp32Can) {
  const Verification v = run_verify(golden_folder(GetParam()), golden_file(GetParam()), Precision::fp32);
  EXPECT_LE(v.logits[0].rel_l2, 2 * framework_in_fp32(GetParam()));
  EXPECT_GT(v.logits[0].rel_l2, std::ldexp(1.0, -26));  // and no better: it was computed in fp32
}

TEST_P(VerifyGoldenTest, HiddenStatesAreMatchedAsWhatTheyAre) {
  const string name = GetParam();
  const Verification v = run_verify(golden_folder(name), golden_file(name));
  const std::size_t layers = name == "mamba2" ? 3 : name == "mamba2_tied" ? 2 : 4;
  ASSERT_EQ(v.hidden.size(), layers + 1);
  for (std::size_t i = 0; i <= layers; ++i) {
    const string side = name == "qwen3_5" ? "input" : "output";
    EXPECT_EQ(v.hidden[i].name, "hidden_" + std::to_string(i));
    EXPECT_EQ(v.hidden[i].matches, i == layers ? "final norm" : side + " of layer " + std::to_string(i));
    EXPECT_LE(v.hidden[i].rel_l2, required) << v.hidden[i].name;
  }
  if (name == "qwen3_5") {
    EXPECT_EQ(v.hidden[0].max_abs, 0);  // rows of the embedding
  }
}

INSTANTIATE_TEST_SUITE_P(Goldens, VerifyGoldenTest, testing::Values("mamba2", "mamba2_tied", "qwen3_5"),
                         [](const auto& golden) { return string(golden.param); });

class VerifyTest : public FilesTest {
 protected:
  fs::path golden_with(const string& name, const std::function<void(StoredTensors&)>& change) const {
    StoredTensors golden = read_tensors(golden_file(name));
    change(golden);
    write_tensors(folder_ / "golden.safetensors", golden);
    return folder_ / "golden.safetensors";
  }
  Verification verify_changed(const string& name, const std::function<void(ModelFiles&)>& change) const {
    ModelFiles files(name);
    change(files);
    return run_verify(files.write(folder_ / "model"), golden_file(name));
  }
};

TEST_F(VerifyTest, PlantedFaultsAreFound) {
  // Each is a fault that a loader could have; all are far above the default bound of the command, 1e-4.
  constexpr double bound = 1e-4;
  const auto one_weight = [](const string& name) {
    return [name](ModelFiles& files) {
      files.tensors.at(name) =
          changed(files.tensors.at(name), [](std::size_t i, float v) { return i == 7 ? v + 0.5F : v; });
    };
  };
  const auto setting = [](const string& key, const nlohmann::json& value) {
    return [key, value](ModelFiles& files) { files.config[key] = value; };
  };
  for (const string weight : {"in_proj.weight", "conv1d.weight", "norm.weight", "out_proj.weight"}) {
    EXPECT_GT(verify_changed("mamba2", one_weight("backbone.layers.2.mixer." + weight)).worst(), bound) << weight;
  }
  EXPECT_GT(verify_changed("mamba2", one_weight("lm_head.weight")).worst(), bound);
  EXPECT_GT(verify_changed("mamba2", setting("layer_norm_epsilon", 0.1)).worst(), bound);
  EXPECT_GT(verify_changed("mamba2", setting("time_step_limit", {0.0, 0.1})).worst(), bound);
  EXPECT_GT(verify_changed("qwen3_5", one_weight("model.layers.3.self_attn.k_norm.weight")).worst(), bound);
  EXPECT_GT(verify_changed("qwen3_5", setting("rms_norm_eps", 0.1)).worst(), bound);
  EXPECT_GT(verify_changed("qwen3_5", setting("rope_parameters", {{"rope_theta", 100.0}})).worst(), bound);
  EXPECT_GT(verify_changed("qwen3_5", setting("rope_parameters", {{"partial_rotary_factor", 0.5}})).worst(), bound);
  EXPECT_LE(verify_changed("qwen3_5", [](ModelFiles&) {}).worst(), bound);
}

TEST_F(VerifyTest, ErrorsAreTheDefinition) {
  // One golden logit moved by d: max_abs moves to d, the relative L2 to d / |logits|, both up to the distance that the
  // unchanged golden has.
  const double d = 1000;
  Values moved;
  const fs::path golden = golden_with("mamba2", [&](StoredTensors& tensors) {
    moved = values_of<double>(tensors.at("logits_f64"));
    moved[123] += d;
    tensors.at("logits_f64") = stored("F64", {1, 45, 97}, moved);
  });
  double norm = 0;
  for (const double x : moved) norm += x * x;
  const Verification v = run_verify(golden_folder("mamba2"), golden);
  EXPECT_NEAR(v.logits[0].max_abs, d, required * d);
  EXPECT_NEAR(v.logits[0].rel_l2, d / std::sqrt(norm), required);
  EXPECT_EQ(v.logits[0].argmax_agreement, 44.0 / 45);
  EXPECT_EQ(v.worst(), v.logits[0].rel_l2);
}

TEST_F(VerifyTest, NotANumberIsTheWorstOfAll) {
  const fs::path golden = golden_with("mamba2", [](StoredTensors& tensors) {
    tensors.at("logits") = changed(tensors.at("logits"), [](std::size_t i, float v) {
      return i == 0 ? std::numeric_limits<float>::quiet_NaN() : v;
    });
  });
  const Verification v = run_verify(golden_folder("mamba2"), golden);
  EXPECT_TRUE(std::isnan(v.logits[1].rel_l2));
  EXPECT_TRUE(std::isnan(v.logits[1].max_abs));
  EXPECT_EQ(v.worst(), std::numeric_limits<double>::infinity());
}

TEST_F(VerifyTest, LossesAreThoseOfTheLogits) {
  // logsumexp and nll computed here, literally, from the golden logits in binary64.
  const StoredTensors tensors = read_tensors(golden_file("mamba2"));
  const Values logits = values_of<double>(tensors.at("logits_f64"));
  const auto ids = values_of<std::int64_t>(tensors.at("input_ids"));
  Values logsumexp, nll;
  for (std::size_t t = 0; t < 45; ++t) {
    double sum = 0;  // logits of this model stay below 10, so nothing overflows
    for (std::size_t v = 0; v < 97; ++v) sum += std::exp(logits[t * 97 + v]);
    logsumexp.push_back(std::log(sum));
    if (t + 1 < 45) nll.push_back(logsumexp.back() - logits[t * 97 + static_cast<std::size_t>(ids[t + 1])]);
  }
  const fs::path golden = golden_with("mamba2", [&](StoredTensors& all) {
    all["logsumexp"] = stored("F64", {45}, logsumexp);
    all["nll"] = stored("F64", {44}, nll);
  });
  Verification v = run_verify(golden_folder("mamba2"), golden);
  ASSERT_EQ(v.others.size(), 2u);
  EXPECT_EQ(v.others[0].name, "logsumexp");
  EXPECT_EQ(v.others[1].name, "nll");
  for (const Agreement& a : v.others) EXPECT_LE(a.rel_l2, required) << a.name;

  nll[3] += 1;
  const fs::path wrong = golden_with("mamba2", [&](StoredTensors& all) { all["nll"] = stored("F64", {44}, nll); });
  v = run_verify(golden_folder("mamba2"), wrong);
  double norm = 0;
  for (const double x : nll) norm += x * x;
  EXPECT_NEAR(v.worst(), 1 / std::sqrt(norm), required);  // 1 in one value, up to what the others are off by
}

TEST_F(VerifyTest, SeveralSequencesAndTheFirstRowsOfOne) {
  const StoredTensors all = read_tensors(golden_file("mamba2"));
  const auto twice = [](const StoredTensor& t) { return StoredTensor{t.dtype, {2, 45, 97}, t.bytes + t.bytes}; };
  const fs::path two = golden_with("mamba2", [&](StoredTensors& tensors) {
    const StoredTensor& ids = all.at("input_ids");
    tensors = {{"input_ids", {ids.dtype, {2, 45}, ids.bytes + ids.bytes}}, {"logits_f64", twice(all.at("logits_f64"))}};
  });
  Verification v = run_verify(golden_folder("mamba2"), two);
  EXPECT_EQ(v.sequences, 2);
  ASSERT_EQ(v.logits.size(), 1u);
  EXPECT_LE(v.worst(), required);  // the second sequence begins from a zero state again

  const fs::path rows = golden_with("mamba2", [&](StoredTensors& tensors) {
    tensors = {{"input_ids", all.at("input_ids")},
               {"logits", {"F32", {10, 97}, all.at("logits").bytes.substr(0, 10 * 97 * 4)}}};
  });
  v = run_verify(golden_folder("mamba2"), rows);
  EXPECT_EQ(v.logits.at(0).matches, "first 10 rows of logits");
  EXPECT_LE(v.worst(), required);
}

TEST_F(VerifyTest, RefusesGoldensThatDoNotFit) {
  const auto refuse = [&](const std::function<void(StoredTensors&)>& change, const std::vector<string>& parts) {
    const fs::path golden = golden_with("mamba2", change);
    expect_error([&] { run_verify(golden_folder("mamba2"), golden); }, parts);
  };
  refuse([](StoredTensors& t) { t.erase("input_ids"); }, {"golden.safetensors", "input_ids"});
  refuse(
      [](StoredTensors& t) {
        t.erase("logits");
        t.erase("logits_f64");
      },
      {"golden.safetensors", "logits"});
  refuse([](StoredTensors& t) { t.at("logits").shape = {1, 97, 45}; }, {"golden.safetensors", "logits", "[1, 97, 45]"});
  refuse([](StoredTensors& t) { t.at("logits") = {"F32", {46, 97}, string(46 * 97 * 4, 0)}; }, {"logits", "[46, 97]"});
  refuse(
      [](StoredTensors& t) {
        t.at("hidden_1") = {"F32", {1, 45, 40}, string(45 * 40 * 4, 0)};
      },
      {"hidden_1", "[1, 45, 40]"});
  refuse([](StoredTensors& t) { t["nll"] = {"F32", {45}, string(45 * 4, 0)}; }, {"nll", "44", "[45]"});
}

}  // namespace
}  // namespace replayssm
