#pragma once

// Speed of the decode kernels. Plain data and two functions; no CUDA header is needed to call them.

#include <cstdint>
#include <string>

#include "core/policy.h"
#include "core/recurrence.h"
#include "cuda/decode.h"

namespace replayssm::cuda {

/// What the memory of the device does at its best.
struct Ceilings {
  std::string device;
  double read = 0;    ///< bytes/s of a kernel that only reads
  double update = 0;  ///< bytes/s of one that adds in place, reads and writes both counted
};

/// Reads, then updates, several GiB in 16-byte accesses, in a few launch configurations; the best median of each.
/// Throws Error where there is no device or not enough memory on it.
Ceilings measure_ceilings();

/// One decode step to measure: `rows` sequences through one layer.
struct BenchCase {
  RecurrenceShape shape;
  /// Formats, L and loop. The ring's formats have to be named: `ring=bf16`. A split state of the delta rule with
  /// loop=closed is what DeltaStep calls a closed loop.
  Policy policy;
  std::int64_t rows = 1;
  Scalar activations = Scalar::bf16;  ///< of all inputs and of y
  Kernel kernel = Kernel::automatic;
};

/// Largest relative L2 differences from State<double> over a sample of rows and heads, beside what is allowed.
struct Accuracy {
  double y = 0, y_bound = 0;              ///< of one token and row, over the heads of the sample, written in fp32
  double y_typed = 0, y_typed_bound = 0;  ///< the same, written in the type of the activations
  double state = 0, state_bound = 0;      ///< of the stored states, read copies included
  bool passed() const {                   // a NaN does not pass
    return y <= y_bound && y_typed <= y_typed_bound && state <= state_bound;
  }
};

/// Seconds of one step of one layer, over the replays of a graph.
struct BenchTime {
  double median = 0, least = 0, largest = 0;
  std::int64_t replays = 0;
};

struct BenchResult {
  Accuracy accuracy;
  BenchTime step;   ///< row r holds (r + t) mod L records at token t; not measured where the accuracy did not pass
  BenchTime flush;  ///< every row flushes at every step; the same as `step` for L = 1
  std::int64_t layers = 0;  ///< sets of states that the launches go round, so that none is found in the cache
  std::int64_t tokens = 0;  ///< steps of each layer in one replay
};

/// Throws Error for a case whose policy the kernels do not know. Needs no device.
void check_case(const BenchCase& bench_case);

/// Checks the kernels on the very buffers that are then timed, and times them if they are right.
///
/// Starts from zero states and runs at least 4 L tokens (row r joins so that it ends with r mod L records); outputs and
/// stored states of the first, the middle and the last row and head are compared with State<double>. Allowed are twice
/// the difference of State<float>, since sums may run in another order, and one rounding of every format that a value
/// passed through, since a value close to a midpoint may be rounded to the other side. All but the last L tokens write
/// y in fp32, so that the rounding of y does not hide what else is wrong.
///
/// Then replays a CUDA graph of a multiple of L tokens: each token is one decode() a layer and one advance_cursors(),
/// which is counted as part of it. There are enough layers, at least two, to make their states four times the second
/// level cache. The time is that of a replay over tokens times layers, nothing subtracted. So for the step on which
/// every row flushes, but there the cursors stand still.
///
/// Throws Error, naming what cannot be served, for a case that check_case() or decode() refuses, for one that does not
/// fit into the memory of the device, and where CUDA reports an error.
BenchResult bench(const BenchCase& bench_case);

}  // namespace replayssm::cuda
