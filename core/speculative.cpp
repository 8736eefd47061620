#include "core/speculative.h"

#include "core/error.h"

namespace replayssm {

template class SpeculativeState<float>;
template class SpeculativeState<double>;

}  // namespace replayssm
