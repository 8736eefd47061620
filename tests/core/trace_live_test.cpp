// Traces that are read while they are written, and made of each other.

#include <gtest/gtest.h>
#include <hdf5.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "core/trace.h"
#include "tests/core/files.h"

namespace replayssm {
namespace {

class TraceLiveTest : public FilesTest {
 protected:
  const string path_ = (folder_ / "run.h5").string();
};

/// Values that hardly compress.
std::vector<double> noise(std::size_t count) {
  std::vector<double> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = 1 / static_cast<double>((i * 2654435761u) % 1000003 + 1);
  return values;
}

// Another process, with HDF5 as it comes, opens the file while it is written: it finds what the last flush brought,
// whatever the writer has done since.
TEST_F(TraceLiveTest, IsReadWhileItIsWritten) {
  const std::vector<double> values = noise(400000);
  constexpr std::size_t flushed[] = {0, 1000, 1500, 261500};
  int go[2], done[2];
  ASSERT_EQ(pipe(go) + pipe(done), 0);
  const pid_t writer_process = fork();
  if (writer_process == 0) {
    char token = 0;
    TraceWriter writer(path_);
    writer.appendable("/y", TraceType::float64, {});
    for (std::size_t i = 0; i < std::size(flushed); ++i) {
      const std::size_t before = i == 0 ? 0 : flushed[i - 1] + (i == 3 ? 250000 : 0);
      writer.append("/y", std::span(values).subspan(before, flushed[i] - before));
      writer.flush();
      // The chunk that has just been written grows and leaves the library's memory; something else would fit into the
      // space that it gives up. Then comes more metadata than the library keeps by itself.
      if (i == 2) writer.append("/y", std::span(values).subspan(flushed[i], 250000));
      const string group = "/many/" + std::to_string(i) + "/";
      for (int n = 0; n < 50; ++n) {
        writer.dataset(group + std::to_string(n), std::vector<double>(10000), {10000});
      }
      for (int n = 0; n < 6000; ++n) writer.attribute(group + "g" + std::to_string(n), "text", string(1000, 'x'));
      if (::write(done[1], &token, 1) != 1 || ::read(go[0], &token, 1) != 1) break;
    }
    kill(getpid(), SIGKILL);
  }
  struct Ended {  // also where an assertion fails
    pid_t process;
    ~Ended() {
      kill(process, SIGKILL);
      waitpid(process, nullptr, 0);
    }
  } const ended{writer_process};
  for (const std::size_t rows : flushed) {
    char token = 0;
    ASSERT_EQ(::read(done[0], &token, 1), 1);
    const hid_t file = H5Fopen(path_.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
    ASSERT_GE(file, 0) << rows;
    const hid_t dataset = H5Dopen2(file, "/y", H5P_DEFAULT), space = H5Dget_space(dataset);
    std::vector<double> read_values(static_cast<std::size_t>(H5Sget_simple_extent_npoints(space)));
    EXPECT_EQ(read_values.size(), rows);
    EXPECT_GE(H5Dread(dataset, H5T_NATIVE_DOUBLE, H5S_ALL, H5S_ALL, H5P_DEFAULT, read_values.data()), 0) << rows;
    EXPECT_TRUE(std::equal(read_values.begin(), read_values.end(), values.begin())) << rows;
    H5Sclose(space);
    H5Dclose(dataset);
    H5Fclose(file);
    EXPECT_EQ(TraceReader(path_).read<double>("/y").values, read_values);
    ASSERT_EQ(::write(go[1], &token, 1), 1);
  }
}

TEST_F(TraceLiveTest, CodesGrowFromZeroRows) {
  TraceWriter writer(path_);
  const CodeLayout layout{.format = "int4:row", .block = 5, .scale_layout = "row", .codes_per_item = 2};
  writer.appendable_codes("/s", TraceType::uint8, {2, 3}, layout, TraceShape{2}, {"code", "checkpoint"});
  writer.appendable_codes("/b", TraceType::uint16, {}, {.format = "bf16", .block = 0, .scale_layout = "none"},
                          std::nullopt);
  writer.flush();
  EXPECT_EQ(TraceReader(path_).shape("/s"), (TraceShape{0, 2, 3}));
  EXPECT_EQ(TraceReader(path_).shape("/s_scales"), (TraceShape{0, 2}));
  const std::vector<std::uint8_t> codes = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  const std::vector<float> scales = {0.5F, 2, 1e-40F, 4};
  writer.append("/s", codes);
  writer.append("/s", codes);
  writer.append("/s_scales", scales);
  writer.append("/s_scales", scales);
  writer.finish();
  const TraceReader reader(path_);
  EXPECT_EQ(reader.shape("/s"), (TraceShape{4, 2, 3}));
  EXPECT_EQ(reader.shape("/s_scales"), (TraceShape{4, 2}));
  EXPECT_EQ(reader.read<std::uint8_t>("/s", {2, 0, 0}, {2, 2, 3}).values, codes);
  EXPECT_EQ(reader.read<float>("/s_scales", {2, 0}, {2, 2}).values, scales);
  EXPECT_EQ(reader.attribute("/s", "format"), TraceAttribute("int4:row"));
  EXPECT_EQ(reader.attribute("/s", "codes_per_item"), TraceAttribute(std::int64_t{2}));
  EXPECT_EQ(reader.attribute("/s", "scales"), TraceAttribute("/s_scales"));
  EXPECT_EQ(reader.shape("/b"), (TraceShape{0}));
  EXPECT_FALSE(reader.contains("/b_scales"));
}

TEST_F(TraceLiveTest, CopiesFromCompleteTraces) {
  const string from = (folder_ / "from.h5").string(), cut = (folder_ / "cut.h5").string();
  const std::vector<double> values = noise(50000);
  for (const string& path : {from, cut}) {
    TraceWriter writer(path);
    writer.appendable("/a/b/x", TraceType::float64, {});
    writer.append("/a/b/x", values);
    writer.attribute("/a/b", "kind", string("mamba2"));
    if (path == from) writer.finish();
  }
  TraceWriter writer(path_);
  expect_error([&] { writer.copy(cut, "/a/b"); }, {cut, "complete"});
  writer.copy(from, "/a/b");
  writer.attribute("/a/b", "more", 1.0);
  expect_error([&] { writer.copy(from, "/a/b"); }, {path_, "/a/b", "already has"});
  expect_error([&] { writer.copy(from, "/c"); }, {from, "/c", "no such object"});
  expect_error([&] { writer.copy((folder_ / "none.h5").string(), "/c"); }, {"none.h5", "No such file"});
  writer.finish();
  const TraceReader reader(path_);
  EXPECT_EQ(reader.read<double>("/a/b/x").values, values);
  EXPECT_EQ(reader.attribute("/a/b", "kind"), TraceAttribute("mamba2"));
}

}  // namespace
}  // namespace replayssm
