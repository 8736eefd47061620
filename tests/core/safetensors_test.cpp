#include "core/safetensors.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>

#include "core/error.h"
#include "tests/core/files.h"

namespace replayssm {
namespace {

class SafetensorsHeader : public FilesTest {};
class SafetensorsData : public FilesTest {};

template <class Real>
std::vector<Real> values(const TensorView& tensor) {
  std::vector<Real> out(static_cast<std::size_t>(tensor.elements()));
  widen(tensor, 0, out.size(), out.data());
  return out;
}

// ---- lengths

TEST_F(SafetensorsHeader, FilesTooShortForALength) {
  for (const std::size_t size : {0, 1, 7}) {
    const fs::path path = write("short.safetensors", string(size, '\x01'));
    expect_error([&] { SafetensorsFile file(path); }, {path.string(), "8 bytes", "found " + std::to_string(size)});
  }
}

TEST_F(SafetensorsHeader, LengthFieldBeyondTheFile) {
  const string body = object({entry("a", "F32", "[1]", 0, 4)}) + "data";
  // The file has 8 + body.size() bytes: its size - 7 is one more than what follows the field. Had memory been taken for
  // the others, they would end in bad_alloc or length_error, which are no Error.
  for (const std::uint64_t length :
       {body.size() + 8 - 7, std::uint64_t{1} << 32, std::uint64_t{1} << 63, (std::uint64_t{1} << 63) - 1,
        std::numeric_limits<std::uint64_t>::max(), std::numeric_limits<std::uint64_t>::max() - 7}) {
    const fs::path path = write("long.safetensors", little_endian(length) + body);
    expect_error([&] { SafetensorsFile file(path); }, {path.string(), "header length", std::to_string(length),
                                                       std::to_string(body.size()), std::to_string(body.size() + 8)});
  }
}

TEST_F(SafetensorsHeader, EveryTruncationIsRefused) {
  const string whole =
      file_of(object({entry("a", "F32", "[2]", 0, 8), entry("b", "U8", "[3]", 8, 11)}) + "  ", "12345678abc");
  EXPECT_EQ(SafetensorsFile(write("whole.safetensors", whole)).tensors().size(), 2u);
  for (std::size_t size = 0; size < whole.size(); ++size) {
    const fs::path path = write("cut.safetensors", whole.substr(0, size));
    EXPECT_THROW(SafetensorsFile file(path), Error) << "cut to " << size << " of " << whole.size();
  }
  expect_error([&] { SafetensorsFile file(write("cut.safetensors", whole.substr(0, whole.size() - 1))); },
               {"cut.safetensors", "'b'", "byte 11", "10 bytes"});
  expect_error([&] { SafetensorsFile file(write("more.safetensors", whole + "x")); },
               {"more.safetensors", "take 11 bytes", "holds 12 bytes"});
}

TEST_F(SafetensorsHeader, LengthsNearReadSizes) {
  for (const std::size_t size : {4096, 65536, 99999, 100000, 100001, 1 << 20}) {
    const string short_header = object({entry("a", "F32", "[1]", 0, 4)});
    // Padded after the object, as the format allows, and inside it, where every byte of the header counts.
    const string name(size - entry("", "F32", "[1]", 0, 4).size() - 2, 'n');
    for (const string& header :
         {short_header + string(size - short_header.size(), ' '), object({entry(name, "F32", "[1]", 0, 4)})}) {
      ASSERT_EQ(header.size(), size);
      const SafetensorsFile file(write("padded.safetensors", file_of(header, little_endian(0x40490fdb, 4))));
      ASSERT_EQ(file.tensors().size(), 1u);
      EXPECT_EQ(values<float>(file.tensors()[0]), std::vector<float>{std::bit_cast<float>(0x40490fdbu)});
    }
  }
}

TEST_F(SafetensorsHeader, LargeHeaderLoadsUnlessTheLimitSaysNo) {
  constexpr std::size_t size = 132095296;
  const fs::path path = folder_ / "large.safetensors";
  {
    const string start = object({entry("a", "U8", "[2]", 0, 2)});
    std::ofstream out(path, std::ios::binary);
    out << little_endian(size) << start;
    const string spaces(1 << 20, ' ');
    for (std::size_t left = size - start.size(); left > 0; left -= std::min(left, spaces.size())) {
      out.write(spaces.data(), static_cast<std::streamsize>(std::min(left, spaces.size())));
    }
    out << "\x05\x07";
  }
  EXPECT_EQ(values<double>(SafetensorsFile(path).at("a")), (std::vector<double>{5, 7}));
  EXPECT_EQ(values<double>(SafetensorsFile(path, size).at("a")), (std::vector<double>{5, 7}));
  expect_error([&] { SafetensorsFile file(path, size - 1); },
               {path.string(), "header length", "132095296", "limit of 132095295"});
}

// ---- what the header says

TEST_F(SafetensorsHeader, NoTensors) {
  EXPECT_TRUE(SafetensorsFile(write("a.safetensors", file_of("{}"))).tensors().empty());
  const SafetensorsFile file(write("b.safetensors", file_of(R"({"__metadata__":{"format":"pt","n":"\u00e9"}})")));
  EXPECT_TRUE(file.tensors().empty());
  EXPECT_EQ(file.metadata(), (std::map<string, string>{{"format", "pt"}, {"n", "\xc3\xa9"}}));
  expect_error([&] { file.at("__metadata__"); }, {"b.safetensors", "no tensor '__metadata__'", "among its 0"});
}

TEST_F(SafetensorsHeader, TensorsInTheOrderOfTheirData) {
  const string header = object({entry("a", "U8", "[1]", 3, 4), "\"__metadata__\":{}", entry("b", "U8", "[3]", 0, 3),
                                entry("e", "F32", "[0,3]", 3, 3), entry("d", "F32", "[0]", 3, 3)});
  SafetensorsFile opened(write("a.safetensors", file_of(header, "\x01\x02\x03\x04")));
  const SafetensorsFile file = std::move(opened);  // views stay valid when the file moves
  std::vector<string> names;
  for (const TensorView& tensor : file.tensors()) names.push_back(tensor.name);
  EXPECT_EQ(names, (std::vector<string>{"b", "d", "e", "a"}));
  EXPECT_EQ(values<float>(file.at("b")), (std::vector<float>{1, 2, 3}));
  EXPECT_EQ(values<float>(file.at("a")), (std::vector<float>{4}));
  EXPECT_EQ(file.find("c"), nullptr);
}

struct Refusal {
  string header;
  std::vector<string> parts;
};

// Each header is in a file with 8 bytes of data.
TEST_F(SafetensorsHeader, Malformed) {
  const string a = entry("a", "F32", "[2]", 0, 8);
  const std::vector<Refusal> refusals = {
      // not a JSON object
      {"", {"begin with '{'"}},
      {"[]", {"begin with '{'"}},
      {" {}", {"begin with '{'"}},
      {"\xef\xbb\xbf{}", {"begin with '{'", "\\xef"}},
      {"{", {"JSON", "from byte 2"}},
      {"{" + a, {"JSON"}},
      {"{" + a + "}}", {"JSON"}},
      {"{" + a + ",}", {"JSON"}},
      {"{" + a + "}\n", {}},  // white space is JSON: loads
      {"{" + a + "}" + string(1, '\0'), {"NUL"}},
      {"{\"\xff\":1}", {"UTF-8", "from byte 3"}},
      {"{\"\xc3\":1}", {"UTF-8"}},
      {string(100000, '{'), {"JSON"}},
      {"{\"a\":" + string(100000, '['), {"JSON"}},
      {R"({"a":1e999})", {"number"}},
      // keys
      {"{" + a + "," + a + "}", {"'a'", "twice"}},
      {R"({"a":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}})", {"'dtype'", "twice"}},
      {R"({"__metadata__":{"k":"1","k":"2"},)" + a + "}", {"'k'", "twice"}},
      {R"({"a":{"shape":[2],"data_offsets":[0,8]}})", {"'a'", "no 'dtype'"}},
      {R"({"a":{"dtype":"F32","data_offsets":[0,8]}})", {"'a'", "no 'shape'"}},
      {R"({"a":{"dtype":"F32","shape":[2]}})", {"'a'", "no 'data_offsets'"}},
      {R"({"a":[]})", {"'a'", "object", "array"}},
      {R"({"a":null})", {"'a'", "object", "null"}},
      // metadata
      {R"({"__metadata__":[]})", {"__metadata__", "array"}},
      {R"({"__metadata__":{"k":1}})", {"__metadata__", "'k'", "number"}},
      // dtype
      {object({entry("a", "F31", "[2]", 0, 8)}), {"'a'", "unknown dtype 'F31'"}},
      {object({entry("a", "f32", "[2]", 0, 8)}), {"'a'", "unknown dtype 'f32'"}},
      {object({entry("a", "F32\\n", "[2]", 0, 8)}), {"'a'", "unknown dtype 'F32\\x0a'"}},
      {R"({"a":{"dtype":1,"shape":[2],"data_offsets":[0,8]}})", {"'a'", "'dtype'", "string", "number"}},
      // shape
      {object({entry("a", "F32", "2", 0, 8)}), {"'a'", "'shape'", "array", "number"}},
      {object({entry("a", "F32", "[-2]", 0, 8)}), {"'a'", "'shape'", "-2"}},
      {object({entry("a", "F32", "[-1,-2]", 0, 8)}), {"'a'", "'shape'", "-1"}},
      {object({entry("a", "F32", "[2.0]", 0, 8)}), {"'a'", "'shape'", "2.0"}},
      {object({entry("a", "F32", "[\\\"2\\\"]", 0, 8)}), {"JSON"}},
      {object({entry("a", "F32", "[true]", 0, 8)}), {"'a'", "'shape'", "true"}},
      {object({entry("a", "F32", "[9223372036854775808]", 0, 8)}), {"'a'", "'shape'", "9223372036854775808"}},
      {object({entry("a", "F32", "[18446744073709551616]", 0, 8)}), {"'a'", "'shape'"}},
      {object({entry("a", "F32", "[4294967296,4294967296]", 0, 8)}), {"'a'", "64-bit", "4294967296"}},
      // 2^61 + 2 elements of 32 bits: the byte count wraps to 8 in 64 bits
      {object({entry("a", "F32", "[4611686018427387906]", 0, 8)}), {"'a'", "64-bit", "4611686018427387906"}},
      {object({entry("a", "F32", "[3]", 0, 8)}), {"'a'", "F32 [3]", "12 bytes", "8"}},
      {object({entry("a", "F32", "[]", 0, 8)}), {"'a'", "F32 []", "4 bytes", "8"}},
      {object({entry("a", "F32", "[0]", 0, 8)}), {"'a'", "F32 [0]", "0 bytes", "8"}},
      {object({entry("a", "F4", "[15]", 0, 8)}), {"'a'", "F4 [15]", "60 bits"}},
      {object({entry("a", "F4", "[]", 0, 1)}), {"'a'", "F4 []", "4 bits"}},
      {object({entry("a", "F6_E2M3", "[10]", 0, 8)}), {"'a'", "F6_E2M3 [10]", "60 bits"}},
      // offsets
      {object({entry("a", "F32", "[2]", 8, 0)}), {"'a'", "end before they begin", "[8, 0]"}},
      {object({entry("a", "F32", "[2]", 1, 9)}), {"'a'", "byte 9", "8 bytes of data"}},
      {object({entry("a", "F32", "[2]", std::uint64_t{1} << 62, (std::uint64_t{1} << 62) + 8)}), {"'a'", "8 bytes"}},
      {object({entry("a", "F32", "[2]", ~std::uint64_t{7}, 0)}), {"'a'", "'data_offsets'", "18446744073709551608"}},
      {object({entry("a", "F32", "[0]", 9, 9)}), {"'a'", "byte 9", "8 bytes of data"}},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4,8]}})", {"'a'", "2 numbers", "3"}},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8]}})", {"'a'", "2 numbers", "1"}},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}})", {"'a'", "'data_offsets'", "-8"}},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":8}})", {"'a'", "'data_offsets'", "array"}},
      // cover
      {"{}", {"take 0 bytes", "holds 8"}},
      {object({entry("a", "F32", "[1]", 0, 4)}), {"take 4 bytes", "holds 8"}},
      {object({entry("a", "F32", "[1]", 4, 8)}), {"'a'", "hole", "byte 4", "expected 0"}},
      {object({entry("a", "U8", "[2]", 0, 2), entry("b", "U8", "[5]", 3, 8)}),
       {"'b'", "hole", "byte 3", "expected 2", "'a'"}},
      {object({entry("a", "U8", "[5]", 0, 5), entry("b", "U8", "[4]", 4, 8)}),
       {"'b'", "overlap", "byte 4", "expected 5", "'a'"}},
      {object({entry("a", "U8", "[8]", 0, 8), entry("b", "U8", "[8]", 0, 8)}), {"'b'", "overlap", "'a'"}},
      {object({entry("a", "U8", "[8]", 0, 8), entry("b", "U8", "[0]", 4, 4)}), {"'b'", "overlap"}},
  };
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(refusal.header.substr(0, 200));
    const fs::path path = write("bad.safetensors", file_of(refusal.header, "12345678"));
    if (refusal.parts.empty()) {
      EXPECT_NO_THROW(SafetensorsFile file(path));
    } else {
      expect_error([&] { SafetensorsFile file(path); }, {path.string()});
      expect_error([&] { SafetensorsFile file(path); }, refusal.parts);
    }
  }
}

