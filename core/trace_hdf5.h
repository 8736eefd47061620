#pragma once

// HDF5 for trace.cpp, its only user: handles that close themselves, errors that name file and object.

#include <hdf5.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/trace.h"

namespace replayssm::hdf5 {

inline constexpr const char* kProducer = "replayssm";

using Dims = std::vector<hsize_t>;

// HDF5 prints its error stack on stderr; here it becomes the message of an Error, and the host's setting is kept.
class Quiet {
 public:
  Quiet() {
    // Before HDF5 starts: at exit it would write again what a full disk has refused, and crash. Handles close in time.
    H5dont_atexit();
    H5Eget_auto2(H5E_DEFAULT, &function_, &data_);
    H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  }
  ~Quiet() { H5Eset_auto2(H5E_DEFAULT, function_, data_); }
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;

 private:
  H5E_auto2_t function_ = nullptr;
  void* data_ = nullptr;
};

// The innermost entry of HDF5's error stack on one line, reduced to the system's message where it holds one.
inline std::string reason() {
  std::string text = "unknown HDF5 error";
  H5Ewalk2(
      H5E_DEFAULT, H5E_WALK_UPWARD,
      [](unsigned depth, const H5E_error2_t* entry, void* out) -> herr_t {
        if (depth == 0 && entry->desc) *static_cast<std::string*>(out) = entry->desc;
        return 0;
      },
      &text);
  const std::string mark = "error message = '";
  if (const auto at = text.find(mark); at != std::string::npos) {
    text = text.substr(at + mark.size());
    text = text.substr(0, text.find('\''));
  }
  std::ranges::replace(text, '\n', ' ');
  return text;
}

class Handle {
 public:
  using Close = herr_t (*)(hid_t);
  Handle() = default;
  Handle(hid_t id, Close closer) : id_(id), close_(closer) {}
  Handle(Handle&& other) noexcept : id_(std::exchange(other.id_, H5I_INVALID_HID)), close_(other.close_) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(id_, other.id_);
    std::swap(close_, other.close_);
    return *this;
  }
  ~Handle() { close(); }

  herr_t close() {
    const Quiet quiet;  // also where an exception or a destructor of the caller closes
    return id_ >= 0 ? close_(std::exchange(id_, H5I_INVALID_HID)) : 0;
  }
  operator hid_t() const { return id_; }  // NOLINT: handed to HDF5 as it is

 private:
  hid_t id_ = H5I_INVALID_HID;
  Close close_ = nullptr;
};

// Without HDF5's file locks: a reader may open what is being written. Nothing but a flush brings metadata to the disk, so
// that between two of them the file is consistent.
inline Handle file_access() {
  Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
  H5Pset_file_locking(access, false, true);
  H5AC_cache_config_t cache;
  cache.version = H5AC__CURR_CACHE_CONFIG_VERSION;
  H5Pget_mdc_config(access, &cache);
  cache.evictions_enabled = false;
  cache.incr_mode = H5C_incr__off;
  cache.flash_incr_mode = H5C_flash_incr__off;
  cache.decr_mode = H5C_decr__off;
  H5Pset_mdc_config(access, &cache);
  return access;
}

// Space that is given up stays as it is: what an earlier flush refers to is never overwritten.
inline Handle file_creation() {
  Handle creation(H5Pcreate(H5P_FILE_CREATE), H5Pclose);
  H5Pset_file_space_strategy(creation, H5F_FSPACE_STRATEGY_NONE, false, 1);
  return creation;
}

struct TypeRow {
  TraceType type;
  hid_t stored, memory;
  std::int64_t bytes;
};

// Built on use: the identifiers exist only once HDF5 has started.
inline std::array<TypeRow, 7> type_rows() {
  return {{{TraceType::float64, H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, 8},
           {TraceType::float32, H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, 4},
           {TraceType::int64, H5T_STD_I64LE, H5T_NATIVE_INT64, 8},
           {TraceType::int32, H5T_STD_I32LE, H5T_NATIVE_INT32, 4},
           {TraceType::uint32, H5T_STD_U32LE, H5T_NATIVE_UINT32, 4},
           {TraceType::uint16, H5T_STD_U16LE, H5T_NATIVE_UINT16, 2},
           {TraceType::uint8, H5T_STD_U8LE, H5T_NATIVE_UINT8, 1}}};
}

