#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/format.h"

namespace replayssm {

/// Stores and reads back, in place, `rows` contiguous rows of n elements of one head, all of a state at once. It may be
/// called from several threads, and must give the same values for the same rows and draw.
using RoundFunction = std::function<void(double* data, std::int64_t rows, std::int64_t n, const Draw& draw)>;

/// A function as a format. Format::own points to one, which lives as long as the program.
struct OwnFormat {
  std::string name;
  RoundFunction function;  ///< data <- Q(data)
};

/// Makes a function the format `name`, which policies may then name: `eager(state=name)`. It takes `hadamard` and
/// `ef=F` and no other modifier, and has no codes. An element counts as `bits` bits in memory, 1 to 32, whatever it
/// shares a scale with included. A state in float is widened for the function, and what that returns is rounded to
/// float once, to nearest; finite elements that become infinite or NaN are counted as overflows.
///
///     register_format("cut8", 8, [](double* x, std::int64_t rows, std::int64_t n, const Draw&) {
///       for (std::int64_t i = 0; i < rows * n; ++i) x[i] = std::trunc(x[i] * 16) / 16;
///     });
///     const Policy policy = parse_policy("eager(state=cut8)");
///
/// Throws Error for a name that is taken or is not made of letters, digits, '_' and '-' behind a letter, for bits out
/// of range and for no function.
Format register_format(std::string_view name, int bits, RoundFunction function);

/// Gives a format a name, which policies may then use and which text() prints; it takes rz, sr, hadamard and ef=F, as
/// far as the format does not have them, and no other modifier. Throws Error for a name as above, and for a format that
/// is exact, a function, has error feedback or a given name.
Format define_format(std::string_view name, const Format& format);

/// Throws Error for a name that no format may be given, taken ones aside.
void check_format_name(std::string_view name);

/// The format without its given name, whose text says what it is.
Format definition_of(Format format);

/// Names and definitions of the formats that were defined so far, oldest first.
std::vector<std::pair<std::string, std::string>> defined_formats();

/// The format registered or defined under a name; null where there is none.
const Format* find_own_format(std::string_view name);

}  // namespace replayssm
