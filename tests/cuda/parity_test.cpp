// Every step of every schedule, storage, ring and shape against the definition.

#include "tests/cuda/parity.h"

#include <tuple>

namespace replayssm::cuda::tests {
namespace {

constexpr Recurrence kRecurrences[] = {Recurrence::mamba2, Recurrence::gated_delta, Recurrence::kda};
constexpr Storage kStorages[] = {Storage::fp32, Storage::fp16, Storage::bf16, Storage::e4m3_row, Storage::int8_row};
constexpr Scalar kScalars[] = {Scalar::fp32, Scalar::fp16, Scalar::bf16};

/// Open and closed loops; Mamba-2 has none.
void CheckLoops(Machine& machine, Case setup, int tokens, int& served) {
  for (const bool closed : {true, false}) {
    if (!closed && !is_delta(setup)) continue;
    setup.closed = closed;
    served += CheckParity(machine, setup, tokens);
  }
}

class Small : public OnMachine {};
INSTANTIATE_TEST_SUITE_P(, Small, testing::ValuesIn(machine_names()));

// Few and small steps of every code path, for tools that make them slow.
TEST_P(Small, Steps) {
  int served = 0;
  for (const Recurrence recurrence : kRecurrences) {
    for (const Storage storage : {Storage::fp32, Storage::fp16, Storage::int8_row}) {
      Case setup{.shape = {recurrence, 2, 1, 16, 64}, .state = storage, .rows = 2};
      served += CheckParity(on(), setup, 1);
      setup.length = 3;
      setup.ring = setup.input = setup.y = Scalar::bf16;
      setup.rows = 3;
      setup.staggered = true;
      CheckLoops(on(), setup, 3, served);
      setup.state = Storage::fp32;
      setup.read = storage;
      CheckLoops(on(), setup, 3, served);
    }
    CheckLoops(on(), {.shape = {recurrence, 4, 2, 80, 96}, .length = 9, .ring = Scalar::bf16, .rows = 2}, 10, served);
    CheckLoops(on(), {.shape = {recurrence, 2, 1, 5, 7}, .length = 3, .ring = Scalar::bf16, .rows = 2}, 4, served);
  }
  EXPECT_GT(served, 0);
}

class Parity : public OnMachine {};
INSTANTIATE_TEST_SUITE_P(, Parity, testing::ValuesIn(machine_names()));

TEST_P(Parity, OfEveryStorageAndRing) {
  int served = 0;
  for (const Recurrence recurrence : kRecurrences) {
    for (const Storage storage : kStorages) {
      Case setup{.shape = {recurrence, 4, 2, 16, 64}, .state = storage, .rows = 3};
      served += CheckParity(on(), setup, 3);  // eager
      setup.length = 5;
      setup.rows = 6;
      setup.staggered = true;
      for (const Scalar ring : kScalars) {
        setup.ring = ring;
        setup.input = ring == Scalar::fp32 ? Scalar::bf16 : ring;
        CheckLoops(on(), setup, 11, served);
        Case split = setup;
        split.state = Storage::fp32;
        split.read = storage;
        CheckLoops(on(), split, 11, served);
      }
    }
  }
  EXPECT_GT(served, 0);
}

TEST_P(Parity, OfUpdatesInATypeOfTheirOwn) {
  int served = 0;
  for (const Recurrence recurrence : {Recurrence::gated_delta, Recurrence::kda}) {
    for (const Scalar ring : kScalars) {
      for (const Scalar u : kScalars) {
        CheckLoops(on(),
                   {.shape = {recurrence, 2, 1, 32, 64},
                    .length = 5,
                    .read = Storage::fp16,
                    .ring = ring,
                    .ring_u = u,
                    .input = Scalar::bf16,
                    .rows = 4,
                    .staggered = true},
                   7, served);
      }
    }
  }
  EXPECT_GT(served, 0);
}

TEST_P(Parity, OfEveryAnchorWithAReadCopy) {
  int served = 0;
  for (const Recurrence recurrence : kRecurrences) {
    for (const Storage anchor : kStorages) {
      CheckLoops(on(),
                 {.shape = {recurrence, 2, 1, 32, 64},
                  .length = 3,
                  .state = anchor,
                  .read = Storage::int8_row,
                  .ring = Scalar::bf16,
                  .rows = 4,
                  .staggered = true},
                 7, served);
    }
  }
  EXPECT_GT(served, 0);
}

TEST_P(Parity, OfEveryInputAndOutputType) {
  int served = 0;
  for (const Recurrence recurrence : kRecurrences) {
    for (const Scalar input : kScalars) {
      for (const Scalar y : kScalars) {
        CheckLoops(on(),
                   {.shape = {recurrence, 2, 2, 16, 64},
                    .length = 4,
                    .read = Storage::bf16,
                    .ring = Scalar::bf16,
                    .input = input,
                    .y = y,
                    .rows = 4,
                    .staggered = true},
                   5, served);
      }
    }
  }
  EXPECT_GT(served, 0);
}

TEST_P(Parity, OfMixedInputTypes) {
  int served = 0;
  for (const Recurrence recurrence : kRecurrences) {
    for (const bool wide_c : {false, true}) {
      for (const Storage state : {Storage::fp32, Storage::bf16, Storage::int8_row}) {
        CheckLoops(on(),
                   {.shape = {recurrence, 4, 2, 32, 64},
                    .length = 4,
                    .state = state,
                    .ring = Scalar::bf16,
                    .input = Scalar::bf16,
                    .wide_c = wide_c,
                    .wide_v = !wide_c,
                    .rows = 4,
                    .staggered = true},
                   5, served);
      }
    }
  }
  EXPECT_GT(served, 0);
}

TEST_P(Parity, OfEveryShape) {
  constexpr struct { int heads, groups; } kHeads[] = {{1, 1}, {2, 1}, {4, 2}, {8, 8}, {3, 1}, {2, 2}, {8, 2}, {16, 8}};
  int served = 0, i = 0;
  for (const Recurrence recurrence : kRecurrences) {
    for (const int P : {5, 16, 64, 80, 128, 192}) {
      for (const int N : {4, 64, 96, 128, 256}) {
        const auto [heads, groups] = kHeads[P * N > 8192 ? i % 3 : i % 8];  // the oracle takes its time
        Case setup{.shape = {recurrence, heads, groups, P, N},
                   .length = 4,
                   .ring = Scalar::bf16,
                   .input = Scalar::bf16,
                   .rows = 4,
                   .skip = i % 2 == 0,
                   .staggered = true};
        if (i % 3 == 0) {
          setup.read = kStorages[i % 5];
        } else {
          setup.state = kStorages[i % 5];
        }
        setup.closed = i % 4 < 2;
        served += CheckParity(on(), setup, 3);
        ++i;
      }
    }
  }
  EXPECT_GT(served, 0);
}

TEST_P(Parity, OfEveryLength) {
  int served = 0;
  for (const Recurrence recurrence : kRecurrences) {
    for (const int length : {1, 2, 3, 8, 16, 32, 33, 50, 64}) {
      Case setup{.shape = {recurrence, 2, 1, 16, 64},
                 .length = length,
                 .ring = Scalar::bf16,
                 .input = Scalar::bf16,
                 .rows = 5,
                 .staggered = true};
      CheckLoops(on(), setup, length + 3, served);
      setup.read = Storage::e4m3_row;
      CheckLoops(on(), setup, length + 3, served);
    }
  }
  EXPECT_GT(served, 0);
}

// Rings that leave room for one tile of states at a time in half a multiprocessor's shared memory, or nearly so.
TEST_P(Parity, OfRingsThatFillTheSharedMemory) {
  int served = 0;
  for (const Recurrence recurrence : kRecurrences) {
    for (const auto& [length, N, ring] : {std::tuple{29, 256, Scalar::fp32},
                                          {53, 256, Scalar::bf16},
                                          {62, 128, Scalar::fp32},
                                          {20, 256, Scalar::bf16},
                                          {47, 128, Scalar::bf16}}) {
      CheckLoops(on(),
                 {.shape = {recurrence, 1, 1, 16, N}, .length = length, .ring = ring, .rows = 4, .staggered = true},
                 length % 8 + 2, served);
    }
  }
  EXPECT_GT(served, 0);
}

TEST_P(Parity, OfClampsAndScales) {
  int served = 0;
  CheckLoops(on(),
             {.shape = {Recurrence::mamba2, 2, 1, 16, 64}, .length = 4, .rows = 2, .dt_min = 0.02F, .dt_max = 0.1F}, 13,
             served);
  CheckLoops(on(), {.shape = {Recurrence::gated_delta, 2, 1, 16, 64}, .length = 4, .rows = 2, .beta_scale = 2}, 13,
             served);
  EXPECT_GT(served, 0);
}

}  // namespace
}  // namespace replayssm::cuda::tests
