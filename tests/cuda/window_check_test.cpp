// What verify() and the functions beside it refuse, and what they say.

#include <gtest/gtest.h>

#include <functional>

#include "core/error.h"
#include "cuda/check.h"

namespace replayssm::cuda::tests {
namespace {

alignas(16) float memory[16];  // nothing is read; only the address counts
auto* const numbers = reinterpret_cast<std::int32_t*>(memory);
auto* const odd = reinterpret_cast<std::int32_t*>(reinterpret_cast<char*>(memory) + 2);

/// A step and what it verifies by, all of it right: T = 3, W = 4, rings of 7.
struct Args {
  Mamba2Step mamba2;
  DeltaStep delta;
  Window window;
  Snapshots snapshots;
  ConvolutionWindow convolution;
  Activations x;
  std::int64_t rows = 2, slots = 2;
  const std::int32_t* slot = numbers;
  const std::int32_t* tokens = numbers;
  std::int32_t* refused = nullptr;
};

Args Right() {
  Args a;
  const auto input = [](std::int64_t width) { return Activations{Scalar::bf16, memory, width}; };
  const auto common = [](Step& step, Recurrence recurrence) {
    step.shape = {recurrence, 4, 2, 16, 64};
    step.rows = step.slots = 2;
    step.slot = numbers;
    step.state = {Storage::fp16, memory, nullptr, 4 * 16 * 64, 0};
    step.ring.capacity = 7;
    step.ring.w = {Scalar::bf16, memory, 2 * 7 * 64};
    step.y = memory;
    step.y_stride = 64;
  };
  common(a.mamba2, Recurrence::mamba2);
  a.mamba2.ring.v = {Scalar::bf16, memory, 4 * 7 * 16};
  a.mamba2.ring.gain = {Scalar::fp32, memory, 4 * 7};
  a.mamba2.x = input(64);
  a.mamba2.B = a.mamba2.C = input(128);
  a.mamba2.dt = input(4);
  common(a.delta, Recurrence::kda);
  a.delta.ring.u = {Scalar::fp32, memory, 4 * 7 * 16};
  a.delta.ring.log_decay = {Scalar::fp32, memory, 4 * 7 * 64};
  a.delta.q = a.delta.k = input(128);
  a.delta.v = input(64);
  a.delta.gate = input(256);
  a.delta.beta = input(4);
  for (const float** parameter : {&a.mamba2.A_log, &a.mamba2.dt_bias, &a.delta.A_log, &a.delta.dt_bias}) {
    *parameter = memory;
  }
  a.window.tokens = a.snapshots.tokens = 3;
  a.window.committed = 4;
  a.window.capacity = 7;
  a.window.count = a.snapshots.count = numbers;
  a.window.origin = a.window.held = a.snapshots.slot = numbers;
  a.convolution = {Scalar::bf16, memory, 8, 3, 24, 3, 1};
  a.x = input(8);
  return a;
}

using Call = std::function<void(const Args&)>;
using Change = std::function<void(Args&)>;

void ExpectRefused(const Call& call, const std::string& begin, const Change& change) {
  Args args = Right();
  EXPECT_NO_THROW(call(args));
  change(args);
  try {
    call(args);
    ADD_FAILURE() << "not refused: " << begin;
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).substr(0, begin.size()), begin);
  }
}

const Call kMamba2 = [](const Args& a) { check(a.mamba2, a.window); };
const Call kDelta = [](const Args& a) { check(a.delta, a.window); };
const Call kSnapshots = [](const Args& a) { check(a.mamba2, a.snapshots); };
const Call kCommit = [](const Args& a) {
  check_commit(a.rows, a.slots, a.slot, a.window, "accepted", a.tokens, a.refused);
};
const Call kSelect = [](const Args& a) { check_commit(a.rows, a.slots, a.slot, a.snapshots, a.tokens, a.refused); };
const Call kConvolution = [](const Args& a) {
  check_commit(a.rows, a.slots, a.slot, a.window, a.convolution, a.x, a.tokens);
};

