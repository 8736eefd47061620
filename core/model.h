#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/backend.h"
#include "core/safetensors.h"

namespace replayssm {

/// What a layer keeps between calls, for one stream and one sequence.
///
/// Speculative decoding: give every SSM layer a state of Backend::new_speculative_state() with one and the same
/// Speculation, and every cache `conv_window.history = committed` of it. Then, for each window of tokens,
///
///     model.forward(backend, i, x, caches[i])    for every layer i; its SSM layers verify
///     accept(caches, n)                          commits the first n tokens, in every layer
///
/// and rollback(caches, n) takes back committed ones. A prompt goes the same way, in windows that are accepted whole.
struct LayerCache {
  std::unique_ptr<RecurrentState> state;  ///< of an SSM layer; made by the caller, whose policy it has
  ConvWindow conv_window;
  AttentionCache attention;
  std::int64_t position = 0;           ///< tokens seen
  std::int64_t committed = 0;          ///< of them that accept() was called for; of no meaning elsewhere
  std::optional<RecurrenceCall> call;  ///< of the last call of an SSM layer
  Tensor readout;  ///< of the last call of an SSM layer: y = S c before D x, [tokens, heads head_dim]
};

/// Commits the first n tokens that forward() has brought through all layers of a model since the last accept(), and
/// takes the others out of its states, convolutions and attention caches. Throws Error, and changes nothing, unless all
/// layers wait for the same number of tokens and n is at most that.
void accept(std::span<LayerCache> layers, std::int64_t n);
/// Takes the last n committed tokens out of all layers. Throws Error, and changes nothing, where a layer does not reach
/// back that far, or tokens wait for accept().
void rollback(std::span<LayerCache> layers, std::int64_t n);

/// One layer of a model as users see it.
struct LayerInfo {
  std::string kind;                           ///< mamba2, gated_delta, attention
  std::optional<RecurrenceShape> recurrence;  ///< of SSM layers
  const TensorView *A_log = nullptr, *dt_bias = nullptr;
};

/// A language model from a Hugging Face folder: config.json and safetensors. Weights stay mapped from their files.
class Model {
 public:
  /// Opens a folder and checks every tensor that the model needs: presence and shape. Throws Error naming the file, the
  /// key or the tensor; an unknown model_type is refused by name.
  static std::unique_ptr<Model> open(const std::filesystem::path& folder);
  virtual ~Model() = default;

  const std::string& type() const { return type_; }
  std::int64_t vocabulary() const { return embedding_->shape[0]; }
  std::int64_t hidden() const { return embedding_->shape[1]; }
  const std::vector<LayerInfo>& layers() const { return layers_; }
  std::int64_t ssm_layers() const;
  /// Bytes, as stored, of the weights that a step of decoding reads once for all its sequences: all that the model uses
  /// but an embedding that is not the head too, of which it reads a few rows.
  std::int64_t step_weight_bytes() const { return weight_bytes_; }
  /// SHA-256 of the weight files.
  std::string sha256() const { return weights_.sha256(); }
  /// What was odd about the folder but not wrong; one line each.
  const std::vector<std::string>& notices() const { return notices_; }

  /// Throws Error naming position and id where an id is not in the vocabulary.
  Tensor embed(Backend& backend, std::span<const std::int32_t> ids) const;
  /// Hidden states [tokens, hidden] behind layer `layer`.
  virtual Tensor forward(Backend& backend, std::int64_t layer, const Tensor& x, LayerCache& cache) const = 0;
  Tensor final_norm(Backend& backend, const Tensor& x) const;
  /// Logits [tokens, vocabulary] from hidden states behind the final norm.
  Tensor logits(Backend& backend, const Tensor& normed) const;

 protected:
  Model(Weights weights, std::string type);

  const TensorView& weight(const std::string& name, std::vector<std::int64_t> shape);
  const TensorView* optional_weight(const std::string& name, bool wanted, std::vector<std::int64_t> shape);
  /// Finds embedding, final norm and head. A tied model uses the embedding as its head, as transformers does, and says
  /// so in a notice where the file holds a head that differs; an untied one without a head is an Error.
  void set_ends(const std::string& embedding, const std::string& norm, const std::vector<std::string>& heads,
                std::int64_t vocabulary, std::int64_t hidden, bool tied);

  Weights weights_;
  std::string type_;
  std::vector<LayerInfo> layers_;
  std::vector<std::string> notices_;
  double epsilon_ = 0;
  NormWeight norm_kind_ = NormWeight::plain;

 private:
  const TensorView *embedding_ = nullptr, *norm_ = nullptr, *head_ = nullptr;
  std::int64_t weight_bytes_ = 0;
};

}  // namespace replayssm
