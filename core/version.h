#pragma once

namespace replayssm {

/// The version of the library, as "major.minor.patch".
const char* version();

/// How the library was built, in one line: compiler and its version, build type, flags, instruction set.
const char* build_description();

/// The revision of the source tree, as git describes it, "-dirty" where it had changes; "unknown" without git.
const char* git_revision();

}  // namespace replayssm
