#pragma once

// The HDF5 file of a run: whole arrays, arrays that grow while the run goes on, and low-precision data as bit patterns.
// HDF5 itself is not thread-safe: use all writers and readers of a process from one thread at a time.

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <ranges>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

namespace replayssm {

/// What a trace stores: exactly these types, little-endian. HDF5 is never asked to convert between them.
enum class TraceType { float64, float32, int64, int32, uint32, uint16, uint8 };

template <class T>
concept TraceScalar = std::same_as<T, double> || std::same_as<T, float> || std::same_as<T, std::int64_t> ||
    std::same_as<T, std::int32_t> || std::same_as<T, std::uint32_t> || std::same_as<T, std::uint16_t> ||
    std::same_as<T, std::uint8_t>;

template <TraceScalar T>
constexpr TraceType trace_type() {
  if constexpr (std::same_as<T, double>) return TraceType::float64;
  if constexpr (std::same_as<T, float>) return TraceType::float32;
  if constexpr (std::same_as<T, std::int64_t>) return TraceType::int64;
  if constexpr (std::same_as<T, std::int32_t>) return TraceType::int32;
  if constexpr (std::same_as<T, std::uint32_t>) return TraceType::uint32;
  if constexpr (std::same_as<T, std::uint16_t>) return TraceType::uint16;
  if constexpr (std::same_as<T, std::uint8_t>) return TraceType::uint8;
}

/// A view of contiguous values of one stored type; it lives no longer than what it views.
struct TraceValues {
  const void* data;
  std::int64_t size;
  TraceType type;

  template <std::ranges::contiguous_range R>
  requires std::ranges::sized_range<R> && TraceScalar<std::ranges::range_value_t<R>> TraceValues(
      const R& values)  // NOLINT: vectors, arrays and spans are meant to be passed as they are
      : data(std::ranges::data(values)),
        size(static_cast<std::int64_t>(std::ranges::size(values))),
        type(trace_type<std::ranges::range_value_t<R>>()) {}
};

using TraceShape = std::vector<std::int64_t>;                            ///< [] is a scalar; a dimension may be 0
using TraceAttribute = std::variant<std::string, double, std::int64_t>;  ///< text is UTF-8 without NUL

/// Attributes `units` and `description` of a dataset; empty ones are not written.
struct TraceInfo {
  std::string units, description;
};

/// How bit patterns are to be decoded: the attributes of these names of a dataset of codes.
struct CodeLayout {
  std::string format;                 ///< name of the number format, as in a policy
  std::int64_t block;                 ///< values that share one scale; 0 where there are no scales
  std::string scale_layout;           ///< which values those are, e.g. "row", "tensor", "along N"
  std::int64_t codes_per_item = 1;    ///< codes packed into one stored item, the first in the lowest bits; 0: code_bits
                                      ///< of one after the other, regardless of items
  std::int64_t code_bits = 0;         ///< bits of a code; 0: those of an item, shared evenly
  std::string scale_format = "fp32";  ///< "fp32", or of one byte: "e8m0", "e4m3"
};

/// Throws Error, touching nothing, if `path` is what a TraceWriter would not make or replace: anything but an earlier
/// trace, a folder included, or a name in a folder that does not exist.
void check_trace_path(const std::string& path);

/// Writes one trace. Object paths are absolute ("/layers/0/y"); groups are made as needed; an object is made once.
///
/// The root carries `producer` = "replayssm" and `complete`, which is 0 until finish() makes it 1: what a killed run
/// leaves is readable up to the last flush() and says that it is incomplete. Another process may open the file between
/// one flush() and the next, without waiting, and reads what the first of them brought; no lock is taken, and that no
/// two writers share a file is for those who start them to see to. Every member throws Error naming file and object if
/// HDF5 refuses, the disk is full or the writer is finished; what a full disk has cut is removed with the writer.
class TraceWriter {
 public:
  /// Creates the file and flushes it. Replaces an earlier trace at `path`; throws Error as check_trace_path() does, or
  /// if the file cannot be made.
  explicit TraceWriter(const std::string& path);
  /// Closes the file; without finish() it stays marked incomplete.
  ~TraceWriter();
  TraceWriter(TraceWriter&&) noexcept;
  TraceWriter& operator=(TraceWriter&&) noexcept;

  /// Sets an attribute of a group or dataset, replacing one of that name; makes the group if there is no such object.
  void attribute(const std::string& object, const std::string& name, const TraceAttribute& value);

  /// Writes a whole array, values [product of shape]. From 64 KiB on it is chunked, shuffled and deflated.
  void dataset(const std::string& path, TraceValues values, const TraceShape& shape, const TraceInfo& info = {});

  /// Makes an array of shape [0, row_shape...] that append() makes longer; each row holds at least one value.
  void appendable(const std::string& path, TraceType type, const TraceShape& row_shape, const TraceInfo& info = {});

  /// Appends rows, values [rows, row_shape...], possibly none, to an array that appendable() of this writer made.
  void append(const std::string& path, TraceValues values);

  /// Writes low-precision data as bit patterns, items (uint8, uint16 or uint32) of the given shape, and their scales as
  /// dataset PATH_scales, named in attribute `scales`; no scales, no such dataset. Rounding to codes is the caller's:
  /// nothing is converted here.
  void codes(const std::string& path, TraceValues codes, const TraceShape& shape, const CodeLayout& layout,
             TraceValues scales, const TraceShape& scales_shape, const TraceInfo& info = {});

  /// Makes arrays of codes of shape [0, row_shape...] and, where scales_shape is given, of scales of shape
  /// [0, scales_shape...], float32 or uint8, that append() makes longer, described as codes() does.
  void appendable_codes(const std::string& path, TraceType type, const TraceShape& row_shape, const CodeLayout& layout,
                        const std::optional<TraceShape>& scales_shape, const TraceInfo& info = {});

  /// Copies a group or dataset with all below it from another trace, which must be complete.
  void copy(const std::string& from_file, const std::string& object);

  /// Brings everything written so far to the file.
  void flush();

  /// Flushes, marks the file complete and closes it.
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Part or whole of a dataset, last index fastest.
template <TraceScalar T>
struct TraceData {
  TraceShape shape;
  std::vector<T> values;
};

/// Reads one trace. Every member throws Error naming file and object if it is missing or of another type.
class TraceReader {
 public:
  /// Throws Error if there is no such file or it is no trace.
  explicit TraceReader(const std::string& path);
  ~TraceReader();
  TraceReader(TraceReader&&) noexcept;
  TraceReader& operator=(TraceReader&&) noexcept;

  /// Whether the writer got to finish().
  bool complete() const;
  bool contains(const std::string& object) const;
  TraceShape shape(const std::string& path) const;
  TraceType type(const std::string& path) const;
  TraceAttribute attribute(const std::string& object, const std::string& name) const;

  /// The whole dataset, or the block of extent `count` from `start`, both [rank]. T must be the stored type.
  template <TraceScalar T>
  TraceData<T> read(const std::string& path) const {
    return read<T>(path, TraceShape(shape(path).size(), 0), shape(path));
  }
  template <TraceScalar T>
  TraceData<T> read(const std::string& path, const TraceShape& start, const TraceShape& count) const {
    TraceData<T> data{count, std::vector<T>(elements(path, trace_type<T>(), start, count))};
    read_block(path, trace_type<T>(), start, count, data.values.data());
    return data;
  }

 private:
  std::size_t elements(const std::string& path, TraceType, const TraceShape& start, const TraceShape& count) const;
  void read_block(const std::string& path, TraceType, const TraceShape& start, const TraceShape& count,
                  void* values) const;

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace replayssm
