#include "analysis/drafts.h"

#include <algorithm>
#include <string>

#include "analysis/decoder.h"
#include "core/error.h"
#include "core/random.h"
#include "core/tokens.h"

namespace replayssm {
namespace {

using Text = std::span<const std::int32_t>;

Proposal first_of(Text drafts, std::int64_t most) {
  return {{drafts.begin(), drafts.begin() + std::min(most, std::ssize(drafts))}};
}

class PromptLookup : public DraftSource {
 public:
  explicit PromptLookup(std::int64_t longest) : longest_(longest) {
    if (longest < 1) fail("prompt lookup: expected n-grams of at least 1 token, found ", longest);
  }

  Proposal propose(Text text, std::int64_t most) override {
    for (std::int64_t n = std::min(longest_, std::ssize(text) - 1); n > 0; --n) {
      const Text end = text.last(static_cast<std::size_t>(n)), before = text.first(text.size() - 1);
      const auto found = std::ranges::find_end(before, end);
      if (found.empty()) continue;
      return first_of(text.subspan(static_cast<std::size_t>(found.end() - before.begin())), most);
    }
    return {};
  }

 private:
  std::int64_t longest_;
};

class ModelDrafts : public DraftSource {
 public:
  ModelDrafts(const Model& model, Backend& backend, std::int64_t most)
      : window_(std::max<std::int64_t>(most, 1)),
        decoder_(model, backend, exact_policy(), Speculation{.window = window_, .committed = window_}) {}

  Proposal propose(Text text, std::int64_t most) override {
    Proposal out;
    if (most < 1) return out;
    while (read_ < std::ssize(text)) {
      const Text window = text.subspan(static_cast<std::size_t>(read_),
                                       static_cast<std::size_t>(std::min(window_, std::ssize(text) - read_)));
      next_ = last_greedy(window);
      decoder_.accept(std::ssize(window));
      read_ += std::ssize(window);
    }
    out.drafts.push_back(next_);
    while (std::ssize(out.drafts) < most) {
      const std::int32_t next = last_greedy(out.drafts);
      decoder_.accept(0);
      out.drafts.push_back(next);
    }
    return out;
  }

 private:
  std::int32_t last_greedy(Text window) {
    const std::vector<double> logits = decoder_.logits(window);
    return greedy(std::span(logits).last(logits.size() / window.size()));
  }

  std::int64_t window_, read_ = 0;
  std::int32_t next_ = 0;
  Decoder decoder_;
};

class KnownText : public DraftSource {
 public:
  explicit KnownText(std::vector<std::int32_t> whole) : whole_(std::move(whole)) {}
  Proposal propose(Text text, std::int64_t most) override {
    return first_of(Text(whole_).subspan(std::min(text.size(), whole_.size())), most);
  }

 private:
  std::vector<std::int32_t> whole_;
};

/// Another id than `id`, by the draw.
std::int32_t another(std::int32_t id, std::uint32_t draw, std::int64_t vocabulary) {
  return static_cast<std::int32_t>((id + 1 + draw % (vocabulary - 1)) % vocabulary);
}

void check_vocabulary(std::int64_t vocabulary) {
  if (vocabulary < 2) fail("wrong drafts need a vocabulary of at least 2 ids, found ", vocabulary);
}

class Corrupted : public DraftSource {
 public:
  Corrupted(std::unique_ptr<DraftSource> source, double rate, std::uint64_t seed, std::int64_t sequence,
            std::int64_t vocabulary)
      : source_(std::move(source)), rate_(rate), seed_(seed), sequence_(sequence), vocabulary_(vocabulary) {
    if (!(rate >= 0 && rate <= 1)) fail("acceptance rate: expected a number in 0..1, found ", rate);
    check_vocabulary(vocabulary);
  }

  Proposal propose(Text text, std::int64_t most) override {
    Proposal out = source_->propose(text, most);
    for (std::size_t i = 0; i < out.drafts.size(); ++i) {
      const Words4 draw =
          philox4x32_10({{static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(text.size()),
                          static_cast<std::uint32_t>(text.size() >> 32), static_cast<std::uint32_t>(sequence_)}},
                        seed_);
      if (draw.word[0] >= rate_ * 0x1p32) out.drafts[i] = another(out.drafts[i], draw.word[1], vocabulary_);
    }
    return out;
  }

 private:
  std::unique_ptr<DraftSource> source_;
  double rate_;
  std::uint64_t seed_;
  std::int64_t sequence_, vocabulary_;
};

class Counted : public DraftSource {
 public:
  Counted(std::unique_ptr<DraftSource> source, std::vector<std::int64_t> counts, std::int64_t vocabulary)
      : source_(std::move(source)), counts_(std::move(counts)), vocabulary_(vocabulary) {
    if (std::ranges::any_of(counts_, [](std::int64_t n) { return n < 0; })) fail("accept counts: found a negative one");
    if (std::ranges::count(counts_, 0) == std::ssize(counts_)) fail("accept counts: nothing would ever be accepted");
    check_vocabulary(vocabulary);
  }

  Proposal propose(Text text, std::int64_t most) override {
    const std::int64_t count = counts_[step_++ % counts_.size()];
    Proposal out = source_->propose(text, most);
    out.discarded = count == 0;
    const std::int64_t right = std::max<std::int64_t>(count - 1, 0);
    if (right < std::ssize(out.drafts)) {
      std::int32_t& wrong = out.drafts[static_cast<std::size_t>(right)];
      wrong = another(wrong, 0, vocabulary_);
    }
    return out;
  }

 private:
  std::unique_ptr<DraftSource> source_;
  std::vector<std::int64_t> counts_;
  std::int64_t vocabulary_;
  std::size_t step_ = 0;
};

}  // namespace

std::unique_ptr<DraftSource> prompt_lookup(std::int64_t longest) { return std::make_unique<PromptLookup>(longest); }

std::unique_ptr<DraftSource> model_drafts(const Model& model, Backend& backend, std::int64_t most) {
  return std::make_unique<ModelDrafts>(model, backend, most);
}

std::unique_ptr<DraftSource> known_text(std::vector<std::int32_t> whole) {
  return std::make_unique<KnownText>(std::move(whole));
}

std::unique_ptr<DraftSource> corrupted(std::unique_ptr<DraftSource> source, double rate, std::uint64_t seed,
                                       std::int64_t sequence, std::int64_t vocabulary) {
  return std::make_unique<Corrupted>(std::move(source), rate, seed, sequence, vocabulary);
}

std::unique_ptr<DraftSource> counted(std::unique_ptr<DraftSource> source, std::vector<std::int64_t> counts,
                                     std::int64_t vocabulary) {
  return std::make_unique<Counted>(std::move(source), std::move(counts), vocabulary);
}

std::vector<std::int64_t> read_accept_counts(const std::filesystem::path& path, std::int64_t window) {
  const std::vector<std::int32_t> read = read_tokens(path).ids;
  for (std::size_t i = 0; i < read.size(); ++i) {
    if (read[i] > window) {
      fail(path.string(), ": expected accept counts of a window of ", window, " tokens, found ", read[i],
           " at position ", i);
    }
  }
  if (std::ranges::all_of(read, [](std::int32_t n) { return n == 0; })) {
    fail(path.string(), ": all accept counts are 0: nothing would ever be accepted");
  }
  return {read.begin(), read.end()};
}

}  // namespace replayssm
