#include "core/tokens.h"

#include <gtest/gtest.h>

#include "tests/core/files.h"

namespace replayssm {
namespace {

using Ids = std::vector<std::int32_t>;
constexpr std::int32_t largest = 2147483647;

class TokensTest : public FilesTest {
 protected:
  void expect_tokens(const fs::path& path, std::int64_t sequences, std::int64_t length, const Ids& ids) const {
    const Tokens tokens = read_tokens(path);
    EXPECT_EQ(tokens.sequences, sequences);
    EXPECT_EQ(tokens.length, length);
    EXPECT_EQ(tokens.ids, ids);
  }

  void expect_refused(const fs::path& path, std::vector<string> parts) const {
    parts.push_back(path.string());
    expect_error([&] { read_tokens(path); }, parts);
  }
};
class TokensText : public TokensTest {};
class TokensSafetensors : public TokensTest {};
class TokensNpy : public TokensTest {};

string codes(const std::vector<std::uint64_t>& values, int bytes) {
  string data;
  for (const std::uint64_t value : values) data += little_endian(value, bytes);
  return data;
}

// ---- text

TEST_F(TokensText, IdsSeparatedByAnyWhiteSpace) {
  expect_tokens(write("a.txt", "1 2 3"), 1, 3, {1, 2, 3});
  expect_tokens(write("b.ids", "\n\t 0\r\n007  2147483647\v5\f6\n\n"), 1, 5, {0, 7, largest, 5, 6});
  expect_tokens(write("no_extension", "42"), 1, 1, {42});
}

TEST_F(TokensText, NoIds) {
  for (const char* text : {"", " ", "\n\r\n\t"}) expect_refused(write("a.txt", text), {"no token ids"});
}

TEST_F(TokensText, BadIdsAreNamedWithTheirPlace) {
  const std::vector<std::pair<string, string>> words = {
      {"-1", "'-1'"},
      {"-0", "'-0'"},
      {"+3", "'+3'"},
      {"2147483648", "'2147483648'"},
      {"1.0", "'1.0'"},
      {"99999999999999999999", "'99999999999999999999'"},
      {"1e3", "'1e3'"},
      {"0x10", "'0x10'"},
      {"12,", "'12,'"},
      {"[1", "'[1'"},
      {"word", "'word'"},
      {"\xef\xbb\xbf\x31", "'\\xef\\xbb\\xbf1'"},
      {string("1\0", 2), "'1\\x00'"},
      {string(1000, '9'), string(100, '9') + "...'"},
  };
  for (const auto& [word, shown] : words) {
    expect_refused(write("a.txt", "5 6\n7\n\n" + word + " 8\n"), {"line 4", "id 3 from 0", shown, "0 .. 2147483647"});
    expect_refused(write("a.txt", word), {"line 1", "id 0 from 0", shown});
  }
}

TEST_F(TokensText, NotAFile) {
  expect_refused(folder_ / "absent.txt", {"No such file"});
  expect_refused(folder_, {"directory"});
}

// ---- safetensors

TEST_F(TokensSafetensors, OneOrMoreSequences) {
  const auto file = [&](const string& dtype, const string& shape, const string& data) {
    return write("a.safetensors", file_of(object({entry("input_ids", dtype, shape, 0, data.size()),
                                                  entry("logits", "F32", "[0]", data.size(), data.size())}),
                                          data));
  };
  expect_tokens(file("I32", "[3]", codes({1, 2, 2147483647}, 4)), 1, 3, {1, 2, largest});
  expect_tokens(file("I64", "[3]", codes({1, 2, 2147483647}, 8)), 1, 3, {1, 2, largest});
  expect_tokens(file("I32", "[2,3]", codes({1, 2, 3, 4, 5, 6}, 4)), 2, 3, {1, 2, 3, 4, 5, 6});
  expect_tokens(file("I64", "[3,1]", codes({1, 2, 3}, 8)), 3, 1, {1, 2, 3});

  expect_refused(file("I64", "[2,2]", codes({1, 2, 3, 2147483648}, 8)), {"'input_ids'", "2147483648", "[1, 1]"});
  expect_refused(file("I64", "[2,2]", codes({1, 2, ~0ull, 4}, 8)), {"'input_ids'", "id -1", "[1, 0]"});
  expect_refused(file("I32", "[3]", codes({1, 0x80000000, 4}, 4)), {"'input_ids'", "-2147483648", "[0, 1]"});
  // truncated to 32 bits, this would be 1
  expect_refused(file("I64", "[1]", codes({(1ull << 32) + 1}, 8)), {"'input_ids'", "4294967297", "[0, 0]"});
  expect_refused(file("F32", "[2]", codes({1, 2}, 4)), {"'input_ids'", "I32 or I64", "F32 [2]"});
  expect_refused(file("I16", "[2]", codes({1, 2}, 2)), {"'input_ids'", "I32 or I64", "I16 [2]"});
  expect_refused(file("I32", "[]", codes({1}, 4)), {"'input_ids'", "0 dimensions"});
  expect_refused(file("I32", "[1,1,2]", codes({1, 2}, 4)), {"'input_ids'", "3 dimensions"});
  for (const char* shape : {"[0]", "[0,3]", "[3,0]"}) expect_refused(file("I32", shape, ""), {"no token ids"});
}

TEST_F(TokensSafetensors, WithoutInputIds) {
  const string header = object({entry("input_id", "I32", "[1]", 0, 4)});
  expect_refused(write("a.safetensors", file_of(header, "1234")),
                 {"no tensor 'input_ids'", "similar names: 'input_id'"});
  expect_refused(write("b.safetensors", ""), {"found 0 bytes"});
}

// ---- .npy

string magic(int version) { return string("\x93NUMPY").append({static_cast<char>(version), '\0'}); }

/// As NumPy writes it: padded with spaces and a newline, so that the data begin at a multiple of 64.
string npy(const string& dict, const string& data, int version = 1) {
  const std::size_t before = version == 1 ? 10 : 12;
  const std::size_t total = (before + dict.size() + 1 + 63) / 64 * 64;
  const string header = dict + string(total - before - dict.size() - 1, ' ') + "\n";
  string file = magic(version);
  file.append(little_endian(header.size(), version == 1 ? 2 : 4));
  return file.append(header).append(data);
}

string dict(const string& descr, const string& shape, const string& fortran = "False") {
  return "{'descr': '" + descr + "', 'fortran_order': " + fortran + ", 'shape': " + shape + ", }";
}

// Byte for byte what numpy.lib.format.write_array wrote in each version.
TEST_F(TokensNpy, WrittenByNumpy) {
  const string spaces(58, ' ');
  expect_tokens(
      write("1.npy", magic(1) + "v" + string(1, '\0') + "{'descr': '<i4', 'fortran_order': False, 'shape': (2, 3), }" +
                         spaces + "\n" + codes({1, 2, 3, 4, 5, 70000}, 4)),
      2, 3, {1, 2, 3, 4, 5, 70000});
  expect_tokens(
      write("2.npy", magic(2) + "t" + string(3, '\0') + "{'descr': '<u2', 'fortran_order': False, 'shape': (2,), }" +
                         spaces + "\n" + codes({7, 8}, 2)),
      1, 2, {7, 8});
  expect_tokens(
      write("3.npy", magic(3) + "t" + string(3, '\0') + "{'descr': '<i8', 'fortran_order': False, 'shape': (1,), }" +
                         spaces + "\n" + codes({9}, 8)),
      1, 1, {9});
}

TEST_F(TokensNpy, EveryIntegerType) {
  const std::vector<std::pair<string, int>> types = {{"|i1", 1}, {"|u1", 1}, {"<i2", 2}, {"<u2", 2},
                                                     {"<i4", 4}, {"<u4", 4}, {"<i8", 8}, {"<u8", 8}};
  for (const int version : {1, 2, 3}) {
    for (const auto& [descr, bytes] : types) {
      SCOPED_TRACE(descr);
      expect_tokens(write("a.npy", npy(dict(descr, "(2, 2)"), codes({1, 2, 3, 127}, bytes), version)), 2, 2,
                    {1, 2, 3, 127});
    }
  }
}

// The code with only the highest bit set, in every type.
TEST_F(TokensNpy, IdsThatNeedTheHighestBit) {
  const auto file = [&](const string& descr, int bytes) {
    return write("a.npy", npy(dict(descr, "(1, 2)"), codes({5, std::uint64_t{1} << (8 * bytes - 1)}, bytes)));
  };
  expect_tokens(file("|u1", 1), 1, 2, {5, 128});
  expect_tokens(file("<u2", 2), 1, 2, {5, 32768});
  expect_refused(file("<u4", 4), {"id 2147483648 at [0, 1]"});
  expect_refused(file("<u8", 8), {"id 9223372036854775808 at [0, 1]"});
  expect_refused(file("|i1", 1), {"id -128 at [0, 1]"});
  expect_refused(file("<i2", 2), {"id -32768 at [0, 1]"});
  expect_refused(file("<i4", 4), {"id -2147483648 at [0, 1]"});
  expect_refused(file("<i8", 8), {"id -9223372036854775808 at [0, 1]"});
}

TEST_F(TokensNpy, HeadersSpeltDifferently) {
  const std::vector<string> headers = {R"({"shape":(2,3),"descr":"<i4","fortran_order":False})",
                                       "{'fortran_order':False , 'shape' : ( 2 , 3 , ) , 'descr' : '<i4' , }"};
  for (const string& header : headers) {
    SCOPED_TRACE(header);
    expect_tokens(write("a.npy", npy(header, codes({1, 2, 3, 4, 5, 6}, 4))), 2, 3, {1, 2, 3, 4, 5, 6});
  }
}

TEST_F(TokensNpy, Refused) {
  const string data = codes({1, 2, 3, 4}, 4);
  const std::vector<std::pair<string, std::vector<string>>> refusals = {
      {dict(">i4", "(2, 2)"), {"little-endian", "'>i4'", "big-endian"}},
      {dict("<f4", "(2, 2)"), {"integer type", "'<f4'"}},
      {dict("|b1", "(4, 4)"), {"integer type", "'|b1'"}},
      {dict("<U4", "(1,)"), {"integer type", "'<U4'"}},
      {dict("|O", "(2,)"), {"integer type", "'|O'"}},
      {dict("<i4", "(2, 2)", "True"), {"C order", "Fortran order"}},
      {dict("<i4", "(2, 2)", "true"), {"'False'", "true"}},
      {dict("<i4", "()"), {"0 dimensions"}},
      {dict("<i4", "(1, 2, 2)"), {"3 dimensions"}},
      {dict("<i4", "(0,)"), {"no token ids"}},
      {dict("<i4", "(0, 4)"), {"no token ids"}},
      {dict("<i4", "(4, 0)"), {"no token ids"}},
      {dict("<i4", "(5,)"), {"1 x 5", "16 bytes"}},
      {dict("<i4", "(3,)"), {"1 x 3", "16 bytes"}},
      {dict("<i4", "(-4,)"), {"dimension", "-4"}},
      {dict("<i4", "(9223372036854775808,)"), {"dimension", "9223372036854775808"}},
      // times 4 bytes, these are 16 modulo 2^64
      {dict("<i4", "(4611686018427387908,)"), {"1 x 4611686018427387908", "16 bytes"}},
      {dict("<i4", "(4, 4611686018427387905)"), {"4 x 4611686018427387905", "16 bytes"}},
      {dict("<i4", "4"), {"expected '('"}},
      {dict("<i4", "(2 2)"), {"expected ')'"}},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (4", {"expected ')'"}},
      {"{'descr': [('a', '<i4')], 'fortran_order': False, 'shape': (4,), }", {"expected a string"}},
      {"{'descr': '<i4', 'shape': (4,), }", {"expected 'descr', 'fortran_order' and 'shape'"}},
      {"{'fortran_order': False, 'shape': (4,), }", {"expected 'descr', 'fortran_order' and 'shape'"}},
      {"{'descr': '<i4', 'fortran_order': False, }", {"expected 'descr', 'fortran_order' and 'shape'"}},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (4,), 'shape': (2,), }", {"repeated key 'shape'"}},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (4,), 'more': 1, }", {"key 'more'"}},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (4,), } {", {"nothing more"}},
      {"{'descr': '<i4", {"expected '''"}},
      {"{'descr' '<i4'", {"expected ':'"}},
      {"", {"expected '{'"}},
  };
  for (const auto& [header, parts] : refusals) {
    SCOPED_TRACE(header);
    expect_refused(write("a.npy", npy(header, data)), parts);
  }
  expect_refused(write("a.npy", npy(dict("<i4", "(2, 2)"), data, 4)), {"version", "4.0"});
  expect_refused(write("a.npy", npy(dict("<i4", "(2, 2)"), data, 0)), {"version", "0.0"});
  expect_refused(write("a.npy", "1 2 3"), {".npy", "'1 2 3'"});
  expect_refused(write("a.npy", ""), {".npy", "''"});
}

TEST_F(TokensNpy, EveryTruncationIsRefused) {
  for (const int version : {1, 2}) {
    const string whole = npy(dict("<u2", "(2, 2)"), codes({1, 2, 3, 4}, 2), version);
    expect_tokens(write("a.npy", whole), 2, 2, {1, 2, 3, 4});
    for (std::size_t size = 0; size < whole.size(); ++size) expect_refused(write("a.npy", whole.substr(0, size)), {});
    expect_refused(write("a.npy", whole + "x"), {"2 x 2", "9 bytes"});
  }
  // A header length of nearly 2^32 is not taken on trust.
  expect_refused(write("a.npy", magic(2) + little_endian(0xfffffffe, 4) + "{}"), {"4294967294 bytes", "only 2"});
}

}  // namespace
}  // namespace replayssm
