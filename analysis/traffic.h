#pragma once

#include <cstdint>
#include <span>

#include "core/model.h"
#include "core/policy.h"

namespace replayssm {

/// Bytes that one step moves between memory and processor for one layer of one sequence, each of them once.
struct StepBytes {
  double state_read = 0;   ///< codes of the checkpoint, the anchor or the read copy
  double state_write = 0;  ///< codes of the checkpoint, or of anchor and read copy
  double scales = 0;       ///< of the states that are read and written
  double ring_read = 0;    ///< the live records
  double ring_append = 0;  ///< the token's record
  double residuals = 0;    ///< codes and scales of what error feedback keeps, read and written by a flush

  double total() const { return state_read + state_write + scales + ring_read + ring_append + residuals; }
  StepBytes& operator+=(const StepBytes& other);
};

/// What one layer stores and moves under a policy, whose `layers` are not looked at. An eager state is a replay of
/// length 1. The only place that says what a record holds and which steps read what of it:
///
///     record                                  appended         read by outputs    read by a flush
///     Mamba-2                                 x, B, dt         x, B, dt           x, B, dt
///     delta rule, loop=open                   u, k, g          u, k, g            u, k, g
///     delta rule, loop=closed                 v, u, k, g, beta u, k, g            v, k, g, beta
///
/// A flush of a closed loop works from the raw record; the u that outputs run on lies beside it. B and k are shared by
/// the heads of a group. Activations of an exact ring are counted as bf16, its gates as fp32; an exact state as fp64.
class LayerTraffic {
 public:
  LayerTraffic(const RecurrenceShape& shape, const Policy& policy);

  /// Bytes of state, residuals and ring of one sequence.
  double stored() const;
  /// A step that meets `held` records and appends one, 0 <= held < L - 1.
  StepBytes output(std::int64_t held) const;
  /// A step that meets L - 1 records and rewrites the state.
  StepBytes flush() const;
  /// The mean over the L steps from one flush to the next.
  StepBytes mean() const;

  /// A speculative step that verifies `window` tokens behind `held` records. It reads the checkpoint or the read copy
  /// and the records once and appends all of the window, rejected ones too. Where it flushes, it reads the anchor in
  /// the place of that, folds the records into it and stores anchor and copy; its outputs run on what it has just
  /// stored. Of length 1, the same as snapshots().
  StepBytes verify(std::int64_t held, std::int64_t window, bool flushes) const;
  /// The same of an engine that keeps a snapshot of the state, in the format of the state or anchor, behind each token
  /// of the window to go back to: it reads one and writes `window` of them.
  StepBytes snapshots(std::int64_t window) const;

 private:
  std::int64_t length_;
  bool split_;
  struct Stored {
    double codes = 0, scales = 0, residual = 0;
  };
  Stored anchor_, copy_;
  struct {
    double appended, output, flush;
  } record_;  // bytes of one record
};

/// Bytes of the activations that one step of one layer and sequence reads and writes, `bytes` each: x, B, C, dt and y;
/// q, k, v, gate, beta and y.
double activation_bytes(const RecurrenceShape& shape, double bytes = 2);

/// What a policy stores and moves for the recurrent state of one sequence, all SSM layers together, from the schedule
/// alone, as LayerTraffic counts it; projections and outputs are not counted.
struct StateCost {
  double bytes_stored_per_sequence = 0;
  double bytes_moved_per_token = 0;
  std::int64_t flushes = 0;          ///< checkpoint writes of a layer in one sequence
  std::int64_t rounded_reads = 0;    ///< steps of a layer in one sequence that read a state that was rounded
  std::int64_t read_copy_reads = 0;  ///< of these, from the read copy of a split state
  std::int64_t ring_reads = 0;       ///< records read from the ring of a layer in one sequence
};

/// Cost of `tokens` steps from the zero state.
StateCost state_cost(std::span<const LayerInfo> layers, const Policy& policy, std::int64_t tokens);

}  // namespace replayssm
