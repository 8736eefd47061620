// Model folders: every spelling of the same model gives the same logits bit for bit, what does not fit is refused in
// one line, and what a layer keeps between calls is what a framework keeps.

#include "core/model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "core/tokens.h"
#include "tests/support/forward.h"
#include "tests/support/model_files.h"

namespace replayssm {
namespace {

using Json = nlohmann::json;

Values logits_of(const Model& model, const std::vector<std::int32_t>& ids, Precision precision = Precision::fp64) {
  const auto backend = reference_backend(precision, 1);
  return Runner(model, *backend).logits(ids);
}

/// The most by which logits may change when products of other heights or widths add up in another order, in relative
/// L2. An order of additions is a choice of rounding errors, so two orders in binary64 differ by at most twice the
/// error of one; and that is the error of the same model in fp32, scaled by the ratio of the precisions, 2^-29.
double order_of_additions(const Model& model, const std::vector<std::int32_t>& ids, const Values& logits) {
  return 2 * std::ldexp(relative_l2(logits_of(model, ids, Precision::fp32), logits), -29);
}

class ModelTest : public FilesTest {
 protected:
  static std::vector<std::int32_t> ids(const string& golden) { return read_tokens(golden_file(golden)).ids; }

  Values logits(const ModelFiles& files, const string& golden) const {
    return logits_of(*Model::open(files.write(folder_ / "model")), ids(golden));
  }
  void expect_same(const ModelFiles& files, const ModelFiles& other, const string& golden) const {
    const Values logits_of_files = logits(files, golden);  // by value: the second model takes the first one's folder
    EXPECT_EQ(logits_of_files, logits(other, golden));
  }
  void expect_refused(const ModelFiles& files, const std::vector<string>& parts) const {
    files.write(folder_ / "model");
    expect_error([&] { Model::open(folder_ / "model"); }, parts);
  }
};

TEST_F(ModelTest, SpellingsOfAnOpenTimeStepLimit) {
  const ModelFiles plain("mamba2");
  const Values expected = logits(plain, "mamba2");
  ModelFiles files = plain;
  files.config["time_step_limit"] = {0.0, 1e308};
  EXPECT_EQ(logits(files, "mamba2"), expected);
  files.config.erase("time_step_limit");
  EXPECT_EQ(logits(files, "mamba2"), expected);
  files.config["time_step_limit"] = {0.0, "INFINITY"};
  files.write(folder_ / "model");
  string text = files.config.dump();
  text.replace(text.find("\"INFINITY\""), 10, "Infinity");  // as Python's json writes it
  write_bytes(folder_ / "model" / "config.json", text);
  EXPECT_EQ(logits_of(*Model::open(folder_ / "model"), ids("mamba2")), expected);
  files.config["time_step_limit"] = {0.0, 0.01};  // a limit that binds
  EXPECT_NE(logits(files, "mamba2"), expected);
}

TEST_F(ModelTest, LanguageModelNestedInAMultimodalCheckpoint) {
  const ModelFiles plain("qwen3_5");
  ModelFiles nested = plain;
  nested.config = {{"model_type", "qwen3_5"}, {"text_config", plain.config}, {"vision_config", {{"depth", 2}}}};
  // As published: the outer object says whether the embeddings are tied.
  nested.config["tie_word_embeddings"] = nested.config["text_config"]["tie_word_embeddings"];
  nested.config["text_config"].erase("tie_word_embeddings");
  nested.tensors.clear();
  for (const auto& [name, tensor] : plain.tensors) {
    nested.tensors[name.starts_with("model.") ? "model.language_model." + name.substr(6) : name] = tensor;
  }
  nested.tensors["model.visual.patch_embed.proj.weight"] = plain.tensors.at("model.norm.weight");
  expect_same(nested, plain, "qwen3_5");
}

TEST_F(ModelTest, LayersByNameOrByInterval) {
  const ModelFiles plain("qwen3_5");
  const Values expected = logits(plain, "qwen3_5");
  ModelFiles files = plain;
  files.config.erase("layer_types");  // every fourth layer, unless the interval says otherwise
  EXPECT_EQ(logits(files, "qwen3_5"), expected);
  files.config["full_attention_interval"] = 4;
  EXPECT_EQ(logits(files, "qwen3_5"), expected);
  files.config["layers_block_type"] = plain.config["layer_types"];
  files.config["full_attention_interval"] = 2;  // the names win
  EXPECT_EQ(logits(files, "qwen3_5"), expected);
  files.config.erase("layers_block_type");
  expect_refused(files, {"model.layers.1.self_attn.q_proj.weight"});
}

TEST_F(ModelTest, RotaryParametersAtTopLevelOrNested) {
  ModelFiles plain("qwen3_5");
  // Values that are no default, so that each spelling shows that it is read.
  plain.config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 500.0}, {"partial_rotary_factor", 0.5}};
  plain.config.erase("partial_rotary_factor");
  ModelFiles top = plain;
  top.config.erase("rope_parameters");
  EXPECT_NE(logits(top, "qwen3_5"), logits(plain, "qwen3_5"));
  top.config["rope_theta"] = 500.0;
  top.config["partial_rotary_factor"] = 0.5;
  expect_same(top, plain, "qwen3_5");
  top.config["rope_scaling"] = nullptr;
  expect_same(top, plain, "qwen3_5");
  ModelFiles mixed = plain;
  mixed.config["rope_parameters"].erase("partial_rotary_factor");
  mixed.config["partial_rotary_factor"] = 0.5;
  expect_same(mixed, plain, "qwen3_5");
  mixed.config["rope_parameters"].erase("rope_theta");
  mixed.config["rope_theta"] = 500.0;
  expect_same(mixed, plain, "qwen3_5");
  // A scaling that is not known is never left out, whichever of its names the file uses.
  for (const char* key : {"type", "rope_type"}) {
    top.config["rope_scaling"] = {{key, "linear"}, {"factor", 2.0}};
    expect_refused(top, {"config.json", "'linear'"});
  }
}

