#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/speculative.h"

namespace replayssm {

/// Speculative states of one layer for many sequences, each in a slot of its own. A slot is allocated, which gives a
/// zero state, and freed, which clears its state and all that controls it.
template <class Real>
class SpeculativePool {
 public:
  /// `slots` free slots. Slot i draws as sequence place.slot + i. Throws Error for fewer than one slot and for what
  /// SpeculativeState refuses.
  SpeculativePool(const RecurrenceShape& shape, const Policy& policy, const Speculation& room, std::int64_t slots,
                  const StatePlace& place = {});

  std::int64_t slots() const { return std::ssize(states_); }
  std::int64_t allocated() const;
  /// The first free slot, now in use. Throws Error where all are.
  std::int64_t allocate();
  /// Throws Error, as all below, for a slot that is not allocated.
  void free(std::int64_t slot);
  /// Makes slot `to` hold what `from` holds: states, ring, cursor, counts, a window that waits. Draws to come are those
  /// of slot `to`.
  void copy(std::int64_t from, std::int64_t to);
  SpeculativeState<Real>& at(std::int64_t slot);

  /// One sequence of a batch, of inputs.tokens tokens. A row with a slot below 0 is padding: neither its inputs nor its
  /// outputs are touched.
  struct Row {
    std::int64_t slot;
    const LayerInputs<Real>* inputs;
    Real* y;  ///< [tokens, heads head_dim], dense
  };
  /// Verifies a window for each row. Throws Error, and changes nothing, where a slot is beyond the pool, free or named
  /// twice, or SpeculativeState::verify() refuses a row.
  void verify(std::span<const Row> rows, int threads = 1);
  /// Commits the first counts[i] tokens of slots[i], slots below 0 left out. Throws Error, and changes nothing, where
  /// one of them does not have so many or is named twice.
  void accept(std::span<const std::int64_t> slots, std::span<const std::int64_t> counts);

 private:
  template <class SlotOf>
  void check_rows(std::size_t rows, SlotOf&& slot_of) const;
  void check(std::int64_t slot) const;
  SpeculativeState<Real>& state(std::int64_t slot) { return states_[static_cast<std::size_t>(slot)]; }

  std::vector<SpeculativeState<Real>> states_;
  std::vector<bool> used_;
};

}  // namespace replayssm
