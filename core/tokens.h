#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace replayssm {

/// Token ids, row-major [sequences, length], each in 0 .. 2^31 - 1. Neither dimension is 0 when read from a file.
struct Tokens {
  std::vector<std::int32_t> ids;
  std::int64_t sequences = 0;
  std::int64_t length = 0;
};

/// Reads token ids. The extension says how:
///   .safetensors  the tensor `input_ids`, I32 or I64, [length] or [sequences, length];
///   .npy          versions 1.0, 2.0 and 3.0, any integer type, little-endian, C order, [length] or [sequences,
///   length]; any other     text of decimal ids separated by white space, one sequence.
/// Nothing is rounded or clamped. Throws Error that names the file and, where there is one, the position and the value:
/// an id that is negative, above 2^31 - 1 or not a number; a file without ids, of another type or order, cut or too
/// long.
Tokens read_tokens(const std::filesystem::path& path);

}  // namespace replayssm
