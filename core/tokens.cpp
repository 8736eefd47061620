#include "core/tokens.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "core/safetensors.h"

namespace replayssm {
namespace {

std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Takes the shape of an array of ids: [length] is one sequence.
Tokens shaped(const std::vector<std::int64_t>& shape, const std::string& where) {
  if (shape.size() != 1 && shape.size() != 2) {
    fail(where, ": expected token ids of shape [length] or [sequences, length], found ", shape.size(), " dimensions");
  }
  Tokens tokens;
  tokens.sequences = shape.size() == 2 ? shape[0] : 1;
  tokens.length = shape.back();
  if (tokens.sequences == 0 || tokens.length == 0) fail(where, ": holds no token ids");
  return tokens;
}

template <class Stored>
void append_ids(std::span<const std::byte> data, Tokens& tokens, const std::string& where) {
  tokens.ids.reserve(data.size() / sizeof(Stored));
  for (std::size_t i = 0; i < data.size() / sizeof(Stored); ++i) {
    Stored value;
    std::memcpy(&value, data.data() + i * sizeof value, sizeof value);  // of any alignment
    if (!std::in_range<std::int32_t>(value) || value < 0) {
      const auto length = static_cast<std::size_t>(tokens.length);
      fail(where, ": token id ", +value, " at [", i / length, ", ", i % length, "] is not in 0 .. 2147483647");
    }
    tokens.ids.push_back(static_cast<std::int32_t>(value));
  }
}

Tokens from_safetensors(const std::filesystem::path& path) {
  const SafetensorsFile file(path);
  const TensorView& tensor = file.at("input_ids");
  const std::string where = path.string() + ": tensor 'input_ids'";
  if (tensor.dtype != Dtype::i32 && tensor.dtype != Dtype::i64) {
    fail(where, ": expected token ids as I32 or I64, found ", tensor.describe());
  }
  Tokens tokens = shaped(tensor.shape, where);
  const std::span data(tensor.data, tensor.bytes);
  if (tensor.dtype == Dtype::i32) append_ids<std::int32_t>(data, tokens, where);
  if (tensor.dtype == Dtype::i64) append_ids<std::int64_t>(data, tokens, where);
  return tokens;
}

/// An integer type of NumPy: how a header spells it, and how its elements become ids.
struct NumpyType {
  std::string_view descr;
  std::size_t bytes;
  void (*append)(std::span<const std::byte>, Tokens&, const std::string&);
};

constexpr std::array<NumpyType, 8> numpy_types = {{{"|i1", 1, append_ids<std::int8_t>},
                                                   {"|u1", 1, append_ids<std::uint8_t>},
                                                   {"<i2", 2, append_ids<std::int16_t>},
                                                   {"<u2", 2, append_ids<std::uint16_t>},
                                                   {"<i4", 4, append_ids<std::int32_t>},
                                                   {"<u4", 4, append_ids<std::uint32_t>},
                                                   {"<i8", 8, append_ids<std::int64_t>},
                                                   {"<u8", 8, append_ids<std::uint64_t>}}};

/// The header of an .npy file: a Python dict of three entries in any order, such as
/// {'descr': '<i4', 'fortran_order': False, 'shape': (2, 3), }
class NumpyHeader {
 public:
  NumpyHeader(std::string_view text, const std::string& where) : text_(text), where_(where) {
    expect("{");
    while (!accept("}")) {
      const std::string_view key = string();
      expect(":");
      if (key == "descr" && descr.empty()) {
        descr = string();
      } else if (key == "fortran_order" && !has_order_) {
        has_order_ = true;
        fortran_order = accept("True");
        if (!fortran_order) expect("False");
      } else if (key == "shape" && !has_shape_) {
        has_shape_ = true;
        read_shape();
      } else {
        fail(where_, ": .npy header: unexpected or repeated key ", in_quotes(key));
      }
      if (!accept(",")) {
        expect("}");
        break;
      }
    }
    if (!rest().empty()) wrong("nothing more");
    if (descr.empty() || !has_order_ || !has_shape_) {
      fail(where_, ": .npy header: expected 'descr', 'fortran_order' and 'shape', found ", in_quotes(text_));
    }
  }

  std::string_view descr;
  bool fortran_order = false;
  std::vector<std::int64_t> shape;

 private:
  std::string_view rest() {
    position_ = std::min(text_.find_first_not_of(" \n", position_), text_.size());
    return text_.substr(position_);
  }

  [[noreturn]] void wrong(std::string_view expected) {
    fail(where_, ": .npy header: expected ", expected, ", found ", in_quotes(rest()));
  }

  bool accept(std::string_view word) {
    if (!rest().starts_with(word)) return false;
    position_ += word.size();
    return true;
  }

  void expect(std::string_view word) {
    if (!accept(word)) wrong(in_quotes(word));
  }