TEST_F(ModelTest, PaddedVocabulary) {
  const ModelFiles plain("mamba2");
  ModelFiles padded = plain;
  padded.config["vocab_size"] = 128;
  for (const char* name : {"backbone.embeddings.weight", "lm_head.weight"}) {
    StoredTensor& tensor = padded.tensors[name];
    tensor.shape[0] = 128;
    tensor.bytes.resize(128 * 48 * 4, 0);
  }
  const Values found = logits(padded, "mamba2"), expected = logits(plain, "mamba2");
  ASSERT_EQ(found.size(), expected.size() / 97 * 128);
  Values kept;
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (i % 128 < 97) {
      kept.push_back(found[i]);
    } else {
      EXPECT_EQ(found[i], 0) << i;
    }
  }
  EXPECT_LE(relative_l2(kept, expected), order_of_additions(*Model::open(folder_ / "model"), ids("mamba2"), expected));
}

TEST_F(ModelTest, TiedAndUntiedHeads) {
  const ModelFiles tied("mamba2_tied");
  ModelFiles files = tied;
  files.tensors["lm_head.weight"] = tied.tensors.at("backbone.embeddings.weight");
  expect_same(files, tied, "mamba2_tied");
  EXPECT_TRUE(Model::open(folder_ / "model")->notices().empty());

  files.tensors["lm_head.weight"] =
      changed(files.tensors["lm_head.weight"], [](std::size_t i, float v) { return i == 5 ? v + 1 : v; });
  expect_same(files, tied, "mamba2_tied");  // the embedding is used
  files.write(folder_ / "model");
  const auto notices = Model::open(folder_ / "model")->notices();
  ASSERT_EQ(notices.size(), 1u);
  for (const string part : {"model.safetensors", "lm_head.weight", "backbone.embeddings.weight"}) {
    EXPECT_NE(notices[0].find(part), string::npos) << notices[0];
  }

  files.config["tie_word_embeddings"] = false;  // now the head counts
  EXPECT_NE(logits(files, "mamba2_tied"), logits(tied, "mamba2_tied"));
  files.tensors.erase("lm_head.weight");
  expect_refused(files, {"model.safetensors", "tie_word_embeddings", "lm_head.weight"});
  files.config.erase("tie_word_embeddings");  // false where it is not said
  expect_refused(files, {"model.safetensors", "lm_head.weight"});
}

TEST_F(ModelTest, Bf16FileWithFp32Gates) {
  ModelFiles bf16("mamba2"), same_in_fp32("mamba2");
  for (auto& [name, tensor] : bf16.tensors) {
    if (name.ends_with("A_log") || name.ends_with(".D") || name.ends_with("dt_bias")) continue;
    same_in_fp32.tensors[name] = with_bf16_values(tensor);
    tensor = cut_to_bf16(tensor);
  }
  expect_same(bf16, same_in_fp32, "mamba2");
}

