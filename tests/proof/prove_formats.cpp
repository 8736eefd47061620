// The proof of the element conversions: every one of all 2^32 floats, rounded to nearest and toward zero to each
// element of up to 19 bits, against the nearest of the sorted code values; doubles at and beside every value and
// midpoint; and the oracle against rationals. Prints the rows of analysis/cli/format_proofs.inc; exits with 1 if
// anything differs.
//
//     build/tests/proof/prove_formats [ELEMENT]... > analysis/cli/format_proofs.inc

#include <atomic>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <mutex>
#include <thread>

#include "tests/proof/proof.h"

namespace {

using namespace replayssm;
using namespace replayssm::proof;

constexpr std::uint64_t kMagnitudes = std::uint64_t{1} << 31, kChunk = std::uint64_t{1} << 22;

/// body(i) for i in [0, n) on all threads of the machine, summed.
template <class Body>
Count Everywhere(std::uint64_t n, Body&& body) {
  std::atomic<std::uint64_t> next = 0;
  std::mutex mutex;
  Count all;
  const auto work = [&] {
    for (std::uint64_t i = next++; i < n; i = next++) {
      const Count one = body(i);
      const std::lock_guard lock(mutex);
      all += one;
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 1; i < std::max(1U, std::thread::hardware_concurrency()); ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  const auto start = std::chrono::steady_clock::now();
  char date[16];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&now));
  std::int64_t wrong = 0;
  std::printf(
      "// Printed by prove_formats, %s: element, rounding, floats, doubles and comparisons of the oracle with\n"
      "// rationals, and how many of all were wrong.\n",
      date);
  for (const Definition& d : Definitions()) {
    const bool wanted = argc == 1 || std::find(argv + 1, argv + argc, d.name) != argv + argc;
    if (d.name == "fp32" || !wanted) continue;  // fp32 is of floats the identity
    const Count oracle = OracleItself(d, 1);
    for (const bool toward_zero : {false, true}) {
      const Count floats = Everywhere(kMagnitudes / kChunk, [&](std::uint64_t i) {
        return Floats(d, toward_zero, i * kChunk, (i + 1) * kChunk, 1);
      });
      const Count doubles = Doubles(d, toward_zero, 1);
      const std::int64_t bad = oracle.wrong + floats.wrong + doubles.wrong;
      std::printf("{\"%s\", \"%s\", %lld, %lld, %lld, %lld, \"%s\"},\n", d.name.c_str(),
                  toward_zero ? "toward zero" : "nearest", static_cast<long long>(floats.compared),
                  static_cast<long long>(doubles.compared), static_cast<long long>(oracle.compared),
                  static_cast<long long>(bad), date);
      std::fflush(stdout);
      std::fprintf(stderr, "%-9s %-11s %lld wrong, %.0f s\n", d.name.c_str(), toward_zero ? "toward zero" : "nearest",
                   static_cast<long long>(bad),
                   std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
      wrong += bad;
    }
  }
  return wrong == 0 ? 0 : 1;
}
