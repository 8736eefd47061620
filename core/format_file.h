#pragma once

#include <string>
#include <vector>

#include "core/format.h"

namespace replayssm {

/// Whether the library was built with a reader of TOML.
bool reads_format_files();

/// Defines the formats of a TOML file (define_format() of core/own_format.h), a table each, whose name is theirs:
///
///     [my8]
///     element = {e = 3, m = 4, specials = "nan"}  # or the name of one, as "e4m3"; keys as in custom(...)
///     scale = "group32"         # none (where it is not given), row, groupN, tileR, head or tensor
///     rule = "ceil"             # amax (where it is not given), floor or ceil
///     cap = 3.5                 # with amax: in the place of the largest value
///     asymmetric = true         # integers: with a zero point
///     rounding = "stochastic"   # nearest (where it is not given), toward_zero or stochastic
///     random_bits = 16          # with stochastic: 1 to 32, 32 where not given
///     hadamard = true
///
/// Returns them in the order of their names. All are read before the first is defined; one that is there already and is
/// the same is left alone. Throws Error, naming file, line and key, for what is no TOML, an unknown key, a value that
/// its key does not take, keys that do not go together, and a name that is built in or taken by another format; and
/// where the library cannot read TOML.
std::vector<Format> read_formats(const std::string& path);

}  // namespace replayssm
