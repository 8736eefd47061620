#include "analysis/cli/interrupt.h"

#include <signal.h>

#include <atomic>

namespace replayssm::cli {
namespace {

std::atomic<bool> noted = false;
static_assert(std::atomic<bool>::is_always_lock_free);  // a signal handler may store nothing else

void note(int) { noted = true; }

}  // namespace

void note_interrupts() {
  struct sigaction action {};
  sigaction(SIGINT, nullptr, &action);
  if (action.sa_handler == SIG_IGN) return;
  action.sa_handler = note;
  action.sa_flags = SA_RESTART | static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
}

bool interrupted() { return noted; }

}  // namespace replayssm::cli