TEST_F(ModelTest, RefusesWhatItDoesNotKnow) {
  struct Case {
    const char *golden, *key;
    Json value;
    std::vector<string> parts;
  };
  const std::vector<Case> cases = {
      {"mamba2", "model_type", "llama", {"'llama'", "mamba2", "qwen3_5"}},
      {"mamba2", "model_type", nullptr, {"'model_type'", "missing"}},
      {"mamba2", "hidden_act", "relu", {"'hidden_act'", "silu"}},
      {"mamba2", "num_heads", nullptr, {"'num_heads'", "missing"}},
      {"mamba2", "num_heads", 7, {"'num_heads'", "'n_groups'"}},
      {"mamba2", "n_groups", 4, {"'num_heads'", "'n_groups'"}},
      {"mamba2", "head_dim", 8, {"'expand'", "'head_dim'"}},
      {"mamba2", "time_step_limit", Json::array({1.0, 0.5}), {"'time_step_limit'", "ascending"}},
      {"mamba2", "layer_norm_epsilon", "small", {"'layer_norm_epsilon'", "small"}},
      {"mamba2", "tie_word_embeddings", 1, {"'tie_word_embeddings'"}},
      {"qwen3_5", "hidden_act", "gelu", {"'hidden_act'", "silu"}},
      {"qwen3_5", "rope_parameters", {{"rope_type", "yarn"}}, {"'yarn'", "default"}},
      {"qwen3_5", "rope_parameters", {{"partial_rotary_factor", 0.2}}, {"'partial_rotary_factor'", "0.2"}},
      {"qwen3_5", "rope_parameters", {{"partial_rotary_factor", 2}}, {"'partial_rotary_factor'", "2"}},
      {"qwen3_5", "linear_num_key_heads", 4, {"'linear_num_value_heads'", "'linear_num_key_heads'"}},
      {"qwen3_5", "num_key_value_heads", 3, {"'num_attention_heads'", "'num_key_value_heads'"}},
      {"qwen3_5", "layer_types", Json::array({"linear_attention"}), {"'layer_types'", "1", "4"}},
      {"qwen3_5",
       "layer_types",
       Json::array({"linear_attention", "linear_attention", "sliding_attention", "full_attention"}),
       {"layer 2", "'sliding_attention'"}},
  };
  for (const Case& c : cases) {
    ModelFiles files(c.golden);
    files.config[c.key] = c.value;
    std::vector<string> parts = c.parts;
    parts.push_back("config.json");
    expect_refused(files, parts);
  }
}

TEST_F(ModelTest, RefusesTensorsThatDoNotFit) {
  for (const auto& [golden, other] : {std::pair{"mamba2", "mixer.D"}, {"qwen3_5", "mlp.up_proj.weight"}}) {
    const ModelFiles plain(golden);
    for (const auto& [name, tensor] : plain.tensors) {  // every tensor is needed, in exactly this shape
      ModelFiles files = plain;
      files.tensors.erase(name);
      expect_refused(files, {name});
      files.tensors[name] = {tensor.dtype, tensor.shape, tensor.bytes};
      files.tensors[name].shape.insert(files.tensors[name].shape.begin(), 1);
      expect_refused(files, {name, "model.safetensors", "shape", "[1, "});
    }
    ModelFiles files = plain;
    for (auto& [name, tensor] : files.tensors) {
      if (name.find(other) == string::npos) continue;
      tensor.dtype = "F8_E4M3";
      tensor.bytes.resize(tensor.bytes.size() / 4);
      expect_refused(files, {name, "F8_E4M3"});
      break;
    }
  }
  // A checkpoint cut to fewer rows than config.json says names both.
  ModelFiles files("mamba2");
  files.config["vocab_size"] = 96;
  expect_refused(files, {"backbone.embeddings.weight", "[96, 48]", "[97, 48]"});
}

TEST_F(ModelTest, RefusesIdsBeyondTheVocabulary) {
  const auto model = Model::open(golden_folder("mamba2"));
  const auto backend = reference_backend(Precision::fp64, 1);
  EXPECT_EQ(model->embed(*backend, std::vector<std::int32_t>{96, 0}).rows, 2);
  expect_error([&] { model->embed(*backend, std::vector<std::int32_t>{1, 2, 97}); }, {"97", "position 2"});
  expect_error([&] { model->embed(*backend, std::vector<std::int32_t>{-1}); }, {"-1", "position 0"});
}