TEST_F(SafetensorsHeader, NamesAreOneLineInMessages) {
  const string header = object({entry("a\\nb", "F32", "[3]", 0, 4)});
  expect_error([&] { SafetensorsFile file(write("a.safetensors", file_of(header, "1234"))); }, {"'a\\x0ab'"});
  EXPECT_EQ(in_quotes("caf\xc3\xa9\t"), "'caf\\xc3\\xa9\\x09'");
  EXPECT_EQ(in_quotes(string(100, 'x')), "'" + string(100, 'x') + "'");
  EXPECT_EQ(in_quotes(string(101, 'x')), "'" + string(100, 'x') + "...'");
}

TEST_F(SafetensorsHeader, NotAFile) {
  expect_error([&] { SafetensorsFile file(folder_ / "absent.safetensors"); }, {"absent.safetensors", "No such file"});
  expect_error([&] { SafetensorsFile file{folder_}; }, {folder_.string(), "directory"});
  fs::create_symlink("nowhere", folder_ / "link.safetensors");
  expect_error([&] { SafetensorsFile file(folder_ / "link.safetensors"); }, {"link.safetensors", "No such file"});
  ASSERT_EQ(mkfifo((folder_ / "pipe.safetensors").c_str(), 0600), 0);
  expect_error([&] { SafetensorsFile file(folder_ / "pipe.safetensors"); }, {"pipe.safetensors", "regular file"});
}

