#pragma once

// Private to cuda/: the state of one layer and one sequence on a device.

#include <cstddef>
#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include "cuda/backend.h"
#include "cuda/serving.h"

namespace replayssm::cuda {

/// Memory of a device.
class Memory {
 public:
  Memory() = default;
  Memory(std::shared_ptr<StepDevice> device, std::size_t bytes)
      : device_(std::move(device)), data_(device_->allocate(bytes)), bytes_(bytes) {}
  Memory(Memory&& other) noexcept { swap(other); }
  Memory& operator=(Memory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Memory() {
    if (data_) device_->release(data_);
  }
  std::size_t bytes() const { return bytes_; }
  std::byte* at(std::int64_t offset = 0) const { return static_cast<std::byte*>(data_) + offset; }

 private:
  void swap(Memory& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  std::shared_ptr<StepDevice> device_;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Raw inputs of consecutive tokens, [tokens, width] each without gaps, in the order of Mamba2Call (x, B, C, dt) or
/// DeltaCall (q, k, v, gate, beta), and what does not depend on the token.
struct SlotInputs {
  std::int64_t tokens = 0;
  std::vector<std::vector<double>> activations;
  std::vector<float> A_log, dt_bias;
  float dt_min = 0, dt_max = 0, beta_scale = 1;
};

/// One slot of a pool and a ring, and the steps that advance it.
class Slot {
 public:
  /// Zero state, empty ring. Throws what serve() throws.
  Slot(std::shared_ptr<StepDevice> device, const RecurrenceShape& shape, const Policy& policy, Scalar activations);

  const RecurrenceShape& shape() const { return shape_; }
  std::int64_t held() const { return held_; }
  std::int64_t steps() const { return steps_; }

  /// One step a token; y [tokens, heads head_dim], as it was stored.
  std::vector<double> advance(const SlotInputs& inputs);

  // [heads, head_dim, state_dim]: what is stored as the kernels read it, code times scale rounded to fp32,
  std::vector<double> checkpoint() const { return stored(step().state, serving_.state); }
  std::vector<double> read_copy() const { return serving_.read ? stored(step().read, *serving_.read) : checkpoint(); }
  /// and what a flush behind the last token would rebuild from it, in binary64.
  std::vector<double> effective() const;

 private:
  const Step& step() const {
    return std::visit([](const auto& s) -> const Step& { return s; }, step_);
  }
  std::vector<double> stored(const StatePool& pool, Storage storage) const;
  std::vector<double> records(const RingField& field, std::int64_t units, std::int64_t width) const;

  std::shared_ptr<StepDevice> device_;
  RecurrenceShape shape_;
  Serving serving_;
  Scalar activations_;
  std::variant<Mamba2Step, DeltaStep> step_;
  Memory memory_, workspace_, tokens_;
  std::int32_t* cursors_ = nullptr;  // 0, 1, ..., length - 1: a cursor for every number of records
  float *A_log_ = nullptr, *dt_bias_ = nullptr;
  std::vector<float> rates_;  // A_log of the last call
  std::int64_t held_ = 0, steps_ = 0;
};

}  // namespace replayssm::cuda
