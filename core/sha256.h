#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace replayssm {

/// SHA-256 of a stream of bytes, fed in pieces of any size. Source: FIPS 180-4, sections 5 and 6.2.
class Sha256 {
 public:
  /// Appends `bytes` (any number, none included) to the message.
  void update(std::span<const std::byte> bytes);

  /// The digest of everything appended so far, as 64 lower-case hexadecimal digits. The message may go on afterwards.
  std::string hex() const;

 private:
  void compress(const std::byte* block);

  std::array<std::uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::byte, 64> block_{};
  std::uint64_t length_ = 0;  // bytes so far; the last length_ % 64 of them wait in block_
};

/// The SHA-256 of one message, as 64 lower-case hexadecimal digits.
std::string sha256_hex(std::span<const std::byte> message);

}  // namespace replayssm
