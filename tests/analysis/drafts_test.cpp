// Where drafts come from: by hand, by counting, and against a model that is run over whole texts.

#include "analysis/drafts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "tests/support/forward.h"
#include "tests/support/model_files.h"

namespace replayssm {
namespace {

using Ids = std::vector<std::int32_t>;

Ids lookup(std::int64_t longest, const Ids& text, std::int64_t most) {
  return prompt_lookup(longest)->propose(text, most).drafts;
}

TEST(PromptLookup, GoesOnAsTheLastPlaceDidWhereTheLongestEndStands) {
  EXPECT_EQ(lookup(3, {1, 2, 3, 4, 5, 1, 2, 3}, 4), (Ids{4, 5, 1, 2}));
  EXPECT_EQ(lookup(3, {1, 2, 3, 4, 5, 1, 2, 3}, 1), (Ids{4}));
  EXPECT_EQ(lookup(3, {1, 2, 3, 4, 5, 1, 2, 3}, 0), (Ids{}));
  EXPECT_EQ(lookup(3, {1, 2, 3, 4, 5, 1, 2, 3}, 9), (Ids{4, 5, 1, 2, 3}));  // the text has no more
  EXPECT_EQ(lookup(3, {7, 1, 8, 1, 9, 1}, 2), (Ids{9, 1}));                 // the later of two places
  EXPECT_EQ(lookup(3, {2, 1, 6, 3, 1, 7, 2, 1}, 1), (Ids{6}));              // two tokens rather than a later one
  EXPECT_EQ(lookup(1, {2, 1, 6, 3, 1, 7, 2, 1}, 1), (Ids{7}));
  EXPECT_EQ(lookup(3, {4, 4, 4}, 5), (Ids{4}));  // the place may overlap the end
}

TEST(PromptLookup, ProposesNothingBehindWhatIsNew) {
  EXPECT_EQ(lookup(3, {1, 2, 3}, 4), (Ids{}));
  EXPECT_EQ(lookup(3, {1}, 4), (Ids{}));
  EXPECT_THROW(prompt_lookup(0), Error);
}

TEST(KnownText, IsWhatFollows) {
  const auto source = known_text({5, 6, 7, 8});
  EXPECT_EQ(source->propose(Ids{5}, 2).drafts, (Ids{6, 7}));
  EXPECT_EQ(source->propose(Ids{5, 6, 7}, 2).drafts, (Ids{8}));
  EXPECT_EQ(source->propose(Ids{5, 6, 7, 8}, 2).drafts, (Ids{}));
  EXPECT_EQ(source->propose(Ids{5, 6, 7, 8, 9}, 2).drafts, (Ids{}));
}

TEST(Corrupted, LeavesItsShareOfDraftsRight) {
  constexpr std::int64_t drafts = 8, steps = 2000;
  const Ids text(drafts + steps, 3);
  for (const double rate : {0.0, 0.25, 0.7, 1.0}) {
    const auto source = corrupted(known_text(text), rate, 11, 0, 5);
    std::int64_t right = 0;
    for (std::int64_t i = 1; i <= steps; ++i) {
      const Ids made = source->propose(std::span(text).first(static_cast<std::size_t>(i)), drafts).drafts;
      ASSERT_EQ(std::ssize(made), drafts);
      for (const std::int32_t id : made) {
        ASSERT_TRUE(id >= 0 && id < 5);
        right += id == 3;
      }
    }
    // Of n independent draws n rate are right, with a standard deviation of sqrt(n rate (1 - rate)); six of them are
    // missed once in 5e8, and the seed is the same every time.
    constexpr double n = drafts * steps;
    EXPECT_LE(std::abs(static_cast<double>(right) - n * rate), 6 * std::sqrt(n * rate * (1 - rate))) << rate;
  }
}

TEST(Corrupted, DrawsByTheSeedTheSequenceAndThePlace) {
  const Ids text(200, 1);
  const auto all = [&](std::uint64_t seed, std::int64_t sequence, std::size_t length) {
    return corrupted(known_text(text), 0.5, seed, sequence, 1000)->propose(std::span(text).first(length), 64).drafts;
  };
  EXPECT_EQ(all(1, 2, 3), all(1, 2, 3));
  EXPECT_NE(all(1, 2, 3), all(2, 2, 3));
  EXPECT_NE(all(1, 2, 3), all(1, 3, 3));
  EXPECT_NE(all(1, 2, 3), all(1, 2, 4));
}

TEST(Corrupted, RefusesWhatIsNoRate) {
  for (const double rate : {-0.1, 1.1, std::nan("")}) EXPECT_THROW(corrupted(known_text({}), rate, 0, 0, 5), Error);
  EXPECT_THROW(corrupted(known_text({}), 0.5, 0, 0, 1), Error);
}

TEST(Counted, MakesOneDraftWrongOrDiscardsTheWindow) {
  const Ids text = {1, 1, 1, 1, 1, 1, 1, 1};
  const auto source = counted(known_text(text), {3, 0, 1, 5, 9}, 4);
  const auto right = [&](std::size_t length) {  // how many drafts are right before the first wrong one
    const Proposal p = source->propose(std::span(text).first(length), 4);
    EXPECT_EQ(p.drafts.size(), 4u);
    const std::int64_t n = std::ranges::find_if(p.drafts, [](std::int32_t id) { return id != 1; }) - p.drafts.begin();
    return std::pair(n, p.discarded);
  };
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(right(1), std::pair(std::int64_t{2}, false));
    EXPECT_EQ(right(1), std::pair(std::int64_t{0}, true));
    EXPECT_EQ(right(1), std::pair(std::int64_t{0}, false));
    EXPECT_EQ(right(2), std::pair(std::int64_t{4}, false));
    EXPECT_EQ(right(3), std::pair(std::int64_t{4}, false));
  }
  EXPECT_THROW(counted(known_text(text), {}, 4), Error);
  EXPECT_THROW(counted(known_text(text), {0, 0}, 4), Error);
  EXPECT_THROW(counted(known_text(text), {2, -1}, 4), Error);
  EXPECT_THROW(counted(known_text(text), {2}, 1), Error);
}

using AcceptCounts = FilesTest;

TEST_F(AcceptCounts, AreReadAndChecked) {
  EXPECT_EQ(read_accept_counts(write("counts.txt", "3 0\n5 1\n"), 5), (std::vector<std::int64_t>{3, 0, 5, 1}));
  expect_error([&] { read_accept_counts(write("many.txt", "3 6"), 5); }, {"many.txt", "6", "position 1", "5"});
  expect_error([&] { read_accept_counts(write("none.txt", "0 0"), 5); }, {"none.txt", "0"});
  expect_error([&] { read_accept_counts(write("words.txt", "1 -2"), 5); }, {"words.txt", "-2"});
  expect_error([&] { read_accept_counts(folder_ / "nowhere.txt", 5); }, {"nowhere.txt"});
}

/// The greedy continuation of a text, each token from the whole text before it.
Ids continued(const Model& model, Backend& backend, Ids text, std::int64_t count) {
  const std::size_t length = text.size();
  for (std::int64_t i = 0; i < count; ++i) {
    const Values logits = Runner(model, backend).logits(text);
    const auto last = logits.end() - model.vocabulary();
    text.push_back(static_cast<std::int32_t>(std::max_element(last, logits.end()) - last));
  }
  return {text.begin() + static_cast<std::ptrdiff_t>(length), text.end()};
}

class ModelDraftsTest : public testing::TestWithParam<const char*> {};

TEST_P(ModelDraftsTest, AreTheModelsOwnTextWhateverWasAccepted) {
  const auto model = Model::open(golden_folder(GetParam()));
  const auto backend = reference_backend(Precision::fp64, 1);
  const auto source = model_drafts(*model, *backend, 4);
  Ids text = {3, 14, 15, 92, 65, 35, 89};
  for (const std::int64_t most : {4, 4, 0, 2, 4, 4, 1, 4}) {
    const Ids drafts = source->propose(text, most).drafts;
    EXPECT_EQ(drafts, continued(*model, *backend, text, most));
    if (most == 2) continue;  // nothing was accepted: the same text again
    text.insert(text.end(), drafts.begin(), drafts.begin() + most / 2);
    text.push_back(static_cast<std::int32_t>(11 * text.size() % 97));  // in the place of a wrong one
  }
}

INSTANTIATE_TEST_SUITE_P(Models, ModelDraftsTest, testing::Values("mamba2", "qwen3_5"));

}  // namespace
}  // namespace replayssm
