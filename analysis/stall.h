#pragma once

#include <cstdint>
#include <vector>

#include "core/policy.h"
#include "core/state.h"

namespace replayssm {

/// How much of a head's state stands still in its stores though it should have moved.
///
/// In a store let v be what was stored before, x the state at hand and Q(x) what is stored now. A change x - v below
/// half a step of the format at v rounds back: Q(x) = v, and the error is all of the change, store after store with the
/// same sign. The law of growth takes the errors of successive stores as independent; where most of them are the
/// changes themselves it does not hold, and a state that only decays keeps its size for ever. The share is
///
///     sum of v^2 where Q(x) = v / sum of v^2        over elements and stores with x != v,
///
/// weighted as the squared error that a decay lost makes. If a state stands still in the share q of its stores, it
/// decays in 1 - q of them: from q = 1/2 on, its memory is more than twice as long as the model's. Such heads are
/// named.
///
/// The scale decides. An fp32 scale that follows the largest element moves with it, so that a row that only decays
/// keeps its codes and loses nothing: share 0. A power of two stays until the row has lost half of its size; meanwhile
/// a decay a per store with 1 - a below half a step over v - 2^-(m + 2) to 2^-(m + 1) for m bits of mantissa - is
/// rounded away. No scale at all is a power of two for good. Stochastic rounding and error feedback take a step as
/// often as changes add up to one: what stands still moves all the same, in the mean, and nothing is counted; nor with
/// scales of a tensor, which one head does not tell.
struct Standstill {
  double still = 0, all = 0;

  Standstill& operator+=(const Standstill& other);
  double share() const { return still > 0 ? still / all : 0; }
};

/// Runs the checkpoint or anchor of one head along its inputs, in binary64: exact steps from what was stored, one store
/// every L tokens. Rings are taken as exact and an open loop as a closed one; a read copy never becomes history.
class StallTrack {
 public:
  /// `shape` is that of one head.
  StallTrack(const RecurrenceShape& shape, const Policy& policy);

  /// Takes in tokens of the head's inputs; what stands still in their stores.
  Standstill advance(const HeadInputs<double>& inputs, std::int64_t tokens);

 private:
  Standstill store();

  Format format_;
  std::int64_t length_, since_store_ = 0;
  State<double> state_;
  std::vector<double> stored_;
};

}  // namespace replayssm
