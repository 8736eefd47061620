// Qwen3.5 language models: Gated DeltaNet layers, gated attention layers and an MLP behind each, in the layout of
// transformers' Qwen3_5ForCausalLM (text) or nested in a multimodal checkpoint.

#include <cmath>

#include "core/families/families.h"

namespace replayssm {
namespace {

class Qwen35Model : public Model {
 public:
  Qwen35Model(const Config& outer, Weights weights) : Model(std::move(weights), outer.text("model_type")) {
    const Config config = outer.nested("text_config");
    const std::int64_t hidden = config.size("hidden_size"), count = config.size("num_hidden_layers");
    const std::string root =
        weights_.has("model.language_model.embed_tokens.weight") ? "model.language_model." : "model.";
    if (config.text("hidden_act", "silu") != "silu") config.wrong("'hidden_act' must be silu");
    epsilon_ = config.number("rms_norm_eps", 1e-6);
    norm_kind_ = NormWeight::one_plus;
    read_attention(config);
    shape_ = {Recurrence::gated_delta, config.size("linear_num_value_heads"), config.size("linear_num_key_heads"),
              config.size("linear_value_head_dim"), config.size("linear_key_head_dim")};
    if (shape_.heads % shape_.groups != 0) {
      config.wrong("'linear_num_value_heads' must be a multiple of 'linear_num_key_heads'");
    }

    std::vector<std::string> kinds = config.layer_kinds();
    const std::int64_t interval = config.size("full_attention_interval", 4);
    if (kinds.empty()) {
      for (std::int64_t i = 1; i <= count; ++i) {
        kinds.push_back(i % interval == 0 ? "full_attention" : "linear_attention");
      }
    }
    if (std::ssize(kinds) != count) {
      config.wrong("'layer_types' names ", kinds.size(), " layers, 'num_hidden_layers' is ", count);
    }
    const std::int64_t mlp = config.size("intermediate_size");
    const bool bias = config.flag("attention_bias", false);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::string at = root + "layers." + std::to_string(i) + ".";
      Block b;
      b.input_norm = &weight(at + "input_layernorm.weight", {hidden});
      b.post_norm = &weight(at + "post_attention_layernorm.weight", {hidden});
      b.gate = &weight(at + "mlp.gate_proj.weight", {mlp, hidden});
      b.up = &weight(at + "mlp.up_proj.weight", {mlp, hidden});
      b.down = &weight(at + "mlp.down_proj.weight", {hidden, mlp});
      const std::string& kind = kinds[static_cast<std::size_t>(i)];
      if (kind == "linear_attention") {
        b.delta = delta_weights(at + "linear_attn.", hidden, config.size("linear_conv_kernel_dim"));
        layers_.push_back({"gated_delta", shape_, b.delta->A_log, b.delta->dt_bias});
      } else if (kind == "full_attention") {
        b.attention = attention_weights(at + "self_attn.", hidden, bias);
        layers_.push_back({"attention", {}});
      } else {
        config.wrong("layer ", i, " is '", kind, "'; known: linear_attention, full_attention");
      }
      blocks_.push_back(b);
    }
    const bool tied = config.flag("tie_word_embeddings", outer.flag("tie_word_embeddings", false));
    set_ends(root + "embed_tokens.weight", root + "norm.weight", {"lm_head.weight"}, config.size("vocab_size"), hidden,
             tied);
  }

  Tensor forward(Backend& backend, std::int64_t layer, const Tensor& x, LayerCache& cache) const override {
    const Block& w = blocks_[static_cast<std::size_t>(layer)];
    const Tensor normed = backend.rms_norm(x, *w.input_norm, epsilon_, norm_kind_, hidden());
    Tensor mixed = w.delta ? delta(backend, *w.delta, normed, cache) : attention(backend, *w.attention, normed, cache);
    backend.add(mixed, x);
    const Tensor post = backend.rms_norm(mixed, *w.post_norm, epsilon_, norm_kind_, hidden());
    Tensor up = backend.linear(post, *w.up);
    backend.multiply_silu(up, backend.linear(post, *w.gate));
    Tensor out = backend.linear(up, *w.down);
    backend.add(out, mixed);
    cache.position += x.rows;
    return out;
  }

 private:
  struct Delta {
    const TensorView *qkv, *z, *beta, *gate, *conv, *A_log, *dt_bias, *norm, *out;
  };
  struct Attention {
    const TensorView *q, *k, *v, *o, *q_bias, *k_bias, *v_bias, *o_bias, *q_norm, *k_norm;
  };
  struct Block {
    const TensorView *input_norm, *post_norm, *gate, *up, *down;
    std::optional<Delta> delta;
    std::optional<Attention> attention;
  };

