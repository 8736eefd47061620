// Speculative decoding of small models: the text against runs over whole prefixes, the counts against a walk by hand.

#include "analysis/speculation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include "analysis/speculation_report.h"
#include "tests/support/forward.h"
#include "tests/support/model_files.h"

namespace replayssm {
namespace {

using Ids = std::vector<std::int32_t>;
using Counts = std::vector<std::int64_t>;

/// Ids without a pattern.
Tokens some_tokens(std::int64_t sequences, std::int64_t length) {
  Tokens tokens{{}, sequences, length};
  std::uint32_t x = 2026;
  for (std::int64_t i = 0; i < sequences * length; ++i) {
    x = x * 1664525 + 1013904223;
    tokens.ids.push_back(static_cast<std::int32_t>((x >> 8) % 97));
  }
  return tokens;
}

class SpeculationTest : public testing::TestWithParam<const char*> {
 protected:
  const std::unique_ptr<Model> model_ = Model::open(golden_folder(GetParam()));
  const std::unique_ptr<Backend> backend_ = reference_backend(Precision::fp64, 1, Products::one_token);

  /// Drafts that are right but for every third or so: all depths of rollback.
  DraftSources mostly_right() const {
    return [this](std::int64_t i) { return corrupted(model_drafts(*model_, *backend_, 8), 0.7, 5, i, 97); };
  }
  /// Of the text itself, so that step i commits counts[i] tokens where its window has as many.
  static DraftSources counted_text(const Tokens& tokens, const Counts& counts) {
    return [&tokens, counts](std::int64_t i) {
      const auto first = tokens.ids.begin() + i * tokens.length;
      return counted(known_text({first, first + tokens.length}), counts, 97);
    };
  }
  SpeculationResult speculated(const Tokens& tokens, const string& policy, const DraftSources& sources,
                               const SpeculationOptions& options) const {
    return speculate(*model_, *backend_, tokens, parse_policy(policy), sources, options);
  }
};

TEST_P(SpeculationTest, TheTextOfAnExactStateIsThatOfWholePrefixes) {
  const Tokens prompts = some_tokens(2, 9);
  const SpeculationOptions options{.window = 4, .ring = 7, .prompt_tokens = 9, .new_tokens = 20};
  const auto whole = reference_backend(Precision::fp64, 1);  // not even the same order of sums
  for (const string policy : {"replay(L=8, state=exact)", "replay(L=8, state=exact, order=sequential)", "exact"}) {
    const SpeculationResult r = speculated(prompts, policy, mostly_right(), options);
    ASSERT_EQ(r.texts.size(), 2u);
    for (std::size_t b = 0; b < 2; ++b) {
      Ids text(prompts.ids.begin() + static_cast<std::ptrdiff_t>(9 * b),
               prompts.ids.begin() + static_cast<std::ptrdiff_t>(9 * b + 9));
      while (text.size() < 29) {
        const Values logits = Runner(*model_, *whole).logits(text);
        text.push_back(
            static_cast<std::int32_t>(std::max_element(logits.end() - 97, logits.end()) - (logits.end() - 97)));
      }
      EXPECT_EQ(r.texts[b], text) << policy;
    }
    EXPECT_TRUE(r.passed());
    EXPECT_EQ(r.own_schedule.same_tokens, 40);
    EXPECT_GT(r.rollbacks(), 5);
    EXPECT_GT(r.accepted, 5);
  }
}

TEST_P(SpeculationTest, PlainDecodingWithTheSameFlushesGivesTheSameBits) {
  const Tokens prompts = some_tokens(3, 9);
  for (const string policy :
       {"replay(L=8, state=bf16)", "replay(L=8, state=int8:row, order=sequential)",
        "replay(L=8, anchor=fp32, read=int8:row, ring=bf16)", "replay(L=8, anchor=bf16, read=e4m3:row, loop=open)",
        "replay(L=8, state=bf16:sr, order=sequential, ring=bf16:sr)", "replay(L=8, state=int8:row:ef=int4)",
        "replay(L=8, state=int8:tensor)", "replay(L=8, state=int4:row, layers=1)", "eager(state=bf16:sr)"}) {
    SCOPED_TRACE(policy);
    const SpeculationResult r = speculated(prompts, policy, mostly_right(),
                                           {.window = 4, .ring = 6, .prompt_tokens = 9, .new_tokens = 16, .seed = 7});
    EXPECT_EQ(r.same_flushes.demand, Demand::bits);
    EXPECT_EQ(r.same_flushes.compared, 48);
    EXPECT_EQ(r.same_flushes.same_tokens, 48);
    EXPECT_EQ(r.same_flushes.same_logits, 48);
    EXPECT_EQ(r.same_flushes.largest_difference, 0);
    EXPECT_EQ(r.same_flushes.states, 9);  // three SSM layers either way
    EXPECT_EQ(r.same_flushes.same_states, 9);
    EXPECT_FALSE(r.same_flushes.first);
    EXPECT_TRUE(r.passed());
    EXPECT_GT(r.rollbacks(), 5);
    const bool eager = policy.starts_with("eager");
    EXPECT_EQ(r.flushes() > 5, !eager);
    EXPECT_EQ(r.own_schedule.demand, eager ? Demand::bits : Demand::nothing);
    // Else it flushes elsewhere.
    EXPECT_EQ(r.own_schedule.same_logits == r.own_schedule.compared, eager);
  }
}

// What the comparison stands on: the products of a token alone, whatever window it comes in.
TEST_P(SpeculationTest, ATokenHasTheSameBitsInAnyWindow) {
  const Ids ids = some_tokens(1, 90).ids;
  for (const Precision precision : {Precision::fp64, Precision::fp32}) {
    const auto backend = reference_backend(precision, 2, Products::one_token);
    const Values whole = Runner(*model_, *backend).logits(ids);
    for (const std::ptrdiff_t window : {1, 2, 3, 7, 64}) {
      Runner runner(*model_, *backend);
      Values cut;
      for (auto first = ids.begin(); first < ids.end();) {
        const auto last = first + std::min(window, ids.end() - first);
        const Values logits = runner.logits({first, last});
        cut.insert(cut.end(), logits.begin(), logits.end());
        first = last;
      }
      EXPECT_EQ(cut, whole) << "windows of " << window;
    }
  }
}

/// What counts there should be, by the rules alone: a step that meets h records and brings t tokens folds if h + t > W.
struct Walk {
  Counts committed, rolled_back, held;
  std::map<std::int64_t, std::int64_t> spacing;
  std::int64_t steps = 0, drafts = 0, accepted = 0, discarded = 0, window_tokens = 0;
  std::int64_t records_read = 0, flushing_records = 0;

