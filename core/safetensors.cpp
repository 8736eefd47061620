#include "core/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>

#include "core/error.h"
#include "core/sha256.h"

namespace replayssm {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

static_assert(std::endian::native == std::endian::little, "the data of a safetensors file are little-endian");

struct DtypeRow {
  Dtype dtype;
  const char* name;
  unsigned bits;
};

constexpr const char* single_name = "model.safetensors";
constexpr const char* index_name = "model.safetensors.index.json";

constexpr std::array<DtypeRow, 22> dtype_rows = {{
    {Dtype::boolean, "BOOL", 8},
    {Dtype::u8, "U8", 8},
    {Dtype::i8, "I8", 8},
    {Dtype::u16, "U16", 16},
    {Dtype::i16, "I16", 16},
    {Dtype::u32, "U32", 32},
    {Dtype::i32, "I32", 32},
    {Dtype::u64, "U64", 64},
    {Dtype::i64, "I64", 64},
    {Dtype::f16, "F16", 16},
    {Dtype::bf16, "BF16", 16},
    {Dtype::f32, "F32", 32},
    {Dtype::f64, "F64", 64},
    {Dtype::c64, "C64", 64},
    {Dtype::f8_e4m3, "F8_E4M3", 8},
    {Dtype::f8_e5m2, "F8_E5M2", 8},
    {Dtype::f8_e8m0, "F8_E8M0", 8},
    {Dtype::f8_e4m3fnuz, "F8_E4M3FNUZ", 8},
    {Dtype::f8_e5m2fnuz, "F8_E5M2FNUZ", 8},
    {Dtype::f6_e2m3, "F6_E2M3", 6},
    {Dtype::f6_e3m2, "F6_E3M2", 6},
    {Dtype::f4, "F4", 4},
}};

/// Parses a JSON object and refuses repeated keys, which the parser alone would drop.
json parse_object(std::string_view text, const std::string& what) {
  std::vector<std::set<std::string>> open_objects;
  const auto check_keys = [&](int, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) open_objects.emplace_back();
    if (event == json::parse_event_t::object_end) open_objects.pop_back();
    if (event == json::parse_event_t::key && !open_objects.back().insert(parsed.get<std::string>()).second) {
      fail(what, ": the key ", in_quotes(parsed.get_ref<const std::string&>()), " appears twice in one object");
    }
    return true;
  };
  // The parser takes a NUL byte for the end of the text.
  if (const auto nul = text.find('\0'); nul != text.npos) fail(what, ": expected JSON, found a NUL at byte ", nul);
  try {
    json object = json::parse(text, check_keys);
    if (!object.is_object()) fail(what, ": expected a JSON object, found ", object.type_name());
    return object;
  } catch (const json::parse_error& e) {
    fail(what, ": is not JSON in UTF-8 from byte ", e.byte, " on");
  } catch (const json::exception&) {
    fail(what, ": expected JSON, found a number that is out of range");
  }
}

const json& field(const json& entry, const char* key, json::value_t type, const std::string& where) {
  const auto found = entry.find(key);
  if (found == entry.end()) fail(where, ": has no '", key, "'");
  if (found->type() != type) {
    fail(where, ": '", key, "' should be of type ", json(type).type_name(), ", found ", found->type_name());
  }
  return *found;
}

std::int64_t size_value(const json& value, const char* key, const std::string& where) {
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() > std::numeric_limits<std::int64_t>::max()) {
    fail(where, ": '", key, "' should hold integers from 0 to 2^63 - 1, found ", in_quotes(value.dump()));
  }
  return value.get<std::int64_t>();
}

