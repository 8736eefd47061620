#pragma once

// Tensors of files in the safetensors format: 8 bytes of little-endian header length, a JSON header that may end in
// spaces, and the data, which the tensors cover without gap or overlap.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace replayssm {

/// How one element of a tensor is stored.
enum class Dtype {
  boolean,
  u8,
  i8,
  u16,
  i16,
  u32,
  i32,
  u64,
  i64,
  f16,
  bf16,
  f32,
  f64,
  c64,  // two f32
  f8_e4m3,
  f8_e5m2,
  f8_e8m0,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  f6_e2m3,  // four in three bytes
  f6_e3m2,
  f4,  // two in a byte
};

/// The name of a dtype in a safetensors header, such as "BF16".
const char* dtype_name(Dtype dtype);

/// `text` in single quotes for a message of one line: bytes that are not printable ASCII as \xNN, cut after 100 bytes.
std::string in_quotes(std::string_view text);

/// A tensor inside a mapped file. The bytes belong to the file and live as long as it does.
struct TensorView {
  std::string name;
  Dtype dtype = Dtype::f32;
  std::vector<std::int64_t> shape;  // logical elements, row-major; [] is a scalar; a packed F4 [2, 8] takes 8 bytes
  const std::byte* data = nullptr;  // of any alignment
  std::size_t bytes = 0;
  std::string file;

  /// The product of the shape: 1 for a scalar, 0 for an empty tensor.
  std::int64_t elements() const;

  /// Dtype and shape for messages: "BF16 [4096, 256]".
  std::string describe() const;
};

/// Writes elements begin, ..., begin + count - 1 (row-major) of a tensor to out[0], ..., out[count - 1] as numbers.
/// Real is float or double. Decodes BF16, F16, F32, F64, BOOL (0, else 1) and the integer types. Exact wherever Real
/// can hold the value; where it cannot (F64, I32, U32, I64, U64 to float; I64, U64 to double) rounded once, to nearest
/// even. Infinities and NaNs stay what they are. Throws Error for any other dtype and for a range outside the tensor.
template <class Real>
void widen(const TensorView& tensor, std::size_t begin, std::size_t count, Real* out);

/// A regular file mapped read-only; links are followed. Must not be shortened by others while it is mapped.
class MappedFile {
 public:
  /// Throws Error if `path` cannot be opened or is not a regular file.
  explicit MappedFile(const std::filesystem::path& path);

  std::span<const std::byte> bytes() const { return {data_.get(), data_.get_deleter().size}; }

 private:
  struct Unmap {
    std::size_t size;
    void operator()(const std::byte* data) const;
  };
  std::unique_ptr<const std::byte, Unmap> data_{nullptr, Unmap{0}};
};

/// Headers longer than this many bytes (1 GiB) are refused unless the caller sets another limit. A header is parsed
/// into memory of several times its size; the largest known is a few hundred MB.
inline constexpr std::size_t default_header_limit = std::size_t{1} << 30;

/// One safetensors file. Its header is checked whole when it is opened; its data are read when they are used.
class SafetensorsFile {
 public:
  /// Maps `path` and checks its header. Throws Error for anything that the format does not allow: a length field that
  /// does not fit the file, a header over `header_limit` bytes, malformed JSON, repeated keys, an unknown dtype, a
  /// shape that does not match its bytes, data that overlap, leave holes, or end before or after the file does.
  /// Unknown fields of a tensor's entry are ignored.
  explicit SafetensorsFile(const std::filesystem::path& path, std::size_t header_limit = default_header_limit);

  /// All tensors, in the order of their data in the file (empty ones that share an offset by name).
  const std::vector<TensorView>& tensors() const { return tensors_; }

  /// The tensor of that name, or null.
  const TensorView* find(std::string_view name) const;

  /// The tensor of that name. Throws Error that names the file, the tensor and the most similar names in the file.
  const TensorView& at(std::string_view name) const;

  /// The header's `__metadata__`; empty when there is none.
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  /// The whole file.
  std::span<const std::byte> bytes() const { return file_.bytes(); }

 private:
  MappedFile file_;
  std::string path_;
  std::vector<TensorView> tensors_;
  std::map<std::string, std::size_t, std::less<>> index_;  // name -> position in tensors_
  std::map<std::string, std::string> metadata_;
};

/// The weights of a Hugging Face folder, in one file or in shards.
class Weights {
 public:
  /// Opens model.safetensors; where there is none, the shards that model.safetensors.index.json names. If both exist,
  /// the single file is used and a notice says so. Other safetensors files are not read. Throws Error for a folder
  /// without either, an index that is not `{"weight_map": {tensor: file name, ...}}` or names a file outside the
  /// folder, a missing shard, a tensor that its shard does not hold, and whatever SafetensorsFile refuses.
  static Weights open(const std::filesystem::path& folder, std::size_t header_limit = default_header_limit);

  bool has(std::string_view name) const { return tensors_.contains(name); }

  /// The tensor of that name. Throws Error that names the folder, the tensor and the most similar names there.
  const TensorView& at(std::string_view name) const;

  /// The names of all tensors, sorted.
  std::vector<std::string> names() const;

  /// One line for everything in the folder that looks like weights and was left out: files beside the shards that the
  /// index does not name, tensors of a shard that it does not name, shards and index beside a single file.
  const std::vector<std::string>& notices() const { return notices_; }

  /// SHA-256 of the files in use, one after the other in the byte order of their names, as hexadecimal digits: for a
  /// single file, what `sha256sum` prints. Reads every byte of them.
  std::string sha256() const;

 private:
  const SafetensorsFile& open_file(const std::string& name, std::size_t header_limit);
  void open_shards(std::size_t header_limit);
  void leave_out(const std::string& name, const std::string& reason);

  std::filesystem::path folder_;
  std::map<std::string, SafetensorsFile> files_;                   // by file name; nodes never move
  std::map<std::string, const TensorView*, std::less<>> tensors_;  // into files_
  std::vector<std::string> notices_;
};

}  // namespace replayssm
