#pragma once

// Everything that an HDF5 file holds, read by HDF5 alone: nothing of the reader under test takes part.

#include <gtest/gtest.h>
#include <hdf5.h>

#include <map>
#include <string>
#include <vector>

namespace replayssm {

/// Type, shape and bytes of an attribute or dataset on one line of memory.
using TraceContents = std::map<std::string, std::string>;

namespace detail {

inline std::string shape_text(hid_t space) {
  std::vector<hsize_t> dims(static_cast<std::size_t>(H5Sget_simple_extent_ndims(space)));
  H5Sget_simple_extent_dims(space, dims.data(), nullptr);
  std::string text = "[";
  for (const hsize_t dim : dims) text += std::to_string(dim) + " ";
  return text + "] ";
}

template <class Read>
std::string bytes_of(hid_t type, hid_t space, Read&& read) {
  const auto count = static_cast<std::size_t>(H5Sget_simple_extent_npoints(space));
  std::string text = std::to_string(H5Tget_class(type)) + "/" + std::to_string(H5Tget_size(type)) + shape_text(space);
  if (H5Tis_variable_str(type) > 0) {
    char* value = nullptr;
    EXPECT_GE(read(&value), 0);
    text += value;
    H5free_memory(value);
    return text;
  }
  std::string bytes(count * H5Tget_size(type), '\0');
  EXPECT_GE(read(bytes.data()), 0);
  return text + bytes;
}

inline void add_attribute(hid_t object, const char* name, const std::string& at, TraceContents& all) {
  const hid_t attribute = H5Aopen(object, name, H5P_DEFAULT), type = H5Aget_type(attribute),
              space = H5Aget_space(attribute);
  all[at + "@" + name] = bytes_of(type, space, [&](void* out) { return H5Aread(attribute, type, out); });
  H5Sclose(space);
  H5Tclose(type);
  H5Aclose(attribute);
}

inline herr_t add_object(hid_t file, const char* name, const H5O_info_t*, void* out) {
  auto& all = *static_cast<TraceContents*>(out);
  const hid_t object = H5Oopen(file, name, H5P_DEFAULT);
  all[name] = "group";
  if (H5Iget_type(object) == H5I_DATASET) {
    const hid_t type = H5Dget_type(object), space = H5Dget_space(object);
    all[name] = bytes_of(type, space, [&](void* values) {
      return H5Dread(object, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values);
    });
    H5Sclose(space);
    H5Tclose(type);
  }
  H5O_info_t info;
  H5Oget_info2(object, &info, H5O_INFO_NUM_ATTRS);
  for (hsize_t i = 0; i < info.num_attrs; ++i) {
    char attribute[256];
    H5Aget_name_by_idx(object, ".", H5_INDEX_NAME, H5_ITER_INC, i, attribute, sizeof attribute, H5P_DEFAULT);
    add_attribute(object, attribute, name, all);
  }
  H5Oclose(object);
  return 0;
}

}  // namespace detail

/// Every dataset as its path, every attribute as path@name.
inline TraceContents trace_contents(const std::string& path) {
  TraceContents all;
  const hid_t file = H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
  EXPECT_GE(file, 0) << path;
  EXPECT_GE(H5Ovisit2(file, H5_INDEX_NAME, H5_ITER_INC, detail::add_object, &all, H5O_INFO_BASIC), 0);
  H5Fclose(file);
  return all;
}

/// Expects the same objects, attributes and bytes, the seconds that the runs took aside.
inline void expect_same_contents(const std::string& path, const std::string& expected_path) {
  TraceContents contents = trace_contents(path), expected = trace_contents(expected_path);
  EXPECT_EQ(contents.erase("run@seconds"), 1u);
  EXPECT_EQ(expected.erase("run@seconds"), 1u);
  for (const auto& [name, bytes] : expected) {
    EXPECT_TRUE(contents.contains(name)) << name;
    EXPECT_TRUE(contents[name] == bytes) << name << " differs";
  }
  EXPECT_EQ(contents.size(), expected.size());
}

}  // namespace replayssm