  Walk(const SpeculationOptions& o, const Counts& counts) {
    committed.resize(static_cast<std::size_t>(o.window + 1));
    rolled_back = committed;
    held.resize(static_cast<std::size_t>(o.ring + 1));
    std::int64_t h = 0;
    for (std::int64_t left = o.prompt_tokens - 1; left > 0;) {
      const std::int64_t t = std::min(left, o.window);
      h = (h + t > o.ring ? 0 : h) + t;
      left -= t;
    }
    for (std::int64_t done = 0; done < o.new_tokens; ++steps) {
      const std::int64_t t = std::min(o.window, o.new_tokens - done);
      const std::int64_t n = std::min(t, counts[static_cast<std::size_t>(steps) % counts.size()]);
      ++held[static_cast<std::size_t>(h)];
      records_read += h;
      if (h + t > o.ring) ++spacing[h], flushing_records += h, h = 0;
      h += n;
      done += n;
      drafts += t - 1;
      window_tokens += t;
      accepted += std::max<std::int64_t>(n - 1, 0);
      discarded += n == 0;
      ++committed[static_cast<std::size_t>(n)];
      ++rolled_back[static_cast<std::size_t>(t - n)];
    }
  }
};

TEST_P(SpeculationTest, CountsAreThoseOfAWalk) {
  const Tokens tokens = some_tokens(2, 40);
  for (const Counts& counts : {Counts{1}, {9}, {3, 1, 2}, {2, 0, 4, 1, 0, 3}}) {
    for (const auto& [window, ring, prompt] :
         {std::tuple{1, 1, 1}, {1, 5, 3}, {3, 3, 7}, {4, 9, 14}, {5, 16, 2}, {4, 9, 1}}) {
      const SpeculationOptions options{
          .window = window, .ring = ring, .prompt_tokens = prompt, .new_tokens = 22, .teacher_forced = true};
      SCOPED_TRACE(testing::PrintToString(counts) + " " + std::to_string(window) + " " + std::to_string(ring));
      const SpeculationResult r = speculated(tokens, "replay(L=8, state=bf16)", counted_text(tokens, counts), options);
      Walk w(options, counts);
      const auto twice = [](Counts c) {
        for (std::int64_t& n : c) n *= 2;
        return c;
      };
      EXPECT_EQ(r.tokens, 44);
      EXPECT_EQ(r.steps, 2 * w.steps);
      EXPECT_EQ(r.drafts, 2 * w.drafts);
      EXPECT_EQ(r.accepted, 2 * w.accepted);
      EXPECT_EQ(r.discarded, 2 * w.discarded);
      EXPECT_EQ(r.window_tokens, 2 * w.window_tokens);
      EXPECT_EQ(r.committed, twice(w.committed));
      EXPECT_EQ(r.rolled_back, twice(w.rolled_back));
      EXPECT_EQ(r.held, twice(w.held));
      for (auto& [length, count] : w.spacing) count *= 2;
      EXPECT_EQ(r.spacing, w.spacing);
      EXPECT_EQ(r.rollbacks(), 2 * (w.steps - w.rolled_back[0]));
      EXPECT_EQ(r.tokens_per_step(), 22.0 / static_cast<double>(w.steps));
      if (w.drafts == 0) {
        EXPECT_TRUE(std::isnan(r.acceptance()));
      } else {
        EXPECT_EQ(r.acceptance(), static_cast<double>(w.accepted) / static_cast<double>(w.drafts));
      }
      EXPECT_TRUE(r.passed());
      EXPECT_EQ(r.texts[1], Ids(tokens.ids.begin() + 40, tokens.ids.begin() + 62 + prompt));
      if (string(GetParam()) != "mamba2") continue;
      // Three layers of 6 heads, 16 x 24, 2 groups: a state in bf16, and a record of x and B in bf16 and dt in fp32.
      const double state = 3 * 6 * 16 * 24 * 2, record = 3 * (6 * 16 * 2 + 2 * 24 * 2 + 6 * 4);
      const auto real = [](std::int64_t n) { return static_cast<double>(n); };
      EXPECT_EQ(r.moved.state_read, real(r.steps) * state);
      EXPECT_EQ(r.moved.state_write, real(r.flushes()) * state);
      EXPECT_EQ(r.moved.ring_read, real(2 * w.records_read) * record);
      EXPECT_EQ(r.moved.ring_append, real(r.window_tokens) * record);
      EXPECT_EQ(r.snapshots.total(), real(r.steps + r.window_tokens) * state);
    }
  }
}

TEST_P(SpeculationTest, TheFirstDivergenceIsThatOfPlainRuns) {
  const Tokens prompts = some_tokens(6, 9);
  const Policy policy = parse_policy("replay(L=5, state=int4:row, order=sequential)");
  const SpeculationResult r = speculate(*model_, *backend_, prompts, policy, mostly_right(),
                                        {.window = 4, .ring = 9, .prompt_tokens = 9, .new_tokens = 24});
  ASSERT_TRUE(r.passed());
  std::optional<TextDivergence> first;
  std::int64_t compared = 0;
  for (std::size_t b = 0; b < 6; ++b) {
    Runner runner(*model_, *backend_, policy);
    for (std::size_t i = 0; i + 1 < r.texts[b].size(); ++i) {
      const Values logits = runner.logits({r.texts[b][i]});
      if (i + 1 < 9) continue;
      ++compared;
      const auto plain = static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
      const std::int32_t token = r.texts[b][i + 1];
      if (plain == token) continue;
      const double gap = logits[static_cast<std::size_t>(plain)] - logits[static_cast<std::size_t>(token)];
      if (!first) first = {static_cast<std::int64_t>(b), static_cast<std::int64_t>(i + 1), token, plain, gap};
      break;
    }
  }
  ASSERT_TRUE(first) << "the test wants a rougher format";
  EXPECT_EQ(r.own_schedule.first, first);
  EXPECT_EQ(r.own_schedule.compared, compared);
  EXPECT_LT(r.own_schedule.same_tokens, compared);
}

TEST_P(SpeculationTest, ThreadsChangeNothing) {
  const Tokens prompts = some_tokens(5, 9);
  SpeculationOptions options{.window = 4, .ring = 9, .prompt_tokens = 9, .new_tokens = 12};
  const SpeculationResult one = speculated(prompts, "replay(L=8, state=int4:row)", mostly_right(), options);
  options.threads = 4;
  std::int64_t last = 0;
  options.progress = [&](std::int64_t done, std::int64_t all) {
    EXPECT_EQ(all, 60);
    EXPECT_GE(done, last);
    last = done;
  };
  const SpeculationResult four = speculated(prompts, "replay(L=8, state=int4:row)", mostly_right(), options);
  EXPECT_EQ(last, 60);
  EXPECT_EQ(four.texts, one.texts);
  EXPECT_EQ(four.held, one.held);
  EXPECT_EQ(four.rolled_back, one.rolled_back);
  EXPECT_EQ(four.moved.total(), one.moved.total());
  EXPECT_EQ(four.own_schedule.first, one.own_schedule.first);
  EXPECT_EQ(four.own_schedule.largest_difference, one.own_schedule.largest_difference);
}

TEST_P(SpeculationTest, EndsWhenAskedTo) {
  std::atomic<int> asked = 0;
  SpeculationOptions options{.window = 4, .ring = 9, .prompt_tokens = 9, .new_tokens = 12};
  options.interrupted = [&] { return ++asked == 3; };
  try {
    speculated(some_tokens(2, 9), "exact", mostly_right(), options);
    FAIL() << "not interrupted";
  } catch (const Interrupted& stop) {
    EXPECT_NE(string(stop.what()).find("of 24 tokens"), string::npos) << stop.what();
  }
  EXPECT_EQ(asked, 3);
}

TEST_P(SpeculationTest, RefusesWhatItCannotDo) {
  const Tokens tokens = some_tokens(2, 20);
  const SpeculationOptions good{.window = 4, .ring = 6, .prompt_tokens = 9, .new_tokens = 5};
  const auto refused = [&](auto&& change, const std::vector<string>& parts, const string& policy = "exact") {
    SpeculationOptions options = good;
    change(options);
    expect_error([&] { check_speculation(*model_, tokens, parse_policy(policy), options); }, parts);
  };
  refused([](auto& o) { o.window = 0; }, {"window", "0"});
  refused([](auto& o) { o.ring = 3; }, {"ring", "4", "3"});
  refused([](auto& o) { o.prompt_tokens = 0; }, {"prompt", "0"});
  refused([](auto& o) { o.new_tokens = 0; }, {"new tokens", "0"});
  refused([](auto& o) { o.prompt_tokens = 21; }, {"20", "21"});
  refused([](auto& o) { o.teacher_forced = true, o.new_tokens = 12; }, {"20", "21"});
  refused([](auto&) {}, {"layers=9", "9"}, "eager(state=bf16, layers=9)");
  // 8 + 5 tokens: of a ring of 12 one more than it ever holds, of one of 13 perhaps none.
  check_speculation(*model_, tokens, parse_policy("replay(L=4, state=bf16)"),
                    {.ring = 12, .prompt_tokens = 9, .new_tokens = 5});
  refused([](auto& o) { o.ring = 13; }, {"replay(L=4, state=bf16)", "13"}, "replay(L=4, state=bf16)");
  refused([](auto& o) { o.prompt_tokens = o.new_tokens = 1; }, {"eager(state=bf16)", "1"}, "eager(state=bf16)");
}

INSTANTIATE_TEST_SUITE_P(Models, SpeculationTest, testing::Values("mamba2", "qwen3_5"));

// ---- what a comparison asks for
// ---------------------------------------------------------------------------------------

TEST(TextComparison, AsksForTokensOrForBits) {
  TextComparison c;
  c.compared = c.same_tokens = c.same_logits = 8;
  c.states = c.same_states = 2;
  const auto passed = [&](Demand demand) {
    c.demand = demand;
    return c.passed();
  };
  EXPECT_TRUE(passed(Demand::bits));
  c.same_states = 1;
  EXPECT_FALSE(passed(Demand::bits));
  c.same_states = 2;
  c.same_logits = 7;
  EXPECT_FALSE(passed(Demand::bits));
  EXPECT_TRUE(passed(Demand::tokens));
  c.same_tokens = 7;
  EXPECT_FALSE(passed(Demand::tokens));
  EXPECT_TRUE(passed(Demand::nothing));
}

// ---- the time of bytes
// ------------------------------------------------------------------------------------------------

/// Bytes of the tensors of a model but those left out.
double bytes_of(const string& model, const string& without) {
  double sum = 0;
  for (const auto& [name, tensor] : read_tensors(golden_folder(model) / "model.safetensors")) {
    if (name != without) sum += static_cast<double>(tensor.bytes.size());
  }
  return sum;
}

TEST(DecodeSeconds, ComeFromTheBytesOfAStep) {
  EXPECT_EQ(static_cast<double>(Model::open(golden_folder("qwen3_5"))->step_weight_bytes()),
            bytes_of("qwen3_5", "model.embed_tokens.weight"));
  EXPECT_EQ(static_cast<double>(Model::open(golden_folder("mamba2_tied"))->step_weight_bytes()),
            bytes_of("mamba2_tied", ""));
  const auto model = Model::open(golden_folder("mamba2"));
  const double weights = bytes_of("mamba2", "backbone.embeddings.weight");
  SpeculationResult r;
  r.policy = parse_policy("replay(L=2, state=bf16)");
  r.tokens = 100;
  r.steps = 40;
  r.window_tokens = 160;
  r.moved.state_read = 2e6;
  r.moved.ring_append = 1e6;
  r.snapshots.state_write = 9e6;
  const double state = 3 * 6 * 16 * 24 * 2, record = 3 * (6 * 16 * 2 + 2 * 24 * 2 + 6 * 4);
  const double activations = 3 * 2 * (6 * 2 * 16 + 2 * 2 * 24 + 6);  // x, y; B, C; dt
  const auto times = decode_seconds(*model, r, {.batches = {1, 8}, .bandwidth = 2});
  ASSERT_EQ(times.size(), 2u);
  for (std::size_t i = 0; i < 2; ++i) {
    const double batch = i == 0 ? 1 : 8;
    // Sums and products of a handful of terms, rounded in another order: within the 4 ulps of DOUBLE_EQ.
    EXPECT_EQ(times[i].batch, i == 0 ? 1 : 8);
    EXPECT_DOUBLE_EQ(times[i].eager, (weights + batch * (2 * state + activations)) / 2e9);
    // Of two steps one reads the state and appends, the other reads both and writes the state.
    EXPECT_DOUBLE_EQ(times[i].replay, (weights + batch * ((3 * state + 2 * record) / 2 + activations)) / 2e9);
    EXPECT_DOUBLE_EQ(times[i].speculative, (40 * weights + batch * (3e6 + 160 * activations)) / 100 / 2e9);
    EXPECT_DOUBLE_EQ(times[i].snapshots, (40 * weights + batch * (9e6 + 160 * activations)) / 100 / 2e9);
  }
}

}  // namespace
}  // namespace replayssm