  std::string_view string() {
    const std::string_view quote = rest().starts_with('"') ? "\"" : "'";
    if (!accept(quote)) wrong("a string (arrays with named fields hold no token ids)");
    const std::string_view body = text_.substr(position_, text_.find(quote, position_) - position_);
    position_ += body.size();
    expect(quote);
    return body;
  }

  void read_shape() {
    expect("(");
    while (!accept(")")) {
      const std::string_view digits = rest();
      std::int64_t size = 0;
      const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), size);
      if (error != std::errc() || size < 0) wrong("a dimension from 0 to 2^63 - 1");
      position_ += static_cast<std::size_t>(end - digits.data());
      shape.push_back(size);
      if (!accept(",")) {
        expect(")");
        break;
      }
    }
  }

  std::string_view text_;
  std::string where_;
  std::size_t position_ = 0;
  bool has_order_ = false;
  bool has_shape_ = false;
};

Tokens from_npy(const std::filesystem::path& path) {
  const std::string where = path.string();
  const MappedFile file(path);
  const std::string_view all = as_text(file.bytes());
  if (!all.starts_with("\x93NUMPY"))
    fail(where, ": expected an .npy file, found the beginning ", in_quotes(all.substr(0, 6)));
  if (all.size() < 8) fail(where, ": its .npy header is cut after ", all.size(), " bytes");
  const int version = static_cast<unsigned char>(all[6]);
  if (version < 1 || version > 3 || all[7] != 0) {
    fail(where, ": expected .npy version 1.0, 2.0 or 3.0, found ", version, ".", +static_cast<unsigned char>(all[7]));
  }
  std::uint32_t header_size = 0;
  const std::size_t before_header = version == 1 ? 10 : 12;
  if (all.size() < before_header) fail(where, ": its .npy header is cut after ", all.size(), " bytes");
  std::memcpy(&header_size, all.data() + 8, before_header - 8);
  if (header_size > all.size() - before_header) {
    fail(where, ": its .npy header should take ", header_size, " bytes, but only ", all.size() - before_header,
         " follow its length");
  }
  const NumpyHeader header(all.substr(before_header, header_size), where);

  const auto type = std::find_if(numpy_types.begin(), numpy_types.end(),
                                 [&](const NumpyType& candidate) { return candidate.descr == header.descr; });
  if (type == numpy_types.end()) {
    fail(where, ": expected token ids of a little-endian integer type, found ", in_quotes(header.descr),
         header.descr.starts_with('>') ? " (big-endian)" : "");
  }
  if (header.fortran_order) fail(where, ": expected an array in C order, found Fortran order");
  Tokens tokens = shaped(header.shape, where);
  const std::span<const std::byte> data = file.bytes().subspan(before_header + header_size);
  std::int64_t bytes = static_cast<std::int64_t>(type->bytes);
  if (__builtin_mul_overflow(bytes, tokens.sequences, &bytes) || __builtin_mul_overflow(bytes, tokens.length, &bytes) ||
      static_cast<std::uint64_t>(bytes) != data.size()) {
    fail(where, ": ", tokens.sequences, " x ", tokens.length, " ids of ", type->bytes, " bytes do not fit the ",
         data.size(), " bytes of data (truncated, or too long)");
  }
  type->append(data, tokens, where);
  return tokens;
}

Tokens from_text(const std::filesystem::path& path) {
  constexpr std::string_view space = " \t\r\n\v\f";
  const std::string where = path.string();
  const MappedFile file(path);
  const std::string_view text = as_text(file.bytes());
  Tokens tokens;
  std::size_t line = 1;
  std::size_t begin = 0;
  for (std::size_t end = 0; (begin = text.find_first_not_of(space, end)) != text.npos;) {
    const std::string_view gap = text.substr(end, begin - end);
    line += static_cast<std::size_t>(std::count(gap.begin(), gap.end(), '\n'));
    end = std::min(text.find_first_of(space, begin), text.size());
    const std::string_view word = text.substr(begin, end - begin);
    std::int32_t id = 0;
    const auto [stop, error] = std::from_chars(word.data(), word.data() + word.size(), id);
    if (error != std::errc() || stop != word.data() + word.size() || word[0] == '-') {
      fail(where, ": line ", line, ", id ", tokens.ids.size(),
           " from 0: expected a token id in 0 .. 2147483647, found ", in_quotes(word));
    }
    tokens.ids.push_back(id);
  }
  if (tokens.ids.empty()) fail(where, ": holds no token ids");
  tokens.sequences = 1;
  tokens.length = static_cast<std::int64_t>(tokens.ids.size());
  return tokens;
}

}  // namespace

Tokens read_tokens(const std::filesystem::path& path) {
  if (path.extension() == ".safetensors") return from_safetensors(path);
  if (path.extension() == ".npy") return from_npy(path);
  return from_text(path);
}

}  // namespace replayssm