inline TypeRow type_row(TraceType type) {
  for (const TypeRow& row : type_rows()) {
    if (row.type == type) return row;
  }
  fail("trace: unknown value type ", static_cast<int>(type));
}

inline Dims dims_of(const TraceShape& shape) { return {shape.begin(), shape.end()}; }

inline Handle utf8_type() {
  Handle type(H5Tcopy(H5T_C_S1), H5Tclose);
  H5Tset_size(type, H5T_VARIABLE);  // h5py reads variable text as str, fixed text as bytes
  H5Tset_cset(type, H5T_CSET_UTF8);
  return type;
}

// An open file, and the errors that name it.
struct TraceFile {
  std::string path;
  Handle file;

  template <class... Parts>
  [[noreturn]] void refuse(const std::string& object, const Parts&... parts) const {
    fail("trace file ", path, ", ", object, ": ", parts...);
  }

  template <class Result>
  Result check(Result result, const std::string& object, const char* action) const {
    if (result < 0) refuse(object, "cannot ", action, ": ", reason());
    return result;
  }

  Handle open(hid_t id, Handle::Close close, const std::string& object, const char* action) const {
    return Handle(check(id, object, action), close);
  }

  void check_path(const std::string& object) const {
    const bool absolute = object.starts_with('/') && object.find("//") == std::string::npos;
    if (!absolute || (object.size() > 1 && object.ends_with('/')) || object.find('\0') != std::string::npos) {
      fail("trace file ", path, ": expected an absolute path like /layers/0/y, found '", object, "'");
    }
  }

  // Number of values of a shape.
  std::int64_t count(const TraceShape& shape, const std::string& object) const {
    std::int64_t product = 1;
    for (std::int64_t dim : shape) {
      if (dim < 0) refuse(object, "expected dimensions of at least 0, found ", dim);
      if (__builtin_mul_overflow(product, dim, &product)) refuse(object, "the shape holds too many values");
    }
    return product;
  }

  bool contains(const std::string& object) const {
    check_path(object);
    if (object == "/") return true;
    for (std::size_t end = 0; end != std::string::npos;) {  // a link is only looked up in a group that exists
      end = object.find('/', end + 1);
      if (H5Lexists(file, object.substr(0, end).c_str(), H5P_DEFAULT) <= 0) return false;
    }
    return true;
  }

  TraceAttribute attribute(const std::string& object, const std::string& name) const {
    if (!contains(object)) refuse(object, "no such object");
    if (H5Aexists_by_name(file, object.c_str(), name.c_str(), H5P_DEFAULT) <= 0) refuse(object, "no attribute ", name);
    const Handle attribute = open(H5Aopen_by_name(file, object.c_str(), name.c_str(), H5P_DEFAULT, H5P_DEFAULT),
                                  H5Aclose, object, "open an attribute");
    const Handle type = open(H5Aget_type(attribute), H5Tclose, object, "read an attribute");
    const Handle space = open(H5Aget_space(attribute), H5Sclose, object, "read an attribute");
    const bool scalar = H5Sget_simple_extent_npoints(space) == 1;
    if (scalar && H5Tis_variable_str(type) > 0) {
      char* text = nullptr;
      check(H5Aread(attribute, utf8_type(), &text), object, "read an attribute");
      std::string value = text ? text : "";
      H5free_memory(text);
      return value;
    }
    if (scalar && H5Tequal(type, H5T_IEEE_F64LE) > 0) {
      double value = 0;
      check(H5Aread(attribute, H5T_NATIVE_DOUBLE, &value), object, "read an attribute");
      return value;
    }
    if (scalar && H5Tequal(type, H5T_STD_I64LE) > 0) {
      std::int64_t value = 0;
      check(H5Aread(attribute, H5T_NATIVE_INT64, &value), object, "read an attribute");
      return value;
    }
    refuse(object, "attribute ", name, ": expected one text, float64 or int64");
  }

  bool is_trace() const {
    return H5Aexists(file, "producer") > 0 && attribute("/", "producer") == TraceAttribute(kProducer);
  }
};

}  // namespace replayssm::hdf5
