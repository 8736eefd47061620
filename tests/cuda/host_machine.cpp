// The generic kernel's own functions on host memory, after the checks that decode() makes.

#include <cstdlib>
#include <cstring>
#include <new>

#include "cuda/check.h"
#include "cuda/generic_window.h"
#include "tests/cuda/machine.h"

namespace replayssm::cuda::tests {
namespace {

class Host : public Machine {
 public:
  void* allocate(std::size_t bytes) override {
    if (bytes == 0) bytes = 1;
    void* there = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (!there) throw std::bad_alloc();
    return there;
  }
  void release(void* there) override { std::free(there); }
  void write(void* there, const void* here, std::size_t bytes) override { std::memcpy(there, here, bytes); }
  void read(void* here, const void* there, std::size_t bytes) override { std::memcpy(here, there, bytes); }
  bool serves(const Mamba2Step&) override { return true; }
  bool serves(const DeltaStep&) override { return true; }
  void decode(const Mamba2Step& step) override {
    check(step);
    generic::step_on_host<false, false>(generic::problem(step));
  }
  void decode(const DeltaStep& step) override {
    check(step);
    if (has_column_decay(step.shape.recurrence)) {
      generic::step_on_host<true, true>(generic::problem(step));
    } else {
      generic::step_on_host<true, false>(generic::problem(step));
    }
  }
  void advance_cursors(std::int64_t rows, const std::int32_t* slot, std::int32_t* held, std::int64_t length) override {
    check_cursors(rows, slot, held, length);
    for (std::int64_t r = 0; r < rows; ++r) {
      if (slot[r] >= 0) held[r] = held[r] == length - 1 ? 0 : held[r] + 1;
    }
  }
  bool verifies() override { return true; }
  void verify(const Mamba2Step& step, const Window& window) override { run(step, window); }
  void verify(const DeltaStep& step, const Window& window) override { run(step, window); }
  void verify(const Mamba2Step& step, const Snapshots& snapshots) override { run(step, snapshots); }
  void verify(const DeltaStep& step, const Snapshots& snapshots) override { run(step, snapshots); }
  void commit(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const Window& window,
              const std::int32_t* accepted, std::int32_t* refused) override {
    check_commit(rows, slots, slot, window, "accepted", accepted, refused);
    for_rows(rows, refused, [&](std::int64_t r) { return generic::commit_row(slots, slot, window, accepted, r); });
  }
  void commit(std::int64_t rows, std::int64_t slots, std::int32_t* slot, const Snapshots& snapshots,
              const std::int32_t* accepted, std::int32_t* refused) override {
    check_commit(rows, slots, slot, snapshots, accepted, refused);
    for_rows(rows, refused, [&](std::int64_t r) { return generic::commit_row(slots, slot, snapshots, accepted, r); });
  }
  void roll_back(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const Window& window,
                 const std::int32_t* tokens, std::int32_t* refused) override {
    check_commit(rows, slots, slot, window, "tokens", tokens, refused);
    for_rows(rows, refused, [&](std::int64_t r) { return generic::roll_back_row(slots, slot, window, tokens, r); });
  }
  void commit_convolution(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const Drafts& drafts,
                          const ConvolutionWindow& window, const Activations& x,
                          const std::int32_t* accepted) override {
    check_commit(rows, slots, slot, drafts, window, x, accepted);
    for (std::int64_t i = 0; i < rows * window.channels; ++i) {
      generic::commit_channel(slots, slot, drafts, window, x, accepted, i / window.channels, i % window.channels);
    }
  }
  void encode_rows(Storage storage, const float* data, std::int64_t rows, std::int64_t n, void* codes,
                   float* scales) override {
    check_rows(storage, data, rows, n, codes, scales);
    for (std::int64_t r = 0; r < rows; ++r) encode_row(storage, data + r * n, n, codes, r * n, scales + r);
  }
  void decode_rows(Storage storage, const void* codes, const float* scales, std::int64_t rows, std::int64_t n,
                   float* data) override {
    check_rows(storage, data, rows, n, codes, scales);
    for (std::int64_t r = 0; r < rows; ++r) decode_row(storage, codes, r * n, scales + r, n, data + r * n);
  }

 private:
  template <class Plan>
  static void run(const Mamba2Step& step, const Plan& plan) {
    check(step, plan);
    generic::verify_on_host<false, false>(generic::problem(step), plan);
  }
  template <class Plan>
  static void run(const DeltaStep& step, const Plan& plan) {
    check(step, plan);
    if (has_column_decay(step.shape.recurrence)) {
      generic::verify_on_host<true, true>(generic::problem(step), plan);
    } else {
      generic::verify_on_host<true, false>(generic::problem(step), plan);
    }
  }
  template <class Row>
  static void for_rows(std::int64_t rows, std::int32_t* refused, const Row& done) {
    for (std::int64_t r = 0; r < rows; ++r) {
      if (!done(r) && refused) ++*refused;
    }
  }
};

}  // namespace

std::vector<std::string> machine_names() { return {"host"}; }

Machine* machine(const std::string&) {
  static Host host;
  return &host;
}

}  // namespace replayssm::cuda::tests
