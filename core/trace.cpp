#include "core/trace.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <utility>

#include "core/error.h"
#include "core/trace_hdf5.h"

namespace replayssm {

using namespace hdf5;

namespace {

constexpr std::int64_t kChunkFrom = 1 << 16;   // bytes from which compression is worth a chunk index
constexpr std::int64_t kChunkBytes = 1 << 18;  // a few chunks fit HDF5's cache of 1 MiB per dataset

// Halves dimensions, the slowest first, until the chunk is small enough.
Dims chunk_of(Dims shape, std::int64_t value_bytes) {
  const auto bytes = [&] {
    auto product = static_cast<hsize_t>(value_bytes);
    for (hsize_t dim : shape) product *= dim;
    return product;
  };
  for (hsize_t& dim : shape) {
    while (dim > 1 && bytes() > static_cast<hsize_t>(kChunkBytes)) dim = (dim + 1) / 2;
  }
  return shape;
}

}  // namespace

void check_trace_path(const std::string& path) {
  namespace fs = std::filesystem;
  const Quiet quiet;
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  const fs::path folder = fs::path(path).has_parent_path() ? fs::path(path).parent_path() : fs::path(".");
  if (status.type() == fs::file_type::not_found) {
    if (!fs::is_directory(folder, error)) fail("trace file ", path, ": there is no folder ", folder.string());
    return;
  }
  if (fs::is_directory(status)) fail("trace file ", path, ": expected a file, found a folder");
  const Handle access = file_access();  // closing it would clear the reason of a failure
  const TraceFile old{path, Handle(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access), H5Fclose)};
  if (old.file < 0) {
    fail("trace file ", path, ": expected no file or an earlier trace, found one that is left as it is: ", reason());
  }
  if (!old.is_trace()) {
    fail("trace file ", path,
         ": expected no file or an earlier trace, found an HDF5 file of another program, which is ", "left as it is");
  }
}

static bool may_replace(const std::string& path) {
  try {
    check_trace_path(path);
    return true;
  } catch (const Error&) {
    return false;
  }
}

struct TraceWriter::Impl : TraceFile {
  struct Growing {
    Handle dataset;  // kept open: closing one would compress and write its unfinished chunk at every append
    TraceType type;
    Dims dims;
    std::int64_t row_size;
  };
  std::map<std::string, Growing> growing;
  Handle guard;         // an object without a name behind all that is on the disk, see flush()
  bool broken = false;  // what is on the disk is no whole HDF5 file

  ~Impl() {
    const Quiet quiet;
    for (auto& [name, array] : growing) broken |= array.dataset.close() < 0;
    guard.close();
    broken |= file >= 0 && H5Fflush(file, H5F_SCOPE_LOCAL) < 0;
    broken |= file.close() < 0;
    if (broken) std::remove(path.c_str());
  }

  // check() of what brings data to the disk.
  void check_written(herr_t result, const std::string& object, const char* action) {
    broken |= result < 0;
    check(result, object, action);
  }

  void check_open(const std::string& object) const {
    if (file < 0) refuse(object, "the trace is already finished");
  }

  void set(const std::string& object, const std::string& name, const TraceAttribute& value) {
    if (!contains(object)) {
      const Handle parents(H5Pcreate(H5P_LINK_CREATE), H5Pclose);
      H5Pset_create_intermediate_group(parents, 1);
      open(H5Gcreate2(file, object.c_str(), parents, H5P_DEFAULT, H5P_DEFAULT), H5Gclose, object, "make a group");
    }
    if (name.empty() || name.find('\0') != std::string::npos) refuse(object, "expected an attribute name");
    const Handle target = open(H5Oopen(file, object.c_str(), H5P_DEFAULT), H5Oclose, object, "open the object");
    if (H5Aexists(target, name.c_str()) > 0) {
      check(H5Adelete(target, name.c_str()), object, "replace an attribute");
    }
    const auto write = [&](hid_t stored, hid_t memory, const void* data) {
      const Handle scalar(H5Screate(H5S_SCALAR), H5Sclose);
      const Handle attribute = open(H5Acreate2(target, name.c_str(), stored, scalar, H5P_DEFAULT, H5P_DEFAULT),
                                    H5Aclose, object, "make an attribute");
      check(H5Awrite(attribute, memory, data), object, "write an attribute");
    };
    if (const auto* text = std::get_if<std::string>(&value)) {
      if (text->find('\0') != std::string::npos) refuse(object, "attribute ", name, ": expected text without NUL");
      const char* data = text->c_str();
      const Handle type = utf8_type();
      write(type, type, &data);
    } else if (const auto* number = std::get_if<double>(&value)) {
      write(H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, number);
    } else {
      write(H5T_STD_I64LE, H5T_NATIVE_INT64, &std::get<std::int64_t>(value));
    }
  }

