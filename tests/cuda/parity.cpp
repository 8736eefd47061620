#include "tests/cuda/parity.h"

#include "tests/cuda/follow.h"

namespace replayssm::cuda::tests {
namespace {

/// Decode steps of a layer.
class Steps : public Follow {
 public:
  using Follow::Follow;

  void token() {
    const TokenInputs in = random_inputs(setup, layer.random);
    const auto held = layer.held.here;
    std::vector<Head<double>> wide;
    std::vector<Head<float>> narrow;
    for (std::int64_t r = 0; r < setup.rows; ++r) {
      for (std::int64_t h = 0; h < s.heads; ++h) {
        wide.push_back(head<double>(r, h, held[size(r)]));
        narrow.push_back(head<float>(r, h, held[size(r)]));
      }
    }
    Untouched rest(layer);
    const std::vector<float> y = layer.step(in);
    for (std::int64_t r = 0; r < setup.rows; ++r) {
      const std::int64_t at = layer.slot.here[size(r)];
      const bool padding = at < 0 || at >= layer.slots, flush = held[size(r)] == setup.length - 1;
      for (std::int64_t h = 0; h < s.heads; ++h) {
        const std::int64_t i = r * s.heads + h;
        const std::vector<float> row_y = part(y, i * s.head_dim, s.head_dim);
        if (padding) {
          for (const float value : row_y) EXPECT_TRUE(std::isnan(value)) << "y of a padded row was written";
          continue;
        }
        compare(raw(in, r, h), at, h, held[size(r)], wide[size(i)], narrow[size(i)], row_y);
      }
      if (padding) {
        EXPECT_EQ(layer.held.here[size(r)], at < 0 ? held[size(r)] : layer.held.here[size(r)]);
        continue;
      }
      EXPECT_EQ(layer.held.here[size(r)], flush ? 0 : held[size(r)] + 1);
      if (!flush) {
        allow_entry(rest, at, held[size(r)]);
        continue;
      }
      allow_state(rest, at);
      if (setup.read) check_copy(at);
    }
    rest.check(layer);
  }

 private:
  template <class T>
  Head<T> head(std::int64_t r, std::int64_t h, std::int64_t held) const {
    const std::int64_t at = layer.slot.here[size(r)];
    if (at < 0 || at >= layer.slots) return {};
    Head<T> out = stored_head<T>(at, h);
    out.flush = held == setup.length - 1;
    for (std::int64_t j = 0; j < held; ++j) out.ring.push_back(record<T>(at, h, j));
    return out;
  }
};

}  // namespace

bool CheckParity(Machine& machine, const Case& setup, int tokens) {
  SCOPED_TRACE(setup.text());
  Layer layer(machine, setup, 5);
  if (!layer.served()) return false;
  layer.fill_states();
  layer.pad();
  Steps follow(layer);
  for (int t = 0; t < tokens; ++t) follow.token();
  follow.check();
  return true;
}

}  // namespace replayssm::cuda::tests