TensorView read_entry(const std::string& name, const json& entry, const std::string& file,
                      std::span<const std::byte> data) {
  const std::string where = file + ": tensor " + in_quotes(name);
  if (!entry.is_object()) fail(where, ": expected an object in the header, found ", entry.type_name());
  TensorView tensor;
  tensor.name = name;
  tensor.file = file;

  const auto& dtype = field(entry, "dtype", json::value_t::string, where).get_ref<const std::string&>();
  const auto row =
      std::find_if(dtype_rows.begin(), dtype_rows.end(), [&](const DtypeRow& r) { return r.name == dtype; });
  if (row == dtype_rows.end()) fail(where, ": unknown dtype ", in_quotes(dtype));
  tensor.dtype = row->dtype;

  std::int64_t bits = row->bits;
  for (const json& value : field(entry, "shape", json::value_t::array, where)) {
    tensor.shape.push_back(size_value(value, "shape", where));
    if (__builtin_mul_overflow(bits, tensor.shape.back(), &bits)) {
      fail(where, ": its shape has more bits than 64-bit integers count: ", in_quotes(entry["shape"].dump()));
    }
  }
  if (bits % 8 != 0) fail(where, ": ", tensor.describe(), " is ", bits, " bits, which do not fill whole bytes");

  const json& offsets = field(entry, "data_offsets", json::value_t::array, where);
  if (offsets.size() != 2) fail(where, ": 'data_offsets' should hold 2 numbers, found ", offsets.size());
  const std::int64_t begin = size_value(offsets[0], "data_offsets", where);
  const std::int64_t end = size_value(offsets[1], "data_offsets", where);
  if (begin > end) fail(where, ": 'data_offsets' end before they begin: [", begin, ", ", end, "]");
  if (end - begin != bits / 8) {
    fail(where, ": ", tensor.describe(), " takes ", bits / 8, " bytes, but 'data_offsets' [", begin, ", ", end,
         "] span ", end - begin);
  }
  if (static_cast<std::uint64_t>(end) > data.size()) {
    fail(where, ": its data end at byte ", end, ", but the file holds ", data.size(), " bytes of data (truncated?)");
  }
  tensor.data = data.data() + begin;
  tensor.bytes = static_cast<std::size_t>(end - begin);
  return tensor;
}

/// Edit distance between two names, to find what a misspelt one may have meant.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t change = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({change, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

[[noreturn]] void fail_missing(const std::string& place, std::string_view name, const std::vector<std::string>& known) {
  std::vector<std::pair<std::size_t, const std::string*>> near;
  for (const std::string& other : known) {
    const std::size_t edits = distance(name, other);
    if (edits <= std::max(name.size(), other.size()) / 2) near.emplace_back(edits, &other);
  }
  std::sort(near.begin(), near.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first < b.first : *a.second < *b.second;
  });
  std::string similar;
  for (std::size_t i = 0; i < std::min<std::size_t>(near.size(), 3); ++i) {
    similar += (i == 0 ? "; similar names: " : ", ") + in_quotes(*near[i].second);
  }
  fail(place, ": has no tensor ", in_quotes(name), " among its ", known.size(), similar);
}

/// The names of the safetensors files in a folder, sorted.
std::vector<std::string> safetensors_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->path().extension() == ".safetensors") names.push_back(entry->path().filename().string());
  }
  if (error) fail(folder.string(), ": cannot be listed: ", error.message());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

const char* dtype_name(Dtype dtype) {
  return std::find_if(dtype_rows.begin(), dtype_rows.end(), [&](const DtypeRow& r) { return r.dtype == dtype; })->name;
}

std::string in_quotes(std::string_view text) {
  constexpr std::size_t longest = 100;
  constexpr std::string_view digits = "0123456789abcdef";
  std::string out = "'";
  for (const char c : text.substr(0, longest)) {
    const auto code = static_cast<unsigned char>(c);
    if (code >= 0x20 && code < 0x7f) {
      out += c;
    } else {
      out += {'\\', 'x', digits[code / 16], digits[code % 16]};
    }
  }
  return out + (text.size() > longest ? "...'" : "'");
}

std::int64_t TensorView::elements() const {
  std::int64_t product = 1;
  for (const std::int64_t size : shape) product *= size;
  return product;
}

