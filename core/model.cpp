#include "core/model.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>

#include "core/config.h"
#include "core/error.h"
#include "core/families/families.h"

namespace replayssm {
namespace {

using Reader = std::function<std::unique_ptr<Model>(const Config&, Weights)>;

const std::map<std::string, Reader>& families() {
  static const std::map<std::string, Reader> table = {
      {"mamba2", open_mamba2},
      {"qwen3_5", open_qwen3_5},  // the multimodal checkpoint; its language model only
      {"qwen3_5_text", open_qwen3_5},
  };
  return table;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

/// Takes the last n tokens out of all that a layer keeps beside its recurrent state.
void shorten(LayerCache& cache, std::int64_t n) {
  ConvWindow& window = cache.conv_window;
  if (window.inputs.storage) {
    window.inputs = window.inputs.range(0, window.inputs.rows - n);
    window.spare -= n;
  }
  if (cache.attention.keys.storage) cache.attention.length -= n;
  cache.position -= n;
  cache.committed = cache.position;
}

/// That the convolution of layer i has kept the inputs of n tokens.
void check_window(const LayerCache& cache, std::size_t i, const std::string& call, std::int64_t n) {
  const ConvWindow& window = cache.conv_window;
  if (window.inputs.storage && n > window.spare) {
    fail(call, ": the convolution of layer ", i, " keeps ", window.spare, " tokens that can be taken back, not ", n,
         "; its history is ", window.history);
  }
}

}  // namespace

void accept(std::span<LayerCache> layers, std::int64_t n) {
  const std::string call = "accept(" + std::to_string(n) + ")";
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const LayerCache& cache = layers[i];
    const std::int64_t pending = cache.position - cache.committed, first = layers[0].position - layers[0].committed;
    const std::int64_t verified = cache.state ? cache.state->speculation().pending : pending;
    if (n < 0 || n > pending) fail(call, ": ", pending, " tokens wait for it");
    if (pending != first) fail(call, ": ", pending, " tokens wait for it in layer ", i, ", ", first, " in layer 0");
    if (pending != verified) fail(call, ": layer ", i, " has seen ", pending, " tokens, its state ", verified);
    check_window(cache, i, call, pending - n);
  }
  for (LayerCache& cache : layers) {
    if (cache.state) cache.state->accept(n);
    shorten(cache, cache.position - cache.committed - n);
  }
}

void rollback(std::span<LayerCache> layers, std::int64_t n) {
  const std::string call = "rollback(" + std::to_string(n) + ")";
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const LayerCache& cache = layers[i];
    const std::int64_t held = cache.state ? cache.state->speculation().held : cache.committed;
    if (cache.position != cache.committed) {
      fail(call, ": ", cache.position - cache.committed, " tokens of layer ", i, " wait for accept()");
    }
    if (n < 0 || n > held) fail(call, ": layer ", i, " can take back ", held, " tokens, down to its checkpoint");
    check_window(cache, i, call, n);
  }
  for (LayerCache& cache : layers) {
    if (cache.state) cache.state->rollback(n);
    shorten(cache, n);
  }
}

std::unique_ptr<Model> Model::open(const std::filesystem::path& folder) {
  const Config config = Config::open(folder);
  const std::string type = config.text("model_type");
  const auto family = families().find(type);
  if (family == families().end()) {
    std::string known;
    for (const auto& [name, reader] : families()) known += (known.empty() ? "" : ", ") + name;
    config.wrong("model_type '", type, "' is not supported; known: ", known);
  }
  return family->second(config, Weights::open(folder));
}

Model::Model(Weights weights, std::string type) : weights_(std::move(weights)), type_(std::move(type)) {
  notices_ = weights_.notices();
}

std::int64_t Model::ssm_layers() const {
  return std::count_if(layers_.begin(), layers_.end(), [](const LayerInfo& l) { return l.recurrence.has_value(); });
}

const TensorView& Model::weight(const std::string& name, std::vector<std::int64_t> shape) {
  const TensorView& tensor = weights_.at(name);
  if (tensor.shape != shape) {
    fail(tensor.file, ": tensor ", name, ": config.json asks for shape ", shape_text(shape), ", found ",
         tensor.describe());
  }
  float unused = 0;
  if (tensor.elements() > 0) widen(tensor, 0, 1, &unused);  // refuses a dtype that cannot be computed with
  weight_bytes_ += static_cast<std::int64_t>(tensor.bytes);
  return tensor;
}

const TensorView* Model::optional_weight(const std::string& name, bool wanted, std::vector<std::int64_t> shape) {
  return wanted ? &weight(name, std::move(shape)) : nullptr;
}

void Model::set_ends(const std::string& embedding, const std::string& norm, const std::vector<std::string>& heads,
                     std::int64_t vocabulary, std::int64_t hidden, bool tied) {
  embedding_ = &weight(embedding, {vocabulary, hidden});
  norm_ = &weight(norm, {hidden});
  const auto present =
      std::find_if(heads.begin(), heads.end(), [&](const std::string& name) { return weights_.has(name); });
  if (tied) {
    head_ = embedding_;
    if (present == heads.end()) return;
    const TensorView& stored = weights_.at(*present);
    const bool same = stored.dtype == embedding_->dtype && stored.bytes == embedding_->bytes &&
                      std::memcmp(stored.data, embedding_->data, stored.bytes) == 0;
    if (!same) {
      notices_.push_back(stored.file + ": tensor " + *present + " differs from " + embedding +
                         " though tie_word_embeddings is true; the embedding is used");
    }
  } else {
    if (present == heads.end()) {
      fail(embedding_->file, ": tie_word_embeddings is false and there is no tensor ", heads.front());
    }
    head_ = &weight(*present, {vocabulary, hidden});
    weight_bytes_ -= static_cast<std::int64_t>(embedding_->bytes);
  }
}

Tensor Model::embed(Backend& backend, std::span<const std::int32_t> ids) const {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= vocabulary()) {
      fail("token ", ids[i], " at position ", i, " is not in the vocabulary of ", vocabulary());
    }
  }
  return backend.embed(*embedding_, ids);
}

Tensor Model::final_norm(Backend& backend, const Tensor& x) const {
  return backend.rms_norm(x, *norm_, epsilon_, norm_kind_, hidden());
}

Tensor Model::logits(Backend& backend, const Tensor& normed) const { return backend.linear(normed, *head_); }

}  // namespace replayssm
