// What of windows only a GPU can show: graphs, and that no fast kernel is pretended.

#include <cuda_runtime_api.h>

#include "core/error.h"
#include "tests/cuda/windows.h"

namespace replayssm::cuda::tests {
namespace {

constexpr Recurrence kRecurrences[] = {Recurrence::mamba2, Recurrence::gated_delta, Recurrence::kda};

void Require(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

class WindowsOnGpu : public OnVerifier {};
INSTANTIATE_TEST_SUITE_P(, WindowsOnGpu, testing::ValuesIn(machine_names()));

// One graph for all steps: counts and accepted tokens are other ones at each launch.
TEST_P(WindowsOnGpu, AGraphDoesWhatTheCallsDo) {
  for (const Recurrence recurrence : kRecurrences) {
    Case setup{.shape = {recurrence, 4, 2, 32, 64}, .read = Storage::int8_row, .ring = Scalar::bf16};
    setup.input = setup.y = Scalar::bf16;
    setup.rows = 4;
    setup.window = 3;
    setup.committed = 4;
    SCOPED_TRACE(setup.text());
    Windows direct(on(), setup), captured(on(), setup);
    for (Windows* layer : {&direct, &captured}) layer->fill_states();
    const TokenInputs in = random_inputs(setup, direct.random);
    captured.set_inputs(in);
    captured.accepted.write({0, 0, 0, 0});

    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t run = nullptr;
    Require(cudaStreamCreate(&stream));
    Require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    if (is_delta(setup)) {
      verify(captured.delta, captured.window, stream);
    } else {
      verify(captured.mamba2, captured.window, stream);
    }
    commit(setup.rows, captured.slots, captured.slot.there(), captured.window, captured.accepted.there(),
           captured.refused.there(), stream);
    Require(cudaStreamEndCapture(stream, &graph));
    Require(cudaGraphInstantiate(&run, graph, 0));
    for (int i = 0; i < 9; ++i) {
      std::vector<std::int32_t> counts, accepted;
      for (std::int64_t r = 0; r < setup.rows; ++r) {
        counts.push_back(static_cast<std::int32_t>((r + i) % 4));
        accepted.push_back(std::min(counts.back(), static_cast<std::int32_t>((r + i) % 3)));
      }
      direct.verify(in, counts);
      EXPECT_EQ(direct.commit(accepted), 0);
      captured.count.write(counts);
      captured.accepted.write(accepted);
      captured.y.here.assign(captured.y.here.size(), 0xFF);
      captured.y.write();
      Require(cudaGraphLaunch(run, stream));
      Require(cudaStreamSynchronize(stream));
      captured.fetch();
      ExpectSame(direct, captured);
      EXPECT_EQ(captured.cursor.read(), direct.cursor.here);
      EXPECT_EQ(captured.origin.read(), direct.origin.here);
      EXPECT_EQ(captured.refused.read()[0], 0);
    }
    Require(cudaGraphExecDestroy(run));
    Require(cudaGraphDestroy(graph));
    Require(cudaStreamDestroy(stream));
  }
}

TEST_P(WindowsOnGpu, NoFastKernelIsThereYet) {
  Case setup{.shape = {Recurrence::mamba2, 2, 1, 16, 64}};
  setup.window = setup.committed = 2;
  Windows layer(on(), setup);
  layer.set_inputs(random_inputs(setup, layer.random));
  EXPECT_THROW(verify(layer.mamba2, layer.window, nullptr, Kernel::fast), Error);
  layer.mamba2.rows = 0;
  verify(layer.mamba2, layer.window, nullptr);
  Require(cudaDeviceSynchronize());
}

}  // namespace
}  // namespace replayssm::cuda::tests
