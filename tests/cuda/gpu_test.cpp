// What only a GPU can show: graphs, the choice of kernels, pools beyond 2^31 elements.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "core/error.h"
#include "cuda/kernels.h"
#include "tests/cuda/layer.h"

namespace replayssm::cuda::tests {
namespace {

constexpr Recurrence kRecurrences[] = {Recurrence::mamba2, Recurrence::gated_delta, Recurrence::kda};

void Require(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

void Decode(Layer& layer, cudaStream_t stream, Kernel kernel) {
  if (is_delta(layer.setup)) {
    decode(layer.delta, stream, kernel);
  } else {
    decode(layer.mamba2, stream, kernel);
  }
}

class OnGpu : public OnMachine {
 protected:
  Kernel kernel() const { return GetParam() != "generic" ? Kernel::fast : Kernel::generic; }
};
INSTANTIATE_TEST_SUITE_P(, OnGpu, testing::ValuesIn(machine_names()));

TEST_P(OnGpu, AGraphDoesWhatTheCallsDo) {
  int served = 0;
  for (const Recurrence recurrence : kRecurrences) {
    const Case setup{.shape = {recurrence, 4, 2, 32, 64},
                     .length = 3,
                     .read = Storage::int8_row,
                     .ring = Scalar::bf16,
                     .input = Scalar::bf16,
                     .y = Scalar::bf16,
                     .rows = 4,
                     .staggered = true};
    SCOPED_TRACE(setup.text());
    Layer direct(on(), setup), captured(on(), setup);
    if (!direct.served()) continue;
    ++served;
    const TokenInputs in = random_inputs(setup, direct.random);
    captured.set_inputs(in);
    for (int t = 0; t < 7; ++t) direct.step(in);

    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t run = nullptr;
    Require(cudaStreamCreate(&stream));
    Require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    Decode(captured, stream, kernel());
    advance_cursors(setup.rows, captured.slot.there(), captured.held.there(), setup.length, stream);
    Require(cudaStreamEndCapture(stream, &graph));
    Require(cudaGraphInstantiate(&run, graph, 0));
    for (int t = 0; t < 7; ++t) Require(cudaGraphLaunch(run, stream));
    Require(cudaStreamSynchronize(stream));
    captured.fetch();
    ExpectSame(direct, captured);
    Require(cudaGraphExecDestroy(run));
    Require(cudaGraphDestroy(graph));
    Require(cudaStreamDestroy(stream));
  }
  EXPECT_GT(served, 0);
}

// The layers of a model share a workspace, and the next begins while the one before ends. With more tiles than blocks,
// which therefore draw tickets.
TEST_P(OnGpu, LayersInAGraphShareAWorkspace) {
  int served = 0;
  for (const Recurrence recurrence : kRecurrences) {
    const Case setup{.shape = {recurrence, 2, 1, 32, 64},
                     .length = 3,
                     .state = recurrence == Recurrence::mamba2 ? Storage::fp32 : Storage::bf16,
                     .ring = Scalar::bf16,
                     .closed = false,
                     .input = Scalar::bf16,
                     .rows = GetParam() != "generic" ? 700 : 20,
                     .staggered = true};
    SCOPED_TRACE(setup.text());
    std::vector<std::unique_ptr<Layer>> direct, captured;
    for (unsigned seed = 1; seed <= 3; ++seed) {
      for (auto* layers : {&direct, &captured}) layers->push_back(std::make_unique<Layer>(on(), setup, seed));
    }
    if (!direct.front()->served()) continue;
    ++served;
    const TokenInputs in = random_inputs(setup, direct.front()->random);
    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t run = nullptr;
    Require(cudaStreamCreate(&stream));
    for (auto& layer : captured) {
      layer->set_inputs(in);
      layer->mamba2.workspace = captured.front()->mamba2.workspace;
      layer->delta.workspace = captured.front()->delta.workspace;
    }
    Require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int t = 0; t < 4; ++t) {
      for (auto& layer : captured) Decode(*layer, stream, kernel());
      for (auto& layer : captured) {
        advance_cursors(setup.rows, layer->slot.there(), layer->held.there(), setup.length, stream);
      }
    }
    Require(cudaStreamEndCapture(stream, &graph));
    Require(cudaGraphInstantiate(&run, graph, 0));
    Require(cudaGraphLaunch(run, stream));
    Require(cudaStreamSynchronize(stream));
    for (std::size_t i = 0; i < direct.size(); ++i) {
      for (int t = 0; t < 4; ++t) direct[i]->step(in);
      captured[i]->fetch();
      ExpectSame(*direct[i], *captured[i]);
    }
    Require(cudaGraphExecDestroy(run));
    Require(cudaGraphDestroy(graph));
    Require(cudaStreamDestroy(stream));
  }
  EXPECT_GT(served, 0);
}

TEST_P(OnGpu, AutomaticTakesTheFastKernelWhereItServes) {
  for (const Recurrence recurrence : kRecurrences) {
    for (const int N : {64, 40}) {
      const Case setup{.shape = {recurrence, 2, 1, 16, N}, .rows = 2};
      SCOPED_TRACE(setup.text());
      Layer chosen(on(), setup), named(on(), setup);
      const TokenInputs in = random_inputs(setup, chosen.random);
      for (Layer* layer : {&chosen, &named}) layer->set_inputs(in);
      const bool has_fast = is_delta(setup) ? fast(named.delta) : fast(named.mamba2);
      EXPECT_EQ(has_fast, N == 64);
      Decode(chosen, nullptr, Kernel::automatic);
      Decode(named, nullptr, has_fast ? Kernel::fast : Kernel::generic);
      Require(cudaDeviceSynchronize());
      chosen.fetch();
      named.fetch();
      ExpectSame(chosen, named);
      if (!has_fast) {
        EXPECT_THROW(Decode(named, nullptr, Kernel::fast), Error);
      }
    }
  }
}

// So many rows that a block takes many tiles, one by one or in runs: those of a few rows come out as if the others were
// not there. Up to 2048 rows are put in order, more are not.
TEST_P(OnGpu, ManyRowsTakeTurns) {
  int served = 0;
  for (const Recurrence recurrence : kRecurrences) {
    for (const auto& [rows, heads, N] : {std::array{900, 2, 64}, {2100, 2, 64}, {1800, 8, 128}}) {
      if (GetParam() == "generic" && rows > 900) continue;
      const Case setup{.shape = {recurrence, heads, 1, 16, N},
                       .length = 5,
                       .read = N == 64 ? std::optional(Storage::int8_row) : std::nullopt,
                       .ring = Scalar::bf16,
                       .closed = N == 64,
                       .input = Scalar::bf16,
                       .rows = rows,
                       .staggered = true};
      SCOPED_TRACE(setup.text());
      Layer all(on(), setup), few(on(), setup);
      if (!all.served()) continue;
      ++served;
      const std::vector<std::int64_t> kept = {0, 3, rows / 2, rows - 1};
      for (const std::int64_t r : kept) {
        const std::int32_t at = all.slot.here[static_cast<std::size_t>(r)];
        ASSERT_GE(at, 0);
        const auto state = random_states(setup, 1, all.random);
        all.set_state(at, state);
        few.set_state(at, state);
      }
      for (std::int64_t r = 0; r < rows; ++r) {
        if (std::find(kept.begin(), kept.end(), r) == kept.end()) few.slot.here[static_cast<std::size_t>(r)] = -1;
      }
      few.slot.write();
      for (int t = 0; t < 6; ++t) {
        const TokenInputs in = random_inputs(setup, all.random);
        const auto y = all.step(in), expected = few.step(in);
        const auto width = static_cast<std::ptrdiff_t>(setup.shape.heads * setup.shape.head_dim);
        for (const std::int64_t r : kept) {
          EXPECT_EQ(std::memcmp(&y[static_cast<std::size_t>(r * width)], &expected[static_cast<std::size_t>(r * width)],
                                static_cast<std::size_t>(width) * sizeof(float)),
                    0)
              << "row " << r << " at token " << t;
        }
        EXPECT_EQ(all.workspace.read(), std::vector<std::uint8_t>(kWorkspaceBytes, 0));
      }
      for (const std::int64_t r : kept) {
        const std::int32_t at = all.slot.here[static_cast<std::size_t>(r)];
        EXPECT_EQ(all.state(at), few.state(at)) << "row " << r;
      }
    }
  }
  EXPECT_GT(served, 0);
}

/// Device memory that is given back.
struct Block {
  explicit Block(std::size_t bytes) {
    if (cudaMalloc(&data, bytes) != cudaSuccess) data = nullptr;
    cudaGetLastError();
  }
  ~Block() { cudaFree(data); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  void* data = nullptr;
};

// A pool of 16385 slots of 131072 one-byte elements: the last slot lies beyond 2^31. The same states in a small pool
// say what is right.
TEST_P(OnGpu, SlotsBeyondTwoToThe31) {
  constexpr std::int64_t kSlots = 16385, kElements = 8 * 128 * 128, kRows = 8 * 128;
  const Case setup{.shape = {Recurrence::mamba2, 8, 1, 128, 128}, .state = Storage::int8_row, .rows = 2};
  Layer small(on(), setup);
  for (const std::int32_t at : small.slot.here) small.set_state(at, random_states(setup, 1, small.random));
  const Block codes(static_cast<std::size_t>(kSlots * kElements)), scales(kSlots * kRows * sizeof(float));
  if (!codes.data || !scales.data) GTEST_SKIP() << "not enough memory on the device";
  Require(cudaMemset(codes.data, 0, static_cast<std::size_t>(kSlots * kElements)));
  Require(cudaMemset(scales.data, 0, kSlots * kRows * sizeof(float)));
  const std::int64_t slots[] = {kSlots - 1, 0};
  const auto copy = [&](auto&& each) {
    for (int r = 0; r < 2; ++r) {
      const std::int64_t at = small.slot.here[static_cast<std::size_t>(r)];
      each(static_cast<std::uint8_t*>(codes.data) + slots[r] * kElements,
           small.pool.bytes.here.data() + at * small.pool.stride, static_cast<std::size_t>(kElements));
      each(static_cast<float*>(scales.data) + slots[r] * kRows,
           small.pool.scales.here.data() + at * small.pool.scale_stride, kRows * sizeof(float));
    }
  };
  copy([](void* there, const void* here, std::size_t n) {
    Require(cudaMemcpy(there, here, n, cudaMemcpyHostToDevice));
  });
  const TokenInputs in = random_inputs(setup, small.random);
  const auto y = small.step(in);  // its memory is fetched: what is right

  small.set_inputs(in);
  small.y.here.assign(small.y.here.size(), 0xFF);
  small.y.write();
  Array<std::int32_t> slot(on());
  slot.write({kSlots - 1, 0});
  Mamba2Step large = small.mamba2;
  large.slots = kSlots;
  large.slot = slot.there();
  large.state = {Storage::int8_row, codes.data, static_cast<float*>(scales.data), kElements, kRows};
  decode(large, nullptr, kernel());
  Require(cudaDeviceSynchronize());
  EXPECT_EQ(small.fetch(), y);
  copy([](const void* there, const void* expected, std::size_t n) {
    std::vector<std::uint8_t> found(n);
    Require(cudaMemcpy(found.data(), there, n, cudaMemcpyDeviceToHost));
    EXPECT_EQ(std::memcmp(found.data(), expected, n), 0);
  });
}

TEST_P(OnGpu, NoRowsAreNoLaunch) {
  Layer layer(on(), {.shape = {Recurrence::mamba2, 2, 1, 16, 64}});
  layer.mamba2.rows = 0;
  decode(layer.mamba2, nullptr, Kernel::automatic);
  Require(cudaDeviceSynchronize());
}

}  // namespace
}  // namespace replayssm::cuda::tests
