#pragma once

// Speculative decoding on the GPU: several tokens of every sequence are verified at once, and as many of them as turn
// out right are committed. Either from a replayed state, of which a rejected token is forgotten by not moving a cursor,
// or from an eager one with a snapshot behind every token.
//
// One step of a model: verify() for every layer, then commit() once, and commit_convolution() for every layer that has
// a convolution. Where there is attention too, the caller takes the rejected tokens off the length of its cache.

#include "cuda/decode.h"

namespace replayssm::cuda {

/// The tokens that a batch verifies: of each row the one that follows what is committed, and behind it a draft's.
///
/// Token t of row r is row first[r] + t of activations and of y, or, without `first`, row r * tokens + t.
struct Drafts {
  std::int64_t tokens = 1;              ///< T: the most that a row has
  const std::int32_t* count = nullptr;  ///< [rows]: tokens of each row, 0 (the row is left alone) to T; 1: no draft
  const std::int32_t* first = nullptr;  ///< [rows], or null
};

/// How rings are kept while tokens are verified. Of all layers alike; device memory that the caller owns.
///
/// Records lie in a circle: record i of a slot is entry (origin + i) mod capacity of its ring. `held` of them are
/// committed. Those of the tokens being verified follow and are not: an entry that is not committed is dead, whatever
/// it holds, and never loaded. A new sequence in a slot begins with held = 0.
struct Window : Drafts {
  std::int64_t committed = 1;      ///< W: the most records that are held, at least T
  std::int64_t capacity = 2;       ///< of the rings of all layers, at least W + T
  std::int32_t* origin = nullptr;  ///< [slots], 0 to capacity - 1; read by verify(), moved by commit()
  std::int32_t* held = nullptr;    ///< [slots], 0 to W; read by verify(), moved by commit() and roll_back()
};

/// Verifies the tokens of every row in one layer, on the stream. A row with held + count > W first folds its records:
///
///     S0 <- Q(e^G S0 + sum_{j <= held} e^{...} u_j w_j^T),  read copy <- Q_lo(S0)
///     y_t = e^{G_t} (S0 c_t) + sum_{j <= t} e^{g_{j+1} + ... + g_t} (w_j . c_t) u_j
///
/// with j over the records (of a row that has folded none) and the tokens of the window up to t. The window's records
/// are written behind those that are held. Nothing else is written: no state but that of a fold, no cursor.
///
/// `step`: the layer and its tokens. Activations and y have a row for each token, see Drafts; y of tokens beyond a
/// row's count is not written. `length` is 1 and `held` null, as the window says what is held; rings are the window's.
/// u of a fold are those of the ring, and in a closed loop those that the state and the raw records give, as of
/// decode()'s flush. A row whose slot, count, origin or held is out of range is padding: nothing of it is read or
/// written.
///
/// Arithmetic and rounding are decode()'s. Every token reads those before it as their records hold them, rounded, and
/// itself unrounded, so that to verify T tokens at once gives what T windows of one token give, and rejected tokens
/// leave nothing behind: records and checkpoints are those of the accepted tokens alone, folded at the same places. In
/// the generic kernel that holds bit for bit, also beside decode(); bits of a row do not depend on the other rows, and
/// are the same in every run. No synchronisation, no allocation: the call can be captured in a CUDA graph, in which
/// count, first, cursors and slots may change from launch to launch.
///
/// After a fold the records are in the state and still in the ring until commit() moves the origin: between two calls
/// of verify() for a layer there has to be a commit(), of 0 tokens where the step is given up.
///
/// Throws Error, naming the field, for a shape, type, pointer or combination that cannot be served, and if the launch
/// fails. No fast kernel is made for windows yet: Kernel::fast is refused.
void verify(const Mamba2Step& step, const Window& window, CUstream_st* stream, Kernel kernel = Kernel::automatic);
void verify(const DeltaStep& step, const Window& window, CUstream_st* stream, Kernel kernel = Kernel::automatic);

/// Commits the first accepted[r] tokens of each row, 0 to its count, once a step, after all layers: where the row has
/// folded, origin <- origin + held (mod capacity), held <- 0; then held <- held + accepted[r]. What is not committed is
/// rolled back.
///
/// rows, slots, slot: as in the steps. accepted [rows]. refused [1], or null: to it is added the number of rows that
/// are no padding and whose count, origin or held is out of range, which stay as they are, or whose accepted[r] is,
/// which commit nothing.
void commit(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const Window& window,
            const std::int32_t* accepted, std::int32_t* refused, CUstream_st* stream);

/// Takes back tokens[r] committed tokens of each row, down to its checkpoint: held <- held - tokens[r]. A row that
/// holds fewer stays as it is and is added to `refused`. Arguments as of commit(); the convolution's inputs before the
/// tokens that are taken back are the caller's to restore.
void roll_back(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const Window& window,
               const std::int32_t* tokens, std::int32_t* refused, CUstream_st* stream);

/// The last inputs of a causal convolution, oldest first: input k of channel c of a slot is element
/// slot * slot_stride + c * channel_stride + k * input_stride.
struct ConvolutionWindow {
  Scalar type = Scalar::bf16;
  void* data = nullptr;
  std::int64_t channels = 0;
  std::int64_t inputs = 0;  ///< kept of each channel: the width of the kernel - 1, or more
  std::int64_t slot_stride = 0, channel_stride = 0, input_stride = 1;
};

/// Moves the convolution's inputs of each row on by the accepted tokens, once a step for every layer: the last `inputs`
/// of those that were there and of the first accepted[r] of `x`.
///
/// x [tokens, channels], before the convolution, rows as in Drafts; rounded to the window's type. A row whose count is
/// out of range, or accepted[r] beyond its count, stays as it is.
void commit_convolution(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const Drafts& drafts,
                        const ConvolutionWindow& window, const Activations& x, const std::int32_t* accepted,
                        CUstream_st* stream);

/// Where an eager state goes behind every token. With the state of the row itself that makes 1 + T slots a sequence.
struct Snapshots : Drafts {
  std::int32_t* slot = nullptr;  ///< [rows, T]: slots of the step's pool, all different, and no row's own
};

/// Verifies the tokens of every row on the eager schedule: from the state in the row's slot, S <- Q(S_t) goes to the
/// snapshot of token t, which the next token starts from; y_t is read from the unrounded S_t. The state in the row's
/// slot stays. `step` as above; it has no read copy and no ring. A row whose slot, count or snapshots are out of range
/// is padding. Bits, errors and graphs as above; those of a window are those of its tokens one by one in decode().
void verify(const Mamba2Step& step, const Snapshots& snapshots, CUstream_st* stream, Kernel kernel = Kernel::automatic);
void verify(const DeltaStep& step, const Snapshots& snapshots, CUstream_st* stream, Kernel kernel = Kernel::automatic);

/// Commits the first accepted[r] tokens of each row: the snapshot behind the last of them becomes the row's slot and
/// the old slot a snapshot, slot[r] <-> snapshots.slot[r, accepted[r] - 1]. None of 0 tokens. Arguments as above.
void commit(std::int64_t rows, std::int64_t slots, std::int32_t* slot, const Snapshots& snapshots,
            const std::int32_t* accepted, std::int32_t* refused, CUstream_st* stream);

}  // namespace replayssm::cuda
