#pragma once

// Private to core and analysis.

#include <cstdint>
#include <functional>

namespace replayssm {

/// body(i) for i in [0, n) on up to `threads` threads, the caller's among them. How the work is cut into bodies must
/// not depend on `threads`: then neither do the results. Bodies may call parallel_for themselves: threads that have
/// run out of work help with what others have started. Threads without work sleep. The first exception that a body
/// throws is rethrown when all are done.
void parallel_for(std::int64_t n, int threads, const std::function<void(std::int64_t)>& body);

}  // namespace replayssm
