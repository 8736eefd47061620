#pragma once

#include <cstdint>
#include <exception>

namespace replayssm {

/// body(i) for i in [0, n) on up to `threads` threads. How the work is cut into bodies must not depend on `threads`:
/// then neither do the results. The first exception that a body throws is rethrown when all are done.
template <class Body>
void parallel_for(std::int64_t n, int threads, Body&& body) {
  if (threads <= 1 || n <= 1) {
    for (std::int64_t i = 0; i < n; ++i) body(i);
    return;
  }
  std::exception_ptr failure;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (std::int64_t i = 0; i < n; ++i) {
    try {
      body(i);
    } catch (...) {
#pragma omp critical(replayssm_parallel_for)
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace replayssm