  // limits: the most each dimension may become; chunk: empty for one piece.
  Handle create(const std::string& object, TraceType type, const Dims& dims, const Dims& limits, const Dims& chunk,
                const TraceInfo& info) {
    if (contains(object)) refuse(object, "the file already has an object of this name");
    const Handle space = open(H5Screate_simple(static_cast<int>(dims.size()), dims.data(), limits.data()), H5Sclose,
                              object, "make the shape");
    const Handle parents(H5Pcreate(H5P_LINK_CREATE), H5Pclose);
    H5Pset_create_intermediate_group(parents, 1);
    const Handle options(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
    H5Pset_obj_track_times(options, false);  // equal runs, equal files
    if (!chunk.empty()) {
      check(H5Pset_chunk(options, static_cast<int>(chunk.size()), chunk.data()), object, "set the chunk shape");
      check(H5Pset_shuffle(options), object, "set the shuffle filter");
      check(H5Pset_deflate(options, 1), object, "set the deflate filter");
    }
    Handle dataset = open(H5Dcreate2(file, object.c_str(), type_row(type).stored, space, parents, options, H5P_DEFAULT),
                          H5Dclose, object, "make the dataset");
    if (!info.units.empty()) set(object, "units", info.units);
    if (!info.description.empty()) set(object, "description", info.description);
    return dataset;
  }

  void describe(const std::string& object, const CodeLayout& layout, bool scaled) {
    const Quiet quiet;
    set(object, "format", layout.format);
    set(object, "block", layout.block);
    set(object, "scale_layout", layout.scale_layout);
    set(object, "codes_per_item", layout.codes_per_item);
    if (layout.code_bits > 0) set(object, "code_bits", layout.code_bits);
    if (!scaled) return;
    set(object, "scales", object + "_scales");
    set(object, "scale_format", layout.scale_format);
  }

  void flush() {
    check_written(H5Fflush(file, H5F_SCOPE_LOCAL), "/", "write");
    // HDF5 gives space at the end of the file back, and then out again: a chunk there that grows would be overwritten.
    guard = open(H5Gcreate_anon(file, H5P_DEFAULT, H5P_DEFAULT), H5Gclose, "/", "reserve space");
  }
};

TraceWriter::TraceWriter(const std::string& path) {
  const Quiet quiet;
  check_trace_path(path);
  auto impl = std::make_unique<Impl>();
  impl->path = path;
  try {
    impl->file = impl->open(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, file_creation(), file_access()), H5Fclose, "/",
                            "make the file");
  } catch (const Error&) {
    impl->broken = !may_replace(path);  // cut off before it began, where the disk is full
    throw;
  }
  impl->broken = true;  // until it has the mark of a trace, without which the next run would refuse to replace it
  impl->set("/", "producer", kProducer);
  impl->set("/", "complete", std::int64_t{0});
  impl->flush();
  impl->broken = false;
  impl_ = std::move(impl);
}

TraceWriter::~TraceWriter() = default;
TraceWriter::TraceWriter(TraceWriter&&) noexcept = default;
TraceWriter& TraceWriter::operator=(TraceWriter&&) noexcept = default;

void TraceWriter::attribute(const std::string& object, const std::string& name, const TraceAttribute& value) {
  const Quiet quiet;
  impl_->check_open(object);
  impl_->set(object, name, value);
}

void TraceWriter::dataset(const std::string& path, TraceValues values, const TraceShape& shape, const TraceInfo& info) {
  const Quiet quiet;
  impl_->check_open(path);
  const std::int64_t expected = impl_->count(shape, path);
  if (values.size != expected) {
    impl_->refuse(path, "expected ", expected, " values for the shape, found ", values.size);
  }
  const TypeRow type = type_row(values.type);
  const Dims dims = dims_of(shape);
  const Dims chunk = values.size >= kChunkFrom / type.bytes ? chunk_of(dims, type.bytes) : Dims{};
  Handle dataset = impl_->create(path, values.type, dims, dims, chunk, info);
  if (values.size == 0) return;
  impl_->check_written(H5Dwrite(dataset, type.memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data), path, "write");
  impl_->check_written(dataset.close(), path, "write");
}

