#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/format.h"

namespace replayssm {

/// How a replay computes outputs and flushes from checkpoint and ring. `closed`: sums with suffix decays, as
/// kernels do; `sequential`: the steps run again from the checkpoint.
enum class Order { closed, sequential };

/// Where a flush of the delta rule takes its `u` from. `closed`: recomputed from the anchor and the raw records;
/// `open`: computed once, when the token arrives, from the read copy, and cached in the ring. Mamba-2 has no
/// feedback from the state to `u`, so there both mean the same.
enum class Loop { closed, open };

/// Formats of the records in a ring. A field's value is rounded once, when the record is appended; the step that
/// appends it computes with the unrounded value.
struct RingFormats {
  /// Activations: x and B (Mamba-2), k and v (delta rule), the cached u (open loop).
  Format activations = parse_format("exact");
  /// Fields set one by one: x, B, dt, k, v, u, g, beta. They win over `activations`.
  std::map<std::string, Format, std::less<>> fields;

  /// The format of one field. Gates (dt, g, beta) that are not named stay fp32, and exact where all is exact.
  Format of(std::string_view field) const;
  bool exact() const;
  bool operator==(const RingFormats&) const = default;
};

/// The readout is taken from the unrounded new state, then the stored state is rounded: S <- Q(S).
struct Eager {
  Format state;
  bool operator==(const Eager&) const = default;
};

/// A checkpoint rewritten every `length` steps and a ring of at most length - 1 records. Shared: one checkpoint in
/// format `anchor` serves outputs and flushes. Split: `read` is the format of a second copy that serves the outputs.
struct Replay {
  std::int64_t length = 16;
  Format anchor;
  std::optional<Format> read;
  RingFormats ring;
  bool operator==(const Replay&) const = default;
};

/// How a model keeps its recurrent state. Plain data; parse_policy(text()) gives the same policy.
struct Policy {
  std::variant<Eager, Replay> schedule;
  Order order = Order::closed;
  Loop loop = Loop::closed;
  /// Inclusive ranges of model layers that the policy holds for; the other layers run exact. Empty: every layer.
  std::vector<std::pair<std::int64_t, std::int64_t>> layers;

  /// Canonical text, e.g. `replay(L=16, anchor=fp32, read=int8:row, ring=bf16, layers=0-3+7)`.
  std::string text() const;
  bool covers(std::int64_t layer) const;
  /// The schedule as a replay: an eager state is a shared one of length 1.
  Replay as_replay() const;
  /// True where no format that the policy names rounds anything.
  bool exact() const;
  bool operator==(const Policy&) const = default;
};

/// The reference: an eager state that is never rounded.
Policy exact_policy();

/// Reads the text of a policy: `exact`, `eager(state=F)`, `replay(L=16, state=F)`, `replay(L=16, anchor=F, read=F)`,
/// with `ring=F`, `ring.FIELD=F`, `order=closed|sequential`, `loop=closed|open`, `layers=0-3+7`.
/// Throws Error that quotes the text and names the word that is wrong.
Policy parse_policy(std::string_view text);

}  // namespace replayssm
