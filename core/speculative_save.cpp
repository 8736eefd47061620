// The bytes of a speculative state: its kind as text, which a state compares with its own, then everything it holds in
// one order, which one function knows for both directions.

#include <algorithm>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "core/error.h"
#include "core/speculative.h"

namespace replayssm {
namespace {

constexpr std::string_view kMagic = "replayssm speculative state 1\n";

class Writer {
 public:
  template <class T>
  void values(T* from, std::int64_t count) {
    static_assert(std::is_trivially_copyable_v<T>);
    const auto* bytes = reinterpret_cast<const std::byte*>(from);
    out.insert(out.end(), bytes, bytes + static_cast<std::size_t>(count) * sizeof(T));
  }

  std::vector<std::byte> out;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : rest_(bytes) {}

  template <class T>
  void values(T* to, std::int64_t count) {
    static_assert(std::is_trivially_copyable_v<T>);
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    if (bytes > rest_.size()) fail("restore: the bytes end ", bytes - rest_.size(), " early: they have been cut");
    if (bytes > 0) std::memcpy(to, rest_.data(), bytes);
    rest_ = rest_.subspan(bytes);
  }
  std::size_t left() const { return rest_.size(); }

 private:
  std::span<const std::byte> rest_;
};

/// One value; what has padding is archived field by field.
template <class Archive, class... Values>
void each(Archive& archive, Values&... values) {
  (archive.values(&values, 1), ...);
}

template <class Archive>
void archive_event(Archive& archive, std::optional<RangeEvents::Event>& event) {
  std::int64_t known = event.has_value();
  RangeEvents::Event value = event.value_or(RangeEvents::Event{0, 0});
  each(archive, known, value.step, value.head);
  if (known != 0) event = value;
}

}  // namespace

template <class Real>
std::string SpeculativeState<Real>::kind() const {
  const RecurrenceShape& s = shape();
  std::ostringstream text;
  text << (sizeof(Real) == 8 ? "fp64 " : "fp32 ") << name(s.recurrence) << " of " << s.heads << " heads, " << s.groups
       << " groups, head_dim " << s.head_dim << ", state_dim " << s.state_dim << ", policy '" << policy().text()
       << "', window " << room_.window << ", committed " << room_.committed << ", slots " << room_.slots;
  return text.str();
}

template <class Real>
template <class Archive>
void SpeculativeState<Real>::archive_heads(Archive& archive, State<Real>& state) {
  const std::int64_t P = state.shape_.head_dim, N = state.shape_.state_dim, D = state.shape_.decay_dim();
  for (auto& head : state.heads_) {
    for (auto* stored : {&head.anchor, &head.read, &head.running, &head.anchor_residual, &head.read_residual}) {
      archive.values(stored->data(), std::ssize(*stored));
    }
    each(archive, head.origin, head.held, head.steps);
    if (head.origin < 0 || head.origin > std::max<std::int64_t>(state.slots_ - 1, 0) || head.held < 0 ||
        head.held > state.slots_) {
      fail("restore: ", head.held, " records from slot ", head.origin, " on do not lie in a ring of ", state.slots_);
    }
    for (std::int64_t i = 0; i < head.held; ++i) {
      const std::int64_t at = (head.origin + i) % state.slots_;
      archive.values(head.ring.v.data() + at * P, P);
      archive.values(head.ring.w.data() + at * N, N);
      archive.values(head.ring.u.data() + at * P, P);
      archive.values(head.ring.log_decay.data() + at * D, D);
      archive.values(head.ring.gain.data() + at, 1);
    }
    each(archive, head.events.overflows, head.events.saturations);
    archive_event(archive, head.events.first_overflow);
    archive_event(archive, head.events.first_non_finite);
  }
}

/// Of a state without a window that waits; a reader's is in the state after clear().
template <class Real>
template <class Archive>
void SpeculativeState<Real>::archive(Archive& archive) {
  each(archive, at_.tokens, at_.held, at_.verified, at_.accepted, at_.rolled_back, at_.origin, at_.windows,
       at_.rollbacks, at_.flushes);
  if (at_.held < 0 || at_.held > room_.committed || at_.origin < 0 || at_.origin >= room_.slots) {
    fail("restore: ", at_.held, " tokens from slot ", at_.origin, " on, in a ring of ", room_.slots,
         " slots that holds at most ", room_.committed);
  }
  archive_heads(archive, state_);
  for (const auto& head : state_.heads_) {
    if (!eager_ && (head.held != at_.held || head.origin != at_.origin)) fail("restore: the heads' cursors differ");
  }
  for (std::int64_t i = 0; eager_ && i < at_.held; ++i) {
    auto& snapshot = snapshots_[slot(i)];
    if (!snapshot) snapshot = state_;
    archive_heads(archive, *snapshot);
  }
}

template <class Real>
std::vector<std::byte> SpeculativeState<Real>::save() const {
  if (at_.pending > 0) fail("save: ", at_.pending, " tokens of a window wait for accept()");
  Writer writer;
  const std::string text = std::string(kMagic) + kind() + "\n";
  writer.values(text.data(), std::ssize(text));
  const_cast<SpeculativeState*>(this)->archive(writer);  // which only reads
  return std::move(writer.out);
}

template <class Real>
void SpeculativeState<Real>::restore(std::span<const std::byte> bytes) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (!text.starts_with(kMagic)) fail("restore: the bytes are no saved speculative state");
  const std::size_t end = text.find('\n', kMagic.size());
  const std::string_view found = text.substr(kMagic.size(), end - kMagic.size());
  if (end == text.npos || found != kind()) fail("restore: this is a state of ", kind(), "; found one of ", found);
  SpeculativeState read(shape(), policy(), room_, state_.place_);
  Reader reader(bytes.subspan(end + 1));
  read.archive(reader);
  if (reader.left() > 0) fail("restore: ", reader.left(), " bytes too many");
  *this = std::move(read);
}

template class SpeculativeState<float>;
template class SpeculativeState<double>;

}  // namespace replayssm
