// Every window of every schedule, storage, ring and shape against the definition: outputs of each token, the records
// that it leaves, folds, cursors, and that nothing else is read or written.

#include "tests/cuda/follow.h"
#include "tests/cuda/windows.h"

namespace replayssm::cuda::tests {
namespace {

constexpr Recurrence kRecurrences[] = {Recurrence::mamba2, Recurrence::gated_delta, Recurrence::kda};
constexpr Storage kStorages[] = {Storage::fp32, Storage::fp16, Storage::bf16, Storage::e4m3_row, Storage::int8_row};
constexpr Scalar kScalars[] = {Scalar::fp32, Scalar::fp16, Scalar::bf16};

/// Windows of random lengths, of which random parts are accepted.
class FollowWindows : public Follow {
 public:
  explicit FollowWindows(Windows& the_layer) : Follow(the_layer), windows_(the_layer) {}

  void window() {
    const TokenInputs in = random_inputs(setup, layer.random);
    std::vector<std::int32_t> counts;
    for (std::int64_t r = 0; r < setup.rows; ++r) counts.push_back(up_to(setup.window));
    const auto held = windows_.cursor.here, origin = windows_.origin.here;
    const auto before = heads();
    Untouched rest(layer);
    const std::vector<float> y = windows_.verify(in, counts);
    EXPECT_EQ(windows_.cursor.read(), held) << "verify() moved a cursor";
    EXPECT_EQ(windows_.origin.read(), origin) << "verify() moved an origin";
    for (std::int64_t r = 0; r < setup.rows; ++r) {
      const std::int64_t tokens = is_padding(r) ? 0 : counts[size(r)], width = s.heads * s.head_dim;
      for (std::int64_t i = (r * setup.window + tokens) * width; i < (r + 1) * setup.window * width; ++i) {
        EXPECT_TRUE(std::isnan(y[size(i)])) << "y of a token that there is not was written";
      }
      if (tokens > 0) compare_row(in, r, tokens, before, y, rest);
    }
    rest.check(layer);
    commit(counts);
  }
  std::int64_t folds() const { return folds_; }

 private:
  /// Heads with their live records, in double and in float.
  struct Heads {
    std::vector<Head<double>> wide;
    std::vector<Head<float>> narrow;
  };

  std::int32_t up_to(std::int64_t most) {
    return std::uniform_int_distribution<std::int32_t>(0, static_cast<std::int32_t>(most))(layer.random);
  }
  std::int64_t slot(std::int64_t r) const { return layer.slot.here[size(r)]; }
  bool is_padding(std::int64_t r) const { return slot(r) < 0 || slot(r) >= layer.slots; }
  bool folds(std::int64_t r, std::int64_t tokens) const {
    return !is_padding(r) && windows_.held_by(slot(r)) + tokens > setup.committed;
  }

  Heads heads() const {
    Heads out;
    for (std::int64_t r = 0; r < setup.rows; ++r) {
      for (std::int64_t h = 0; h < s.heads; ++h) {
        out.wide.push_back(head<double>(r, h));
        out.narrow.push_back(head<float>(r, h));
      }
    }
    return out;
  }
  template <class T>
  Head<T> head(std::int64_t r, std::int64_t h) const {
    if (is_padding(r)) return {};
    Head<T> out = stored_head<T>(slot(r), h);
    for (std::int64_t j = 0; j < windows_.held_by(slot(r)); ++j) {
      out.ring.push_back(record<T>(slot(r), h, windows_.entry(slot(r), j)));
    }
    return out;
  }

  template <class T>
  static Vec<T> folded(Head<T> head) {
    oracle::Prepared<T> last;
    static_cast<oracle::Record<T>&>(last) = head.ring.back();
    last.c = last.w;
    head.ring.pop_back();
    return oracle::Step<T>(head, last).folded();
  }

  void compare_row(const TokenInputs& in, std::int64_t r, std::int64_t tokens, const Heads& before,
                   const std::vector<float>& y, Untouched& rest) {
    const std::int64_t at = slot(r), held = windows_.held_by(at);
    const bool fold = folds(r, tokens);
    if (fold) {
      ++folds_;
      allow_state(rest, at);
      if (setup.read) check_copy(at);
    }
    for (std::int64_t t = 0; t < tokens; ++t) allow_entry(rest, at, windows_.entry(at, held + t));
    for (std::int64_t h = 0; h < s.heads; ++h) {
      Head<double> wide = before.wide[size(r * s.heads + h)];
      Head<float> narrow = before.narrow[size(r * s.heads + h)];
      if (fold) {
        compare_state(at, h, folded(narrow), folded(wide));
        wide = stored_head<double>(at, h);
        narrow = stored_head<float>(at, h);
      }
      for (std::int64_t t = 0; t < tokens; ++t) {
        const std::int64_t token = r * setup.window + t, entry = windows_.entry(at, held + t);
        compare(raw(in, token, h), at, h, entry, wide, narrow, part(y, (token * s.heads + h) * s.head_dim, s.head_dim));
        wide.ring.push_back(record<double>(at, h, entry));
        narrow.ring.push_back(record<float>(at, h, entry));
      }
    }
  }

