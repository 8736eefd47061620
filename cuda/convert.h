#pragma once

// Rows of states between fp32 and their stored form, on the GPU: to fill a pool and to read one back.

#include <cstdint>

#include "cuda/decode.h"

namespace replayssm::cuda {

/// Stores `rows` contiguous rows of n fp32 elements: the codes and scales that encode_rows() in core/format.h gives for
/// the format, bit for bit, each element rounded once to nearest even.
///
/// data [rows, n], codes [rows, n], scales [rows] where the storage has them, otherwise unused and may be null; device
/// memory, no overlap. Runs on the stream, without synchronisation. Throws Error for a null or misaligned pointer, a
/// size out of range, and if the launch fails.
void encode_rows(Storage storage, const float* data, std::int64_t rows, std::int64_t n, void* codes, float* scales,
                 CUstream_st* stream);

/// Reads back what encode_rows() or a decode step stored: code times scale, rounded once to fp32. A row whose scale is
/// NaN is NaN.
void decode_rows(Storage storage, const void* codes, const float* scales, std::int64_t rows, std::int64_t n,
                 float* data, CUstream_st* stream);

}  // namespace replayssm::cuda
