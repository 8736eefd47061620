#pragma once

// The built program as a subprocess.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/support/model_files.h"

namespace replayssm {

/// A program that was started, its output going to files in a folder of the test.
class Process {
 public:
  Process(const fs::path& folder, const std::vector<string>& command)
      : out_(folder / "stdout.txt"), err_(folder / "stderr.txt") {
    std::vector<char*> arguments;
    for (const string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    pid_ = fork();
    if (pid_ != 0) return;
    signal(SIGINT, SIG_DFL);  // ignored where the tests run in the background of a script
    redirect(out_, STDOUT_FILENO);
    redirect(err_, STDERR_FILENO);
    execv(arguments[0], arguments.data());
    _exit(127);
  }

  void send(int signal) const { kill(pid_, signal); }

  /// Waits for the end. The exit code, or minus the signal that ended it.
  int wait() const {
    int status = 0;
    EXPECT_EQ(waitpid(pid_, &status, 0), pid_);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

  string out() const { return read_text(out_); }
  string err() const { return read_text(err_); }

 private:
  static void redirect(const fs::path& file, int descriptor) {
    dup2(open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), descriptor);
  }

  fs::path out_, err_;
  pid_t pid_ = -1;
};

struct Outcome {
  int code;
  string out, err;
};

/// A test that runs the program.
class ProgramTest : public FilesTest {
 protected:
  Process start(std::vector<string> arguments) const {
    arguments.insert(arguments.begin(), REPLAYSSM_PROGRAM);
    return Process(folder_, arguments);
  }
  Outcome run(const std::vector<string>& arguments) const {
    const Process process = start(arguments);
    const int code = process.wait();
    return {code, process.out(), process.err()};
  }
  /// The JSON of a command that is done without a word on standard error.
  nlohmann::json json(std::vector<string> arguments) const {
    arguments.insert(arguments.end(), {"--json", "-"});
    const Outcome o = run(arguments);
    EXPECT_EQ(o.code, 0) << o.err;
    EXPECT_EQ(o.err, "");
    return nlohmann::json::parse(o.out);  // all of it: nothing else may be on standard output
  }
  /// Expects exit code 2, nothing on standard output and one line on standard error that holds every part.
  void expect_refused(const std::vector<string>& arguments, const std::vector<string>& parts) const {
    SCOPED_TRACE(testing::PrintToString(arguments));
    const Outcome o = run(arguments);
    EXPECT_EQ(o.code, 2);
    EXPECT_EQ(o.out, "");
    EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 1) << o.err;
    EXPECT_TRUE(o.err.starts_with("replayssm: ") && o.err.ends_with("\n")) << o.err;
    for (const string& part : parts) EXPECT_NE(o.err.find(part), string::npos) << "no \"" << part << "\" in: " << o.err;
  }
  string path(const string& name) const { return (folder_ / name).string(); }

  const string mamba2_ = golden_folder("mamba2").string(), mamba2_golden_ = golden_file("mamba2").string();
  const string hybrid_ = golden_folder("qwen3_5").string(), hybrid_golden_ = golden_file("qwen3_5").string();
};

}  // namespace replayssm
