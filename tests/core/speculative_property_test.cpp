// Random windows, accept counts, rollbacks, saves and slots used again: a speculative state is bit for bit a State that
// advances by the committed tokens alone and flushes at the same positions. Drivers with a planted fault are caught.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>

#include "core/error.h"
#include "core/speculative.h"
#include "tests/core/state_helpers.h"

namespace replayssm {
namespace {

/// What a driver does, right; a fault is one of these done wrong.
template <class Real>
struct Driver {
  virtual ~Driver() = default;
  virtual void accept(SpeculativeState<Real>& s, std::int64_t n) { s.accept(n); }
  virtual void rollback(SpeculativeState<Real>& s, std::int64_t n) { s.rollback(n); }
  virtual void reuse(SpeculativeState<Real>& s) { s.clear(); }
  virtual std::vector<std::byte> save(const SpeculativeState<Real>& s) { return s.save(); }
};

/// The tokens of a sequence that are committed, the positions of its flushes, and what was read.
template <class Real>
struct History {
  Stream<Real> tokens;  // [head][token]
  std::vector<std::size_t> flushes;
  std::vector<std::vector<Real>> y;

  explicit History(std::int64_t heads) : tokens(static_cast<std::size_t>(heads)) {}
  std::size_t size() const { return y.size(); }
  std::size_t held() const { return size() - (flushes.empty() ? 0 : flushes.back()); }
  void resize(std::size_t n) {
    for (auto& head : tokens) head.resize(n);
    y.resize(n);
  }
};

const StatePlace kPlace{.seed = 11, .slot = 3, .layer = 2};

template <class Real>
bool Same(const SpeculativeState<Real>& speculative, const History<Real>& history, std::size_t back) {
  SpeculativeState<Real> s = speculative;
  State<Real> plain(s.shape(), s.policy(), kPlace);
  const std::size_t count = history.size() - back;
  std::size_t at = 0;
  std::vector<Real> y;
  const auto advance = [&](std::size_t to) {
    const auto some = Advance(plain, history.tokens, at, to);
    y.insert(y.end(), some.begin(), some.end());
    at = to;
  };
  for (const std::size_t flush : history.flushes) {
    advance(flush);
    plain.fold();
  }
  advance(count);
  std::vector<Real> seen;
  for (std::size_t t = 0; t < count; ++t) seen.insert(seen.end(), history.y[t].begin(), history.y[t].end());
  bool same = SameBits(y, seen);
  for (std::int64_t h = 0; h < s.shape().heads; ++h) {
    same = same && SameBits(s.effective(h, static_cast<std::int64_t>(back)), plain.effective(h));
    if (back > 0) continue;
    same = same && SameBits(s.checkpoint(h), plain.checkpoint(h)) && SameBits(s.read_copy(h), plain.read_copy(h));
  }
  return same && (back > 0 || s.events() == plain.events());
}

/// Runs a random sequence; whether every check came out.
template <class Real>
bool Run(const RecurrenceShape& shape, const Policy& policy, unsigned seed, Driver<Real>& driver) {
  std::mt19937 random(seed);
  const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(random() % static_cast<unsigned>(n)); };
  Speculation room;
  room.window = 1 + below(4);
  room.committed = room.window + below(5);
  room.slots = room.window + room.committed + below(3);
  room.origin = below(room.slots);
  const std::size_t width = static_cast<std::size_t>(shape.heads * shape.head_dim);
  const auto stream = RandomStream<Real>(shape, 120, seed + 1);
  std::size_t next = 0;
  auto s = std::make_unique<SpeculativeState<Real>>(shape, policy, room, kPlace);
  for (int sequence = 0; sequence < 2; ++sequence) {
    if (sequence > 0) driver.reuse(*s);
    History<Real> history(shape.heads);
    for (int round = 0; round < 12; ++round) {
      const std::int64_t T = 1 + below(room.window), pick = below(4);
      const std::int64_t n = pick == 0 ? 0 : pick == 1 ? T : below(T + 1);
      if (history.held() > 0 && static_cast<std::int64_t>(history.held()) + T > room.committed) {
        history.flushes.push_back(history.size());
      }
      Stream<Real> window(stream.size());
      for (std::int64_t t = 0; t < T; ++t, ++next) {
        for (std::size_t h = 0; h < stream.size(); ++h) {
          Token<Real> token = stream[h][next % stream[h].size()];
          if (t > n) token.v[0] = token.gain = std::numeric_limits<Real>::quiet_NaN();  // rejected
          window[h].push_back(token);
        }
      }
      std::vector<Real> y(static_cast<std::size_t>(T) * width);
      s->verify(Inputs(window, 0, static_cast<std::size_t>(T)), y.data());
      driver.accept(*s, n);
      for (std::size_t t = 0; t < static_cast<std::size_t>(n); ++t) {
        for (std::size_t h = 0; h < stream.size(); ++h) history.tokens[h].push_back(window[h][t]);
        const auto from = y.begin() + static_cast<std::ptrdiff_t>(t * width);
        history.y.emplace_back(from, from + static_cast<std::ptrdiff_t>(width));
      }
      if (history.held() > 0 && below(4) == 0) {
        const std::int64_t back = 1 + below(static_cast<std::int64_t>(history.held()));
        if (s->status().held < back) return false;
        driver.rollback(*s, back);
        history.resize(history.size() - static_cast<std::size_t>(back));
      }
      if (below(6) == 0) {
        Speculation other = room;
        other.origin = below(room.slots);
        auto loaded = std::make_unique<SpeculativeState<Real>>(shape, policy, other, kPlace);
        loaded->restore(driver.save(*s));
        s = std::move(loaded);
      }
      if (s->status().held != static_cast<std::int64_t>(history.held()) ||
          s->status().tokens != static_cast<std::int64_t>(history.size()) ||
          s->status().flushes != static_cast<std::int64_t>(history.flushes.size())) {
        return false;
      }
      if (below(8) == 0) {
        const auto back = static_cast<std::size_t>(below(static_cast<std::int64_t>(history.held()) + 1));
        if (!Same(*s, history, back)) return false;
      }
    }
    if (!Same(*s, history, 0)) return false;
  }
  return true;
}

std::vector<std::string> Policies() {
  std::vector<std::string> all;
  for (const std::string& text : PoliciesOfEveryKind()) {
    const auto length = text.find("L=");
    const bool eager = length == text.npos || text.substr(length, 4) == "L=1,";
    // A length that no sequence comes to: State is to flush where it is told alone.
    all.push_back(eager ? text : text.substr(0, length) + "L=99" + text.substr(length + 3));
  }
  return all;
}

template <class Kind>
class SpeculativeProperty : public testing::Test {};
TYPED_TEST_SUITE(SpeculativeProperty, Kinds);

TYPED_TEST(SpeculativeProperty, OfEveryPolicy) {
  using Real = TypeParam::Real;
  unsigned seed = 1;
  for (const std::string& text : Policies()) {
    const Policy policy = parse_policy(text);
    for (int i = 0; i < 12; ++i, ++seed) {
      Driver<Real> right;
      EXPECT_TRUE(Run<Real>(TypeParam::shape(3, 5, 4, 2), policy, seed, right)) << text << ", seed " << seed;
    }
  }
}

// ---- planted faults
// ---------------------------------------------------------------------------------------------------

/// The cursor is moved as if all drafts had been accepted.
struct KeepsAll : Driver<float> {
  void accept(SpeculativeState<float>& s, std::int64_t) override { s.accept(s.status().pending); }
};
/// The step after an acceptance begins from the state before the accepted drafts.
struct Stale : Driver<float> {
  void accept(SpeculativeState<float>& s, std::int64_t n) override { s.accept(std::min<std::int64_t>(n, 1)); }
};
/// A rejection is applied once more after the next window.
struct RejectsTwice : Driver<float> {
  std::int64_t rejected = 0;
  void accept(SpeculativeState<float>& s, std::int64_t n) override {
    const std::int64_t now = s.status().pending - n;
    s.accept(n);
    s.rollback(std::min(rejected, s.status().held));
    rejected = now;
  }
};
/// A rollback counts from another position.
struct WrongDepth : Driver<float> {
  void rollback(SpeculativeState<float>& s, std::int64_t n) override { s.rollback(n - 1); }
};
/// A slot is used again with what the sequence before left in it.
struct NotCleared : Driver<float> {
  void reuse(SpeculativeState<float>& s) override {
    const std::vector<float> zero(static_cast<std::size_t>(s.shape().heads * s.shape().head_dim * s.shape().state_dim));
    s.set(zero.data());
  }
};
/// What is saved is the state one token earlier.
struct SavesEarlier : Driver<float> {
  std::vector<std::byte> save(const SpeculativeState<float>& s) override {
    SpeculativeState<float> copy = s;
    copy.rollback(std::min<std::int64_t>(1, s.status().held));
    return copy.save();
  }
};

template <class Fault>
class SpeculativeFault : public testing::Test {};
using Faults = testing::Types<KeepsAll, Stale, RejectsTwice, WrongDepth, NotCleared, SavesEarlier>;
TYPED_TEST_SUITE(SpeculativeFault, Faults);

TYPED_TEST(SpeculativeFault, IsCaught) {
  for (const auto recurrence : {Recurrence::mamba2, Recurrence::gated_delta, Recurrence::kda}) {
    for (const char* text : {"eager(state=bf16:sr)", "replay(L=99, state=bf16)",
                             "replay(L=99, anchor=fp32, read=int8:row, ring=bf16, order=sequential)"}) {
      int caught = 0;
      for (unsigned seed = 1; seed <= 20; ++seed) {
        TypeParam fault;
        caught += !Run<float>({recurrence, 2, 1, 3, 5}, parse_policy(text), seed, fault);
      }
      EXPECT_GT(caught, 0) << text;
    }
  }
}

}  // namespace
}  // namespace replayssm
