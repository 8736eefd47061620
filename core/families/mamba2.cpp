// Mamba-2 language models (Dao & Gu 2024) in the layout of transformers' Mamba2ForCausalLM.

#include <limits>

#include "core/families/families.h"

namespace replayssm {
namespace {

class Mamba2Model : public Model {
 public:
  Mamba2Model(const Config& config, Weights weights) : Model(std::move(weights), config.text("model_type")) {
    const std::int64_t hidden = config.size("hidden_size"), layers = config.size("num_hidden_layers");
    shape_ = {Recurrence::mamba2, config.size("num_heads"), config.size("n_groups"), config.size("head_dim"),
              config.size("state_size")};
    if (shape_.heads % shape_.groups != 0) config.wrong("'num_heads' must be a multiple of 'n_groups'");
    if (config.text("hidden_act", "silu") != "silu") config.wrong("'hidden_act' must be silu");
    if (config.has("expand") &&
        config.number("expand") * static_cast<double>(hidden) != static_cast<double>(shape_.heads * shape_.head_dim)) {
      config.wrong("'expand' * 'hidden_size' must equal 'num_heads' * 'head_dim'");
    }
    epsilon_ = config.number("layer_norm_epsilon", 1e-5);
    limits_ = config.range("time_step_limit", {0.0, std::numeric_limits<double>::infinity()});
    inner_ = shape_.heads * shape_.head_dim;
    state_ = shape_.groups * shape_.state_dim;
    const std::int64_t conv = inner_ + 2 * state_, projected = inner_ + conv + shape_.heads;
    const bool bias = config.flag("use_bias", false), conv_bias = config.flag("use_conv_bias", true);
    for (std::int64_t i = 0; i < layers; ++i) {
      const std::string at = "backbone.layers." + std::to_string(i) + ".", mixer = at + "mixer.";
      blocks_.push_back({&weight(at + "norm.weight", {hidden}), &weight(mixer + "in_proj.weight", {projected, hidden}),
                         optional_weight(mixer + "in_proj.bias", bias, {projected}),
                         &weight(mixer + "conv1d.weight", {conv, 1, config.size("conv_kernel")}),
                         optional_weight(mixer + "conv1d.bias", conv_bias, {conv}),
                         &weight(mixer + "A_log", {shape_.heads}), &weight(mixer + "dt_bias", {shape_.heads}),
                         &weight(mixer + "D", {shape_.heads}), &weight(mixer + "norm.weight", {inner_}),
                         &weight(mixer + "out_proj.weight", {hidden, inner_}),
                         optional_weight(mixer + "out_proj.bias", bias, {hidden})});
      layers_.push_back({"mamba2", shape_, blocks_.back().A_log, blocks_.back().dt_bias});
    }
    set_ends("backbone.embeddings.weight", "backbone.norm_f.weight", {"lm_head.weight"}, config.size("vocab_size"),
             hidden, config.flag("tie_word_embeddings", false));
  }

  Tensor forward(Backend& backend, std::int64_t layer, const Tensor& x, LayerCache& cache) const override {
    const Block& w = blocks_[static_cast<std::size_t>(layer)];
    const Tensor normed = backend.rms_norm(x, *w.norm, epsilon_, NormWeight::plain, hidden());
    const Tensor projected = backend.linear(normed, *w.in_proj, w.in_bias);  // [z | x B C | dt]
    const Tensor z = projected.slice(0, inner_), dt = projected.slice(2 * inner_ + 2 * state_, shape_.heads);
    const Tensor xBC =
        backend.causal_conv_silu(projected.slice(inner_, inner_ + 2 * state_), *w.conv, w.conv_bias, cache.conv_window);
    const Tensor heads = xBC.slice(0, inner_);
    cache.call = Mamba2Call{shape_,
                            heads,
                            xBC.slice(inner_, state_),
                            xBC.slice(inner_ + state_, state_),
                            dt,
                            w.A_log,
                            w.dt_bias,
                            limits_.first,
                            limits_.second};
    cache.readout = backend.advance(*cache.state, *cache.call);
    Tensor y = backend.add_skip(cache.readout, heads, *w.D);
    backend.multiply_silu(y, z);
    y = backend.rms_norm(y, *w.gated_norm, epsilon_, NormWeight::plain, inner_);
    Tensor out = backend.linear(y, *w.out_proj, w.out_bias);
    backend.add(out, x);
    cache.position += x.rows;
    return out;
  }

 private:
  struct Block {
    const TensorView *norm, *in_proj, *in_bias, *conv, *conv_bias, *A_log, *dt_bias, *D, *gated_norm, *out_proj,
        *out_bias;
  };
  RecurrenceShape shape_;
  std::int64_t inner_ = 0, state_ = 0;
  std::pair<double, double> limits_;
  std::vector<Block> blocks_;
};

}  // namespace

std::unique_ptr<Model> open_mamba2(const Config& config, Weights weights) {
  return std::make_unique<Mamba2Model>(config, std::move(weights));
}

}  // namespace replayssm