  void commit(const std::vector<std::int32_t>& counts) {
    auto held = windows_.cursor.here, origin = windows_.origin.here;
    std::vector<std::int32_t> accepted;
    for (std::int64_t r = 0; r < setup.rows; ++r) {
      accepted.push_back(up_to(counts[size(r)]));
      if (is_padding(r)) continue;
      std::int32_t &h = held[size(slot(r))], &o = origin[size(slot(r))];
      if (folds(r, counts[size(r)])) {
        o = static_cast<std::int32_t>((o + h) % layer.capacity);
        h = 0;
      }
      h += accepted.back();
    }
    EXPECT_EQ(windows_.commit(accepted), 0);
    EXPECT_EQ(windows_.cursor.here, held);
    EXPECT_EQ(windows_.origin.here, origin);
  }

  Windows& windows_;
  std::int64_t folds_ = 0;
};

bool CheckWindows(Machine& machine, const Case& setup, int windows) {
  SCOPED_TRACE(setup.text());
  if (!machine.verifies()) return false;
  Windows layer(machine, setup, 5);
  layer.fill_states();
  layer.pad();
  FollowWindows follow(layer);
  for (int i = 0; i < windows; ++i) follow.window();
  follow.check();
  EXPECT_GT(follow.folds(), 0);
  return true;
}

/// Shared in an open loop, which keeps u, and split in both; Mamba-2 has none.
void CheckKinds(Machine& machine, Case setup, int windows) {
  setup.closed = false;
  CheckWindows(machine, setup, windows);
  setup.read = setup.state;
  setup.state = Storage::fp32;
  CheckWindows(machine, setup, windows);
  setup.closed = true;
  if (is_delta(setup)) CheckWindows(machine, setup, windows);
}

// Few and small windows of every code path, for tools that make them slow.
class SmallWindows : public OnVerifier {};
INSTANTIATE_TEST_SUITE_P(, SmallWindows, testing::ValuesIn(machine_names()));

TEST_P(SmallWindows, AgainstTheDefinition) {
  for (const Recurrence recurrence : kRecurrences) {
    for (const Storage storage : {Storage::fp16, Storage::int8_row}) {
      Case setup{.shape = {recurrence, 2, 1, 5, 7}, .state = storage, .ring = Scalar::bf16, .rows = 5};
      setup.window = 2;
      setup.committed = 3;
      CheckKinds(on(), setup, 8);
    }
  }
}

class WindowParity : public OnVerifier {};
INSTANTIATE_TEST_SUITE_P(, WindowParity, testing::ValuesIn(machine_names()));

// Enough windows that the ring goes round more than once.
TEST_P(WindowParity, OfEveryStorageAndRing) {
  for (const Recurrence recurrence : kRecurrences) {
    for (const Storage storage : kStorages) {
      for (const Scalar ring : kScalars) {
        Case setup{.shape = {recurrence, 4, 2, 8, 12}, .state = storage, .ring = ring, .rows = 5};
        setup.input = setup.y = ring == Scalar::fp32 ? Scalar::bf16 : ring;
        setup.window = 4;
        setup.committed = 6;
        CheckKinds(on(), setup, 12);
      }
    }
  }
}

TEST_P(WindowParity, OfEveryWindow) {
  for (const Recurrence recurrence : kRecurrences) {
    for (const auto& [window, committed] : {std::pair{1, 1}, {1, 5}, {2, 2}, {3, 16}, {8, 8}, {8, 20}, {11, 13}}) {
      Case setup{.shape = {recurrence, 2, 1, 6, 9}, .state = Storage::bf16, .ring = Scalar::bf16, .rows = 4};
      setup.ring_u = Scalar::fp16;
      setup.window = window;
      setup.committed = committed;
      CheckKinds(on(), setup, 4 + 6 * committed / window);
    }
  }
}

TEST_P(WindowParity, OfEveryShape) {
  constexpr struct {
    int heads, groups, P, N;
  } kShapes[] = {{1, 1, 80, 96}, {3, 1, 64, 128}, {2, 2, 192, 5}, {8, 2, 16, 64}, {8, 8, 1, 1}, {2, 1, 3, 256}};
  for (const Recurrence recurrence : kRecurrences) {
    for (const auto& [heads, groups, P, N] : kShapes) {
      Case setup{.shape = {recurrence, heads, groups, P, N}, .state = Storage::e4m3_row, .ring = Scalar::bf16};
      setup.input = Scalar::bf16;
      setup.rows = 2;
      setup.window = 3;
      setup.committed = 4;
      setup.skip = false;
      setup.dt_max = 0.5F;
      setup.beta_scale = 2;
      CheckWindows(on(), setup, 12);
    }
  }
}

}  // namespace
}  // namespace replayssm::cuda::tests
