#pragma once

// Private to the benchmark: the device memory of a case and its decode steps.

#include <vector>

#include "cuda/bench.h"
#include "cuda/bench_device.h"
#include "cuda/bench_reference.h"

namespace replayssm::cuda {

/// The layers of a case: states and rings of each, and what they share: parameters, inputs of `sets` tokens, cursors.
/// Inputs and parameters are random, from fixed seeds; decays go from e^-0.001 to e^-1 a token.
class Layers {
 public:
  /// Zero states, empty rings. Throws Error for a policy that no kernel serves and where the memory is too small.
  Layers(const BenchCase& bench_case, const Stream& stream);

  std::int64_t layers() const { return layers_; }
  std::int64_t sets() const { return sets_; }  ///< a multiple of L, at least 16
  /// Tokens until every row has flushed at least three times and row r holds r mod L records.
  std::int64_t warm_tokens() const;
  /// The first of these that row r takes part in.
  std::int64_t joins(std::int64_t row) const { return (length_ - row % length_) % length_; }

  /// Puts token t of every layer on the stream, then moves the cursors on. Tokens before L are for the rows that have
  /// joined; set t mod sets() of the inputs is read and of y written, as `y_type`.
  void token(std::int64_t t, Scalar y_type) const;
  /// The same for all rows, while the cursors stay where they are.
  void standing_token(std::int64_t t) const;
  void all_hold(std::int64_t records) const;

  // Host copies, of what is on the device when the stream is idle.
  const HostParameters& parameters() const { return parameters_; }
  HostSequence sequence(std::int64_t row, std::int64_t tokens) const;
  std::vector<double> y(std::int64_t token, std::int64_t row, Scalar y_type) const;
  /// Heads of the first layer, [heads, head_dim, state_dim]; of the read copy, where there is one, if `read`.
  std::vector<double> states(std::int64_t row, const std::vector<std::int64_t>& heads, bool read) const;

 private:
  /// An array of a layer: where it begins in the layer's memory, and bytes and elements of a slot.
  struct Part {
    std::int64_t offset = -1, elements = 0;
  };
  struct Pool {
    Format format;
    Storage storage;
    Part codes, scales;
  };
  struct Input {
    std::int64_t width;
    float mean, deviation;
    Buffer data;  // [sets, rows, width], a set on set_elements()
  };

  /// From one set of inputs or outputs of this width to the next.
  std::int64_t set_elements(std::int64_t width) const;
  Part take(std::int64_t elements, std::int64_t bytes);
  template <class T = void>
  T* place(const Part& part, std::int64_t layer) const {
    return part.offset < 0 ? nullptr : memory_.at<T>(layer * layer_bytes_ + part.offset);
  }
  Pool pool(const Format& format);
  StatePool on_device(const Pool& pool, std::int64_t layer) const;
  void make_parameters();
  Activations input(std::size_t i, std::int64_t set) const;
  /// Where y of a set begins; there is room for fp32.
  void* y_of(std::int64_t set, Scalar type) const;
  /// Steps of all rows but for slots and y.
  void fill(Step& step, std::int64_t layer) const;
  Mamba2Step mamba2_step(std::int64_t layer, std::int64_t set) const;
  DeltaStep delta_step(std::int64_t layer, std::int64_t set) const;
  void decode_all(std::int64_t set, const std::int32_t* slot, Scalar y_type) const;

  BenchCase case_;
  const Stream& stream_;
  std::int64_t length_, layers_ = 0, sets_ = 0, layer_bytes_ = 0;
  bool closed_loop_ = false;
  Pool state_, read_;
  Scalar v_type_{}, u_type_{}, w_type_{};
  Part v_, u_, w_, gain_, log_decay_;
  HostParameters parameters_;
  std::vector<Input> inputs_;  // x, B, C, dt; q, k, v, gate, beta
  Buffer memory_, workspace_, y_, A_log_, dt_bias_, D_, slots_, held_;
};

}  // namespace replayssm::cuda