// ---- data

TEST_F(SafetensorsData, ShapesAndBytesOfEveryDtype) {
  struct Row {
    const char* name;
    Dtype dtype;
    std::size_t bytes_of_2x8;
    bool decodes;
  };
  const std::vector<Row> rows = {
      {"BOOL", Dtype::boolean, 16, true},
      {"U8", Dtype::u8, 16, true},
      {"I8", Dtype::i8, 16, true},
      {"U16", Dtype::u16, 32, true},
      {"I16", Dtype::i16, 32, true},
      {"U32", Dtype::u32, 64, true},
      {"I32", Dtype::i32, 64, true},
      {"U64", Dtype::u64, 128, true},
      {"I64", Dtype::i64, 128, true},
      {"F16", Dtype::f16, 32, true},
      {"BF16", Dtype::bf16, 32, true},
      {"F32", Dtype::f32, 64, true},
      {"F64", Dtype::f64, 128, true},
      {"C64", Dtype::c64, 128, false},
      {"F8_E4M3", Dtype::f8_e4m3, 16, false},
      {"F8_E5M2", Dtype::f8_e5m2, 16, false},
      {"F8_E8M0", Dtype::f8_e8m0, 16, false},
      {"F8_E4M3FNUZ", Dtype::f8_e4m3fnuz, 16, false},
      {"F8_E5M2FNUZ", Dtype::f8_e5m2fnuz, 16, false},
      {"F6_E2M3", Dtype::f6_e2m3, 12, false},
      {"F6_E3M2", Dtype::f6_e3m2, 12, false},
      {"F4", Dtype::f4, 8, false},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.name);
    string data;
    for (std::size_t i = 0; i < row.bytes_of_2x8; ++i) data += static_cast<char>(37 * i + 11);
    const fs::path path =
        write("a.safetensors", file_of(object({entry("w", row.name, "[2,8]", 0, data.size())}), data));
    const SafetensorsFile file(path);
    const TensorView& tensor = file.at("w");
    EXPECT_EQ(tensor.dtype, row.dtype);
    EXPECT_STREQ(dtype_name(tensor.dtype), row.name);
    EXPECT_EQ(tensor.shape, (std::vector<std::int64_t>{2, 8}));
    EXPECT_EQ(tensor.elements(), 16);
    EXPECT_EQ(tensor.describe(), string(row.name) + " [2, 8]");
    EXPECT_EQ(tensor.file, path.string());
    EXPECT_EQ(string(reinterpret_cast<const char*>(tensor.data), tensor.bytes), data);
    std::array<float, 16> out;
    if (row.decodes) {
      EXPECT_NO_THROW(widen(tensor, 0, 16, out.data()));
    } else {
      expect_error([&] { widen(tensor, 0, 16, out.data()); },
                   {path.string(), "'w'", string("dtype ") + row.name + " "});
    }
  }
}

