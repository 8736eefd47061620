#pragma once

// What decode() asks of a step before anything is launched; private to cuda/.

#include "cuda/decode.h"

namespace replayssm::cuda {

/// Throws Error that names the field for a shape, type, pointer, stride or combination that cannot be served.
void check(const Mamba2Step& step);
void check(const DeltaStep& step);

/// The same for advance_cursors() and for the two functions of convert.h.
void check_cursors(std::int64_t rows, const std::int32_t* slot, const std::int32_t* held, std::int64_t length);
void check_rows(Storage storage, const float* data, std::int64_t rows, std::int64_t n, const void* codes,
                const float* scales);

}  // namespace replayssm::cuda
