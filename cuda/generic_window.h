#pragma once

// Generic speculative steps, private to cuda/, of the parts of cuda/generic.h: the tokens of a window one after another
// on a row of the state, which stays with its thread. Plain C++, as those.

#include <vector>

#include "cuda/generic.h"
#include "cuda/speculate.h"

namespace replayssm::cuda::generic {

/// The tokens of a row; false where their number is out of range.
struct Tokens {
  std::int64_t count, first;
};

REPLAYSSM_HOST_DEVICE inline bool find_tokens(const Drafts& drafts, std::int64_t row, Tokens& tokens) {
  tokens = {drafts.count[row], drafts.first ? drafts.first[row] : row * drafts.tokens};
  return tokens.count >= 0 && tokens.count <= drafts.tokens;
}

/// How many of them are committed: `accepted`, none where that is out of range.
REPLAYSSM_HOST_DEVICE inline std::int64_t committed(const Tokens& tokens, std::int32_t accepted) {
  return accepted >= 0 && accepted <= tokens.count ? accepted : 0;
}

/// Whether the cursor of a slot is one.
REPLAYSSM_HOST_DEVICE inline bool in_range(const Window& window, std::int64_t slot) {
  return window.origin[slot] >= 0 && window.origin[slot] < window.capacity && window.held[slot] >= 0 &&
         window.held[slot] <= window.committed;
}

REPLAYSSM_HOST_DEVICE inline bool folds(const Window& window, std::int64_t slot, const Tokens& tokens) {
  return window.held[slot] + tokens.count > window.committed;
}

/// The origin behind the records of a slot.
REPLAYSSM_HOST_DEVICE inline std::int64_t origin_after(const Window& window, std::int64_t slot) {
  const std::int64_t next = std::int64_t{window.origin[slot]} + window.held[slot];
  return next < window.capacity ? next : next - window.capacity;
}

// ---- a step ---------------------------------------------------------------------------------------------------------

/// Where a row and head work, as find_place(); `flush` says that the records are folded first.
REPLAYSSM_HOST_DEVICE inline bool find_window(const Step& step, const Window& window, std::int64_t row,
                                              std::int64_t head, Place& at, Tokens& tokens) {
  if (!find_place(step, row, head, at) || !find_tokens(window, row, tokens) || !in_range(window, at.slot)) return false;
  at.origin = window.origin[at.slot];
  at.held = window.held[at.slot];
  at.flush = folds(window, at.slot, tokens);
  return true;
}

REPLAYSSM_HOST_DEVICE inline bool find_window(const Step& step, const Snapshots& snapshots, std::int64_t row,
                                              std::int64_t head, Place& at, Tokens& tokens) {
  if (!find_place(step, row, head, at) || !find_tokens(snapshots, row, tokens)) return false;
  for (std::int64_t t = 0; t < tokens.count; ++t) {
    const std::int32_t to = snapshots.slot[row * snapshots.tokens + t];
    if (to < 0 || to >= step.slots) return false;
  }
  return true;
}

/// The row of the state that the first token meets.
template <bool delta, bool columns>
REPLAYSSM_HOST_DEVICE void begin_row(const Problem& in, const Window&, const Place& at, int p, float* s) {
  const Step& step = in.step;
  const bool split = step.read.codes != nullptr;
  load_row(step, at.flush || !split ? step.state : step.read, at, p, s);
  run_records<delta, columns>(in, at, p, at.flush && in.closed_loop, s);
  if (!at.flush) return;
  store_row(step, step.state, at, p, s);
  if (split) store_row(step, step.read, at, p, s);
}

template <bool delta, bool columns>
REPLAYSSM_HOST_DEVICE void begin_row(const Problem& in, const Snapshots&, const Place& at, int p, float* s) {
  load_row(in.step, in.step.state, at, p, s);
}

/// What begin_row() of all rows leaves of the ring.
REPLAYSSM_HOST_DEVICE inline void begin_records(const Window& window, Place& at) {
  if (!at.flush) return;
  at.origin = origin_after(window, at.slot);
  at.held = 0;
}
REPLAYSSM_HOST_DEVICE inline void begin_records(const Snapshots&, Place&) {}

/// Token t of row `row`, whose activations are those of at.row, for row p of the state.
template <bool delta, bool columns>
REPLAYSSM_HOST_DEVICE void token_row(const Problem& in, const Window&, std::int64_t, std::int64_t, const Place& at,
                                     const Token& token, int p, float* s) {
  const int N = static_cast<int>(in.step.shape.state_dim);
  const Fresh fresh = fresh_row(in, at, token, p);
  decay<columns>(fresh, N, s);
  const float u = form_u<delta>(fresh, s, N);
  put_y(in, at, fresh, p, u, s);
  const float kept = append_row<delta>(in, at, token, p, fresh.value, u, s);
  add(kept, Rounded{token, in.step.ring, fresh.value}, N, s);  // as later tokens read it
}

template <bool delta, bool columns>
REPLAYSSM_HOST_DEVICE void token_row(const Problem& in, const Snapshots& snapshots, std::int64_t row, std::int64_t t,
                                     const Place& at, const Token& token, int p, float* s) {
  const int N = static_cast<int>(in.step.shape.state_dim);
  const Fresh fresh = fresh_row(in, at, token, p);
  decay<columns>(fresh, N, s);
  const float u = form_u<delta>(fresh, s, N);
  put_y(in, at, fresh, p, u, s);
  add(u, fresh, N, s);
  Place to = at;
  to.slot = snapshots.slot[row * snapshots.tokens + t];
  store_row(in.step, in.step.state, to, p, s);
}

/// What the token brings to all rows of the head.
template <bool delta, bool columns>
REPLAYSSM_HOST_DEVICE void token_head(const Problem& in, const Window&, Place& at, const Token& token, int lane,
                                      int lanes) {
  append_head<delta, columns>(in, at, token, lane, lanes);
  ++at.held;
}
template <bool delta, bool columns>
REPLAYSSM_HOST_DEVICE void token_head(const Problem&, const Snapshots&, Place&, const Token&, int, int) {}

/// A step on host memory, one row after another.
template <bool delta, bool columns, class Plan>
void verify_on_host(const Problem& in, const Plan& plan) {
  const std::int64_t P = in.step.shape.head_dim;
  for (std::int64_t row = 0; row < in.step.rows; ++row) {
    for (std::int64_t head = 0; head < in.step.shape.heads; ++head) {
      Place at;
      Tokens tokens;
      if (!find_window(in.step, plan, row, head, at, tokens) || tokens.count == 0) continue;
      std::vector<float> s(static_cast<std::size_t>(P * kMaxDim));
      for (int p = 0; p < P; ++p) begin_row<delta, columns>(in, plan, at, p, s.data() + p * kMaxDim);
      begin_records(plan, at);
      for (std::int64_t t = 0; t < tokens.count; ++t) {
        at.row = tokens.first + t;
        Token token;
        prepare<delta, columns>(in, at, 0, 1, token);
        for (int p = 0; p < P; ++p) {
          token_row<delta, columns>(in, plan, row, t, at, token, p, s.data() + p * kMaxDim);
        }
        token_head<delta, columns>(in, plan, at, token, 0, 1);
      }
    }
  }
}

// ---- cursors --------------------------------------------------------------------------------------------------------

REPLAYSSM_HOST_DEVICE inline bool is_padding(std::int64_t slots, std::int32_t slot) {
  return slot < 0 || slot >= slots;
}

/// What is done for one row; false where it is refused.
REPLAYSSM_HOST_DEVICE inline bool commit_row(std::int64_t slots, const std::int32_t* slot, const Window& window,
                                             const std::int32_t* accepted, std::int64_t row) {
  const std::int64_t at = slot[row];
  if (is_padding(slots, slot[row])) return true;
  Tokens tokens;
  if (!find_tokens(window, row, tokens) || !in_range(window, at)) return false;
  if (folds(window, at, tokens)) {
    window.origin[at] = static_cast<std::int32_t>(origin_after(window, at));
    window.held[at] = 0;
  }
  const std::int64_t n = committed(tokens, accepted[row]);
  window.held[at] += static_cast<std::int32_t>(n);
  return n == accepted[row];
}

REPLAYSSM_HOST_DEVICE inline bool roll_back_row(std::int64_t slots, const std::int32_t* slot, const Window& window,
                                                const std::int32_t* tokens, std::int64_t row) {
  if (is_padding(slots, slot[row])) return true;
  const std::int32_t n = tokens[row];
  if (!in_range(window, slot[row]) || n < 0 || n > window.held[slot[row]]) return false;
  window.held[slot[row]] -= n;
  return true;
}

REPLAYSSM_HOST_DEVICE inline bool commit_row(std::int64_t slots, std::int32_t* slot, const Snapshots& snapshots,
                                             const std::int32_t* accepted, std::int64_t row) {
  if (is_padding(slots, slot[row])) return true;
  Tokens tokens;
  if (!find_tokens(snapshots, row, tokens)) return false;
  const std::int64_t n = committed(tokens, accepted[row]);
  if (n > 0) {
    std::int32_t& taken = snapshots.slot[row * snapshots.tokens + n - 1];
    if (is_padding(slots, taken)) return false;
    const std::int32_t old = slot[row];
    slot[row] = taken;
    taken = old;
  }
  return n == accepted[row];
}

/// Channel c of row `row`.
REPLAYSSM_HOST_DEVICE inline void commit_channel(std::int64_t slots, const std::int32_t* slot, const Drafts& drafts,
                                                 const ConvolutionWindow& window, const Activations& x,
                                                 const std::int32_t* accepted, std::int64_t row, std::int64_t c) {
  Tokens tokens;
  if (is_padding(slots, slot[row]) || !find_tokens(drafts, row, tokens)) return;
  const std::int64_t n = committed(tokens, accepted[row]);
  const std::int64_t base = slot[row] * window.slot_stride + c * window.channel_stride;
  if (n == 0) return;
  for (std::int64_t k = 0; k < window.inputs; ++k) {  // in order: what is read has not been written
    const std::int64_t from = k + n, behind = from - window.inputs;
    const float value = behind < 0 ? load(window.type, window.data, base + from * window.input_stride)
                                   : input(x, tokens.first + behind, c);
    store(window.type, window.data, base + k * window.input_stride, value);
  }
}

}  // namespace replayssm::cuda::generic
