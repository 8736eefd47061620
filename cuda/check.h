#pragma once

// What decode() and verify() ask of a step before anything is launched; private to cuda/.

#include "cuda/speculate.h"

namespace replayssm::cuda {

/// Throws Error that names the field for a shape, type, pointer, stride or combination that cannot be served.
void check(const Mamba2Step& step);
void check(const DeltaStep& step);
void check(const Mamba2Step& step, const Window& window);
void check(const DeltaStep& step, const Window& window);
void check(const Mamba2Step& step, const Snapshots& snapshots);
void check(const DeltaStep& step, const Snapshots& snapshots);

/// The same for commit(), roll_back(), whose numbers of tokens are `what`, and commit_convolution().
void check_commit(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const Window& window,
                  const char* what, const std::int32_t* tokens, const std::int32_t* refused);
void check_commit(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const Snapshots& snapshots,
                  const std::int32_t* accepted, const std::int32_t* refused);
void check_commit(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const Drafts& drafts,
                  const ConvolutionWindow& window, const Activations& x, const std::int32_t* accepted);

/// The same for advance_cursors() and for the two functions of convert.h.
void check_cursors(std::int64_t rows, const std::int32_t* slot, const std::int32_t* held, std::int64_t length);
void check_rows(Storage storage, const float* data, std::int64_t rows, std::int64_t n, const void* codes,
                const float* scales);

}  // namespace replayssm::cuda
