#pragma once

// A layer whose tokens are verified in windows: rings that begin anywhere, and the cursors of its slots.

#include "tests/cuda/layer.h"

namespace replayssm::cuda::tests {

class Windows : public Layer {
  Machine& on_;

 public:
  /// As a Layer; `setup` has a window. Origins are random, nothing is held; every row has T tokens.
  explicit Windows(Machine& machine, const Case& the_setup, unsigned seed = 1)
      : Layer(machine, the_setup, seed), on_(machine) {
    begin();
  }
  Windows(Machine& machine, const Case& the_setup, const Parameters& the_parameters, unsigned seed = 1)
      : Layer(machine, the_setup, the_parameters, seed), on_(machine) {
    begin();
  }

  /// verify() of rows with `counts` tokens; fetches all memory. Returns y [tokens, heads head_dim], NaN where nobody
  /// wrote.
  std::vector<float> verify(const TokenInputs& inputs, std::vector<std::int32_t> counts);
  std::vector<float> verify_snapshots(const TokenInputs& inputs, const Snapshots& snapshots);
  /// commit() and roll_back(), of as many tokens for each row; return how many rows were refused.
  int commit(std::vector<std::int32_t> accepted);
  int roll_back(std::vector<std::int32_t> tokens);

  /// The entry of the ring that record i of a slot lies in.
  std::int64_t entry(std::int64_t at, std::int64_t i) const {
    return (origin.here[static_cast<std::size_t>(at)] + i) % capacity;
  }
  std::int32_t held_by(std::int64_t at) const { return cursor.here[static_cast<std::size_t>(at)]; }

  Window window;  ///< what verify() and commit() are told
  Array<std::int32_t> count{on_}, origin{on_}, cursor{on_}, accepted{on_}, refused{on_};

 private:
  void begin();
  template <class Plan>
  std::vector<float> run(const TokenInputs& inputs, const Plan& plan);
};

/// A test of windows on each machine that has a kernel for them.
class OnVerifier : public OnMachine {
 protected:
  void SetUp() override {
    OnMachine::SetUp();
    if (!IsSkipped() && !on().verifies()) GTEST_SKIP() << "no kernel for windows";
  }
};

}  // namespace replayssm::cuda::tests
