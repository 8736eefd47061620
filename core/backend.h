#pragma once

// The seam between model code and what computes it. Model families are written once against these operations.

#include <cmath>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "core/error.h"
#include "core/policy.h"
#include "core/recurrence.h"
#include "core/safetensors.h"
#include "core/speculative.h"
#include "core/state.h"

namespace replayssm {

enum class Precision { fp32, fp64 };

/// A matrix [rows, columns] of the backend's scalars, row t at t * stride. Copies and views share the storage.
struct Tensor {
  std::shared_ptr<void> storage;
  std::int64_t offset = 0, rows = 0, columns = 0, stride = 0;

  /// Columns first .. first + count of every row.
  Tensor slice(std::int64_t first, std::int64_t count) const { return {storage, offset + first, rows, count, stride}; }
  /// Rows first .. first + count.
  Tensor range(std::int64_t first, std::int64_t count) const {
    return {storage, offset + first * stride, count, columns, stride};
  }
};

/// The inputs [K - 1 + spare, channels] of a short convolution so far, the newest last. The next token needs K - 1 of
/// them; behind those it keeps the inputs of up to `history` tokens more, so that as many tokens can be taken back.
struct ConvWindow {
  Tensor inputs;
  std::int64_t history = 0;
  std::int64_t spare = 0;
};

/// Keys and values of the tokens so far, [capacity, kv_heads head_dim] each.
struct AttentionCache {
  Tensor keys, values;
  std::int64_t length = 0;
};

struct AttentionShape {
  std::int64_t heads = 0, kv_heads = 0, head_dim = 0;
};

/// How a norm's weight enters: times w, or times 1 + w (Qwen families).
enum class NormWeight { plain, one_plus };

/// Inputs of a Mamba-2 recurrence, as in Mamba2Inputs.
struct Mamba2Call {
  RecurrenceShape shape;
  Tensor x, B, C, dt;
  const TensorView *A_log = nullptr, *dt_bias = nullptr;
  double dt_min = 0, dt_max = 0;
};

/// Inputs of a delta-rule recurrence, as in DeltaInputs.
struct DeltaCall {
  RecurrenceShape shape;
  Tensor q, k, v, gate, beta;
  const TensorView *A_log = nullptr, *dt_bias = nullptr;
  double beta_scale = 1;
};

/// What one call of a layer brings to its recurrence. Holding one keeps its tensors alive.
using RecurrenceCall = std::variant<Mamba2Call, DeltaCall>;

/// A State in the backend's precision, or a SpeculativeState.
class RecurrentState {
 public:
  virtual ~RecurrentState() = default;

  // Of a speculative state, which advance() gives a window to verify; see SpeculativeState. Others throw Error.
  /// Commits the first n tokens of the window.
  virtual void accept(std::int64_t) { not_speculative("accept"); }
  /// Takes back the last n committed tokens.
  virtual void rollback(std::int64_t) { not_speculative("rollback"); }
  virtual SpeculationStatus speculation() const { not_speculative("speculation"); }

  /// A flush behind the last token: State::fold(). Throws Error for a speculative state, which folds by itself.
  virtual void fold() { fail("fold(): the recurrent state is none that is flushed from outside"); }

  virtual RangeEvents events() const = 0;
  /// Records in the ring.
  virtual std::int64_t held() const = 0;
  // States [heads, head_dim, state_dim], widened to binary64:
  /// what the schedule would rebuild after the last token,
  virtual std::vector<double> effective() = 0;
  /// the stored checkpoint or anchor,
  virtual std::vector<double> checkpoint() const = 0;
  /// and what output-only steps read: the read copy of a split state, else the checkpoint.
  virtual std::vector<double> read_copy() const = 0;

 private:
  [[noreturn]] static void not_speculative(const char* call) {
    fail(call, "(): the recurrent state is not a speculative one; Backend::new_speculative_state() makes those");
  }
};

/// Parts of a relative L2 error.
struct SquaredError {
  double difference = 0, reference = 0;
  SquaredError& operator+=(const SquaredError& other) {
    difference += other.difference;
    reference += other.reference;
    return *this;
  }
  /// sqrt(difference / reference); 0 where both are 0.
  double relative() const { return difference == 0 ? 0 : std::sqrt(difference / reference); }
};

/// Tensor operations on [tokens, width] matrices, one sequence at a time, every one computed in precision().
/// Weights are read from their file as they are and widened exactly where the precision can hold them.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual Precision precision() const = 0;
  /// The precision in which advance() computes a state that a policy rounds.
  virtual Precision recurrence_precision() const { return precision(); }

