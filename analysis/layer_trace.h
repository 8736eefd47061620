#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "analysis/study.h"
#include "core/trace.h"

namespace replayssm {

/// The groups of a layer study's file that belong to a model layer, and to one policy in it.
std::string layer_group(std::int64_t layer);
std::string policy_group(std::int64_t layer, std::size_t policy);

/// What of a layer study is kept as raw data, see docs/trace.md.
struct TraceSelection {
  bool u = false, w = false, decay = false, y = false, state = false;
  std::vector<std::int64_t> layers;  ///< none: every layer that a policy covers
};

/// Reads a list such as "u,w,decay,y,state" and layers such as "0-3+7", or none for all. Throws Error that quotes what
/// it does not know.
TraceSelection parse_trace(std::string_view items, std::string_view layers);

/// Writes the raw data of a layer study as its chunks go by: one file for each layer, `layer_NN.h5` in a folder, which
/// is flushed after every chunk and complete when the layer is done. Memory is one chunk of one layer.
class LayerTrace {
 public:
  /// `chunk_tokens` as in the study, whose states are sampled at the end of each chunk. Throws Error for a layer that
  /// is none, keeps no state or is covered by no policy.
  LayerTrace(const Model& model, Backend& backend, const Tokens& tokens, const std::vector<Policy>& policies,
             const TraceSelection& selection, std::int64_t chunk_tokens, int threads, std::filesystem::path folder);
  ~LayerTrace();

  /// Bytes of all values, before compression.
  double bytes() const;

  /// Takes in one chunk of StudyOptions::observe. Throws Error as TraceWriter does.
  void observe(const LayerChunk& chunk);
  /// Ends the file of a layer, for StudyOptions::layer_done.
  void finish_layer(std::int64_t layer);
  /// Copies what was traced into a file. Throws Error where the file of a layer is missing or incomplete.
  void copy_to(TraceWriter& file) const;

 private:
  struct Layer;
  std::filesystem::path file_of(std::int64_t layer) const;
  std::vector<double> host(const Tensor& x) const;
  void start_layer(const LayerChunk& chunk);
  void start_policy(const LayerChunk& chunk);
  void add_reference(const LayerChunk& chunk);
  void add_run(const std::string& run, const LayerChunk& chunk, const Tensor& y, RecurrentState& state);

  const Model& model_;
  Backend& backend_;
  const Tokens& tokens_;
  const std::vector<Policy>& policies_;
  TraceSelection selection_;
  const std::int64_t chunk_tokens_;
  const int threads_;
  std::filesystem::path folder_;
  std::unique_ptr<Layer> layer_;  // the one at hand
};

}  // namespace replayssm