TEST(WindowCheck, NamesTheFieldOfAStep) {
  const auto refused = [](const char* begin, const Change& change) { ExpectRefused(kMamba2, begin, change); };
  refused("shape.recurrence: expected mamba2", [](Args& a) { a.mamba2.shape.recurrence = Recurrence::kda; });
  refused("length: expected 1", [](Args& a) { a.mamba2.length = 5; });
  refused("held: expected null", [](Args& a) { a.mamba2.held = numbers; });
  refused("tokens: expected 1 to 2147483647, found 0", [](Args& a) { a.window.tokens = 0; });
  refused("tokens: expected rows x tokens up to 2147483647",
          [](Args& a) { a.window.tokens = a.window.committed = 1 << 30, a.window.capacity = std::int64_t{1} << 31; });
  refused("committed: expected tokens = 3 to 2147483647 records, found 2", [](Args& a) { a.window.committed = 2; });
  refused("capacity: expected committed + tokens = 7 to 2147483647 records, found 6",
          [](Args& a) { a.window.capacity = 6; });
  refused("count: expected a device pointer, found null", [](Args& a) { a.window.count = nullptr; });
  refused("first: expected a pointer aligned to 4 bytes", [](Args& a) { a.window.first = odd; });
  refused("origin: expected", [](Args& a) { a.window.origin = nullptr; });
  refused("held: expected a pointer aligned", [](Args& a) { a.window.held = odd; });
  refused("ring.capacity: expected the window's 8, found 7", [](Args& a) { a.window.capacity = 8; });
  refused("ring.v.data:", [](Args& a) { a.mamba2.ring.v.data = nullptr; });
  refused("ring.w.slot_stride: expected at least 896 elements, found 895",
          [](Args& a) { a.mamba2.ring.w.slot_stride = 895; });
  refused("state.codes:", [](Args& a) { a.mamba2.state.codes = nullptr; });
  refused("x.data:", [](Args& a) { a.mamba2.x.data = nullptr; });
  refused("y_stride: expected at least 64", [](Args& a) { a.mamba2.y_stride = 63; });
  ExpectRefused(kDelta, "ring.u.data:", [](Args& a) { a.delta.ring.u.data = nullptr; });
  ExpectRefused(kDelta, "ring.v.data:", [](Args& a) { a.delta.closed_loop = true; });
  ExpectRefused(kDelta, "shape.recurrence: expected gated_delta or kda",
                [](Args& a) { a.delta.shape.recurrence = Recurrence::mamba2; });
  Args none = Right();
  none.mamba2 = {};
  none.mamba2.shape = {Recurrence::mamba2, 4, 2, 16, 64};
  EXPECT_NO_THROW(check(none.mamba2, none.window)) << "no rows need no memory";
}

TEST(WindowCheck, NamesTheFieldOfSnapshots) {
  Args args = Right();
  args.mamba2.ring = {};
  EXPECT_NO_THROW(check(args.mamba2, args.snapshots)) << "an eager state needs no ring";
  EXPECT_NO_THROW(check(args.delta, args.snapshots));
  ExpectRefused(kSnapshots, "read.codes: expected null", [](Args& a) { a.mamba2.read = a.mamba2.state; });
  ExpectRefused(kSnapshots, "snapshots.slot: expected", [](Args& a) { a.snapshots.slot = nullptr; });
  ExpectRefused(kSnapshots, "count:", [](Args& a) { a.snapshots.count = nullptr; });
  ExpectRefused(kSelect, "snapshots.slot: expected", [](Args& a) { a.snapshots.slot = nullptr; });
  ExpectRefused(kSelect, "accepted: expected", [](Args& a) { a.tokens = nullptr; });
}

TEST(WindowCheck, NamesTheArgumentOfACommit) {
  ExpectRefused(kCommit, "rows: expected 0 to 2147483647, found -1", [](Args& a) { a.rows = -1; });
  ExpectRefused(kCommit, "slots: expected at least 0, found -2", [](Args& a) { a.slots = -2; });
  ExpectRefused(kCommit, "slot: expected", [](Args& a) { a.slot = nullptr; });
  ExpectRefused(kCommit, "accepted: expected", [](Args& a) { a.tokens = nullptr; });
  ExpectRefused(kCommit, "refused: expected a pointer aligned", [](Args& a) { a.refused = odd; });
  ExpectRefused(kCommit, "committed: expected", [](Args& a) { a.window.committed = 0; });
  ExpectRefused(kConvolution, "window.channels: expected 1 to", [](Args& a) { a.convolution.channels = 0; });
  ExpectRefused(kConvolution, "rows: expected rows x channels up to",
                [](Args& a) { a.rows = a.convolution.channels = 1 << 20; });
  ExpectRefused(kConvolution, "window.inputs: expected at least 0", [](Args& a) { a.convolution.inputs = -1; });
  ExpectRefused(kConvolution, "window.data: expected", [](Args& a) { a.convolution.data = nullptr; });
  ExpectRefused(kConvolution, "window.input_stride: expected at least 1",
                [](Args& a) { a.convolution.input_stride = 0; });
  ExpectRefused(kConvolution, "x.stride: expected at least 8 elements, found 7", [](Args& a) { a.x.stride = 7; });
  ExpectRefused(kConvolution, "accepted: expected", [](Args& a) { a.tokens = nullptr; });
}

}  // namespace
}  // namespace replayssm::cuda::tests
