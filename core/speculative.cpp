#include "core/speculative.h"

#include "core/error.h"

namespace replayssm {
namespace {

/// The room with the defaults filled in.
Speculation checked(Speculation room) {
  if (room.window < 1) fail("speculation: the window must be at least 1 token, found ", room.window);
  if (room.committed < room.window) {
    fail("speculation: the ring must hold at least a window of ", room.window, " committed tokens, found ",
         room.committed);
  }
  const std::int64_t least = room.window + room.committed;
  if (room.slots == 0) room.slots = least;
  if (room.slots < least) {
    fail("speculation: a ring of ", room.committed, " committed tokens and a window of ", room.window,
         " needs at least ", least, " slots, found ", room.slots);
  }
  if (room.origin < 0 || room.origin >= room.slots) {
    fail("speculation: the origin must be one of the ", room.slots, " slots from 0 on, found ", room.origin);
  }
  return room;
}

/// A state of length 1 rounds itself at every token.
bool rounds_every_token(const Policy& policy) { return policy.as_replay().length == 1; }

}  // namespace

template <class Real>
SpeculativeState<Real>::SpeculativeState(const RecurrenceShape& shape, const Policy& policy, const Speculation& room,
                                         const StatePlace& place)
    : room_(checked(room)),
      eager_(rounds_every_token(policy)),
      state_(shape, policy, place, eager_ ? 0 : room_.slots, eager_ ? 0 : room_.origin) {
  at_.origin = room_.origin;
  if (eager_) snapshots_.resize(static_cast<std::size_t>(room_.slots));
}

template <class Real>
const State<Real>& SpeculativeState<Real>::after(std::int64_t records) const {
  return eager_ && records > 0 ? *snapshots_[slot(records - 1)] : state_;
}

template <class Real>
void SpeculativeState<Real>::drop_snapshots(std::int64_t first, std::int64_t last) {
  for (std::int64_t i = first; eager_ && i < last; ++i) snapshots_[slot(i)].reset();
}

template <class Real>
void SpeculativeState<Real>::fold(int threads) {
  if (at_.held == 0) return;
  if (eager_) {
    state_ = after(at_.held);
    drop_snapshots(0, at_.held);
  } else {
    state_.fold(threads);
  }
  at_.origin = static_cast<std::int64_t>(slot(at_.held));
  at_.held = 0;
  ++at_.flushes;
}

template <class Real>
void SpeculativeState<Real>::check_window(std::int64_t tokens) const {
  if (tokens < 0 || tokens > room_.window) {
    fail("verify: a window of ", tokens, " tokens, of at most ", room_.window);
  }
  if (at_.pending > 0) fail("verify: ", at_.pending, " tokens of the window before wait for accept()");
}

template <class Real>
void SpeculativeState<Real>::verify(const LayerInputs<Real>& inputs, Real* y, std::int64_t y_stride, int threads) {
  check_window(inputs.tokens);
  if (at_.held + inputs.tokens > room_.committed) fold(threads);
  if (eager_) {
    State<Real> next = after(at_.held);
    for (std::int64_t t = 0; t < inputs.tokens; ++t) {
      LayerInputs<Real> one{1, {}, {}};
      for (const HeadInputs<Real>& head : inputs.heads) one.heads.push_back(head.from(t));
      next.advance(one, y + t * y_stride, y_stride, threads);
      snapshots_[slot(at_.held + t)] = next;
    }
  } else {
    state_.verify(inputs, y, y_stride, threads);
  }
  at_.pending = inputs.tokens;
  at_.verified += inputs.tokens;
  ++at_.windows;
}

template <class Real>
void SpeculativeState<Real>::check_accept(std::int64_t n) const {
  if (n < 0 || n > at_.pending) fail("accept: ", n, " tokens of the ", at_.pending, " that wait for it");
}

template <class Real>
void SpeculativeState<Real>::accept(std::int64_t n) {
  check_accept(n);
  drop_snapshots(at_.held + n, at_.held + at_.pending);
  at_.pending = 0;
  at_.accepted += n;
  hold(at_.held + n);
}

template <class Real>
void SpeculativeState<Real>::rollback(std::int64_t n) {
  if (at_.pending > 0) fail("rollback: ", at_.pending, " tokens of a window wait for accept()");
  if (n < 0 || n > at_.held) {
    fail("rollback: ", n, " tokens of the ", at_.held, " committed since the checkpoint, at token ",
         at_.tokens - at_.held);
  }
  drop_snapshots(at_.held - n, at_.held);
  at_.rolled_back += n;
  at_.rollbacks += n > 0;
  hold(at_.held - n);
}

template <class Real>
void SpeculativeState<Real>::hold(std::int64_t records) {
  at_.tokens += records - at_.held;
  at_.held = records;
  if (!eager_) state_.hold(records);
}

template <class Real>
std::vector<Real> SpeculativeState<Real>::effective(std::int64_t head, std::int64_t back) {
  if (back < 0 || back > at_.held) {
    fail("effective: ", back, " tokens back of the ", at_.held, " committed since the checkpoint, at token ",
         at_.tokens - at_.held);
  }
  const std::int64_t records = at_.held - back;
  return eager_ ? after(records).checkpoint(head) : state_.effective(head, records);
}

template <class Real>
void SpeculativeState<Real>::set(const Real* state) {
  if (eager_) state_ = after(at_.held);  // its count of tokens and its events
  drop_snapshots(0, at_.held + at_.pending);
  state_.set(state);
  at_.held = at_.pending = 0;
}

template <class Real>
void SpeculativeState<Real>::clear() {
  *this = SpeculativeState(shape(), policy(), room_, state_.place_);
}

/// Takes over all that another of the same kind holds, but its place.
template <class Real>
void SpeculativeState<Real>::copy(const SpeculativeState& from) {
  const StatePlace own = state_.place_;
  *this = from;
  state_.place_ = own;
  for (auto& snapshot : snapshots_) {
    if (snapshot) snapshot->place_ = own;
  }
}

template class SpeculativeState<float>;
template class SpeculativeState<double>;

}  // namespace replayssm
