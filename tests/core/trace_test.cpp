#include "core/trace.h"

#include <gtest/gtest.h>
#include <hdf5.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/format.h"
#include "tests/core/files.h"

namespace replayssm {
namespace {

class TraceTest : public FilesTest {
 protected:
  const string path_ = (folder_ / "run.h5").string();
};

string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

// The message is one line and holds all of `parts`.
void expect_error(const std::function<void()>& call, const std::vector<string>& parts) {
  const string message = message_of(call);
  for (const string& part : parts) EXPECT_NE(message.find(part), string::npos) << message << "\nlacks " << part;
  EXPECT_EQ(message.find('\n'), string::npos) << message;
}

// Runs `work` in a child process; how the child ended, as of waitpid().
int in_child(const std::function<void()>& work) {
  const pid_t child = fork();
  if (child == 0) {
    work();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

template <class T>
class TraceOf : public TraceTest {};
using Scalars = testing::Types<double, float, std::int64_t, std::int32_t, std::uint32_t, std::uint16_t, std::uint8_t>;
TYPED_TEST_SUITE(TraceOf, Scalars);

// Values of every bit pattern that a type has an interest in, NaN aside, which does not compare.
template <class T>
std::vector<T> samples(std::size_t count) {
  std::vector<T> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<T>(static_cast<std::uint32_t>(i * 2654435761u));
  const T extremes[] = {std::numeric_limits<T>::max(), std::numeric_limits<T>::lowest(), std::numeric_limits<T>::min(),
                        std::numeric_limits<T>::denorm_min(), std::numeric_limits<T>::infinity()};
  std::copy_n(extremes, std::min<std::size_t>(count, 5), values.begin());
  return values;
}

TYPED_TEST(TraceOf, ComesBackAsItWasWritten) {
  const std::vector<TraceShape> shapes = {{}, {1}, {5}, {2, 3}, {2, 3, 4}, {0}, {1, 0, 3}, {300, 1000}, {3, 2, 50000}};
  TraceWriter writer(this->path_);
  std::vector<std::vector<TypeParam>> all;
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    const auto size = std::accumulate(shapes[i].begin(), shapes[i].end(), std::int64_t{1}, std::multiplies<>());
    all.push_back(samples<TypeParam>(static_cast<std::size_t>(size)));
    writer.dataset("/some/group/" + std::to_string(i), all.back(), shapes[i]);
  }
  writer.finish();
  const TraceReader reader(this->path_);
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    const string name = "/some/group/" + std::to_string(i);
    EXPECT_EQ(reader.shape(name), shapes[i]);
    EXPECT_EQ(reader.type(name), trace_type<TypeParam>());
    const auto data = reader.read<TypeParam>(name);
    EXPECT_EQ(data.shape, shapes[i]);
    EXPECT_EQ(data.values, all[i]);
  }
}

TYPED_TEST(TraceOf, GrowsFromZeroRows) {
  TraceWriter writer(this->path_);
  writer.appendable("/kl", trace_type<TypeParam>(), {2, 3});
  writer.appendable("/long", trace_type<TypeParam>(), {});
  writer.flush();
  EXPECT_EQ(TraceReader(this->path_).shape("/kl"), (TraceShape{0, 2, 3}));
  EXPECT_TRUE(TraceReader(this->path_).template read<TypeParam>("/kl").values.empty());

  const auto values = samples<TypeParam>(24);
  const std::span<const TypeParam> rows(values);
  writer.append("/kl", rows.first(6));
  writer.append("/kl", rows.first(0));
  writer.append("/kl", rows.subspan(6));
  const auto longer = samples<TypeParam>(300000);  // many chunks
  for (std::size_t at = 0; at < longer.size(); at += 7500) {
    writer.append("/long", std::span(longer).subspan(at, 7500));
    if (at % 60000 == 0) writer.flush();
  }
  writer.finish();
  const TraceReader reader(this->path_);
  EXPECT_EQ(reader.shape("/kl"), (TraceShape{4, 2, 3}));
  EXPECT_EQ(reader.read<TypeParam>("/kl").values, values);
  EXPECT_EQ(reader.read<TypeParam>("/long").values, longer);
}

TEST_F(TraceTest, NaNKeepsItsBits) {
  const std::vector<std::uint32_t> bits{0x7FC00001u, 0xFFC12345u, 0x80000000u};
  std::vector<float> values;
  for (std::uint32_t b : bits) values.push_back(std::bit_cast<float>(b));
  TraceWriter writer(path_);
  writer.dataset("/x", values, {3});
  writer.finish();
  const auto read = TraceReader(path_).read<float>("/x").values;
  for (std::size_t i = 0; i < bits.size(); ++i) EXPECT_EQ(std::bit_cast<std::uint32_t>(read[i]), bits[i]);
}

TEST_F(TraceTest, Slices) {
  std::vector<std::int32_t> values(4 * 5 * 3);
  std::iota(values.begin(), values.end(), 0);
  TraceWriter writer(path_);
  writer.dataset("/x", values, {4, 5, 3});
  writer.dataset("/scalar", std::vector<double>{2.5}, {});
  writer.finish();
  const TraceReader reader(path_);
  EXPECT_EQ(reader.read<std::int32_t>("/x", {1, 2, 0}, {2, 2, 2}).values,
            (std::vector<std::int32_t>{21, 22, 24, 25, 36, 37, 39, 40}));
  const auto empty = reader.read<std::int32_t>("/x", {0, 2, 0}, {1, 0, 3});
  EXPECT_EQ(empty.shape, (TraceShape{1, 0, 3}));
  EXPECT_TRUE(empty.values.empty());
  EXPECT_EQ(reader.read<double>("/scalar").values, std::vector<double>{2.5});
  const TraceShape none{0, 0, 0}, one{1, 1, 1};
  expect_error(
      [&] {
        reader.read<std::int32_t>("/x", {3, 0, 0}, {2, 1, 1});
      },
      {path_, "/x", "dimension 0 of size 4 has no 2 entries from 3"});
  expect_error([&] { reader.read<std::int32_t>("/x", {0, 0, -1}, one); }, {"dimension 2"});
  expect_error([&] { reader.read<std::int32_t>("/x", none, {1, -1, 1}); }, {"dimension 1"});
  expect_error([&] { reader.read<std::int32_t>("/x", {0, 0}, {1, 1}); }, {"expected a block of 3 dimensions"});
}

TEST_F(TraceTest, AttributesOfGroupsAndDatasets) {
  TraceWriter writer(path_);
  writer.attribute("/", "command", "kl");
  writer.attribute("/layers/3", "kind", "mamba2 – β");  // makes the groups; text is UTF-8
  writer.attribute("/layers/3", "index", std::int64_t{1} << 60);
  writer.attribute("/layers/3", "growth", 0.1);
  writer.attribute("/layers/3", "growth", 0.2);  // replaces
  writer.attribute("/layers/3", "note", "");
  writer.dataset("/layers/3/kl", std::vector<double>{1}, {1}, {.units = "nats", .description = "KL per token"});
  writer.finish();
  const TraceReader reader(path_);
  EXPECT_EQ(reader.attribute("/", "command"), TraceAttribute("kl"));
  EXPECT_EQ(reader.attribute("/", "producer"), TraceAttribute("replayssm"));
  EXPECT_EQ(reader.attribute("/layers/3", "kind"), TraceAttribute("mamba2 – β"));
  EXPECT_EQ(reader.attribute("/layers/3", "index"), TraceAttribute(std::int64_t{1} << 60));
  EXPECT_EQ(reader.attribute("/layers/3", "growth"), TraceAttribute(0.2));
  EXPECT_EQ(reader.attribute("/layers/3", "note"), TraceAttribute(""));
  EXPECT_EQ(reader.attribute("/layers/3/kl", "units"), TraceAttribute("nats"));
  EXPECT_EQ(reader.attribute("/layers/3/kl", "description"), TraceAttribute("KL per token"));
  EXPECT_TRUE(reader.contains("/layers/3") && reader.contains("/layers/3/kl") && reader.contains("/"));
  EXPECT_FALSE(reader.contains("/layers/4") || reader.contains("/layers/3/kl/x") || reader.contains("/a/b/c"));
  expect_error([&] { reader.attribute("/layers/3", "none"); }, {path_, "/layers/3", "none"});
  expect_error([&] { reader.attribute("/layers/4", "kind"); }, {path_, "/layers/4", "no such object"});
}

TEST_F(TraceTest, HalfPrecisionIsRoundedBeforeItIsStored) {
  // Just above a midpoint of two subnormals of fp16 in double, on it in float: rounded twice it would go to even, 0xFF.
  const auto* fp16 = std::ranges::find(kElements, "fp16", &Element::name);
  const auto code = static_cast<std::uint16_t>(encode(*fp16, 1.5249285751529568e-05));
  TraceWriter writer(path_);
  writer.codes("/state", std::vector{code}, {1}, {.format = "fp16", .block = 0, .scale_layout = "none"},
               std::vector<float>{}, {});
  writer.finish();
  const TraceReader reader(path_);
  const auto bits = reader.read<std::uint16_t>("/state").values;
  EXPECT_EQ(bits, std::vector<std::uint16_t>{0x100});
  EXPECT_EQ(decode<double>(*fp16, bits[0]), 1.52587890625e-05);
  EXPECT_EQ(reader.attribute("/state", "format"), TraceAttribute("fp16"));
  EXPECT_FALSE(reader.contains("/state_scales"));
}

TEST_F(TraceTest, LowPrecisionDataComeBackBitByBit) {
  std::vector<std::uint16_t> bf16(65536);
  std::iota(bf16.begin(), bf16.end(), std::uint16_t{0});
  std::vector<std::uint8_t> bytes(256);
  std::iota(bytes.begin(), bytes.end(), std::uint8_t{0});
  std::vector<float> scales{0.5f, 1e-45f, 3.0f, std::numeric_limits<float>::infinity()};
  TraceWriter writer(path_);
  writer.codes("/s/bf16", bf16, {256, 256}, {.format = "bf16", .block = 0, .scale_layout = "none"},
               std::vector<float>{}, {}, {.units = "", .description = "checkpoint"});
  writer.codes("/s/e4m3", bytes, {4, 64}, {.format = "e4m3", .block = 64, .scale_layout = "row"}, scales, {4});
  writer.codes("/s/fp4", bytes, {2, 128},
               {.format = "e2m1", .block = 32, .scale_layout = "along N", .codes_per_item = 2},
               std::vector<std::uint8_t>(16, 127), {2, 8});
  writer.finish();
  const TraceReader reader(path_);
  EXPECT_EQ(reader.read<std::uint16_t>("/s/bf16").values, bf16);
  EXPECT_EQ(reader.attribute("/s/bf16", "description"), TraceAttribute("checkpoint"));
  EXPECT_EQ(reader.read<std::uint8_t>("/s/e4m3").values, bytes);
  EXPECT_EQ(reader.attribute("/s/e4m3", "format"), TraceAttribute("e4m3"));
  EXPECT_EQ(reader.attribute("/s/e4m3", "block"), TraceAttribute(std::int64_t{64}));
  EXPECT_EQ(reader.attribute("/s/e4m3", "scale_layout"), TraceAttribute("row"));
  EXPECT_EQ(reader.attribute("/s/e4m3", "codes_per_item"), TraceAttribute(std::int64_t{1}));
  EXPECT_EQ(reader.attribute("/s/e4m3", "scales"), TraceAttribute("/s/e4m3_scales"));
  EXPECT_EQ(reader.read<float>("/s/e4m3_scales").values, scales);
  EXPECT_EQ(reader.read<std::uint8_t>("/s/fp4").values, bytes);
  EXPECT_EQ(reader.attribute("/s/fp4", "codes_per_item"), TraceAttribute(std::int64_t{2}));
  EXPECT_EQ(reader.read<std::uint8_t>("/s/fp4_scales").shape, (TraceShape{2, 8}));
  TraceWriter other((folder_ / "other.h5").string());
  expect_error([&] { other.codes("/x", scales, {4}, {}, scales, {4}); }, {"/x", "uint8, uint16 or uint32"});
}

TEST_F(TraceTest, CompleteOnlyOnceFinished) {
  {
    TraceWriter writer(path_);
    EXPECT_FALSE(TraceReader(path_).complete());  // from the start
    writer.dataset("/x", std::vector<float>{1, 2}, {2});
  }
  EXPECT_FALSE(TraceReader(path_).complete());
  EXPECT_EQ(TraceReader(path_).read<float>("/x").values, (std::vector<float>{1, 2}));
  TraceWriter writer(path_);
  TraceWriter moved = std::move(writer);
  moved.finish();
  EXPECT_TRUE(TraceReader(path_).complete());
  EXPECT_FALSE(TraceReader(path_).contains("/x"));  // replaced, not added to
  expect_error([&] { moved.dataset("/x", std::vector<float>{1}, {1}); }, {path_, "/x", "finished"});
  expect_error([&] { moved.attribute("/", "x", 1.0); }, {"finished"});
  expect_error([&] { moved.append("/x", std::vector<float>{1}); }, {"finished"});
  expect_error([&] { moved.appendable("/x", TraceType::float32, {}); }, {"finished"});
  expect_error([&] { moved.flush(); }, {"finished"});
  expect_error([&] { moved.finish(); }, {"finished"});
}

TEST_F(TraceTest, AKilledRunLeavesWhatItFlushed) {
  const std::vector<double> values = samples<double>(50000);
  const int status = in_child([&] {
    TraceWriter writer(path_);
    writer.appendable("/kl", TraceType::float64, {});
    writer.attribute("/", "command", "kl");
    writer.append("/kl", std::span(values).first(40000));
    writer.flush();
    writer.append("/kl", std::span(values).subspan(40000));
    kill(getpid(), SIGKILL);
  });
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  {
    const TraceReader reader(path_);
    EXPECT_FALSE(reader.complete());
    EXPECT_EQ(reader.attribute("/", "command"), TraceAttribute("kl"));
    const auto kl = reader.read<double>("/kl").values;
    ASSERT_GE(kl.size(), 40000u);
    EXPECT_TRUE(std::equal(values.begin(), values.begin() + 40000, kl.begin()));
  }
  TraceWriter(path_).finish();  // and may be replaced
  EXPECT_TRUE(TraceReader(path_).complete());
}

// A file that may not grow beyond `limit` bytes, as on a full disk: an error that says so, and an orderly end.
TEST_F(TraceTest, NoSpaceLeft) {
  std::vector<std::uint32_t> noise(1 << 18);  // does not compress to less than half
  for (std::size_t i = 0; i < noise.size(); ++i) noise[i] = static_cast<std::uint32_t>(i * i * 2654435761u);
  for (const rlim_t limit : {100, 1000, 3000, 20000, 100000, 500000}) {
    testing::internal::CaptureStderr();
    const int status = in_child([&] {
      signal(SIGXFSZ, SIG_IGN);
      const rlimit both{limit, limit};
      setrlimit(RLIMIT_FSIZE, &both);
      const string message = message_of([&] {
        TraceWriter writer(path_);
        writer.appendable("/growing", TraceType::uint32, {});
        writer.append("/growing", std::span(noise).first(1 << 17));
        writer.dataset("/whole", std::span(noise).subspan(1 << 17), {1 << 17});
        writer.finish();
      });
      const bool named = message.find(path_) != string::npos && message.find("File too large") != string::npos &&
                         message.find('\n') == string::npos;
      // With all that a process does at its end; but HDF5 leaks a kilobyte where it cannot even make the file, which a
      // leak checker would report there.
      limit > 100 ? std::exit(named ? 0 : 1) : _exit(named ? 0 : 1);
    });
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "") << limit;
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << limit << ": " << status;
    EXPECT_FALSE(fs::exists(path_)) << limit;
  }
}

TEST_F(TraceTest, PathsThatCannotBeWritten) {
  expect_error([&] { TraceWriter((folder_ / "none" / "run.h5").string()); },
               {"none/run.h5", "there is no folder", (folder_ / "none").string()});
  expect_error([&] { TraceWriter{folder_.string()}; }, {folder_.string(), "found a folder"});
  expect_error([&] { TraceWriter(""); }, {"trace file"});
  expect_error([&] { TraceWriter("/dev/null"); }, {"/dev/null", "left as it is"});

  fs::create_directory(folder_ / "locked");
  fs::permissions(folder_ / "locked", fs::perms::owner_read | fs::perms::owner_exec | fs::perms::others_exec);
  const bool root = geteuid() == 0;  // who may write anywhere: be somebody else for a moment
  ASSERT_EQ(root ? seteuid(65534) : 0, 0);
  expect_error([&] { TraceWriter((folder_ / "locked" / "run.h5").string()); }, {"locked/run.h5", "Permission denied"});
  ASSERT_EQ(root ? seteuid(0) : 0, 0);
}

TEST_F(TraceTest, FilesOfOthersAreLeftAsTheyAre) {
  const auto contents = [](const string& path) {
    std::ifstream file(path, std::ios::binary);
    return string(std::istreambuf_iterator<char>(file), {});
  };
  for (const string& bytes : {string("notes, not numbers"), string(), string(4096, '\0')}) {
    const string path = write("notes.h5", bytes).string();
    expect_error([&] { TraceWriter{path}; }, {path, "expected no file or an earlier trace"});
    EXPECT_EQ(contents(path), bytes);
    expect_error([&] { TraceReader{path}; }, {path});
  }
  const string foreign = (folder_ / "foreign.h5").string();
  H5Fclose(H5Fcreate(foreign.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT));
  const string before = contents(foreign);
  expect_error([&] { TraceWriter{foreign}; }, {foreign, "of another program"});
  expect_error([&] { TraceReader{foreign}; }, {foreign, "of another program"});
  EXPECT_EQ(contents(foreign), before);
  expect_error([&] { TraceReader{path_}; }, {path_, "No such file or directory"});
}

TEST_F(TraceTest, WhatDoesNotFitIsRefused) {
  TraceWriter writer(path_);
  const std::vector<float> six(6);
  expect_error([&] { writer.dataset("/x", six, {2, 2}); }, {path_, "/x", "expected 4 values for the shape, found 6"});
  expect_error([&] { writer.dataset("/x", six, {-2, -3}); }, {"/x", "found -2"});
  expect_error([&] { writer.dataset("/x", six, {1ll << 40, 1ll << 40}); }, {"/x", "too many values"});
  for (const string& bad : {string("x"), string(""), string("/a//b"), string("/a/"), string("/a\0b", 4)}) {
    expect_error([&] { writer.dataset(bad, six, {6}); }, {path_, "expected an absolute path"});
  }
  writer.dataset("/x", six, {6});
  expect_error([&] { writer.dataset("/x", six, {6}); }, {"/x", "already has an object"});
  expect_error([&] { writer.dataset("/", six, {6}); }, {"already has an object"});
  expect_error([&] { writer.dataset("/x/below", six, {6}); }, {path_, "/x/below", "cannot make the dataset"});
  expect_error([&] { writer.attribute("/x/below", "a", 1.0); }, {path_, "/x/below", "cannot make a group"});
  expect_error([&] { writer.attribute("/x", "", 1.0); }, {"/x", "expected an attribute name"});
  expect_error([&] { writer.attribute("/x", "a", string("a\0b", 3)); }, {"/x", "attribute a", "without NUL"});

  expect_error([&] { writer.append("/x", six); }, {"/x", "no array that can be appended to"});
  expect_error([&] { writer.appendable("/g", TraceType::float32, {0}); }, {"/g", "at least one value"});
  writer.appendable("/g", TraceType::float32, {4});
  expect_error([&] { writer.append("/g", six); }, {"/g", "expected whole rows of 4 values, found 6"});
  expect_error([&] { writer.append("/g", std::vector<double>(4)); }, {"/g", "not of the type"});
  writer.finish();
  const TraceReader reader(path_);
  EXPECT_EQ(reader.shape("/g"), (TraceShape{0, 4}));
  expect_error([&] { reader.read<double>("/x"); }, {path_, "/x", "not of the type asked for"});
  expect_error([&] { reader.read<float>("/y"); }, {path_, "/y", "no such object"});
}

TEST_F(TraceTest, ErrorsPrintNothingAndKeepTheHostsHandler) {
  TraceWriter writer(path_);
  H5E_auto2_t before = nullptr, after = nullptr;
  void *before_data = nullptr, *after_data = nullptr;
  H5Eget_auto2(H5E_DEFAULT, &before, &before_data);
  testing::internal::CaptureStderr();
  expect_error([&] { TraceReader{path_ + "none"}; }, {path_});
  writer.dataset("/x", std::vector<float>{1}, {1});
  expect_error([&] { writer.dataset("/x/y", std::vector<float>{1}, {1}); }, {"/x/y"});
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  H5Eget_auto2(H5E_DEFAULT, &after, &after_data);
  EXPECT_EQ(before, after);
  EXPECT_EQ(before_data, after_data);
}

TEST_F(TraceTest, EqualRunsMakeEqualFiles) {
  const auto make = [&](const string& name) {
    TraceWriter writer((folder_ / name).string());
    writer.dataset("/x", samples<double>(20000), {20000}, {.units = "nats", .description = ""});
    writer.finish();
    std::ifstream file(folder_ / name, std::ios::binary);
    return string(std::istreambuf_iterator<char>(file), {});
  };
  const string first = make("a.h5");
  sleep(1);  // HDF5 keeps times in seconds
  EXPECT_EQ(first, make("b.h5"));
  EXPECT_LT(first.size(), 20000 * sizeof(double));  // and large arrays are compressed
}

}  // namespace
}  // namespace replayssm