void TraceWriter::appendable(const std::string& path, TraceType type, const TraceShape& row_shape,
                             const TraceInfo& info) {
  const Quiet quiet;
  impl_->check_open(path);
  const std::int64_t row_size = impl_->count(row_shape, path);
  if (row_size == 0) impl_->refuse(path, "expected rows of at least one value");
  const std::int64_t bytes = type_row(type).bytes;
  Dims dims = dims_of(row_shape);
  dims.insert(dims.begin(), 0);
  Dims limits = dims;
  limits.front() = H5S_UNLIMITED;
  Dims chunk = dims;
  chunk.front() = static_cast<hsize_t>(std::max<std::int64_t>(1, kChunkBytes / bytes / row_size));
  Handle dataset = impl_->create(path, type, dims, limits, chunk_of(chunk, bytes), info);
  impl_->growing.emplace(path, Impl::Growing{std::move(dataset), type, dims, row_size});
}

void TraceWriter::append(const std::string& path, TraceValues values) {
  const Quiet quiet;
  impl_->check_open(path);
  const auto found = impl_->growing.find(path);
  if (found == impl_->growing.end()) impl_->refuse(path, "no array that can be appended to");
  Impl::Growing& array = found->second;
  if (values.type != array.type) impl_->refuse(path, "the appended values are not of the type of the array");
  if (values.size % array.row_size != 0) {
    impl_->refuse(path, "expected whole rows of ", array.row_size, " values, found ", values.size, " values");
  }
  if (values.size == 0) return;
  Dims start(array.dims.size(), 0), block = array.dims, dims = array.dims;
  start.front() = dims.front();
  block.front() = static_cast<hsize_t>(values.size / array.row_size);
  dims.front() += block.front();
  impl_->check(H5Dset_extent(array.dataset, dims.data()), path, "make the array longer");
  const Handle file_space = impl_->open(H5Dget_space(array.dataset), H5Sclose, path, "read the shape");
  impl_->check(H5Sselect_hyperslab(file_space, H5S_SELECT_SET, start.data(), nullptr, block.data(), nullptr), path,
               "select rows");
  const Handle memory_space(H5Screate_simple(static_cast<int>(block.size()), block.data(), nullptr), H5Sclose);
  impl_->check_written(
      H5Dwrite(array.dataset, type_row(values.type).memory, memory_space, file_space, H5P_DEFAULT, values.data), path,
      "write");
  array.dims = dims;
}

void TraceWriter::codes(const std::string& path, TraceValues codes, const TraceShape& shape, const CodeLayout& layout,
                        TraceValues scales, const TraceShape& scales_shape, const TraceInfo& info) {
  if (codes.type != TraceType::uint8 && codes.type != TraceType::uint16 && codes.type != TraceType::uint32) {
    impl_->refuse(path, "expected codes as uint8, uint16 or uint32");
  }
  dataset(path, codes, shape, info);
  impl_->describe(path, layout, scales.size > 0);
  if (scales.size > 0) dataset(path + "_scales", scales, scales_shape, {"", "scales of " + path});
}

void TraceWriter::appendable_codes(const std::string& path, TraceType type, const TraceShape& row_shape,
                                   const CodeLayout& layout, const std::optional<TraceShape>& scales_shape,
                                   const TraceInfo& info) {
  appendable(path, type, row_shape, info);
  impl_->describe(path, layout, scales_shape.has_value());
  if (!scales_shape) return;
  const TraceType scale_type = layout.scale_format == "fp32" ? TraceType::float32 : TraceType::uint8;
  appendable(path + "_scales", scale_type, *scales_shape, {"", "scales of " + path});
}

void TraceWriter::copy(const std::string& from_file, const std::string& object) {
  const Quiet quiet;
  impl_->check_open(object);
  if (impl_->contains(object)) impl_->refuse(object, "the file already has an object of this name");
  TraceFile from{from_file, {}};
  from.file = from.open(H5Fopen(from_file.c_str(), H5F_ACC_RDONLY, file_access()), H5Fclose, "/", "open the file");
  if (!from.is_trace() || from.attribute("/", "complete") != TraceAttribute(std::int64_t{1})) {
    from.refuse("/", "expected a complete trace to copy from");
  }
  if (!from.contains(object)) from.refuse(object, "no such object");
  const Handle parents(H5Pcreate(H5P_LINK_CREATE), H5Pclose);
  H5Pset_create_intermediate_group(parents, 1);
  impl_->check_written(H5Ocopy(from.file, object.c_str(), impl_->file, object.c_str(), H5P_DEFAULT, parents), object,
                       "copy");
}

void TraceWriter::flush() {
  const Quiet quiet;
  impl_->check_open("/");
  impl_->flush();
}

