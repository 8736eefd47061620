#pragma once

// Decode kernels: one token of many sequences through one layer's recurrence, on the GPU. Plain data and two functions;
// no CUDA header is needed to call them.

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "core/recurrence.h"

struct CUstream_st;  // cudaStream_t is a pointer to it

namespace replayssm::cuda {

/// Types of activations and of the records in a ring.
enum class Scalar : std::uint8_t { fp32, fp16, bf16 };

/// Formats of stored states, as core/format.h defines them: fp32, fp16, bf16, `e4m3:row` and `int8:row`.
enum class Storage : std::uint8_t { fp32, fp16, bf16, e4m3_row, int8_row };

/// States of one layer, one a slot: codes [slots, heads, head_dim, state_dim], state_dim contiguous, and, where the
/// storage has them, fp32 scales [slots, heads, head_dim]. Strides count elements from slot to slot.
struct StatePool {
  Storage storage = Storage::fp32;
  void* codes = nullptr;
  float* scales = nullptr;
  std::int64_t slot_stride = 0, scale_slot_stride = 0;
};

/// One field of the records of one layer: [slots, heads or groups, capacity, width], contiguous within a slot.
struct RingField {
  Scalar type = Scalar::bf16;
  void* data = nullptr;
  std::int64_t slot_stride = 0;  ///< elements
};

/// The records of one layer. Record i of a slot is the (i + 1)-th token since its checkpoint. Entries at and beyond a
/// row's `held` are dead: they are never loaded, whatever they hold.
struct Ring {
  std::int64_t capacity = 0;  ///< records that each field has room for, at least length - 1
  RingField v;                ///< [.., heads, capacity, head_dim]: x; v of the delta rule (closed loop only)
  RingField u;                ///< [.., heads, capacity, head_dim]: u of the delta rule, from what outputs read
  RingField w;                ///< [.., groups, capacity, state_dim]: B; k after normalisation
  RingField gain;             ///< [.., heads, capacity], fp32: dt after softplus and clamp; beta (closed loop only)
  RingField log_decay;        ///< [.., heads, capacity, decay_dim], fp32: g of the delta rule
};

/// Activations [rows, width], row r at r * stride elements; width contiguous.
struct Activations {
  Scalar type = Scalar::bf16;
  const void* data = nullptr;
  std::int64_t stride = 0;
};

/// Bytes of a workspace, whatever the step.
inline constexpr std::size_t kWorkspaceBytes = 16;

/// What is the same for every recurrence. All pointers are device memory that the caller owns.
struct Step {
  RecurrenceShape shape;
  /// L: a row whose `held` is L - 1 flushes. 1 is the eager schedule, which needs no ring.
  std::int64_t length = 1;
  std::int64_t rows = 0;
  std::int64_t slots = 0;  ///< of every pool and ring
  /// [rows]: the slot of each row, no slot twice. Negative, or not below `slots`: padding, which touches no slot and
  /// whose y is not written.
  const std::int32_t* slot = nullptr;
  /// [rows]: records in the ring of the row's slot, 0 to L - 1; read only. The caller moves it on, once a token for all
  /// layers: see advance_cursors(). Null: all 0.
  const std::int32_t* held = nullptr;
  StatePool state;  ///< the checkpoint, or the anchor of a split state
  StatePool read;   ///< the read copy of a split state; codes null where the state is shared
  Ring ring;
  /// kWorkspaceBytes of device memory, aligned to 16 bytes, that nothing else uses until the step is done. Zero before
  /// the first step that uses it; every step leaves it zero. Null: the generic kernel runs.
  void* workspace = nullptr;
  Scalar y_type = Scalar::bf16;
  void* y = nullptr;  ///< [rows, heads head_dim], written
  std::int64_t y_stride = 0;
};

/// Raw inputs of a Mamba-2 layer after its convolution and SiLU, as Mamba2Inputs in core/mamba2.h.
struct Mamba2Step : Step {
  Activations x;                   ///< [rows, heads head_dim]
  Activations B;                   ///< [rows, groups state_dim]
  Activations C;                   ///< [rows, groups state_dim]
  Activations dt;                  ///< [rows, heads], before bias and softplus
  const float* A_log = nullptr;    ///< [heads]
  const float* dt_bias = nullptr;  ///< [heads]
  const float* D = nullptr;        ///< [heads]: y + D x is written; null: y
  float dt_min = 0, dt_max = std::numeric_limits<float>::infinity();
};

/// Raw inputs of a Gated DeltaNet or KDA layer after its convolution and SiLU, as DeltaInputs in core/delta_rule.h.
///
/// `closed_loop`: a flush recomputes every u from the state and the raw records v, w, beta and g, so that nothing that
/// was computed from a read copy enters the anchor; the ring then holds v and beta besides u. Otherwise the cached u of
/// the ring is folded in.
struct DeltaStep : Step {
  bool closed_loop = false;
  Activations q, k;                ///< [rows, groups state_dim], before normalisation
  Activations v;                   ///< [rows, heads head_dim]
  Activations gate;                ///< [rows, heads decay_dim]
  Activations beta;                ///< [rows, heads], before the sigmoid
  const float* A_log = nullptr;    ///< [heads]
  const float* dt_bias = nullptr;  ///< [heads decay_dim]
  float beta_scale = 1;
};

/// Which kernels may be used: `automatic` takes the fast one where there is one for the shape.
enum class Kernel : std::uint8_t { automatic, fast, generic };

/// Computes one token for every row on the stream: reads y from checkpoint (or read copy) and ring and appends the
/// token's record, or, where held is L - 1, rebuilds the state, reads y from it and stores it.
///
///     output-only   y = e^G (S0 c) + sum_j e^{g_{j+1} + ... + g_h} (w_j . c) u_j
///     flush         S = e^G S0 + sum_j e^{...} u_j w_j^T,  y = S c,  S0 <- Q(S),  read copy <- Q_lo(S0)
///
/// All arithmetic in fp32, inputs widened exactly. A state is rounded once, when it is stored, to nearest even, a
/// record when it is appended; the step that appends it uses the unrounded values; y is rounded to y_type last. Results
/// are the same in every run, and those of a row do not depend on the other rows. No synchronisation, no allocation:
/// the call can be captured in a CUDA graph.
///
/// Fast kernels: state_dim 64, 96, 128 or 256, head_dim a multiple of 16, length up to 64, a split state's anchor in
/// fp32, all data aligned to 16 bytes, and a workspace. In the delta rule an open loop where the state is shared, and
/// where it is split a closed one of length 2 to 16, with keys in bf16 (Gated DeltaNet). Tiles and their records must
/// fit into half a multiprocessor's shared memory: with inputs and y of 16 bits, of rings in bf16 all lengths do at
/// state_dim up to 128 and 53 at 256, in fp32 62 and 29, of KDA in bf16 47 and 20 (split 16 and 13). Anything else up to
/// head_dim and state_dim 256 runs in the generic kernel, which is many times slower and rounds in another order.
///
/// Sums of products in fast kernels are in part those of matrix units: of exact products, cut off, not rounded to
/// nearest, at the last bits of fp32. So outputs read states of 16 and 8 bits, with vectors in parts of 16 bits: of an
/// element 22 bits are kept, and no more than 2^-39 of the largest is lost. So flushes take in the records of a bf16
/// ring, of which an infinite one may leave NaN for infinity.
///
/// Throws Error, naming the field, for a shape, type, pointer or combination that cannot be served, and if the launch
/// fails.
void decode(const Mamba2Step& step, CUstream_st* stream, Kernel kernel = Kernel::automatic);
void decode(const DeltaStep& step, CUstream_st* stream, Kernel kernel = Kernel::automatic);

/// held <- held + 1, or 0 where it was length - 1; rows whose slot is negative stay. Once a token, after all layers.
void advance_cursors(std::int64_t rows, const std::int32_t* slot, std::int32_t* held, std::int64_t length,
                     CUstream_st* stream);

/// Whether this build has the kernels, and a device to run them on.
bool available();

}  // namespace replayssm::cuda
