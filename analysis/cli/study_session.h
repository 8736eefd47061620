#pragma once

#include <functional>
#include <optional>
#include <string>

#include "analysis/cli/study_arguments.h"
#include "analysis/study_folder.h"

namespace replayssm::cli {

/// One study as a command runs it: Ctrl-C ends it, and where it writes a file it can be resumed.
class StudySession {
 public:
  /// `settings`: the options of the command that results depend on, beside those of StudyArguments. From here on
  /// interrupts are noted. Takes hold of the side folder of --output, or else of --json, and refuses files that could
  /// not be written at the end.
  StudySession(const StudyArguments& arguments, StudyInput& input, const StudyFolder::Identity& settings);

  /// The options that every study has: threads, progress, interruption, checkpoint.
  StudyOptions study_options();
  /// Calls `study`; if it is interrupted, says what is left of it and how to go on. Sets the seconds of the run's
  /// facts.
  void run(const std::function<void()>& study);
  /// Calls write(path) where there is an --output, which is replaced by what that has written, and puts the text into
  /// --json. Then nothing is left to resume.
  void finish(const std::function<void(const std::string& path)>& write, const std::function<std::string()>& json);

  /// Where parts of the output may wait; throws Error where there is no output.
  std::filesystem::path folder() const;

 private:
  const StudyArguments& arguments_;
  StudyInput& input_;
  std::optional<StudyFolder> folder_;
};

}  // namespace replayssm::cli
