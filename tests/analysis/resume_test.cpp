// Studies that stop and go on: from every step, in both precisions, with the bits of a run in one go.

#include <gtest/gtest.h>

#include <sstream>

#include "analysis/archive.h"
#include "analysis/layer_report.h"
#include "analysis/study_folder.h"
#include "core/tokens.h"
#include "tests/support/model_files.h"
#include "tests/support/study_results.h"

namespace replayssm {
namespace {

/// Keeps every state that a study saves, and gives the one that a test wants.
class KeptStates : public StudyCheckpoint {
 public:
  bool load(const std::function<void(Archive&)>& take) override {
    if (!from) return false;
    std::istringstream in(states.at(*from));
    Archive archive(in);
    take(archive);
    EXPECT_EQ(in.peek(), std::istringstream::traits_type::eof());
    return true;
  }
  void save(const std::function<void(Archive&)>& give) override {
    std::ostringstream out;
    Archive archive(out);
    give(archive);
    states.push_back(out.str());
  }

  std::vector<string> states;
  std::optional<std::size_t> from;
};

struct Setup {
  const char* model;
  Precision precision;
};

class ResumeOf : public testing::TestWithParam<Setup> {
 protected:
  Tokens two_sequences() const {
    Tokens tokens{{}, 2, 21};
    for (int i = 0; i < 42; ++i) tokens.ids.push_back(i * i % 97);
    return tokens;
  }

