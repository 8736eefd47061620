#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/policy.h"
#include "core/recurrence.h"
#include "core/state.h"

namespace replayssm {

/// What a speculative state has room for.
struct Speculation {
  std::int64_t window = 0;     ///< T: the most tokens of one verify(), at least 1
  std::int64_t committed = 0;  ///< W: the most records that the ring holds between steps, at least T
  std::int64_t slots = 0;      ///< of the ring, at least W + T; 0 stands for W + T
  std::int64_t origin = 0;     ///< slot of the first record, 0 .. slots - 1; no result depends on it

  bool operator==(const Speculation&) const = default;
};

/// Where a speculative state stands, and what it did since the zero state. All counts are of tokens but the last four.
struct SpeculationStatus {
  std::int64_t tokens = 0;       ///< committed since the zero state, those rolled back not among them
  std::int64_t held = 0;         ///< committed since the checkpoint: records in the ring, as far as rollback() reaches
  std::int64_t pending = 0;      ///< of the window that accept() has yet to decide on
  std::int64_t verified = 0;     ///< that verify() gave outputs for
  std::int64_t accepted = 0;     ///< that accept() committed
  std::int64_t rolled_back = 0;  ///< that rollback() took back
  std::int64_t origin = 0;       ///< slot of the ring that holds the first record
  std::int64_t windows = 0;      ///< calls of verify()
  std::int64_t rollbacks = 0;    ///< calls of rollback() that took back something
  std::int64_t flushes = 0;      ///< times that the records were folded into the checkpoint

  bool operator==(const SpeculationStatus&) const = default;
};

/// The recurrent state of one layer and one sequence under speculative decoding: a checkpoint (or anchor and read copy)
/// and a circular ring of the records of the tokens since. A step is
///
///     verify(window)   outputs of T tokens: the next one and its drafts
///     accept(n)        the first n of them are committed; the rest is dropped by not advancing the cursor
///
/// verify() writes no state. Before it, where h + T > W, the h committed records are folded into the checkpoint,
/// S0 <- Q(S), each flush an event of its own behind the last committed token, and the origin moves on by h. Rejected
/// tokens leave no trace: after any accept counts, states, outputs, draws and events are bit for bit those of a State
/// that advances by the committed tokens alone and calls State::fold() at the same positions. Entries of the ring that
/// hold no committed record are never read and may hold anything; they start as NaN.
///
/// The schedule of the policy gives formats, order and loop. T and W take the place of its length, but for length 1,
/// `eager(...)`: such a state rounds itself at every token, so that there is nothing to replay, and the ring holds a
/// snapshot of the state behind each token instead of its record. Draws of stochastic rounding count committed tokens,
/// modulo 2^32. Positions in the ring are kept modulo `slots`.
template <class Real>
class SpeculativeState {
 public:
  /// Zero state, empty ring. Throws Error for a shape that State refuses and for a Speculation out of range.
  SpeculativeState(const RecurrenceShape& shape, const Policy& policy, const Speculation& room,
                   const StatePlace& place = {});

  /// Outputs of a window of inputs.tokens tokens, at most T: y[t] [heads head_dim] at y + t * y_stride receives S c
  /// before D x, as if all tokens up to t were committed. Throws Error, and changes nothing, for a larger window and
  /// while another one waits for accept().
  void verify(const LayerInputs<Real>& inputs, Real* y, std::int64_t y_stride, int threads = 1);
  void verify(const LayerInputs<Real>& inputs, Real* y) { verify(inputs, y, shape().heads * shape().head_dim); }

  /// Commits the first n tokens of the window, 0 <= n <= pending, and drops the others. Throws Error, and changes
  /// nothing, for any other n: a window is decided on once.
  void accept(std::int64_t n);

  /// Takes back the last n committed tokens, 0 <= n <= held: the checkpoint is as far as it goes. Throws Error, and
  /// changes nothing, beyond that and while a window waits for accept().
  void rollback(std::int64_t n);

  const RecurrenceShape& shape() const { return state_.shape(); }
  const Policy& policy() const { return state_.policy_; }
  const Speculation& room() const { return room_; }
  const SpeculationStatus& status() const { return at_; }
  /// What went out of range, of committed tokens and flushes alone.
  RangeEvents events() const { return latest().events(); }

  /// The state [head_dim, state_dim] as of the token `back` before the last committed one, 0 <= back <= held,
  /// unrounded: what a flush there would store, before its rounding. Throws Error beyond.
  std::vector<Real> effective(std::int64_t head, std::int64_t back = 0);
  /// The stored checkpoint or anchor, and the copy that outputs read; of an eager state, that behind the last token.
  const std::vector<Real>& checkpoint(std::int64_t head) const { return latest().checkpoint(head); }
  const std::vector<Real>& read_copy(std::int64_t head) const { return latest().read_copy(head); }
  /// Starts from a state [heads, head_dim, state_dim] that is stored as it is, without rounding; drops ring, residuals
  /// and a window that waits. The count of tokens goes on.
  void set(const Real* state);
  /// Back to how it was made: zero state, empty ring, every count 0.
  void clear();

  /// All that it holds, as bytes for restore() on a machine of the same byte order: states, records, snapshots, cursor,
  /// residuals, counts and events. What rejected tokens left behind is not among them, so that the same committed
  /// tokens and flushes give the same bytes but for the counts. Throws Error while a window waits for accept().
  std::vector<std::byte> save() const;
  /// Goes on as the saved state would; draws are those of its own place. Throws Error, and changes nothing, for bytes
  /// that are no such state, are cut or too long, and for those of another precision, shape, policy or room, of which
  /// it names both.
  void restore(std::span<const std::byte> bytes);

 private:
  template <class>
  friend class SpeculativePool;
  std::size_t slot(std::int64_t record) const { return static_cast<std::size_t>((at_.origin + record) % room_.slots); }
  const State<Real>& after(std::int64_t records) const;
  const State<Real>& latest() const { return after(at_.held); }
  void drop_snapshots(std::int64_t first, std::int64_t last);
  void check_window(std::int64_t tokens) const;
  void check_accept(std::int64_t n) const;
  void copy(const SpeculativeState& from);
  void fold(int threads);
  void hold(std::int64_t records);
  std::string kind() const;
  template <class Archive>
  void archive(Archive& archive);
  template <class Archive>
  static void archive_heads(Archive& archive, State<Real>& state);

  Speculation room_;
  SpeculationStatus at_;
  bool eager_;         // of length 1: snapshots in the place of records
  State<Real> state_;  // with its ring; of an eager state the one behind the tokens that are held no more
  std::vector<std::optional<State<Real>>> snapshots_;  // of an eager state: [slots], those of live tokens
};

}  // namespace replayssm