  void read_attention(const Config& config) {
    attention_ = {config.size("num_attention_heads"), config.size("num_key_value_heads"),
                  config.size("head_dim", config.size("hidden_size") / config.size("num_attention_heads"))};
    if (attention_.heads % attention_.kv_heads != 0) {
      config.wrong("'num_attention_heads' must be a multiple of 'num_key_value_heads'");
    }
    const Config rope = config.nested(config.has("rope_parameters") ? "rope_parameters" : "rope_scaling");
    const std::string kind = rope.text("rope_type", rope.text("type", "default"));  // older files: type
    if (kind != "default") config.wrong("rope_type '", kind, "' is not supported; known: default");
    theta_ = rope.number("rope_theta", config.number("rope_theta", 10000.0));
    const double part = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 0.25));
    rotary_dim_ = static_cast<std::int64_t>(static_cast<double>(attention_.head_dim) * part);
    if (rotary_dim_ < 0 || rotary_dim_ > attention_.head_dim || rotary_dim_ % 2 != 0) {
      config.wrong("'partial_rotary_factor' ", part, " of head_dim ", attention_.head_dim,
                   " is no even number in range");
    }
  }

  Delta delta_weights(const std::string& at, std::int64_t hidden, std::int64_t kernel) {
    const std::int64_t values = shape_.heads * shape_.head_dim, all = values + 2 * shape_.groups * shape_.state_dim;
    return {&weight(at + "in_proj_qkv.weight", {all, hidden}),
            &weight(at + "in_proj_z.weight", {values, hidden}),
            &weight(at + "in_proj_b.weight", {shape_.heads, hidden}),
            &weight(at + "in_proj_a.weight", {shape_.heads, hidden}),
            &weight(at + "conv1d.weight", {all, 1, kernel}),
            &weight(at + "A_log", {shape_.heads}),
            &weight(at + "dt_bias", {shape_.heads}),
            &weight(at + "norm.weight", {shape_.head_dim}),
            &weight(at + "out_proj.weight", {hidden, values})};
  }

  Attention attention_weights(const std::string& at, std::int64_t hidden, bool bias) {
    const std::int64_t d = attention_.head_dim, q = 2 * attention_.heads * d, kv = attention_.kv_heads * d;
    return {&weight(at + "q_proj.weight", {q, hidden}),
            &weight(at + "k_proj.weight", {kv, hidden}),
            &weight(at + "v_proj.weight", {kv, hidden}),
            &weight(at + "o_proj.weight", {hidden, attention_.heads * d}),
            optional_weight(at + "q_proj.bias", bias, {q}),
            optional_weight(at + "k_proj.bias", bias, {kv}),
            optional_weight(at + "v_proj.bias", bias, {kv}),
            optional_weight(at + "o_proj.bias", bias, {hidden}),
            &weight(at + "q_norm.weight", {d}),
            &weight(at + "k_norm.weight", {d})};
  }

  Tensor delta(Backend& backend, const Delta& w, const Tensor& x, LayerCache& cache) const {
    const std::int64_t keys = shape_.groups * shape_.state_dim, values = shape_.heads * shape_.head_dim;
    const Tensor qkv = backend.causal_conv_silu(backend.linear(x, *w.qkv), *w.conv, nullptr, cache.conv_window);
    cache.call = DeltaCall{shape_,
                           qkv.slice(0, keys),
                           qkv.slice(keys, keys),
                           qkv.slice(2 * keys, values),
                           backend.linear(x, *w.gate),
                           backend.linear(x, *w.beta),
                           w.A_log,
                           w.dt_bias};
    cache.readout = backend.advance(*cache.state, *cache.call);
    Tensor y = backend.rms_norm(cache.readout, *w.norm, epsilon_, NormWeight::plain, shape_.head_dim);
    backend.multiply_silu(y, backend.linear(x, *w.z));
    return backend.linear(y, *w.out);
  }

  Tensor attention(Backend& backend, const Attention& w, const Tensor& x, LayerCache& cache) const {
    const std::int64_t d = attention_.head_dim;
    const Tensor q_gate = backend.linear(x, *w.q, w.q_bias);  // [q | gate] per head
    Tensor q = backend.rms_norm(backend.take(q_gate, 2 * d, 0, d), *w.q_norm, epsilon_, norm_kind_, d);
    Tensor k = backend.rms_norm(backend.linear(x, *w.k, w.k_bias), *w.k_norm, epsilon_, norm_kind_, d);
    backend.rope(q, d, rotary_dim_, theta_, cache.position);
    backend.rope(k, d, rotary_dim_, theta_, cache.position);
    Tensor y = backend.attention(q, k, backend.linear(x, *w.v, w.v_bias), attention_, cache.attention);
    backend.multiply_sigmoid(y, backend.take(q_gate, 2 * d, d, d));
    return backend.linear(y, *w.o, w.o_bias);
  }

  RecurrenceShape shape_;
  AttentionShape attention_;
  std::int64_t rotary_dim_ = 0;
  double theta_ = 0;
  std::vector<Block> blocks_;
};

}  // namespace

std::unique_ptr<Model> open_qwen3_5(const Config& config, Weights weights) {
  return std::make_unique<Qwen35Model>(config, std::move(weights));
}

}  // namespace replayssm