TEST_F(SafetensorsData, ScalarAndEmptyTensors) {
  const SafetensorsFile file(
      write("a.safetensors", file_of(object({entry("scalar", "F32", "[]", 0, 4), entry("empty", "F32", "[0,3]", 4, 4),
                                             entry("wide", "F32", "[0,4611686018427387904]", 4, 4)}),
                                     little_endian(0x3fc00000, 4))));
  EXPECT_EQ(values<float>(file.at("scalar")), std::vector<float>{1.5f});
  EXPECT_EQ(file.at("scalar").describe(), "F32 []");
  EXPECT_EQ(file.at("empty").shape, (std::vector<std::int64_t>{0, 3}));
  EXPECT_EQ(file.at("empty").elements(), 0);
  EXPECT_TRUE(values<float>(file.at("empty")).empty());
  EXPECT_EQ(file.at("wide").elements(), 0);
}

TEST_F(SafetensorsData, AnyAlignmentGivesTheSameValues) {
  string data = little_endian(0x3fc0, 2) + little_endian(0x3e00, 2);
  for (int i = 0; i < 9; ++i) data += little_endian(std::bit_cast<std::uint32_t>(static_cast<float>(i) + 0.5f), 4);
  for (int i = 0; i < 9; ++i) data += little_endian(std::bit_cast<std::uint64_t>(i + 0.25), 8);
  data += little_endian(static_cast<std::uint64_t>(-3), 8);
  const string entries =
      object({entry("b", "BF16", "[1]", 0, 2), entry("h", "F16", "[1]", 2, 4), entry("f", "F32", "[9]", 4, 40),
              entry("d", "F64", "[9]", 40, 112), entry("i", "I64", "[1]", 112, 120)});
  std::vector<bool> seen(8, false);
  for (std::size_t pad = 0; pad < 8; ++pad) {
    const SafetensorsFile file(write("a.safetensors", file_of(entries + string(pad, ' '), data)));
    seen[reinterpret_cast<std::uintptr_t>(file.at("f").data) % 8] = true;
    EXPECT_EQ(values<double>(file.at("b")), std::vector<double>{1.5});
    EXPECT_EQ(values<double>(file.at("h")), std::vector<double>{1.5});
    EXPECT_EQ(values<double>(file.at("f")), (std::vector<double>{0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5}));
    EXPECT_EQ(values<float>(file.at("f")), (std::vector<float>{0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5}));
    EXPECT_EQ(values<double>(file.at("d")), (std::vector<double>{.25, 1.25, 2.25, 3.25, 4.25, 5.25, 6.25, 7.25, 8.25}));
    EXPECT_EQ(values<double>(file.at("i")), std::vector<double>{-3});
  }
  EXPECT_EQ(seen, std::vector<bool>(8, true)) << "every alignment should have been met";
}

