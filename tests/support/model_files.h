#pragma once

// Model folders for tests: a tiny golden one is read, changed and written again, without the readers under test.

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/core/files.h"

namespace replayssm {

struct StoredTensor {
  string dtype;
  std::vector<std::int64_t> shape;
  string bytes;
};
using StoredTensors = std::map<string, StoredTensor>;

inline string read_text(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in) << path;
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

inline void write_bytes(const fs::path& path, const string& bytes) {
  std::ofstream out(path, std::ios::binary);
  out << bytes;
  EXPECT_TRUE(out) << path;
}

inline StoredTensors read_tensors(const fs::path& path) {
  const string file = read_text(path);
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof length);
  const auto header = nlohmann::json::parse(file.substr(8, length));
  StoredTensors tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const std::size_t begin = entry["data_offsets"][0], end = entry["data_offsets"][1];
    tensors[name] = {entry["dtype"], entry["shape"], file.substr(8 + length + begin, end - begin)};
  }
  return tensors;
}

inline void write_tensors(const fs::path& path, const StoredTensors& tensors) {
  string data;
  nlohmann::json header;
  for (const auto& [name, tensor] : tensors) {
    header[name] = {{"dtype", tensor.dtype},
                    {"shape", tensor.shape},
                    {"data_offsets", {data.size(), data.size() + tensor.bytes.size()}}};
    data += tensor.bytes;
  }
  write_bytes(path, file_of(header.dump(), data));
}

/// The elements of a tensor that is stored as T.
template <class T>
std::vector<T> values_of(const StoredTensor& tensor) {
  std::vector<T> out(tensor.bytes.size() / sizeof(T));
  std::memcpy(out.data(), tensor.bytes.data(), tensor.bytes.size());
  return out;
}

template <class T>
StoredTensor stored(const string& dtype, std::vector<std::int64_t> shape, const std::vector<T>& values) {
  return {dtype, std::move(shape), string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T))};
}

/// An F32 tensor with change(i) applied to element i.
template <class Change>
StoredTensor changed(const StoredTensor& tensor, Change&& change) {
  std::vector<float> values = values_of<float>(tensor);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = change(i, values[i]);
  return stored("F32", tensor.shape, values);
}

/// The upper halves of an F32 tensor's elements, as BF16.
inline StoredTensor cut_to_bf16(const StoredTensor& tensor) {
  string bytes;
  for (std::size_t i = 0; i < tensor.bytes.size(); i += 4) bytes += tensor.bytes.substr(i + 2, 2);
  return {"BF16", tensor.shape, bytes};
}

/// The same values as F32: what is left of them after cut_to_bf16().
inline StoredTensor with_bf16_values(const StoredTensor& tensor) {
  string bytes = tensor.bytes;
  for (std::size_t i = 0; i < bytes.size(); i += 4) bytes[i] = bytes[i + 1] = 0;
  return {"F32", tensor.shape, bytes};
}

inline fs::path golden_folder(const string& name) { return fs::path(REPLAYSSM_TEST_DATA) / "models" / name; }
inline fs::path golden_file(const string& name) { return golden_folder(name) / "golden.safetensors"; }

/// A golden model that a test changes and writes somewhere else.
struct ModelFiles {
  nlohmann::json config;
  StoredTensors tensors;

  explicit ModelFiles(const string& golden)
      : config(nlohmann::json::parse(read_text(golden_folder(golden) / "config.json"))),
        tensors(read_tensors(golden_folder(golden) / "model.safetensors")) {}

  fs::path write(const fs::path& folder) const {
    fs::create_directories(folder);
    write_bytes(folder / "config.json", config.dump());
    write_tensors(folder / "model.safetensors", tensors);
    return folder;
  }
};

}  // namespace replayssm
