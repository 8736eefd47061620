#include <replayssm/core/format.h>
#include <replayssm/core/version.h>
#include <replayssm/cuda/decode.h>

#include <cstdio>
#include <cstring>

int main() {
  if (std::strcmp(replayssm::version(), EXPECTED_VERSION) != 0) {
    std::printf("version: expected %s, found %s\n", EXPECTED_VERSION, replayssm::version());
    return 1;
  }
  // bf16 keeps 8 significant bits: 1 + 2^-9 lies below the midpoint of 1 and 1 + 2^-7, 1 + 3 * 2^-9 above it.
  double row[] = {1 + 0x1p-9, 1 + 0x3p-9};
  replayssm::round_rows(replayssm::parse_format("bf16"), row, 1, 2);
  if (row[0] != 1 || row[1] != 1 + 0x1p-7) {
    std::printf("bf16: expected 1 and 1.0078125, found %.17g and %.17g\n", row[0], row[1]);
    return 1;
  }
  // Nothing is said of this machine; it links, with kernels or without.
  std::printf("CUDA kernels: %s\n", replayssm::cuda::available() ? "available" : "not available");
  return 0;
}