std::string TensorView::describe() const {
  std::string text = dtype_name(dtype);
  text += " [";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

MappedFile::MappedFile(const fs::path& path) {
  const std::string name = path.string();
  const auto refuse = [&] { fail(name, ": cannot be read: ", std::generic_category().message(errno)); };
  // O_NONBLOCK: opening a pipe that nobody writes to must not hang.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) refuse();
  const std::unique_ptr<const int, void (*)(const int*)> closer(&descriptor, [](const int* d) { ::close(*d); });

  struct stat status {};
  if (::fstat(descriptor, &status) != 0) refuse();
  if (S_ISDIR(status.st_mode)) fail(name, ": expected a file, found a directory");
  if (!S_ISREG(status.st_mode)) fail(name, ": expected a regular file, found a pipe or device");
  if (status.st_size == 0) return;  // there is nothing to map
  const auto size = static_cast<std::size_t>(status.st_size);
  void* const address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor, 0);
  if (address == MAP_FAILED) refuse();
  data_ = {static_cast<const std::byte*>(address), Unmap{size}};
}

void MappedFile::Unmap::operator()(const std::byte* data) const { ::munmap(const_cast<std::byte*>(data), size); }

SafetensorsFile::SafetensorsFile(const fs::path& path, std::size_t header_limit) : file_(path), path_(path.string()) {
  const std::span<const std::byte> all = file_.bytes();
  std::uint64_t length = 0;
  if (all.size() < sizeof length) {
    fail(path_, ": expected a safetensors file, whose header length alone takes 8 bytes, found ", all.size(), " bytes");
  }
  std::memcpy(&length, all.data(), sizeof length);
  const std::span<const std::byte> rest = all.subspan(sizeof length);
  if (length > rest.size()) {
    fail(path_, ": its header length field says ", length, " bytes, but only ", rest.size(), " of the file's ",
         all.size(), " bytes follow it (truncated, or not a safetensors file)");
  }
  if (length > header_limit) {
    fail(path_, ": its header length field says ", length, " bytes, over the limit of ", header_limit);
  }
  const auto header_size = static_cast<std::size_t>(length);
  std::string_view text(reinterpret_cast<const char*>(rest.data()), header_size);
  text = text.substr(0, text.find_last_not_of(' ') + 1);  // the parser is slow on long padding, and copies it
  if (!text.starts_with('{')) fail(path_, ": its header should begin with '{', found ", in_quotes(text.substr(0, 1)));

  const json header = parse_object(text, path_ + ": header");
  const std::span<const std::byte> data = rest.subspan(header_size);
  for (const auto& [name, entry] : header.items()) {
    if (name != "__metadata__") {
      tensors_.push_back(read_entry(name, entry, path_, data));
      continue;
    }
    if (!entry.is_object()) fail(path_, ": '__metadata__' should be an object of strings, found ", entry.type_name());
    for (const auto& [key, value] : entry.items()) {
      if (!value.is_string()) {
        fail(path_, ": '__metadata__': ", in_quotes(key), " should be a string, found ", value.type_name());
      }
      metadata_[key] = value.get<std::string>();
    }
  }

  // The sort is stable and the header's keys come sorted, so empty tensors at one place stay in the order of names.
  std::stable_sort(tensors_.begin(), tensors_.end(), [](const TensorView& a, const TensorView& b) {
    return a.data != b.data ? a.data < b.data : a.bytes < b.bytes;
  });
  const std::byte* end = data.data();
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const TensorView& tensor = tensors_[i];
    if (tensor.data != end) {
      const std::string before =
          i == 0 ? "the beginning of the data" : "the end of tensor " + in_quotes(tensors_[i - 1].name);
      fail(path_, ": tensor ", in_quotes(tensor.name), ": its data ",
           tensor.data < end ? "overlap what comes before: they begin at byte " : "leave a hole: they begin at byte ",
           tensor.data - data.data(), ", expected ", end - data.data(), ", ", before);
    }
    end += tensor.bytes;
    index_.emplace(tensor.name, i);
  }
  if (end != data.data() + data.size()) {
    fail(path_, ": its tensors take ", end - data.data(), " bytes, but the file holds ", data.size(), " bytes of data");
  }
}

const TensorView* SafetensorsFile::find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

const TensorView& SafetensorsFile::at(std::string_view name) const {
  if (const TensorView* tensor = find(name)) return *tensor;
  std::vector<std::string> known;
  for (const TensorView& tensor : tensors_) known.push_back(tensor.name);
  fail_missing(path_, name, known);
}

