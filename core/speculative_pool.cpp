#include "core/speculative_pool.h"

#include <algorithm>

#include "core/error.h"

namespace replayssm {

template <class Real>
SpeculativePool<Real>::SpeculativePool(const RecurrenceShape& shape, const Policy& policy, const Speculation& room,
                                       std::int64_t slots, const StatePlace& place) {
  if (slots < 1) fail("a pool must have at least 1 slot, found ", slots);
  StatePlace own = place;
  for (std::int64_t i = 0; i < slots; ++i, ++own.slot) states_.emplace_back(shape, policy, room, own);
  used_.resize(states_.size());
}

template <class Real>
std::int64_t SpeculativePool<Real>::allocated() const {
  return std::ranges::count(used_, true);
}

template <class Real>
std::int64_t SpeculativePool<Real>::allocate() {
  const auto unused = std::ranges::find(used_, false);
  if (unused == used_.end()) fail("all ", slots(), " slots of the pool are allocated");
  *unused = true;
  return unused - used_.begin();
}

template <class Real>
void SpeculativePool<Real>::check(std::int64_t slot) const {
  if (slot < 0 || slot >= slots()) fail("slot ", slot, " is not in the pool of ", slots());
  if (!used_[static_cast<std::size_t>(slot)]) fail("slot ", slot, " of the pool is not allocated");
}

template <class Real>
void SpeculativePool<Real>::free(std::int64_t slot) {
  check(slot);
  state(slot).clear();
  used_[static_cast<std::size_t>(slot)] = false;
}

template <class Real>
void SpeculativePool<Real>::copy(std::int64_t from, std::int64_t to) {
  check(from);
  check(to);
  if (from != to) state(to).copy(state(from));
}

template <class Real>
SpeculativeState<Real>& SpeculativePool<Real>::at(std::int64_t slot) {
  check(slot);
  return state(slot);
}

/// That slot_of(i) is an allocated slot that no other row has, or below 0, for every row.
template <class Real>
template <class SlotOf>
void SpeculativePool<Real>::check_rows(std::size_t rows, SlotOf&& slot_of) const {
  std::vector<bool> seen(states_.size());
  for (std::size_t i = 0; i < rows; ++i) {
    const std::int64_t slot = slot_of(i);
    if (slot < 0) continue;
    check(slot);
    if (seen[static_cast<std::size_t>(slot)]) fail("slot ", slot, " of the pool is named twice in a batch");
    seen[static_cast<std::size_t>(slot)] = true;
  }
}

template <class Real>
void SpeculativePool<Real>::verify(std::span<const Row> rows, int threads) {
  check_rows(rows.size(), [&](std::size_t i) { return rows[i].slot; });
  for (const Row& row : rows) {
    if (row.slot >= 0) state(row.slot).check_window(row.inputs->tokens);
  }
  for (const Row& row : rows) {
    if (row.slot < 0) continue;
    SpeculativeState<Real>& s = state(row.slot);
    s.verify(*row.inputs, row.y, s.shape().heads * s.shape().head_dim, threads);
  }
}

template <class Real>
void SpeculativePool<Real>::accept(std::span<const std::int64_t> slots, std::span<const std::int64_t> counts) {
  if (slots.size() != counts.size()) fail("accept: ", counts.size(), " counts for ", slots.size(), " slots");
  check_rows(slots.size(), [&](std::size_t i) { return slots[i]; });
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] >= 0) state(slots[i]).check_accept(counts[i]);
  }
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] >= 0) state(slots[i]).accept(counts[i]);
  }
}

template class SpeculativePool<float>;
template class SpeculativePool<double>;

}  // namespace replayssm
