// The kernels on a GPU: the generic one and, where it serves a step, the fast one; that on a single block too, which
// uses each of its buffers again and again.

#include <cuda_runtime_api.h>

#include "core/error.h"
#include "cuda/convert.h"
#include "cuda/kernels.h"
#include "tests/cuda/machine.h"

namespace replayssm::cuda::tests {
namespace {

void require(cudaError_t error, const char* what) {
  if (error != cudaSuccess) fail(what, ": ", cudaGetErrorString(error));
}

class Gpu : public Machine {
 public:
  explicit Gpu(Kernel kernel, int blocks = 0) : kernel_(kernel), blocks_(blocks) {}

  void* allocate(std::size_t bytes) override {
    void* there = nullptr;
    require(cudaMalloc(&there, bytes == 0 ? 1 : bytes), "cudaMalloc");
    return there;
  }
  void release(void* there) override { cudaFree(there); }
  void write(void* there, const void* here, std::size_t bytes) override {
    require(cudaMemcpy(there, here, bytes, cudaMemcpyHostToDevice), "copy to the device");
  }
  void read(void* here, const void* there, std::size_t bytes) override {
    require(cudaMemcpy(here, there, bytes, cudaMemcpyDeviceToHost), "copy from the device");
  }
  bool serves(const Mamba2Step& step) override { return kernel_ == Kernel::generic || fast(step); }
  bool serves(const DeltaStep& step) override { return kernel_ == Kernel::generic || fast(step); }
  void decode(const Mamba2Step& step) override { run(step); }
  void decode(const DeltaStep& step) override { run(step); }
  void advance_cursors(std::int64_t rows, const std::int32_t* slot, std::int32_t* held, std::int64_t length) override {
    cuda::advance_cursors(rows, slot, held, length, nullptr);
    wait();
  }
  bool verifies() override { return kernel_ == Kernel::generic; }
  void verify(const Mamba2Step& step, const Window& window) override { run(step, window); }
  void verify(const DeltaStep& step, const Window& window) override { run(step, window); }
  void verify(const Mamba2Step& step, const Snapshots& snapshots) override { run(step, snapshots); }
  void verify(const DeltaStep& step, const Snapshots& snapshots) override { run(step, snapshots); }
  void commit(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const Window& window,
              const std::int32_t* accepted, std::int32_t* refused) override {
    cuda::commit(rows, slots, slot, window, accepted, refused, nullptr);
    wait();
  }
  void commit(std::int64_t rows, std::int64_t slots, std::int32_t* slot, const Snapshots& snapshots,
              const std::int32_t* accepted, std::int32_t* refused) override {
    cuda::commit(rows, slots, slot, snapshots, accepted, refused, nullptr);
    wait();
  }
  void roll_back(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const Window& window,
                 const std::int32_t* tokens, std::int32_t* refused) override {
    cuda::roll_back(rows, slots, slot, window, tokens, refused, nullptr);
    wait();
  }
  void commit_convolution(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const Drafts& drafts,
                          const ConvolutionWindow& window, const Activations& x,
                          const std::int32_t* accepted) override {
    cuda::commit_convolution(rows, slots, slot, drafts, window, x, accepted, nullptr);
    wait();
  }
  void encode_rows(Storage storage, const float* data, std::int64_t rows, std::int64_t n, void* codes,
                   float* scales) override {
    cuda::encode_rows(storage, data, rows, n, codes, scales, nullptr);
    wait();
  }
  void decode_rows(Storage storage, const void* codes, const float* scales, std::int64_t rows, std::int64_t n,
                   float* data) override {
    cuda::decode_rows(storage, codes, scales, rows, n, data, nullptr);
    wait();
  }

 private:
  template <class AnyStep>
  void run(const AnyStep& step) {
    most_blocks = blocks_;
    cuda::decode(step, nullptr, kernel_);
    most_blocks = 0;
    wait();
  }
  template <class AnyStep, class Plan>
  void run(const AnyStep& step, const Plan& plan) {
    cuda::verify(step, plan, nullptr, kernel_);
    wait();
  }
  void wait() { require(cudaDeviceSynchronize(), "a kernel"); }

  Kernel kernel_;
  int blocks_;
};

}  // namespace

std::vector<std::string> machine_names() { return {"generic", "fast", "fast, one block"}; }

Machine* machine(const std::string& name) {
  static const bool has_device = available();
  if (!has_device) return nullptr;
  static Gpu generic(Kernel::generic), fast(Kernel::fast), one_block(Kernel::fast, 1);
  return name == "fast" ? &fast : name == "generic" ? &generic : &one_block;
}

}  // namespace replayssm::cuda::tests
