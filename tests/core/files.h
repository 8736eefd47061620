#pragma once

// Files for tests, written byte by byte here, so that nothing of the reader under test takes part in them.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "core/error.h"

namespace replayssm {

namespace fs = std::filesystem;
using std::string;

/// A test with an empty folder of its own, removed at its end.
class FilesTest : public testing::Test {
 protected:
  void SetUp() override { fs::create_directories(folder_); }
  void TearDown() override { fs::remove_all(folder_); }

  fs::path write(const string& name, const string& bytes) const {
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
    return folder_ / name;
  }

  const fs::path folder_ = fs::path(testing::TempDir()) / ("replayssm_" + std::to_string(getpid()));
};

inline string little_endian(std::uint64_t value, int bytes = 8) {
  string out;
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i) & 255);
  return out;
}

/// A safetensors file: length, header, data.
inline string file_of(const string& header, const string& data = "") {
  return little_endian(header.size()) + header + data;
}

/// One tensor's entry in a safetensors header; shape is JSON, such as "[2,3]".
inline string entry(const string& name, const string& dtype, const string& shape, std::uint64_t begin,
                    std::uint64_t end) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":[" +
         std::to_string(begin) + "," + std::to_string(end) + "]}";
}

/// A JSON object of such entries.
inline string object(const std::vector<string>& entries) {
  string text = "{";
  for (const string& one : entries) text.append(text.size() > 1 ? "," : "").append(one);
  return text.append("}");
}

/// Expects the action to throw Error with a message of one line that holds every part.
template <class Action>
void expect_error(const Action& action, const std::vector<string>& parts) {
  try {
    action();
    ADD_FAILURE() << "no error; expected one that names " << testing::PrintToString(parts);
  } catch (const Error& e) {
    const string text = e.what();
    EXPECT_EQ(text.find('\n'), text.npos) << text;
    for (const string& part : parts) EXPECT_NE(text.find(part), text.npos) << "no \"" << part << "\" in: " << text;
  }
}

}  // namespace replayssm