/// The value of a code of a binary format with one sign bit, `exponent_bits` and `mantissa_bits`, from its definition.
double value_of_code(unsigned code, int exponent_bits, int mantissa_bits) {
  const int exponent = static_cast<int>(code >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = static_cast<int>(code) & ((1 << mantissa_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double sign = code >> (exponent_bits + mantissa_bits) & 1 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  }
  const int significand = exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits);
  return sign * std::ldexp(significand, std::max(exponent, 1) - bias - mantissa_bits);
}

TEST_F(SafetensorsData, EveryCodeOfBf16AndF16) {
  string data;
  for (unsigned code = 0; code < 65536; ++code) data += little_endian(code, 2);
  const SafetensorsFile file(write("a.safetensors", file_of(object({entry("BF16", "BF16", "[256,256]", 0, 131072),
                                                                    entry("F16", "F16", "[65536]", 131072, 262144)}),
                                                            data + data)));
  for (const auto& [name, exponent_bits, mantissa_bits] : {std::tuple{"BF16", 8, 7}, std::tuple{"F16", 5, 10}}) {
    const std::vector<double> doubles = values<double>(file.at(name));
    const std::vector<float> floats = values<float>(file.at(name));
    for (unsigned code = 0; code < 65536; ++code) {
      const double expected = value_of_code(code, exponent_bits, mantissa_bits);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(doubles[code]) && std::isnan(floats[code])) << name << " code " << code;
        continue;
      }
      ASSERT_EQ(doubles[code], expected) << name << " code " << code;
      ASSERT_EQ(static_cast<double>(floats[code]), expected) << name << " code " << code;
      ASSERT_EQ(std::signbit(doubles[code]), std::signbit(expected)) << name << " code " << code;
      ASSERT_EQ(std::signbit(floats[code]), std::signbit(expected)) << name << " code " << code;
    }
  }
}

