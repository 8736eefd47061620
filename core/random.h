#pragma once

#include <cstdint>

#include "core/element.h"

namespace replayssm {

struct Words4 {
  std::uint32_t word[4];
};

/// Philox4x32-10: four random words from a counter and a key, a bijection of the counter for every key.
/// Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
REPLAYSSM_HOST_DEVICE constexpr Words4 philox4x32_10(Words4 counter, std::uint64_t key) {
  auto low_key = static_cast<std::uint32_t>(key), high_key = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t even = std::uint64_t{0xD2511F53} * counter.word[0];
    const std::uint64_t odd = std::uint64_t{0xCD9E8D57} * counter.word[2];
    counter = {{static_cast<std::uint32_t>(odd >> 32) ^ counter.word[1] ^ low_key, static_cast<std::uint32_t>(odd),
                static_cast<std::uint32_t>(even >> 32) ^ counter.word[3] ^ high_key, static_cast<std::uint32_t>(even)}};
    low_key += 0x9E3779B9;
    high_key += 0xBB67AE85;
  }
  return counter;
}

/// Where a state lies in a run: what makes the draws of stochastic rounding its own.
struct StatePlace {
  std::uint64_t seed = 0;
  std::uint32_t slot = 0;   ///< the sequence
  std::uint32_t layer = 0;  ///< of the model, below 65536
};

/// The random words of one store of one head: of element i, word i % 4 of Philox with the seed as the key and the
/// counter words i / 4, token, slot, layer * 65536 + head. The same place and token give the same word, on whatever
/// thread or device; what shares a store (anchor and read copy, the fields of a record) shares its words.
struct Draw {
  StatePlace place = {};
  std::uint32_t token = 0;  ///< since the zero state
  std::uint32_t head = 0;   ///< below 65536
  std::int64_t first = 0;   ///< index in the head of the first element that is stored

  /// The four words of elements 4 quarter .. 4 quarter + 3.
  REPLAYSSM_HOST_DEVICE constexpr Words4 words(std::int64_t quarter) const {
    return philox4x32_10({{static_cast<std::uint32_t>(quarter), token, place.slot, place.layer * 65536 + head}},
                         place.seed);
  }
};

}  // namespace replayssm
