#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/format.h"

namespace replayssm {

/// Rows of a head as a format stores them: codes and scales as encode_rows() lays them out.
struct StoredRows {
  std::vector<std::byte> codes, scales;
};

/// The codes of `rows` contiguous rows of n elements of one head that round_rows<Real>(format, ...) has rounded
/// already: decode_rows<Real>() of them gives the same bits back, a NaN for a NaN. Nothing is rounded here. (Encoding
/// the rows again is not enough: where code times scale was rounded, their largest element may ask for another scale.)
/// Real is float or double. Throws Error for `exact`, and for a row that is not one of the format's.
template <class Real>
StoredRows codes_of_rounded(const Format& format, const Real* data, std::int64_t rows, std::int64_t n);

}  // namespace replayssm
