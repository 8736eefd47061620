#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "analysis/study.h"

namespace replayssm {

/// The folder OUTPUT.parts beside the file that a study will write: what an interrupted run leaves there, a later one
/// goes on from. It holds
///
///     identity   what run it is: one line for each name and value
///     state      what is done so far; replaced whole or not at all
///     lock       locked by the process that works on it
///
/// and what others put there meanwhile. Use it from one thread.
class StudyFolder : public StudyCheckpoint {
 public:
  /// What makes two runs the same run: names and values, each one line.
  using Identity = std::vector<std::pair<std::string, std::string>>;

  /// Makes the folder, or takes over the one that an earlier run has left. Throws Error naming it if it cannot be made,
  /// is at work in another process or is no such folder; if it holds a state and `resume` is false, or has another
  /// identity, of which the first name that differs is given with both values.
  StudyFolder(const std::string& output, const Identity& identity, bool resume);
  /// Removes the folder where no state is saved.
  ~StudyFolder() override;
  StudyFolder(const StudyFolder&) = delete;
  StudyFolder& operator=(const StudyFolder&) = delete;

  bool load(const std::function<void(Archive&)>& take) override;
  /// Saves unless that would take more than about a tenth of the time.
  void save(const std::function<void(Archive&)>& give) override;

  const std::filesystem::path& path() const { return folder_; }
  bool has_state() const;
  /// Seconds that this run and those before it took, as far as they were saved.
  double seconds() const;
  /// Removes the folder and all in it: the study is done.
  void remove();

 private:
  using Clock = std::chrono::steady_clock;

  std::filesystem::path folder_;
  int lock_ = -1;
  double earlier_seconds_ = 0;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point next_save_ = start_;
};

}  // namespace replayssm
