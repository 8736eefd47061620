#pragma once

// Private to the benchmark: owners of what CUDA hands out, and the kernels that are not under test.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/error.h"
#include "cuda/decode.h"

namespace replayssm::cuda {

/// Throws Error with what CUDA says.
inline void check(cudaError_t error, const char* doing) {
  if (error != cudaSuccess) fail("CUDA, ", doing, ": ", cudaGetErrorString(error));
}

/// Device memory. Allocated as it is: its contents are what was there.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::int64_t bytes) : bytes_(bytes) {
    if (bytes > 0) check(cudaMalloc(&data_, static_cast<std::size_t>(bytes)), "allocating device memory");
  }
  template <class T>
  explicit Buffer(const std::vector<T>& host) : Buffer(static_cast<std::int64_t>(host.size() * sizeof(T))) {
    if (data_) check(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "copying");
  }
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Buffer() { cudaFree(data_); }

  std::int64_t bytes() const { return bytes_; }
  /// The place `offset` bytes in; null where there is nothing.
  template <class T = void>
  T* at(std::int64_t offset = 0) const {
    return data_ ? reinterpret_cast<T*>(static_cast<std::byte*>(data_) + offset) : nullptr;
  }
  void zero() const {
    if (data_) check(cudaMemset(data_, 0, static_cast<std::size_t>(bytes_)), "clearing device memory");
  }

 private:
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

class Stream {
 public:
  /// Waits for copies that CUDA makes without a stream, and they for it.
  Stream() { check(cudaStreamCreate(&stream_), "making a stream"); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(stream_); }
  operator cudaStream_t() const { return stream_; }
  void wait() const { check(cudaStreamSynchronize(stream_), "running kernels"); }

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  Event() { check(cudaEventCreate(&event_), "making an event"); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() { cudaEventDestroy(event_); }
  operator cudaEvent_t() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

/// What launch() puts on the stream, as a graph that is ready to run.
class Graph {
 public:
  template <class Launch>
  Graph(const Stream& stream, Launch&& launch) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capturing a graph");
    cudaGraph_t graph = nullptr;
    try {
      launch();
    } catch (...) {
      cudaStreamEndCapture(stream, &graph);
      if (graph) cudaGraphDestroy(graph);
      throw;
    }
    check(cudaStreamEndCapture(stream, &graph), "capturing a graph");
    const cudaError_t error = cudaGraphInstantiate(&graph_, graph, 0);
    cudaGraphDestroy(graph);
    check(error, "making a graph");
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() { cudaGraphExecDestroy(graph_); }
  void run(const Stream& stream) const { check(cudaGraphLaunch(graph_, stream), "running a graph"); }

 private:
  cudaGraphExec_t graph_ = nullptr;
};

/// Seconds of each of several runs of launch(), after two that are not counted: as many as take about `enough` seconds
/// together, at least 9 and at most 99.
template <class Launch>
std::vector<double> time_runs(const Stream& stream, double enough, Launch&& launch) {
  const auto timed = [&](std::size_t runs) {
    std::vector<Event> events(runs + 1);
    check(cudaEventRecord(events[0], stream), "recording an event");
    for (std::size_t i = 0; i < runs; ++i) {
      launch();
      check(cudaEventRecord(events[i + 1], stream), "recording an event");
    }
    stream.wait();
    std::vector<double> seconds(runs);
    for (std::size_t i = 0; i < runs; ++i) {
      float milliseconds = 0;
      check(cudaEventElapsedTime(&milliseconds, events[i], events[i + 1]), "reading an event");
      seconds[i] = 1e-3 * double{milliseconds};
    }
    return seconds;
  };
  const double one = timed(2).back();
  const double runs = enough / one;
  return timed(runs < 9 ? 9 : runs > 99 ? 99 : static_cast<std::size_t>(runs));
}

struct Spread {
  double least, median, largest;
};
Spread spread(std::vector<double> values);

/// data[0 .. n) <- mean + deviation z, z normal and cut off at 4, rounded to `type`. The same for the same seed.
void fill_normal(Scalar type, void* data, std::int64_t n, float mean, float deviation, std::uint64_t seed,
                 cudaStream_t stream);

}  // namespace replayssm::cuda
