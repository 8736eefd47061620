#include "analysis/study_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "analysis/archive.h"
#include "core/error.h"
#include "core/replace_file.h"

namespace replayssm {
namespace {

namespace fs = std::filesystem;

constexpr const char* first_line = "replayssm: what an interrupted study has done";

std::vector<std::string> lines_of(const fs::path& file) {
  std::ifstream in(file);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

/// Throws unless the folder is new or one that a StudyFolder has made, however early that was killed.
void check_ours(const fs::path& folder) {
  const std::vector<std::string> lines = lines_of(folder / "identity");
  bool ours = lines.empty() || lines.front() == first_line;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const fs::path name = entry.path().filename();
    ours = ours && (!lines.empty() || name == "lock" || name == "identity.part");
  }
  if (!ours) fail(folder.string(), ": expected no such folder or that of an interrupted study, found another");
}

void check_identity(const fs::path& folder, const StudyFolder::Identity& identity) {
  const std::vector<std::string> lines = lines_of(folder / "identity");
  for (std::size_t i = 0; i < identity.size(); ++i) {
    const auto& [name, value] = identity[i];
    const std::string found = i + 1 < lines.size() ? lines[i + 1] : "";
    if (found == name + ": " + value) continue;
    const bool same_name = found.starts_with(name + ": ");
    fail(folder.string(), ": cannot resume: this run has ", name, " '", value, "', the interrupted one ",
         same_name ? "had '" + found.substr(name.size() + 2) + "'" : "had no such thing");
  }
  if (lines.size() != identity.size() + 1)
    fail(folder.string(), ": cannot resume: ", lines.back(), " is not in this run");
}

void write_identity(const fs::path& folder, const StudyFolder::Identity& identity) {
  const fs::path made = folder / "identity.part";
  std::ofstream out(made);
  out << first_line << "\n";
  for (const auto& [name, value] : identity) out << name << ": " << value << "\n";
  out.close();
  if (!out) fail(made.string(), ": cannot be written");
  replace_file(made, folder / "identity");
}

}  // namespace

StudyFolder::StudyFolder(const std::string& output, const Identity& identity, bool resume)
    : folder_(output + ".parts") {
  std::error_code error;
  fs::create_directory(folder_, error);
  if (error) fail(folder_.string(), ": cannot be made: ", error.message());
  check_ours(folder_);
  lock_ = open((folder_ / "lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (lock_ < 0) fail(folder_.string(), ": cannot be written: ", std::strerror(errno));
  if (flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    close(lock_);
    fail(folder_.string(), ": another process is at work on it");
  }
  try {
    if (has_state()) {
      if (!resume) fail(folder_.string(), ": found an interrupted study; resume it (--resume) or remove the folder");
      check_identity(folder_, identity);
    } else {
      write_identity(folder_, identity);
    }
  } catch (...) {
    close(lock_);
    throw;
  }
}

StudyFolder::~StudyFolder() {
  if (lock_ < 0) return;
  has_state() ? static_cast<void>(close(lock_)) : remove();
}

bool StudyFolder::has_state() const { return fs::exists(folder_ / "state"); }

double StudyFolder::seconds() const {
  return earlier_seconds_ + std::chrono::duration<double>(Clock::now() - start_).count();
}

bool StudyFolder::load(const std::function<void(Archive&)>& take) {
  if (!has_state()) return false;
  const std::string file = (folder_ / "state").string();
  std::ifstream in(file, std::ios::binary);
  Archive archive(in);
  try {
    archive(earlier_seconds_);
    take(archive);
  } catch (const std::exception& error) {  // a length that is none may ask for too much memory
    fail(file, ": ", error.what());
  }
  if (in.peek() != std::ifstream::traits_type::eof()) fail(file, ": holds more than a state");
  return true;
}

void StudyFolder::save(const std::function<void(Archive&)>& give) {
  const Clock::time_point start = Clock::now();
  if (start < next_save_) return;
  const fs::path made = folder_ / "state.part";
  try {
    std::ofstream out(made, std::ios::binary);
    Archive archive(out);
    double total = seconds();
    archive(total);
    give(archive);
    out.close();
    if (!out) fail("cannot be written");
  } catch (const Error& error) {
    fs::remove(made);
    fail((folder_ / "state").string(), ": ", error.what());
  }
  replace_file(made, folder_ / "state");
  const Clock::time_point end = Clock::now();
  next_save_ = end + 10 * (end - start);
}

void StudyFolder::remove() {
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
  close(std::exchange(lock_, -1));
}

}  // namespace replayssm