class GoldenTest : public testing::TestWithParam<const char*> {};

// The framework kept these in fp32 from a run in fp32, and our requirement for such arrays is 1e-5 in relative L2. A
// transposed or reversed reading is off by the size of the array itself, which is checked too.
constexpr double required = 1e-5;

TEST_P(GoldenTest, StatesAndConvWindowsAreTheFrameworks) {
  const auto model = Model::open(golden_folder(GetParam()));
  const StoredTensors golden = read_tensors(golden_file(GetParam()));
  const auto backend = reference_backend(Precision::fp64, 1);
  Runner run(*model, *backend);
  run.logits(read_tokens(golden_file(GetParam())).ids);
  for (std::size_t layer = 0; layer < model->layers().size(); ++layer) {
    if (!model->layers()[layer].recurrence) continue;
    const RecurrenceShape shape = *model->layers()[layer].recurrence;
    const string at = "cache_" + std::to_string(layer);
    const std::vector<float> theirs = values_of<float>(golden.at(at + "_recurrent_states_0"));
    const Values ours = run.cache(layer).state->effective();  // [heads, head_dim, state_dim]
    ASSERT_EQ(ours.size(), theirs.size());
    const auto P = static_cast<std::size_t>(shape.head_dim), N = static_cast<std::size_t>(shape.state_dim);
    Values straight(ours.size()), transposed(ours.size());
    for (std::size_t h = 0; h < ours.size() / (P * N); ++h) {
      for (std::size_t p = 0; p < P; ++p) {
        for (std::size_t n = 0; n < N; ++n) {
          straight[(h * P + p) * N + n] = static_cast<double>(theirs[(h * P + p) * N + n]);
          transposed[(h * P + p) * N + n] = static_cast<double>(theirs[(h * N + n) * P + p]);
        }
      }
    }
    const bool key_first = shape.recurrence != Recurrence::mamba2;
    EXPECT_LE(relative_l2(ours, key_first ? transposed : straight), required) << at;
    EXPECT_GE(relative_l2(ours, key_first ? straight : transposed), 0.5) << at;

    // Theirs [channels, K] with the oldest input first; ours [K - 1, channels].
    const StoredTensor& conv = golden.at(at + "_conv_states_0");
    const std::vector<float> columns = values_of<float>(conv);
    const auto channels = static_cast<std::size_t>(conv.shape[1]), K = static_cast<std::size_t>(conv.shape[2]);
    Values last(channels * (K - 1)), first(channels * (K - 1));
    for (std::size_t c = 0; c < channels; ++c) {
      for (std::size_t k = 1; k < K; ++k) {
        last[(k - 1) * channels + c] = static_cast<double>(columns[c * K + k]);
        first[(k - 1) * channels + c] = static_cast<double>(columns[c * K + k - 1]);
      }
    }
    const Values window = read_all(*backend, run.cache(layer).conv_window.inputs);
    EXPECT_LE(relative_l2(window, last), required) << at;
    EXPECT_GE(relative_l2(window, first), 0.5) << at;
  }
}

TEST_P(GoldenTest, TokensMayComeInAnyNumberOfCalls) {
  const auto model = Model::open(golden_folder(GetParam()));
  const std::vector<std::int32_t> ids = read_tokens(golden_file(GetParam())).ids;
  const Values whole = logits_of(*model, ids);
  const double bound = order_of_additions(*model, ids, whole);
  for (const std::vector<std::size_t>& calls :
       {std::vector<std::size_t>{20, 25}, {1, 44}, {44, 1}, {3, 2, 16, 1, 17, 6}, std::vector<std::size_t>(45, 1)}) {
    const auto backend = reference_backend(Precision::fp64, 1);
    Runner run(*model, *backend);
    Values logits;
    auto next = ids.begin();
    for (const std::size_t count : calls) {
      const auto end = next + static_cast<std::ptrdiff_t>(count);
      const Values some = run.logits({next, end});
      logits.insert(logits.end(), some.begin(), some.end());
      next = end;
    }
    EXPECT_LE(relative_l2(logits, whole), bound) << testing::PrintToString(calls);
    EXPECT_EQ(run.cache(0).position, 45);
  }
}

INSTANTIATE_TEST_SUITE_P(Goldens, GoldenTest, testing::Values("mamba2", "mamba2_tied", "qwen3_5"),
                         [](const auto& golden) { return string(golden.param); });

}  // namespace
}  // namespace replayssm
