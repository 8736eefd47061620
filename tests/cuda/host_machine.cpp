// The generic kernel's own functions on host memory, after the checks that decode() makes.

#include <cstdlib>
#include <cstring>
#include <new>

#include "cuda/check.h"
#include "cuda/generic.h"
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
};

}  // namespace

std::vector<std::string> machine_names() { return {"host"}; }

Machine* machine(const std::string&) {
  static Host host;
  return &host;
}

}  // namespace replayssm::cuda::tests
