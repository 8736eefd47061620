// The one file that is compiled for plain x86-64 whatever the rest is compiled for: it has to run on the machine that
// cannot run the rest. It therefore uses no template and no inline function of any library, because the linker may
// take this file's copy of such a function for the whole program, or another file's copy for this one.
//
// The check is in the file of version(), which the program calls, so that a static library's linker cannot drop it.
#include "core/version.h"

#ifdef REPLAYSSM_NEEDS_X86_64_V3
#include <unistd.h>

namespace {

// 101 is the first priority open to programs: it runs before the constructors of other files, which may already hold
// the instructions in question. Nothing is set up at that point, so only system calls are used.
[[gnu::constructor(101)]] void refuse_lesser_processors() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("x86-64-v3")) return;
  static const char message[] =
      "replayssm: this build needs a processor with the x86-64-v3 instructions (AVX2, FMA, BMI2, F16C) and this one "
      "lacks some of them; configure with -DREPLAYSSM_PORTABLE=ON to build for any x86-64\n";
  // The exit status says the same if standard error is closed.
  [[maybe_unused]] const auto written = write(STDERR_FILENO, message, sizeof message - 1);
  _exit(2);
}

}  // namespace
#endif

namespace replayssm {

const char* version() { return REPLAYSSM_VERSION; }

const char* build_description() {
#ifdef __clang__
  return __VERSION__ ", " REPLAYSSM_BUILD_FLAGS;  // Clang's text starts with its name
#else
  return "GCC " __VERSION__ ", " REPLAYSSM_BUILD_FLAGS;
#endif
}

}  // namespace replayssm