  virtual Tensor zeros(std::int64_t rows, std::int64_t columns) = 0;
  /// Rows ids of table [vocabulary, width].
  virtual Tensor embed(const TensorView& table, std::span<const std::int32_t> ids) = 0;
  /// x W^T + bias, W [out, in].
  virtual Tensor linear(const Tensor& x, const TensorView& weight, const TensorView* bias = nullptr) = 0;
  /// x += y.
  virtual void add(Tensor& x, const Tensor& y) = 0;
  /// x / sqrt(mean(x^2) + epsilon) over groups of `group` columns, times the weight [group] or [columns].
  virtual Tensor rms_norm(const Tensor& x, const TensorView& weight, double epsilon, NormWeight kind,
                          std::int64_t group) = 0;
  /// silu(bias + sum_k w[c, k] x[t - K + 1 + k, c]) per channel; weight [channels, 1, K]. `window` holds the inputs
  /// before x (K - 1 rows of zeros at first; made here when empty) and is moved on.
  virtual Tensor causal_conv_silu(const Tensor& x, const TensorView& weight, const TensorView* bias,
                                  ConvWindow& window) = 0;
  /// x *= silu(gate).
  virtual void multiply_silu(Tensor& x, const Tensor& gate) = 0;
  /// x *= sigmoid(gate).
  virtual void multiply_sigmoid(Tensor& x, const Tensor& gate) = 0;
  /// y + D x per head; D [heads], y and x [tokens, heads head_dim].
  virtual Tensor add_skip(const Tensor& y, const Tensor& x, const TensorView& D) = 0;
  /// Of every `period` columns those at first .. first + count: q and gate out of [q | gate] per head.
  virtual Tensor take(const Tensor& x, std::int64_t period, std::int64_t first, std::int64_t count) = 0;
  /// Rotary embedding (rotate-half) of the first rotary_dim dimensions of every head; row 0 stands at `position`.
  virtual void rope(Tensor& x, std::int64_t head_dim, std::int64_t rotary_dim, double theta, std::int64_t position) = 0;
  /// Causal softmax(q k^T / sqrt(head_dim)) v after appending k and v to the cache.
  virtual Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& shape,
                           AttentionCache& cache) = 0;

  /// The zero state. `place` is what stochastic rounding draws from.
  virtual std::unique_ptr<RecurrentState> new_state(const RecurrenceShape& shape, const Policy& policy,
                                                    const StatePlace& place = {}) = 0;
  /// The zero state of a SpeculativeState. Throws Error where the backend has none.
  virtual std::unique_ptr<RecurrentState> new_speculative_state(const RecurrenceShape&, const Policy&,
                                                                const Speculation&, const StatePlace& = {}) {
    fail("this backend keeps no speculative states");
  }
  /// Advances a state by the tokens of the call; returns y = S c before D x, [tokens, heads head_dim]. A speculative
  /// state verifies them.
  virtual Tensor advance(RecurrentState& state, const RecurrenceCall& call) = 0;

  /// sum (x - reference)^2 and sum reference^2 in binary64.
  virtual SquaredError squared_error(const Tensor& x, const Tensor& reference) = 0;
  /// Copies to host memory, [rows, columns], widened to binary64.
  virtual void read(const Tensor& x, double* out) = 0;
  /// A tensor of values [rows, columns] from host memory, rounded to the backend's precision; what read() gave comes
  /// back as it was.
  virtual Tensor write(const double* values, std::int64_t rows, std::int64_t columns) = 0;
};

/// How many tokens go into a matrix product. A product of many rows adds its terms in another order than that of one of
/// them alone, and in one that depends on their number.
enum class Products {
  many_tokens,  ///< as many as there are: the fastest
  one_token,    ///< each by itself: its results are the same bits, whatever other tokens come in the same call
};

/// The CPU reference: Eigen for matrix products, `threads` threads, results independent of their number.
std::unique_ptr<Backend> reference_backend(Precision precision, int threads, Products products = Products::many_tokens);

}  // namespace replayssm
