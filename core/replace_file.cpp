#include "core/replace_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "core/error.h"

namespace replayssm {
namespace {

/// Waits until a file's bytes, or a folder's names, are on the disk.
bool bring_to_disk(const std::filesystem::path& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  const bool done = fsync(file) == 0 || errno == EINVAL;  // a file system that has no disk to wait for
  const int reason = errno;
  close(file);
  errno = reason;
  return done;
}

}  // namespace

void replace_file(const std::filesystem::path& made, const std::filesystem::path& path) {
  const auto folder = path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
  if (bring_to_disk(made) && std::rename(made.c_str(), path.c_str()) == 0 && bring_to_disk(folder)) return;
  const std::string reason = std::strerror(errno);
  std::remove(made.c_str());
  fail(path.string(), ": cannot be written: ", reason);
}

}  // namespace replayssm
