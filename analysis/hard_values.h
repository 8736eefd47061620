#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace replayssm {

/// The state of one head as conversions are tried on it: rows [rows, n], n contiguous.
struct TrialState {
  std::string name;
  std::int64_t layer = 0, head = 0, rows = 0, n = 0;
  std::vector<double> values;
};

/// Values at which conversions go wrong, always the same ones, whatever the format: heads of 16 rows of 64 elements.
///
///   ties      midpoints between neighbours with 1, 2, 3, 7 and 10 bits of mantissa and between whole numbers, each
///   with
///             the two doubles that lie 2^-45 of it to either side, which a detour through float makes ties too. The
///             largest element of every row, or one of it, is the largest value of a format, so that its scale is 1
///   scales    rows that differ in size from their neighbours, the largest element on, just below and just above the
///             largest value of a format times a power of two, and at powers of two
///   range     every power of two of a double, odd multiples of them, and the edges of the formats' ranges
///   specials  NaN, infinities and zeros of both signs among finite values; rows of zeros, and of values of 1e-40
std::vector<TrialState> hard_values();

}  // namespace replayssm