void TraceWriter::finish() {
  const Quiet quiet;
  impl_->check_open("/");
  impl_->flush();  // the mark must not reach the disk before the data
  impl_->set("/", "complete", std::int64_t{1});
  impl_->flush();
  impl_->growing.clear();
  impl_->guard.close();
  impl_->check_written(impl_->file.close(), "/", "close the file");
}

struct TraceReader::Impl : TraceFile {
  Handle dataset(const std::string& object) const {
    if (!contains(object)) refuse(object, "no such object");
    return open(H5Dopen2(file, object.c_str(), H5P_DEFAULT), H5Dclose, object, "open the dataset");
  }
};

TraceReader::TraceReader(const std::string& path) : impl_(std::make_unique<Impl>()) {
  const Quiet quiet;
  impl_->path = path;
  impl_->file = impl_->open(H5Fopen(path.c_str(), H5F_ACC_RDONLY, file_access()), H5Fclose, "/", "open the file");
  if (!impl_->is_trace()) impl_->refuse("/", "expected a trace, found an HDF5 file of another program");
}

TraceReader::~TraceReader() = default;
TraceReader::TraceReader(TraceReader&&) noexcept = default;
TraceReader& TraceReader::operator=(TraceReader&&) noexcept = default;

bool TraceReader::complete() const {
  const Quiet quiet;
  return H5Aexists(impl_->file, "complete") > 0 && impl_->attribute("/", "complete") == TraceAttribute(std::int64_t{1});
}

bool TraceReader::contains(const std::string& object) const {
  const Quiet quiet;
  return impl_->contains(object);
}

TraceShape TraceReader::shape(const std::string& path) const {
  const Quiet quiet;
  const Handle dataset = impl_->dataset(path);
  const Handle space = impl_->open(H5Dget_space(dataset), H5Sclose, path, "read the shape");
  Dims dims(static_cast<std::size_t>(impl_->check(H5Sget_simple_extent_ndims(space), path, "read the shape")));
  H5Sget_simple_extent_dims(space, dims.data(), nullptr);
  return {dims.begin(), dims.end()};
}

TraceType TraceReader::type(const std::string& path) const {
  const Quiet quiet;
  const Handle dataset = impl_->dataset(path);
  const Handle type = impl_->open(H5Dget_type(dataset), H5Tclose, path, "read the type");
  for (const TypeRow& row : type_rows()) {
    if (H5Tequal(type, row.stored) > 0) return row.type;
  }
  impl_->refuse(path, "the values are of no type that a trace stores");
}

TraceAttribute TraceReader::attribute(const std::string& object, const std::string& name) const {
  const Quiet quiet;
  return impl_->attribute(object, name);
}

std::size_t TraceReader::elements(const std::string& path, TraceType expected, const TraceShape& start,
                                  const TraceShape& count) const {
  if (type(path) != expected) impl_->refuse(path, "the values are not of the type asked for");
  const TraceShape whole = shape(path);
  if (start.size() != whole.size() || count.size() != whole.size()) {
    impl_->refuse(path, "expected a block of ", whole.size(), " dimensions, found ", start.size(), " and ",
                  count.size());
  }
  for (std::size_t i = 0; i < whole.size(); ++i) {
    if (start[i] < 0 || count[i] < 0 || start[i] > whole[i] || count[i] > whole[i] - start[i]) {
      impl_->refuse(path, "dimension ", i, " of size ", whole[i], " has no ", count[i], " entries from ", start[i]);
    }
  }
  return static_cast<std::size_t>(impl_->count(count, path));
}

void TraceReader::read_block(const std::string& path, TraceType type, const TraceShape& start, const TraceShape& count,
                             void* values) const {
  if (impl_->count(count, path) == 0) return;
  const Quiet quiet;
  const Handle dataset = impl_->dataset(path);
  const Handle file_space = impl_->open(H5Dget_space(dataset), H5Sclose, path, "read the shape");
  const Dims extent = dims_of(count);
  if (!count.empty()) {  // a scalar has nothing to select
    impl_->check(
        H5Sselect_hyperslab(file_space, H5S_SELECT_SET, dims_of(start).data(), nullptr, extent.data(), nullptr), path,
        "select a block");
  }
  const Handle memory_space(H5Screate_simple(static_cast<int>(extent.size()), extent.data(), nullptr), H5Sclose);
  impl_->check(H5Dread(dataset, type_row(type).memory, memory_space, file_space, H5P_DEFAULT, values), path, "read");
}

}  // namespace replayssm