  const std::unique_ptr<Model> model_ = Model::open(golden_folder(GetParam().model));
  const std::unique_ptr<Backend> backend_ = reference_backend(GetParam().precision, 2);
  const Tokens tokens_ = two_sequences();
  const std::vector<Policy> policies_ = {parse_policy("eager(state=e4m3:row)"),
                                         parse_policy("replay(L=4, anchor=fp32, read=int4:row, layers=2)"),
                                         parse_policy("exact")};
};

TEST_P(ResumeOf, EveryStepGivesTheSameBits) {
  for (const bool local : {false, true}) {
    const StudyOptions plain{.threads = 2, .local = local, .chunk_tokens = 8};
    const auto expected = run_study(*model_, *backend_, tokens_, policies_, plain);
    KeptStates kept;
    StudyOptions options = plain;
    options.checkpoint = &kept;
    run_study(*model_, *backend_, tokens_, policies_, options);
    const std::size_t steps = model_->layers().size() + 2;  // then two sequences are compared
    ASSERT_EQ(kept.states.size(), steps);
    // A stream that is the reference's up to layer 2 is not saved again before it.
    EXPECT_GT(kept.states[steps - 3].size(), kept.states[0].size() + 42 * sizeof(double) * model_->hidden());
    for (std::size_t step = 0; step < steps; ++step) {
      kept.from = step;
      // 4 streams in 3 chunks of 2 sequences go through every layer; then each sequence is compared.
      const std::size_t layers = model_->layers().size();
      const std::size_t before = step < layers ? (step + 1) * 24 : layers * 24 + (step + 1 - layers) * 12;
      std::vector<std::int64_t> progress;
      options.progress = [&](std::int64_t done, std::int64_t all) {
        EXPECT_EQ(all, (layers + 1) * 24);
        EXPECT_EQ(done, before + progress.size());
        progress.push_back(done);
      };
      const auto results = run_study(*model_, *backend_, tokens_, policies_, options);
      EXPECT_EQ(progress.back(), (layers + 1) * 24);
      ASSERT_EQ(results.size(), expected.size());
      for (std::size_t i = 0; i < results.size(); ++i) expect_identical(results[i], expected[i]);
    }
  }
}

TEST_P(ResumeOf, LayerStudyToo) {
  const StudyOptions plain{.threads = 2, .chunk_tokens = 8};
  const auto json = [&](const StudyOptions& options) {
    return layers_json(*model_, {}, run_layer_study(*model_, *backend_, tokens_, policies_, options, true));
  };
  const string expected = json(plain);
  KeptStates kept;
  StudyOptions options = plain;
  options.checkpoint = &kept;
  EXPECT_EQ(json(options), expected);
  const std::size_t steps = kept.states.size();
  for (std::size_t step = 0; step < steps; ++step) {
    kept.from = step;
    EXPECT_EQ(json(options), expected) << step;
  }
}

TEST_P(ResumeOf, StopsBeforeTheNextChunk) {
  for (std::int64_t chunks = 0; chunks < 20; ++chunks) {
    std::int64_t asked = 0;
    StudyOptions options{.threads = 2, .chunk_tokens = 8};
    options.interrupted = [&] { return asked++ == chunks; };
    EXPECT_THROW(run_study(*model_, *backend_, tokens_, policies_, options), Interrupted);
    EXPECT_EQ(asked, chunks + 1);
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, ResumeOf,
                         testing::Values(Setup{"mamba2", Precision::fp64}, Setup{"mamba2", Precision::fp32},
                                         Setup{"qwen3_5", Precision::fp64}, Setup{"qwen3_5", Precision::fp32}),
                         [](const auto& setup) {
                           return string(setup.param.model) +
                               (setup.param.precision == Precision::fp64 ? "_fp64" : "_fp32");
                         });

TEST(StudyOptions, ChunksHoldTokens) {
  const auto model = Model::open(golden_folder("mamba2"));
  const auto backend = reference_backend(Precision::fp64, 1);
  for (const std::int64_t chunk : {0, -1}) {
    expect_error(
        [&] {
          run_study(*model, *backend, {{1, 2, 3}, 1, 3}, {exact_policy()}, {.chunk_tokens = chunk});
        },
        {"chunks of at least 1 token", std::to_string(chunk)});
  }
}

using StudyFolderTest = FilesTest;
const StudyFolder::Identity identity = {{"program", "1"}, {"precision", "fp64"}};

void save_number(StudyFolder& folder, int number) {
  folder.save([&](Archive& a) { a(number); });
}

int load_number(StudyFolder& folder) {
  int number = 0;
  EXPECT_TRUE(folder.load([&](Archive& a) { a(number); }));
  return number;
}

TEST_F(StudyFolderTest, KeepsTheLastStateForTheSameRunOnly) {
  const string output = (folder_ / "run.h5").string(), parts = output + ".parts";
  { StudyFolder(output, identity, true); }
  EXPECT_FALSE(fs::exists(parts));  // nothing was saved
  {
    StudyFolder folder(output, identity, false);
    EXPECT_FALSE(folder.load([](Archive&) {}));
    save_number(folder, 7);
    expect_error([&] { StudyFolder(output, identity, true); }, {parts, "another process"});
  }
  expect_error([&] { StudyFolder(output, identity, false); }, {parts, "interrupted study", "--resume"});
  expect_error([&] { StudyFolder(output, {{"program", "1"}, {"precision", "fp32"}}, true); },
               {parts, "precision", "'fp32'", "'fp64'"});
  expect_error([&] { StudyFolder(output, {{"program", "1"}, {"local", "yes"}}, true); }, {parts, "local", "'yes'"});
  expect_error([&] { StudyFolder(output, {{"program", "1"}}, true); }, {parts, "precision: fp64"});
  StudyFolder folder(output, identity, true);
  EXPECT_EQ(load_number(folder), 7);
  EXPECT_GT(folder.seconds(), 0);
  folder.remove();
  EXPECT_FALSE(fs::exists(parts));
}

TEST_F(StudyFolderTest, AStateThatCouldNotBeWrittenLeavesTheOneBefore) {
  const string output = (folder_ / "run.h5").string();
  {
    StudyFolder folder(output, identity, false);
    save_number(folder, 7);
  }
  StudyFolder folder(output, identity, true);
  expect_error([&] { folder.save([](Archive&) { fail("full disk"); }); }, {"run.h5.parts/state", "full disk"});
  EXPECT_EQ(load_number(folder), 7);
}

TEST_F(StudyFolderTest, FoldersOfOthersAndDamagedStatesAreRefused) {
  const string output = (folder_ / "run.h5").string();
  const fs::path parts = output + ".parts";
  fs::create_directory(parts);
  write_bytes(parts / "notes", "not ours");
  expect_error([&] { StudyFolder(output, identity, true); }, {parts.string(), "found another"});
  EXPECT_EQ(read_text(parts / "notes"), "not ours");
  fs::remove(parts / "notes");
  write_bytes(parts / "lock", "");  // all that a run has left that was killed at once
  {
    StudyFolder folder(output, identity, false);
    save_number(folder, 7);
  }
  const string state = read_text(parts / "state");
  for (const string& damaged : {state.substr(0, state.size() - 1), state + "x", string()}) {
    write_bytes(parts / "state", damaged);
    StudyFolder folder(output, identity, true);
    expect_error([&] { folder.load([](Archive& a) { int number = 0; a(number); }); }, {(parts / "state").string()});
  }
  fs::remove_all(parts);
  write_bytes(parts, "a file");
  expect_error([&] { StudyFolder(output, identity, true); }, {parts.string(), "cannot be made"});
  expect_error([&] { StudyFolder((folder_ / "none" / "run.h5").string(), identity, true); }, {"none/run.h5.parts"});
}

}  // namespace
}  // namespace replayssm
