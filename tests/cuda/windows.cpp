#include "tests/cuda/windows.h"

namespace replayssm::cuda::tests {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

}  // namespace

void Windows::begin() {
  common().held = nullptr;
  std::vector<std::int32_t> origins;
  for (std::int64_t at = 0; at < slots; ++at) {
    origins.push_back(static_cast<std::int32_t>(random() % static_cast<unsigned long>(capacity)));
  }
  window.tokens = setup.window;
  window.committed = setup.committed;
  window.capacity = capacity;
  window.count = count.write(std::vector<std::int32_t>(size(setup.rows), static_cast<std::int32_t>(setup.window)));
  window.origin = origin.write(origins);
  window.held = cursor.write(std::vector<std::int32_t>(size(slots), 0));
  refused.write({0});
}

template <class Plan>
std::vector<float> Windows::run(const TokenInputs& inputs, const Plan& plan) {
  y.here.assign(y.here.size(), 0xFF);
  y.write();
  set_inputs(inputs);
  if (is_delta(setup)) {
    on_.verify(delta, plan);
  } else {
    on_.verify(mamba2, plan);
  }
  return fetch();
}

std::vector<float> Windows::verify(const TokenInputs& inputs, std::vector<std::int32_t> counts) {
  count.write(std::move(counts));
  return run(inputs, window);
}
std::vector<float> Windows::verify_snapshots(const TokenInputs& inputs, const Snapshots& snapshots) {
  return run(inputs, snapshots);
}

int Windows::commit(std::vector<std::int32_t> tokens) {
  refused.write({0});
  on_.commit(setup.rows, slots, slot.there(), window, accepted.write(std::move(tokens)), refused.there());
  origin.read();
  cursor.read();
  return refused.read()[0];
}

int Windows::roll_back(std::vector<std::int32_t> tokens) {
  refused.write({0});
  on_.roll_back(setup.rows, slots, slot.there(), window, accepted.write(std::move(tokens)), refused.there());
  cursor.read();
  return refused.read()[0];
}

}  // namespace replayssm::cuda::tests
