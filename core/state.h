#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/policy.h"
#include "core/recurrence.h"

namespace replayssm {

/// What went out of range in a state, counted while it ran. Steps are 0-based token indices since the zero state.
struct RangeEvents {
  struct Event {
    std::int64_t step, head;
    bool operator==(const Event&) const = default;
    auto operator<=>(const Event&) const = default;
  };
  std::int64_t overflows = 0;             ///< finite values that became Inf or NaN when they were stored
  std::optional<Event> first_overflow;    ///< the first overflow
  std::optional<Event> first_non_finite;  ///< the first Inf or NaN in an output or a stored state
  bool overflows_counted = true;          ///< false where the state was stored by what counts neither
  std::int64_t saturations = 0;           ///< finite values beyond the range that became its largest value

  void merge(const RangeEvents&);
};

/// The recurrent state of one layer and one sequence as a policy keeps it: a checkpoint (or anchor and read copy) and
/// a ring of records. All arithmetic in Real; what the policy names is rounded once, when it is stored; the rest never.
/// Results do not depend on how the tokens are cut into calls, nor on which threads advance which heads.
template <class Real>
class State {
 public:
  /// Zero state, empty ring. `place` is what stochastic rounding draws from; a token counts from the zero state, and an
  /// input that the heads of a group share is the first one's. Throws Error for a shape that is not positive or heads
  /// that are no multiple of groups.
  State(const RecurrenceShape& shape, const Policy& policy, const StatePlace& place = {});

  /// Advances all heads by inputs.tokens steps; y[t] [heads head_dim] at y + t * y_stride receives S c before D x.
  void advance(const LayerInputs<Real>& inputs, Real* y, std::int64_t y_stride, int threads = 1);
  void advance(const LayerInputs<Real>& inputs, Real* y) { advance(inputs, y, shape_.heads * shape_.head_dim); }

  /// Advances head `head` alone; y[t] [head_dim] at y + t * y_stride. Heads are independent of each other: different
  /// heads may be advanced from different threads. Throws Error where they share a scale (Format::joins_heads).
  void advance_head(std::int64_t head, const LayerInputs<Real>& inputs, Real* y, std::int64_t y_stride);

  const RecurrenceShape& shape() const { return shape_; }
  /// Records in the ring.
  std::int64_t held() const { return heads_.front().held; }
  RangeEvents events() const;

  /// The stored checkpoint or anchor, and the copy that outputs read (the same where shared): [head_dim, state_dim].
  const std::vector<Real>& checkpoint(std::int64_t head) const { return heads_[static_cast<std::size_t>(head)].anchor; }
  const std::vector<Real>& read_copy(std::int64_t head) const;
  /// Starts from a state [heads, head_dim, state_dim] that is stored as it is, without rounding; empties the ring and
  /// the residuals. The count of tokens goes on.
  void set(const Real* state);
  /// What a flush after the last record would rebuild, unrounded: [head_dim, state_dim].
  std::vector<Real> effective(std::int64_t head) {
    return effective(head, heads_[static_cast<std::size_t>(head)].held);
  }
  /// A flush between tokens: S0 <- Q(effective) of every head, and the ring is empty. It draws as the last token;
  /// nothing happens where the ring is empty already.
  void fold(int threads = 1);

 private:
  using Vector = std::vector<Real>;
  // Records are kept in the `slots_` slots of a circular ring, of which slot `origin` holds the first. Those that hold
  // none are never read.
  struct Ring {
    Vector v, w, u, log_decay, gain;
  };
  struct Head {
    Vector anchor, read, running;           // running: read copy with the ring applied (sequential order only)
    Vector anchor_residual, read_residual;  // with error feedback only
    Ring ring;
    std::int64_t origin = 0, held = 0, steps = 0;
    RangeEvents events;
    std::optional<RangeEvents::Event> verified_non_finite;  // the first one in outputs of tokens that do not count yet
  };
  template <bool Delta, bool ColumnDecay>
  class Engine;
  template <class Use>
  auto with_engine(std::int64_t head, const HeadInputs<Real>& in, Use&& use);
  template <class Body>
  void for_heads(int threads, Body&& body);
  void store_together(int threads);

  // A SpeculativeState's: records behind the ones that count.
  template <class>
  friend class SpeculativeState;
  State(const RecurrenceShape& shape, const Policy& policy, const StatePlace& place, std::int64_t slots,
        std::int64_t origin);
  /// Outputs of tokens that are appended behind the records, but do not count yet.
  void verify(const LayerInputs<Real>& inputs, Real* y, std::int64_t y_stride, int threads);
  /// Makes the first `records` count, of those that do and of those that verify() appended.
  void hold(std::int64_t records);
  /// What a flush after the first `records` would rebuild.
  std::vector<Real> effective(std::int64_t head, std::int64_t records);

  RecurrenceShape shape_;
  Policy policy_;
  StatePlace place_;
  Replay schedule_;   // an eager state is a replay of length 1
  bool joins_heads_;  // what is stored takes all heads
  std::int64_t slots_;
  struct {
    Format v, w, u, log_decay, gain;
    bool exact;
  } ring_;
  std::vector<Head> heads_;
};

}  // namespace replayssm
