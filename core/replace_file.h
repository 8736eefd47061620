#pragma once

#include <filesystem>

namespace replayssm {

/// Puts the finished file `made` in the place of `path`, whole or not at all: its bytes are on the disk before the name
/// changes, and the name before this returns. Both lie on one file system. Throws Error naming `path` if the system
/// refuses; `made` is then removed and an earlier `path` is as it was.
void replace_file(const std::filesystem::path& made, const std::filesystem::path& path);

}  // namespace replayssm
