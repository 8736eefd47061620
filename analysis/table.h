#pragma once

// Private to analysis: tables for people.

#include <string>
#include <vector>

namespace replayssm {

/// A number as printf's `format` writes it; "-" for NaN, "inf", "-inf".
std::string number_text(const char* format, double value);

/// Bytes with a binary unit, three significant digits.
std::string bytes_text(double bytes);

/// Rows of as many cells each, in columns: the first and the last, names and notes, to the left, figures to the right.
std::string aligned(const std::vector<std::vector<std::string>>& rows);

}  // namespace replayssm
