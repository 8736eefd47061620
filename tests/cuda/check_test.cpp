// What decode() refuses, and what it says.

#include "cuda/check.h"

#include <gtest/gtest.h>

#include <functional>

#include "core/error.h"
#include "cuda/codes.cuh"
#include "cuda/generic.h"

namespace replayssm::cuda::tests {
namespace {

alignas(16) float memory[16];  // nothing is read; only the address counts

Activations input(std::int64_t width) { return {Scalar::bf16, memory, width}; }

template <class AnyStep>
AnyStep common(Recurrence recurrence) {
  AnyStep step;
  step.shape = {recurrence, 4, 2, 16, 64};
  step.length = 3;
  step.rows = 2;
  step.slots = 2;
  step.slot = step.held = reinterpret_cast<std::int32_t*>(memory);
  step.state = {Storage::int8_row, memory, memory, 4 * 16 * 64, 4 * 16};
  step.ring.capacity = 2;
  step.ring.w = {Scalar::bf16, memory, 2 * 2 * 64};
  step.y = memory;
  step.y_stride = 64;
  step.A_log = step.dt_bias = memory;
  return step;
}

Mamba2Step mamba2() {
  auto step = common<Mamba2Step>(Recurrence::mamba2);
  step.ring.v = {Scalar::bf16, memory, 4 * 2 * 16};
  step.ring.gain = {Scalar::fp32, memory, 4 * 2};
  step.x = input(64);
  step.B = step.C = input(128);
  step.dt = input(4);
  return step;
}

DeltaStep kda() {
  auto step = common<DeltaStep>(Recurrence::kda);
  step.ring.u = {Scalar::fp32, memory, 4 * 2 * 16};
  step.ring.log_decay = {Scalar::fp32, memory, 4 * 2 * 64};
  step.q = step.k = input(128);
  step.v = input(64);
  step.gate = input(256);
  step.beta = input(4);
  return step;
}

template <class AnyStep>
std::string Message(AnyStep step, const std::function<void(AnyStep&)>& change) {
  change(step);
  try {
    check(step);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

template <class AnyStep>
void ExpectRefused(const AnyStep& step, const std::string& begin, const std::function<void(AnyStep&)>& change) {
  EXPECT_EQ(Message<AnyStep>(step, change).substr(0, begin.size()), begin);
}

TEST(Check, TakesWhatIsRight) {
  EXPECT_EQ(Message<Mamba2Step>(mamba2(), [](auto&) {}), "");
  EXPECT_EQ(Message<DeltaStep>(kda(), [](auto&) {}), "");
  EXPECT_EQ(Message<Mamba2Step>(mamba2(),
                                [](auto& s) {
                                  s.length = 1;  // needs no ring
                                  s.ring = {};
                                  s.held = nullptr;
                                }),
            "");
  EXPECT_EQ(Message<Mamba2Step>(mamba2(),
                                [](auto& s) {
                                  s.rows = 0;  // needs no memory
                                  s.slot = nullptr;
                                  s.y = nullptr;
                                  s.state = {};
                                }),
            "");
}

TEST(Check, NamesTheFieldOfAMamba2Step) {
  const auto refused = [](const char* begin, const std::function<void(Mamba2Step&)>& change) {
    ExpectRefused<Mamba2Step>(mamba2(), begin, change);
  };
  refused("shape.recurrence: expected mamba2", [](auto& s) { s.shape.recurrence = Recurrence::kda; });
  refused("shape.head_dim: expected 1 to 256, found 257", [](auto& s) { s.shape.head_dim = 257; });
  refused("shape.state_dim: expected 1 to 256, found 0", [](auto& s) { s.shape.state_dim = 0; });
  refused("shape.heads:", [](auto& s) { s.shape.heads = 0; });
  refused("shape.groups: expected a divisor of the 4 heads, found 3", [](auto& s) { s.shape.groups = 3; });
  refused("rows: expected at least 0, found -1", [](auto& s) { s.rows = -1; });
  refused("rows: expected rows x heads up to 2147483647", [](auto& s) { s.rows = std::int64_t{1} << 30; });
  refused("slots:", [](auto& s) { s.slots = -1; });
  refused("length:", [](auto& s) { s.length = 0; });
  refused("slot: expected a device pointer, found null", [](auto& s) { s.slot = nullptr; });
  refused("held: expected a pointer aligned to 4 bytes",
          [](auto& s) { s.held = reinterpret_cast<const std::int32_t*>(reinterpret_cast<const char*>(memory) + 2); });
  refused("state.storage: expected fp32", [](auto& s) { s.state.storage = static_cast<Storage>(9); });
  refused("state.codes:", [](auto& s) { s.state.codes = nullptr; });
  refused("state.slot_stride: expected at least 4096 elements, found 4095",
          [](auto& s) { s.state.slot_stride = 4095; });
  refused("state.scales:", [](auto& s) { s.state.scales = nullptr; });
  refused("state.scale_slot_stride:", [](auto& s) { s.state.scale_slot_stride = 63; });
  refused("read.scales:", [](auto& s) { s.read = {Storage::e4m3_row, memory, nullptr, 4096, 64}; });
  refused("y_type:", [](auto& s) { s.y_type = static_cast<Scalar>(3); });
  refused("y: expected", [](auto& s) { s.y = nullptr; });
  refused("y_stride: expected at least 64 elements, found 63", [](auto& s) { s.y_stride = 63; });
  refused("workspace: expected a pointer aligned to 16 bytes", [](auto& s) { s.workspace = memory + 1; });
  refused("ring.capacity: expected at least length - 1 = 2", [](auto& s) { s.ring.capacity = 1; });
  refused("ring.v.data:", [](auto& s) { s.ring.v.data = nullptr; });
  refused("ring.v.slot_stride:", [](auto& s) { s.ring.v.slot_stride = 127; });
  refused("ring.gain.type: expected fp32", [](auto& s) { s.ring.gain.type = Scalar::bf16; });
  refused("ring.w.slot_stride:", [](auto& s) { s.ring.w.slot_stride = 0; });
  refused("x.data:", [](auto& s) { s.x.data = nullptr; });
  refused("B.stride: expected at least 128 elements, found 64", [](auto& s) { s.B.stride = 64; });
  refused("C.type:", [](auto& s) { s.C.type = static_cast<Scalar>(7); });
  refused("dt.stride:", [](auto& s) { s.dt.stride = 3; });
  refused("A_log:", [](auto& s) { s.A_log = nullptr; });
  refused("dt_bias:", [](auto& s) { s.dt_bias = nullptr; });
  refused("dt_min: expected at most dt_max = 1, found 2", [](auto& s) {
    s.dt_min = 2;
    s.dt_max = 1;
  });
}

TEST(Check, NamesTheFieldOfADeltaStep) {
  const auto refused = [](const char* begin, const std::function<void(DeltaStep&)>& change) {
    ExpectRefused<DeltaStep>(kda(), begin, change);
  };
  refused("shape.recurrence: expected gated_delta or kda", [](auto& s) { s.shape.recurrence = Recurrence::mamba2; });
  refused("ring.u.data:", [](auto& s) { s.ring.u.data = nullptr; });
  refused("ring.log_decay.slot_stride: expected at least 512", [](auto& s) { s.ring.log_decay.slot_stride = 8; });
  refused("ring.v.data:", [](auto& s) { s.closed_loop = true; });
  refused("gate.stride: expected at least 256", [](auto& s) { s.gate.stride = 4; });
  refused("beta_scale: expected a finite number", [](auto& s) { s.beta_scale = HUGE_VALF; });
  refused("q.data:", [](auto& s) { s.q.data = nullptr; });
  refused("beta.data:", [](auto& s) { s.beta.data = nullptr; });
}

TEST(Check, OfCursorsAndRows) {
  std::int32_t held = 0;
  EXPECT_THROW(check_cursors(-1, &held, &held, 2), Error);
  EXPECT_THROW(check_cursors(1, nullptr, &held, 2), Error);
  EXPECT_THROW(check_cursors(1, &held, nullptr, 2), Error);
  EXPECT_THROW(check_cursors(1, &held, &held, 0), Error);
  check_cursors(0, nullptr, nullptr, 2);
  EXPECT_THROW(check_rows(Storage::int8_row, memory, 1, 4, memory, nullptr), Error);
  EXPECT_THROW(check_rows(Storage::fp16, nullptr, 1, 4, memory, nullptr), Error);
  EXPECT_THROW(check_rows(Storage::fp16, memory, 1, 0, memory, nullptr), Error);
  check_rows(Storage::fp16, memory, 1, 4, memory, nullptr);
}

// Slots of 131072 elements: offsets beyond 32 bits.
TEST(Check, OffsetsHave64Bits) {
  Step step;
  step.ring.capacity = 1024;
  const RingField field{Scalar::bf16, nullptr, 131072};
  EXPECT_EQ(generic::at_record(step, field, 16384, 0, 0, 128, 0), 2147483648);
  EXPECT_EQ(generic::at_record(step, field, 32768, 0, 0, 128, 0), 4294967296);
  EXPECT_EQ(generic::at_record(step, field, 0, 1 << 15, 0, 128, 5), 4294967301);
}

}  // namespace
}  // namespace replayssm::cuda::tests