Weights Weights::open(const fs::path& folder, std::size_t header_limit) {
  std::error_code error;
  if (!fs::is_directory(folder, error)) {
    fail(folder.string(), ": expected a model folder, found ", fs::exists(folder, error) ? "a file" : "nothing there");
  }
  Weights weights;
  weights.folder_ = folder;
  // A link that leads nowhere counts as present, so that opening it says what is wrong.
  const bool single = fs::exists(fs::symlink_status(folder / single_name, error));
  const bool index = fs::exists(fs::symlink_status(folder / index_name, error));
  const std::vector<std::string> here = safetensors_in(folder);
  if (single) {
    const SafetensorsFile& file = weights.open_file(single_name, header_limit);
    for (const TensorView& tensor : file.tensors()) weights.tensors_.emplace(tensor.name, &tensor);
    if (index) weights.leave_out(index_name, "model.safetensors is there and is used alone");
  } else if (index) {
    weights.open_shards(header_limit);
  } else {
    std::string found;
    for (const std::string& name : here) found += (found.empty() ? "" : ", ") + in_quotes(name);
    fail(folder.string(), ": expected ", single_name, " or ", index_name, ", found ",
         found.empty() ? "no safetensors file" : "only " + found);
  }
  // Beside a single file, only names like those of its shards can be meant as weights of the same model.
  for (const std::string& name : here) {
    if (weights.files_.contains(name) || (single && !name.starts_with("model"))) continue;
    weights.leave_out(name, single ? "model.safetensors is used alone" : "the index does not name it");
  }
  return weights;
}

const SafetensorsFile& Weights::open_file(const std::string& name, std::size_t header_limit) {
  return files_.try_emplace(name, folder_ / name, header_limit).first->second;
}

void Weights::leave_out(const std::string& name, const std::string& reason) {
  notices_.push_back((folder_ / name).string() + ": left out: " + reason);
}

void Weights::open_shards(std::size_t header_limit) {
  const fs::path path = folder_ / index_name;
  const std::string where = path.string();
  const MappedFile file(path);
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
  const json index = parse_object(text, where);
  const json& map = field(index, "weight_map", json::value_t::object, where);
  if (map.empty()) fail(where, ": its 'weight_map' names no tensor");

  for (const auto& [name, shard] : map.items()) {
    const std::string entry = where + ": tensor " + in_quotes(name);
    if (!shard.is_string()) fail(entry, ": expected the name of its shard, found ", shard.type_name());
    const auto& shard_name = shard.get_ref<const std::string&>();
    // Exactly one component that is a name: no directory, no "..", nothing absolute.
    if (shard_name.empty() || shard_name == "." || shard_name == ".." || shard_name.find('/') != shard_name.npos) {
      fail(entry, ": expected the name of a shard in the same folder, found ", in_quotes(shard_name));
    }
    std::error_code error;
    if (!files_.contains(shard_name) && !fs::exists(folder_ / shard_name, error)) {
      fail(entry, ": its shard ", in_quotes(shard_name), " is missing in the folder");
    }
    const TensorView* tensor = open_file(shard_name, header_limit).find(name);
    if (tensor == nullptr) fail(entry, ": is not in its shard ", in_quotes(shard_name));
    tensors_.emplace(name, tensor);
  }
  for (const auto& [shard_name, shard] : files_) {
    std::vector<std::string> extra;
    for (const TensorView& tensor : shard.tensors()) {
      const auto used = tensors_.find(tensor.name);
      if (used == tensors_.end() || used->second != &tensor) extra.push_back(tensor.name);
    }
    if (extra.empty()) continue;
    leave_out(shard_name, std::to_string(extra.size()) +
                              " of its tensors, which the index does not place there; first " + in_quotes(extra[0]));
  }
}

const TensorView& Weights::at(std::string_view name) const {
  if (const auto found = tensors_.find(name); found != tensors_.end()) return *found->second;
  fail_missing(folder_.string(), name, names());
}

std::vector<std::string> Weights::names() const {
  std::vector<std::string> all;
  for (const auto& [name, tensor] : tensors_) all.push_back(name);
  return all;
}

std::string Weights::sha256() const {
  Sha256 hash;
  for (const auto& [name, file] : files_) hash.update(file.bytes());
  return hash.hex();
}

}  // namespace replayssm
