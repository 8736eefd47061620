#pragma once

// One layer of a served model on a machine: pools, rings, cursors, and the inputs of a step, all of them with gaps
// between slots and rows, and everything that no kernel may read filled with 0xFF, which is NaN in every type.

#include <algorithm>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "core/format.h"
#include "cuda/decode.h"
#include "tests/cuda/machine.h"

namespace replayssm::cuda::tests {

struct Case {
  RecurrenceShape shape;
  std::int64_t length = 1;
  Storage state = Storage::fp32;
  std::optional<Storage> read = {};
  Scalar ring = Scalar::fp32;         ///< of v, w and u
  std::optional<Scalar> ring_u = {};  ///< of u, where it is another
  bool closed = true;
  Scalar input = Scalar::fp32, y = Scalar::fp32;
  bool wide_c = false, wide_v = false;  ///< C or q, and x or v, come in fp32, with values of the input type
  std::int64_t rows = 1;
  bool skip = true;  ///< with D x, for Mamba-2
  float dt_min = 0, dt_max = std::numeric_limits<float>::infinity(), beta_scale = 1;
  bool staggered = false;  ///< row r begins with r mod length records
  /// Of a step that verifies: T and W, both at least 1.
  std::int64_t window = 0, committed = 0;
  std::string text() const;
  Scalar u_type() const { return ring_u.value_or(ring); }
  /// Rows of activations and y.
  std::int64_t tokens() const { return rows * std::max<std::int64_t>(window, 1); }
};

bool is_delta(const Case& setup);
Format format_of(Storage storage);
Format format_of(Scalar type);
std::string name_of(Storage storage);
std::string name_of(Scalar type);

/// Inputs of one step, [tokens, width] without gaps: x, B, C, dt of Mamba-2; v, k, q, gate, beta of the delta rule.
struct TokenInputs {
  std::vector<float> v, w, c, gate, beta;
};

/// [heads], dt_bias [heads decay_dim].
struct Parameters {
  std::vector<float> A_log, dt_bias, D;
};

/// Of a contracting recurrence: half-lives from below one token to hundreds, all in the input type.
TokenInputs random_inputs(const Case& setup, std::mt19937& random);
Parameters random_parameters(const Case& setup, std::mt19937& random);
std::vector<float> random_states(const Case& setup, std::int64_t slots, std::mt19937& random);

/// The memory of one field or pool, in codes.
struct Stored {
  explicit Stored(Machine& machine) : bytes(machine), scales(machine) {}
  Array<std::uint8_t> bytes;
  Array<float> scales;
  std::int64_t stride = 0, scale_stride = 0;  ///< elements from slot to slot
};

class Layer {
 public:
  /// Zero states, poisoned rings, empty but for staggered rows, whose records are random.
  Layer(Machine& machine, const Case& the_setup, const Parameters& the_parameters, unsigned seed = 1);
  Layer(Machine& machine, const Case& the_setup, unsigned seed = 1);

  /// Whether the machine has a kernel for it.
  bool served();
  /// Rounds a state [heads, head_dim, state_dim] into the pools of a slot; the ring stays.
  void set_state(std::int64_t at, const std::vector<float>& state);
  /// A random state in every slot.
  void fill_states();
  /// Of more than two rows, makes the first and the third padding of both kinds.
  void pad();
  /// One token: decode() and advance_cursors(); fetches all memory. Returns y [tokens, heads head_dim]; of rows that
  /// are padding whatever was there, NaN at first.
  std::vector<float> step(const TokenInputs& inputs);
  /// The parts of step() around the two calls.
  void set_inputs(const TokenInputs& inputs);
  std::vector<float> fetch();

  /// What is stored, decoded: [heads, head_dim, state_dim].
  std::vector<float> state(std::int64_t at) const { return decoded(pool, setup.state, at); }
  std::vector<float> read_copy(std::int64_t at) const {
    return setup.read ? decoded(copy, *setup.read, at) : state(at);
  }
  /// Record j of a field, [heads or groups, width].
  std::vector<float> record(const Stored& field, Scalar type, std::int64_t units, std::int64_t width, std::int64_t at,
                            std::int64_t j) const;

  Step& common() { return is_delta(setup) ? static_cast<Step&>(delta) : mamba2; }

  const Case setup;
  const Parameters parameters;
  std::int64_t slots, capacity;
  std::mt19937 random;

  Mamba2Step mamba2;
  DeltaStep delta;
  Array<std::int32_t> slot, held;
  Stored pool, copy, v, u, w, gain, log_decay;
  Array<std::uint8_t> y, workspace;

 private:
  void make_memory();
  void connect();
  void fill_records(std::int64_t row);
  void put_state(std::int64_t at, const std::vector<float>& state);
  void write_states();
  std::vector<float> decoded(const Stored& from, Storage storage, std::int64_t at) const;
  void make_pool(Stored& to, Storage storage);
  RingField make_field(Stored& to, Scalar type, std::int64_t elements);
  Activations upload(Array<std::uint8_t>& to, const std::vector<float>& from, std::int64_t width, bool wide = false);

  Machine& machine_;
  Array<float> A_log_, dt_bias_, D_;
  Array<std::uint8_t> in_v_, in_w_, in_c_, in_gate_, in_beta_;
  std::int64_t y_stride_ = 0;
};

/// Expects all that two layers have stored to be the same, bit for bit.
void ExpectSame(const Layer& a, const Layer& b);

/// Codes of values in a type, little-endian, and back.
std::vector<std::uint8_t> encoded(Scalar type, const std::vector<float>& values);
float value_at(Scalar type, const std::uint8_t* bytes, std::int64_t i);

}  // namespace replayssm::cuda::tests