TEST_F(SafetensorsData, WiderTypesAreExactOrRoundedOnce) {
  string data, header;
  const auto add = [&](const string& name, const string& dtype, std::vector<std::uint64_t> codes, int bytes) {
    const std::size_t begin = data.size();
    for (const std::uint64_t code : codes) data += little_endian(code, bytes);
    header +=
        (header.empty() ? "{" : ",") + entry(name, dtype, "[" + std::to_string(codes.size()) + "]", begin, data.size());
  };
  const auto code_of = [](double x) { return std::bit_cast<std::uint64_t>(x); };
  // 1 + 2^-24 is half way between floats, to even: 1. A little more: 1 + 2^-23. Beyond the largest float: infinity.
  add("F64", "F64", {code_of(1 + 0x1p-24), code_of(1 + 0x1p-24 + 0x1p-52), code_of(1e300), code_of(-0.0)}, 8);
  add("F32", "F32", {0x00000001, 0x7f7fffff, 0xff800000, 0x80000000}, 4);
  add("I64", "I64", {(1ull << 53) + 1, (1ull << 53) + 3, static_cast<std::uint64_t>(-1), 1ull << 63}, 8);
  add("U64", "U64", {~0ull, 1ull << 63}, 8);
  add("I32", "I32", {0x80000000, 0x7fffffff}, 4);
  add("U32", "U32", {0x80000000, 0xffffffff}, 4);
  add("I16", "I16", {0x8000, 0x7fff}, 2);
  add("U16", "U16", {0x8000, 0xffff}, 2);
  add("I8", "I8", {0x80, 0x7f}, 1);
  add("U8", "U8", {0x80, 0xff}, 1);
  add("BOOL", "BOOL", {0, 1, 255}, 1);
  const SafetensorsFile file(write("a.safetensors", file_of(header + "}", data)));
  constexpr float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(values<float>(file.at("F64")), (std::vector<float>{1, 1 + 0x1p-23f, infinity, 0}));
  EXPECT_TRUE(std::signbit(values<float>(file.at("F64"))[3]));
  EXPECT_EQ(values<double>(file.at("F64")), (std::vector<double>{1 + 0x1p-24, 1 + 0x1p-24 + 0x1p-52, 1e300, 0}));
  EXPECT_EQ(values<float>(file.at("F32")), (std::vector<float>{0x1p-149f, 0x1.fffffep127f, -infinity, 0}));
  EXPECT_EQ(values<double>(file.at("F32"))[0], 0x1p-149);
  EXPECT_TRUE(std::signbit(values<double>(file.at("F32"))[3]));
  EXPECT_EQ(values<double>(file.at("I64")), (std::vector<double>{0x1p53, 0x1p53 + 4, -1, -0x1p63}));
  EXPECT_EQ(values<double>(file.at("U64")), (std::vector<double>{0x1p64, 0x1p63}));
  EXPECT_EQ(values<double>(file.at("I32")), (std::vector<double>{-2147483648.0, 2147483647.0}));
  EXPECT_EQ(values<float>(file.at("I32")), (std::vector<float>{-2147483648.0f, 2147483648.0f}));
  EXPECT_EQ(values<double>(file.at("U32")), (std::vector<double>{2147483648.0, 4294967295.0}));
  EXPECT_EQ(values<float>(file.at("I16")), (std::vector<float>{-32768, 32767}));
  EXPECT_EQ(values<float>(file.at("U16")), (std::vector<float>{32768, 65535}));
  EXPECT_EQ(values<float>(file.at("I8")), (std::vector<float>{-128, 127}));
  EXPECT_EQ(values<float>(file.at("U8")), (std::vector<float>{128, 255}));
  EXPECT_EQ(values<float>(file.at("BOOL")), (std::vector<float>{0, 1, 1}));
}

TEST_F(SafetensorsData, RangesOfATensor) {
  string data;
  for (int i = 0; i < 40; ++i) data += little_endian(std::bit_cast<std::uint32_t>(static_cast<float>(i)) >> 16, 2);
  const SafetensorsFile file(write("a.safetensors", file_of(object({entry("w", "BF16", "[5,8]", 0, 80)}), data)));
  const TensorView& tensor = file.at("w");
  for (std::size_t begin = 0; begin <= 40; ++begin) {
    for (std::size_t count = 0; count <= 40 - begin; ++count) {
      std::vector<double> out(count + 1, -1);
      widen(tensor, begin, count, out.data());
      for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(out[i], static_cast<double>(begin + i));
      ASSERT_EQ(out[count], -1) << "written past the end";
    }
  }
  constexpr std::size_t huge = std::numeric_limits<std::size_t>::max();
  double out = 0;
  for (const auto& [begin, count] :
       {std::pair<std::size_t, std::size_t>{0, 41}, {40, 1}, {41, 0}, {1, huge}, {huge, 1}}) {
    expect_error([&] { widen(tensor, begin, count, &out); }, {"a.safetensors", "'w'", "BF16 [5, 8]", "40"});
  }
}

}  // namespace
}  // namespace replayssm
