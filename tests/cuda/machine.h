#pragma once

// Where the tests of the decode kernels run them: a program links one file that says which machines there are.

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/speculate.h"

namespace replayssm::cuda::tests {

class Machine {
 public:
  virtual ~Machine() = default;
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void release(void* there) = 0;
  virtual void write(void* there, const void* here, std::size_t bytes) = 0;
  virtual void read(void* here, const void* there, std::size_t bytes) = 0;
  /// Whether its kernel is made for this step; tests leave out what is not.
  virtual bool serves(const Mamba2Step& step) = 0;
  virtual bool serves(const DeltaStep& step) = 0;
  virtual void decode(const Mamba2Step& step) = 0;
  virtual void decode(const DeltaStep& step) = 0;
  virtual void advance_cursors(std::int64_t rows, const std::int32_t* slot, std::int32_t* held,
                               std::int64_t length) = 0;
  /// Whether its kernel is made for windows of tokens.
  virtual bool verifies() = 0;
  virtual void verify(const Mamba2Step& step, const Window& window) = 0;
  virtual void verify(const DeltaStep& step, const Window& window) = 0;
  virtual void verify(const Mamba2Step& step, const Snapshots& snapshots) = 0;
  virtual void verify(const DeltaStep& step, const Snapshots& snapshots) = 0;
  virtual void commit(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const Window& window,
                      const std::int32_t* accepted, std::int32_t* refused) = 0;
  virtual void commit(std::int64_t rows, std::int64_t slots, std::int32_t* slot, const Snapshots& snapshots,
                      const std::int32_t* accepted, std::int32_t* refused) = 0;
  virtual void roll_back(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const Window& window,
                         const std::int32_t* tokens, std::int32_t* refused) = 0;
  virtual void commit_convolution(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const Drafts& drafts,
                                  const ConvolutionWindow& window, const Activations& x,
                                  const std::int32_t* accepted) = 0;
  virtual void encode_rows(Storage storage, const float* data, std::int64_t rows, std::int64_t n, void* codes,
                           float* scales) = 0;
  virtual void decode_rows(Storage storage, const void* codes, const float* scales, std::int64_t rows, std::int64_t n,
                           float* data) = 0;
};

/// The machines of this program, and one of them: null where there is no device for it.
std::vector<std::string> machine_names();
Machine* machine(const std::string& name);

/// A test on each machine of the program.
class OnMachine : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!machine(GetParam())) GTEST_SKIP() << "no CUDA device";
  }
  Machine& on() const { return *machine(GetParam()); }
};

/// Memory of a machine and what the test thinks is in it.
template <class T>
class Array {
 public:
  explicit Array(Machine& machine) : machine_(machine) {}
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { machine_.release(there_); }

  /// Puts `values` there.
  T* write(std::vector<T> values) {
    if (values.size() > capacity_) {
      machine_.release(there_);
      there_ = nullptr;
      there_ = static_cast<T*>(machine_.allocate(values.size() * sizeof(T)));
      capacity_ = values.size();
    }
    here = std::move(values);
    if (!here.empty()) machine_.write(there_, here.data(), here.size() * sizeof(T));
    return there_;
  }
  void write() { machine_.write(there_, here.data(), here.size() * sizeof(T)); }
  /// Fetches what is there.
  std::vector<T>& read() {
    if (!here.empty()) machine_.read(here.data(), there_, here.size() * sizeof(T));
    return here;
  }
  T* there() const { return there_; }

  std::vector<T> here;

 private:
  Machine& machine_;
  T* there_ = nullptr;
  std::size_t capacity_ = 0;
};

}  // namespace replayssm::cuda::tests
