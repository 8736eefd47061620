// The built program: exit codes, messages, reports.

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>

#include "core/format_file.h"
#include "cuda/decode.h"
#include "tests/support/process.h"

namespace replayssm {
namespace {

using Json = nlohmann::json;
using Words = std::vector<string>;
using CommandTest = ProgramTest;

TEST_F(CommandTest, HelpAndVersion) {
  for (const Words& words :
       {Words{"--help"}, {"kl", "--help"}, {"verify", "-h"}, {"inspect", "-h"}, {"formats", "-h"}}) {
    const Outcome o = run(words);
    EXPECT_EQ(o.code, 0);
    EXPECT_EQ(o.err, "");
    EXPECT_NE(o.out.find("Usage:"), string::npos) << o.out;
  }
  const string help = run({"kl", "--help"}).out;
  for (const string option : {"MODEL", "--tokens", "--max-tokens", "--sequences", "--policy", "--json", "--output",
                              "--threads", "--device", "--precision"}) {
    EXPECT_NE(help.find(option), string::npos) << option;
  }
  EXPECT_TRUE(run({"--version"}).out.starts_with("replayssm "));
}

TEST_F(CommandTest, UsageErrors) {
  expect_refused({}, {"command"});
  expect_refused({"bogus"}, {"bogus"});
  expect_refused({"kl"}, {"MODEL"});
  expect_refused({"kl", mamba2_}, {"--tokens"});
  const Words kl = {"kl", mamba2_, "--tokens", mamba2_golden_};
  const auto with = [&](const Words& more) {
    Words all = kl;
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  expect_refused(with({"--bogus"}), {"--bogus"});
  expect_refused(with({"extra"}), {"extra"});
  for (const string value : {"0", "-1", "two", "1025", "1.5"})
    expect_refused(with({"--threads", value}), {"--threads", value});
  for (const string option : {"--max-tokens", "--sequences"}) {
    for (const string value : {"0", "-3", "many"}) expect_refused(with({option, value}), {option, value});
  }
  if (!cuda::available()) expect_refused(with({"--device", "cuda"}), {"--device cuda", "no CUDA"});
  expect_refused(with({"--activations", "bf16"}), {"--activations bf16", "--device cuda"});
  expect_refused(with({"--device", "cuda", "--activations", "int8"}), {"--activations", "int8"});
  expect_refused({"verify", mamba2_, "--golden", mamba2_golden_, "--device", "cuda"}, {"--device cuda", "verify"});
  expect_refused(with({"--device", "tpu"}), {"--device", "tpu"});
  expect_refused(with({"--precision", "fp16"}), {"--precision", "fp16"});
  expect_refused(with({"-p", "eagr(state=bf16)"}), {"'eagr(state=bf16)'", "'eagr'"});
  expect_refused(with({"-p", "eager(state=bf17)"}), {"'eager(state=bf17)'", "'bf17'"});
  expect_refused(with({"-p", "exact", "-p", "eager(\nstate=bf17)"}), {"bf17"});  // one line even so
  expect_refused(with({"-p", "eager(state=bf16, layers=3)"}), {"layers=3", "layer 3", "0-2"});
  expect_refused(with({"-p", "replay(L=64, state=bf16)"}), {"replay(L=64, state=bf16)", "45 tokens"});
  expect_refused(with({"--sequences", "46"}), {mamba2_golden_, "45", "46"});
  expect_refused({"verify", mamba2_, "--golden", mamba2_golden_, "--bound", "-1"}, {"--bound", "-1"});
  expect_refused({"verify", mamba2_, "--golden", mamba2_golden_, "--bound", "nan"}, {"--bound", "nan"});
  expect_refused({"formats", "bf17"}, {"'bf17'"});
  expect_refused({"formats", "int8"}, {"int8"});
}

TEST_F(CommandTest, FilesThatCannotBeUsed) {
  const string ids = write("ids.txt", "1 2 3 4\n").string(), empty = write("empty.txt", "").string();
  const string words = write("words.txt", "1 2 three").string(), large = write("large.txt", "1 2 97 3").string();
  expect_refused({"kl", path("nowhere"), "--tokens", ids}, {path("nowhere")});
  expect_refused({"inspect", path("nowhere")}, {path("nowhere")});
  expect_refused({"kl", mamba2_, "--tokens", path("none.txt")}, {path("none.txt")});
  expect_refused({"kl", mamba2_, "--tokens", empty}, {empty});
  expect_refused({"kl", mamba2_, "--tokens", words}, {words, "three"});
  expect_refused({"kl", mamba2_, "--tokens", mamba2_ + "/model.safetensors"}, {"model.safetensors", "input_ids"});
  expect_refused({"kl", mamba2_, "--tokens", large, "-p", "eager(state=bf16)", "--output", path("x.h5")},
                 {large, "97", "[0, 2]"});
  EXPECT_FALSE(fs::exists(path("x.h5")));
  expect_refused({"verify", mamba2_, "--golden", path("none")}, {path("none")});
  expect_refused({"verify", mamba2_, "--golden", mamba2_ + "/model.safetensors"}, {"input_ids"});

  ModelFiles files("mamba2");
  files.config["model_type"] = "llama";
  expect_refused({"inspect", files.write(folder_ / "llama").string()}, {"config.json", "'llama'"});
  files = ModelFiles("mamba2");
  files.tensors.erase("backbone.layers.1.mixer.D");
  expect_refused({"inspect", files.write(folder_ / "holes").string()}, {"holes", "backbone.layers.1.mixer.D"});

  // What cannot be written is refused before the work is done.
  const Words kl = {"kl", mamba2_, "--tokens", mamba2_golden_, "-p", "exact"};
  for (const auto& [option, target] : {std::pair<string, string>{"--json", "no/such/folder/x.json"},
                                       {"--json", "llama"},
                                       {"--output", "no/such/folder/x.h5"},
                                       {"--output", "llama"}}) {
    Words all = kl;
    all.insert(all.end(), {option, path(target)});
    expect_refused(all, {path(target)});
  }
  expect_refused({"kl", mamba2_, "--tokens", mamba2_golden_, "-p", "exact", "--output", ids}, {ids});
  EXPECT_EQ(read_text(ids), "1 2 3 4\n");  // a file of another kind is not replaced
}

TEST_F(CommandTest, AFullStandardOutputIsAnError) {
  const Process process(folder_, {"/bin/sh", "-c", string(REPLAYSSM_PROGRAM) + " formats >/dev/full"});
  EXPECT_EQ(process.wait(), 2);
  EXPECT_NE(process.err().find("standard output"), string::npos);
}

TEST_F(CommandTest, VerifyChecksAgainstItsBound) {
  const Json report = json({"verify", mamba2_, "--golden", mamba2_golden_});
  EXPECT_EQ(report["command"], "verify");
  EXPECT_EQ(report["tokens"], 45);
  EXPECT_EQ(report["sequences"], 1);
  EXPECT_EQ(report["bound"], 1e-4);
  EXPECT_EQ(report["passed"], true);
  EXPECT_EQ(report["against"], "logits_f64");
  EXPECT_EQ(report["argmax_agreement"], 1.0);
  EXPECT_LE(report["rel_l2"].get<double>(), 1e-5);  // the requirement on logits
  EXPECT_TRUE(report["max_abs"].is_number());
  ASSERT_EQ(report["layers"].size(), 4u);
  EXPECT_EQ(report["layers"][1]["name"], "hidden_1");
  EXPECT_EQ(report["layers"][1]["matches"], "output of layer 1");
  EXPECT_TRUE(report["layers"][1]["rel_l2"].is_number());

  Outcome o = run({"verify", mamba2_, "--golden", mamba2_golden_, "--bound", "1e-12"});
  EXPECT_EQ(o.code, 1);
  EXPECT_NE(o.out.find("DIFFERS"), string::npos);
  o = run({"verify", mamba2_, "--golden", mamba2_golden_, "--precision", "fp32"});
  EXPECT_EQ(o.code, 0);
  EXPECT_NE(o.out.find("agrees"), string::npos);

  ModelFiles files("mamba2");
  files.config["layer_norm_epsilon"] = 0.1;
  o = run({"verify", files.write(folder_ / "eps").string(), "--golden", mamba2_golden_, "--json", path("v.json")});
  EXPECT_EQ(o.code, 1);
  EXPECT_EQ(Json::parse(read_text(folder_ / "v.json"))["passed"], false);  // the report of a failure is still written
}

TEST_F(CommandTest, ShardsAreTheSameModel) {
  const ModelFiles whole("mamba2");
  const Json expected = json({"verify", mamba2_, "--golden", mamba2_golden_});
  StoredTensors parts[2];
  Json map;
  std::size_t count = 0;
  for (const auto& [name, tensor] : whole.tensors) {
    const std::size_t part = count++ % 2;
    parts[part][name] = tensor;
    map[name] = part == 0 ? "model-00001-of-00002.safetensors" : "model-00002-of-00002.safetensors";
  }
  const fs::path folder = folder_ / "shards";
  whole.write(folder);
  fs::remove(folder / "model.safetensors");
  write_tensors(folder / "model-00001-of-00002.safetensors", parts[0]);
  write_tensors(folder / "model-00002-of-00002.safetensors", parts[1]);
  write_bytes(folder / "model.safetensors.index.json", Json{{"weight_map", map}}.dump());
  Json found = json({"verify", folder.string(), "--golden", mamba2_golden_});
  found["model"] = expected["model"];
  EXPECT_EQ(found, expected);

  const Process sum(folder_,
                    {"/bin/sh", "-c", "cat '" + folder.string() + "'/model-0000?-of-00002.safetensors | sha256sum"});
  EXPECT_EQ(sum.wait(), 0);
  EXPECT_EQ(json({"inspect", folder.string()})["model"]["sha256"], sum.out().substr(0, 64));

  write_tensors(folder / "model-00003-of-00003.safetensors", parts[0]);
  Outcome o = run({"verify", folder.string(), "--golden", mamba2_golden_});
  EXPECT_EQ(o.code, 0);
  EXPECT_NE(o.err.find("model-00003-of-00003.safetensors"), string::npos) << o.err;

  fs::remove(folder / "model-00002-of-00002.safetensors");
  expect_refused({"verify", folder.string(), "--golden", mamba2_golden_}, {"model-00002-of-00002.safetensors"});
  const string moved = parts[1].begin()->first;
  parts[1].erase(moved);
  write_tensors(folder / "model-00002-of-00002.safetensors", parts[1]);
  expect_refused({"verify", folder.string(), "--golden", mamba2_golden_}, {"model-00002-of-00002.safetensors", moved});
  fs::remove(folder / "model.safetensors.index.json");
  expect_refused({"verify", folder.string(), "--golden", mamba2_golden_}, {folder.string(), "model.safetensors"});
}

TEST_F(CommandTest, NoticesGoToStandardError) {
  ModelFiles files("mamba2_tied");
  files.tensors["lm_head.weight"] =
      changed(files.tensors.at("backbone.embeddings.weight"), [](std::size_t, float v) { return 2 * v; });
  const Outcome o = run({"verify", files.write(folder_ / "model").string(), "--golden",
                         golden_file("mamba2_tied").string(), "--json", "-"});
  EXPECT_EQ(o.code, 0);
  EXPECT_TRUE(Json::accept(o.out));
  EXPECT_NE(o.err.find("lm_head.weight"), string::npos) << o.err;
}

TEST_F(CommandTest, Inspect) {
  const Json report = json({"inspect", hybrid_});
  EXPECT_EQ(report["command"], "inspect");
  EXPECT_EQ(report["model"]["type"], "qwen3_5_text");
  EXPECT_EQ(report["model"]["layers"], 4);
  EXPECT_EQ(report["model"]["ssm_layers"], 3);
  EXPECT_EQ(report["model"]["hidden"], 48);
  EXPECT_EQ(report["model"]["vocabulary"], 97);
  EXPECT_EQ(report["state_bytes_fp32"], 3 * 6 * 16 * 16 * 4);
  ASSERT_EQ(report["layers"].size(), 4u);
  EXPECT_EQ(report["layers"][3]["kind"], "attention");
  EXPECT_FALSE(report["layers"][3].contains("heads"));
  const Json layer = report["layers"][1];
  EXPECT_EQ(layer["kind"], "gated_delta");
  EXPECT_EQ(layer["heads"], 6);
  EXPECT_EQ(layer["groups"], 2);
  EXPECT_EQ(layer["head_dim"], 16);
  EXPECT_EQ(layer["state_dim"], 16);
  const StoredTensors tensors = ModelFiles("qwen3_5").tensors;
  const auto A_log = values_of<float>(tensors.at("model.layers.1.linear_attn.A_log"));
  const auto bias = values_of<float>(tensors.at("model.layers.1.linear_attn.dt_bias"));
  for (std::size_t h = 0; h < 6; ++h) {
    // Tokens until a gate of input 0 has halved the state. Three functions within an ulp, a product and a quotient
    // within half of one: 4 on either side.
    const double rate = std::exp(double{A_log[h]}) * std::log1p(std::exp(double{bias[h]}));
    const double life = std::log(2.0) / rate;
    EXPECT_NEAR(layer["half_lives"][h].get<double>(), life, 8 * std::numeric_limits<double>::epsilon() * life);
  }
  EXPECT_NE(run({"inspect", hybrid_}).out.find("gated_delta"), string::npos);
}

TEST_F(CommandTest, Formats) {
  const string table = run({"formats"}).out;
  for (const string name : {"exact", "fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2", "int8", "int4"}) {
    EXPECT_NE(table.find("\n" + name + " "), string::npos) << name;
  }
  const string e4m3 = run({"formats", "e4m3:row"}).out;
  for (const string fact : {"e4m3:row", "448", "0.015625", "0.001953125", "0x78", "nan"}) {
    EXPECT_NE(e4m3.find(fact), string::npos) << fact << "\n" << e4m3;
  }
  EXPECT_NE(run({"formats", "bf16"}).out.find("16 bits"), string::npos);
  for (const string name : {"mxfp8_e4m3", "mxfp6_e3m2", "mxint8", "nvfp4"}) {
    EXPECT_NE(table.find("\n" + name + " "), string::npos) << name;
  }
  const string mx = run({"formats", "mxfp6_e2m3:ceil"}).out, nv = run({"formats", "nvfp4"}).out;
  for (const string fact :
       {"mxfp6_e2m3:ceil", "6 bits", "7.5", "2^e", "amax / 2^e <= 7.5", "group of 32", "0x38", "NaN"}) {
    EXPECT_NE(mx.find(fact), string::npos) << fact << "\n" << mx;
  }
  for (const string fact : {"448 x 6", "group of 16", "e4m3", "head"}) EXPECT_NE(nv.find(fact), string::npos) << nv;
  const string affine = run({"formats", "int8:tensor:asym:ef=int4"}).out;
  for (const string fact : {"all heads", "/ 255)", "z = -128", "residual", "kept as int4:tensor"}) {
    EXPECT_NE(affine.find(fact == "residual" ? "error feedback" : fact), string::npos) << fact << affine;
  }
}

// Every kind of format says how it was proved.
TEST_F(CommandTest, FormatsTellTheirProof) {
  for (const auto& [format, proof] : {std::pair{"e4m3", "all 4294967296 floats rounded nearest"},
                                      {"fp16:rz", "4294967296 floats rounded toward zero"},
                                      {"mxint8", "4294967296 floats"},
                                      {"bf16:sr", "4 standard errors"},
                                      {"fp32", "the identity"},
                                      {"custom(e=3,m=4)", "formula of their fields"},
                                      {"int8:row:hadamard", "rotation against the matrix"},
                                      {"int8:row:ef=int4", "store by store"},
                                      {"mxfp4:ceil", "literal reading of their standards"}}) {
    const string text = run({"formats", format}).out;
    EXPECT_NE(text.find("proof: "), string::npos) << text;
    EXPECT_NE(text.find(proof), string::npos) << text;
    EXPECT_EQ(text.find(" 1 wrong"), string::npos) << text;
  }
}

// In every command that takes policies.
TEST_F(CommandTest, FormatsOfAFile) {
  const string file = path("my.toml");
  std::ofstream(file) << "[my4]\nelement = {e = 0, m = 3}\nscale = \"group8\"\n";
  if (!reads_format_files()) {
    expect_refused({"formats", "my4", "--formats", file}, {file, "toml++"});
    return;
  }
  EXPECT_NE(run({"formats", "my4", "--formats", file}).out.find("defined as custom(e=0,m=3):group8"), string::npos);
  EXPECT_NE(run({"formats", "--formats", file}).out.find("my4 = custom(e=0,m=3):group8"), string::npos);
  const string shape = "mamba2:heads=2,head_dim=4,state_dim=8,groups=1";
  const string traffic = run({"traffic", "--shape", shape, "-p", "eager(state=my4)", "--formats", file}).out;
  EXPECT_NE(traffic.find("eager(state=my4)"), string::npos) << traffic;
  const string tokens = path("ids.txt");
  std::ofstream(tokens) << "1 2 3 4 5 6 7 8";
  const std::vector<string> study = {mamba2_,     "--tokens", tokens,   "-p", "replay(L=2, state=my4:ef=my4)",
                                     "--formats", file,       "--json", "-"};
  for (const char* command : {"kl", "layers"}) {
    Words words = {command};
    words.insert(words.end(), study.begin(), study.end());
    const Json json = Json::parse(run(words).out);
    EXPECT_EQ(json["results"][0]["policy"], "replay(L=2, state=my4:ef=my4)");
    EXPECT_EQ(json["formats"]["my4"], "custom(e=0,m=3):group8");
  }
  expect_refused({"formats", "my4"}, {"unknown name 'my4'"});
  expect_refused({"traffic", "--shape", shape, "--formats", "none.toml"}, {"none.toml"});
  std::ofstream(file) << "[my4]\nelement = \"e4m3\"\nscales = \"row\"\n";
  expect_refused({"formats", "--formats", file}, {file, "line 3", "'scales'"});
}

}  // namespace
}  // namespace replayssm
