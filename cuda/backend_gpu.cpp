// Decode steps on the current CUDA device, on the stream that copies wait for.

#include <cuda_runtime_api.h>

#include "core/error.h"
#include "cuda/backend.h"

namespace replayssm::cuda {
namespace {

void require(cudaError_t error, const char* doing) {
  if (error != cudaSuccess) fail("CUDA, ", doing, ": ", cudaGetErrorString(error));
}

class Gpu : public StepDevice {
 public:
  explicit Gpu(Kernel kernel) : kernel_(kernel) {}

  void* allocate(std::size_t bytes) override {
    void* there = nullptr;
    require(cudaMalloc(&there, bytes), "allocating device memory");
    const cudaError_t cleared = cudaMemset(there, 0, bytes);
    if (cleared != cudaSuccess) cudaFree(there);
    require(cleared, "clearing device memory");
    return there;
  }
  void release(void* there) noexcept override { cudaFree(there); }
  void write(void* there, const void* here, std::size_t bytes) override {
    require(cudaMemcpy(there, here, bytes, cudaMemcpyHostToDevice), "copying to the device");
  }
  void read(void* here, const void* there, std::size_t bytes) override {
    require(cudaMemcpy(here, there, bytes, cudaMemcpyDeviceToHost), "running steps");
  }
  void decode(const Mamba2Step& step) override { cuda::decode(step, nullptr, kernel_); }
  void decode(const DeltaStep& step) override { cuda::decode(step, nullptr, kernel_); }

 private:
  Kernel kernel_;
};

}  // namespace

std::shared_ptr<StepDevice> gpu(Kernel kernel) {
  if (!available()) fail("CUDA: this machine has no device that the decode kernels run on");
  return std::make_shared<Gpu>(kernel);
}

}  // namespace replayssm::cuda
