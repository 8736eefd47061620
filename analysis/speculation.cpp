#include "analysis/speculation.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>

#include "analysis/decoder.h"
#include "analysis/roofline.h"
#include "core/error.h"
#include "core/parallel.h"

namespace replayssm {
namespace {

using Text = std::span<const std::int32_t>;
using Logits = std::span<const double>;

/// A state of length 1 rounds itself at every token: there is nothing to fold.
bool folds(const Policy& policy) { return policy.as_replay().length > 1; }

/// The policy of plain decoding that flushes where it is told to alone: longer than a ring of W records ever gets.
Policy flushed_by_hand(const Policy& policy, std::int64_t ring) {
  return folds(policy) ? with_length(policy, ring + 1) : policy;
}

Demand own_demand(const Policy& policy) {
  if (!folds(policy)) return Demand::bits;
  if (!policy.exact()) return Demand::nothing;
  return policy.order == Order::sequential ? Demand::bits : Demand::tokens;
}

bool same_bits(Logits a, Logits b) { return std::memcmp(a.data(), b.data(), a.size_bytes()) == 0; }

void add(std::vector<std::int64_t>& sum, const std::vector<std::int64_t>& more) {
  sum.resize(std::max(sum.size(), more.size()));
  for (std::size_t i = 0; i < more.size(); ++i) sum[i] += more[i];
}

/// One sequence decoded plainly, a token at a time, beside another run.
class PlainText {
 public:
  PlainText(const Model& model, Backend& backend, const Policy& policy, const StatePlace& place, Demand demand)
      : decoder_(model, backend, policy, {}, place) {
    out_.demand = demand;
  }

  void read(Text ids) {
    for (const std::int32_t& id : ids) decoder_.read({&id, 1});
  }
  void fold() {
    if (!ended_) decoder_.fold();
  }

  /// Reads the token in front of `position` and compares what it makes of that position with the logits of the other
  /// run. `forced`: what follows is the same, however they compare.
  void compare(std::int32_t id, Logits other, std::int64_t sequence, std::int64_t position, bool forced) {
    if (ended_) return;
    const std::vector<double> own = decoder_.logits({&id, 1});
    const std::int32_t token = greedy(other), plain = greedy(own);
    ++out_.compared;
    out_.same_tokens += token == plain;
    out_.same_logits += same_bits(own, other);
    for (std::size_t i = 0; i < own.size(); ++i) {
      const double difference = std::abs(own[i] - other[i]);
      if (std::isfinite(difference)) out_.largest_difference = std::max(out_.largest_difference, difference);
    }
    if (token == plain) return;
    ended_ = !forced;
    const auto at = [&](std::int32_t i) { return own[static_cast<std::size_t>(i)]; };
    if (!out_.first) out_.first = {sequence, position, token, plain, at(plain) - at(token)};
  }

  void compare_states(Decoder& other, std::size_t layers) {
    for (std::size_t i = 0; i < layers; ++i) {
      if (!decoder_.state(i)) continue;
      ++out_.states;
      out_.same_states += !ended_ && same_bits(decoder_.state(i)->effective(), other.state(i)->effective());
    }
  }

  const TextComparison& result() const { return out_; }

 private:
  Decoder decoder_;
  TextComparison out_;
  bool ended_ = false;
};

/// One sequence under speculation, and the plain runs beside it.
class Sequence {
 public:
  Sequence(const Model& model, Backend& backend, const Policy& policy, const SpeculationOptions& options, Text given,
           std::int64_t index)
      : model_(model),
        options_(options),
        given_(given),
        index_(index),
        place_{options.seed, static_cast<std::uint32_t>(index), 0},
        target_(model, backend, policy, room(), place_),
        same_(model, backend, flushed_by_hand(policy, options.ring), place_, Demand::bits),
        own_(model, backend, policy, place_, own_demand(policy)) {
    out_.policy = policy;
    out_.room = room();
    const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n) + 1; };
    out_.committed.resize(size(options.window));
    out_.rolled_back.resize(size(options.window));
    out_.held.resize(size(options.ring));
    for (std::size_t i = 0; i < model.layers().size(); ++i) {
      const auto& shape = model.layers()[i].recurrence;
      if (!shape) continue;
      const bool covered = policy.covers(static_cast<std::int64_t>(i));
      traffic_.emplace_back(*shape, covered ? policy : exact_policy());
      if (covered && !watched_) watched_ = target_.state(i);
    }
  }

  SpeculationResult run(DraftSource& source, const std::function<void(std::int64_t)>& decoded) {
    read_prompt();
    while (out_.tokens < options_.new_tokens) decoded(step(source));
    same_.compare_states(target_, model_.layers().size());
    if (own_.result().demand == Demand::bits) own_.compare_states(target_, model_.layers().size());
    out_.same_flushes = same_.result();
    out_.own_schedule = own_.result();
    out_.texts.push_back(std::move(text_));
    return std::move(out_);
  }

 private:
  Speculation room() const { return {.window = options_.window, .committed = options_.ring}; }

  /// What a call of the target does before its tokens: a flush, behind the last committed token. Gives the records that
  /// it met, and those that it folded.
  template <class Call>
  std::pair<std::int64_t, std::int64_t> watch(Call&& call) {
    const SpeculationStatus before = watched_->speculation();
    call();
    const bool folded = folds(out_.policy) && watched_->speculation().flushes > before.flushes;
    if (folded) same_.fold();
    return {before.held, folded ? before.held : 0};
  }

  void read_prompt() {
    const std::int64_t count = options_.prompt_tokens - 1;
    for (std::int64_t first = 0; first < count; first += options_.window) {
      const Text window = given_.subspan(static_cast<std::size_t>(first),
                                         static_cast<std::size_t>(std::min(options_.window, count - first)));
      watch([&] { target_.read(window); });
      target_.accept(std::ssize(window));
      same_.read(window);
      own_.read(window);
    }
    text_.assign(given_.begin(), given_.begin() + options_.prompt_tokens);
  }

  /// Verifies one window; the number of tokens that it committed.
  std::int64_t step(DraftSource& source) {
    const std::int64_t most = std::min(options_.window, options_.new_tokens - out_.tokens) - 1;
    const Proposal proposal = source.propose(text_, most);
    std::vector<std::int32_t> window = {text_.back()};
    window.insert(window.end(), proposal.drafts.begin(), proposal.drafts.end());
    std::vector<double> logits;
    const auto [held, folded] = watch([&] { logits = target_.logits(window); });
    const auto row = [&](std::int64_t i) {
      const auto columns = static_cast<std::size_t>(model_.vocabulary());
      return Logits(logits).subspan(static_cast<std::size_t>(i) * columns, columns);
    };
    const auto next = [&](std::int64_t i) {  // the token behind token i of the window
      return options_.teacher_forced ? given_[text_.size() + static_cast<std::size_t>(i)] : greedy(row(i));
    };
    std::vector<std::int32_t> taken;
    while (!proposal.discarded && std::ssize(taken) < std::ssize(window)) {
      taken.push_back(next(std::ssize(taken)));
      if (std::ssize(taken) < std::ssize(window) && window[taken.size()] != taken.back()) break;
    }
    const std::int64_t n = std::ssize(taken);
    target_.accept(n);
    for (std::int64_t i = 0; i < n; ++i) {
      for (PlainText* plain : {&same_, &own_}) {
        plain->compare(window[static_cast<std::size_t>(i)], row(i), index_, std::ssize(text_) + i,
                       options_.teacher_forced);
      }
    }
    text_.insert(text_.end(), taken.begin(), taken.end());
    count(held, folded, std::ssize(window), n, proposal.discarded);
    return n;
  }

  void count(std::int64_t held, std::int64_t folded, std::int64_t window, std::int64_t n, bool discarded) {
    ++out_.steps;
    out_.tokens += n;
    out_.window_tokens += window;
    out_.drafts += window - 1;
    out_.accepted += std::max<std::int64_t>(n - 1, 0);
    out_.discarded += discarded;
    ++out_.committed[static_cast<std::size_t>(n)];
    ++out_.rolled_back[static_cast<std::size_t>(window - n)];
    ++out_.held[static_cast<std::size_t>(held)];
    if (folded > 0) ++out_.spacing[folded];
    for (const LayerTraffic& layer : traffic_) {
      out_.moved += layer.verify(held, window, folded > 0);
      out_.snapshots += layer.snapshots(window);
    }
  }

  const Model& model_;
  const SpeculationOptions& options_;
  Text given_;
  std::int64_t index_;
  StatePlace place_;
  Decoder target_;
  PlainText same_, own_;
  RecurrentState* watched_ = nullptr;  // of the target: all layers that the policy names do alike
  std::vector<LayerTraffic> traffic_;  // of the SSM layers
  std::vector<std::int32_t> text_;     // what is committed, and the next token
  SpeculationResult out_;
};

void merge(SpeculationResult& sum, const SpeculationResult& more) {
  sum.policy = more.policy;
  sum.room = more.room;
  sum.texts.insert(sum.texts.end(), more.texts.begin(), more.texts.end());
  sum.tokens += more.tokens;
  sum.steps += more.steps;
  sum.drafts += more.drafts;
  sum.accepted += more.accepted;
  sum.discarded += more.discarded;
  add(sum.committed, more.committed);
  add(sum.rolled_back, more.rolled_back);
  add(sum.held, more.held);
  for (const auto& [tokens, count] : more.spacing) sum.spacing[tokens] += count;
  sum.moved += more.moved;
  sum.snapshots += more.snapshots;
  sum.window_tokens += more.window_tokens;
  sum.same_flushes.merge(more.same_flushes);
  sum.own_schedule.merge(more.own_schedule);
}

}  // namespace

void TextComparison::merge(const TextComparison& other) {
  demand = other.demand;
  compared += other.compared;
  same_tokens += other.same_tokens;
  same_logits += other.same_logits;
  largest_difference = std::max(largest_difference, other.largest_difference);
  states += other.states;
  same_states += other.same_states;
  if (!first) first = other.first;
}

bool TextComparison::passed() const {
  const bool tokens = same_tokens == compared, bits = same_logits == compared && same_states == states;
  return demand == Demand::nothing || (tokens && (demand == Demand::tokens || bits));
}

std::int64_t SpeculationResult::rollbacks() const { return steps - rolled_back[0]; }

std::int64_t SpeculationResult::flushes() const {
  std::int64_t sum = 0;
  for (const auto& flush : spacing) sum += flush.second;
  return sum;
}

double SpeculationResult::tokens_per_step() const { return static_cast<double>(tokens) / static_cast<double>(steps); }

double SpeculationResult::acceptance() const {
  if (drafts == 0) return std::numeric_limits<double>::quiet_NaN();
  return static_cast<double>(accepted) / static_cast<double>(drafts);
}

void check_speculation(const Model& model, const Tokens& tokens, const Policy& policy,
                       const SpeculationOptions& options) {
  if (options.window < 1) fail("window: expected at least 1 token, found ", options.window);
  if (options.ring < options.window) {
    fail("ring: expected room for a window of ", options.window, " tokens at least, found ", options.ring);
  }
  if (options.prompt_tokens < 1) fail("prompt tokens: expected at least 1, found ", options.prompt_tokens);
  if (options.new_tokens < 1) fail("new tokens: expected at least 1, found ", options.new_tokens);
  const std::int64_t needed = options.prompt_tokens + (options.teacher_forced ? options.new_tokens : 0);
  if (tokens.sequences < 1 || tokens.length < needed) {
    fail("speculation: sequences of ", tokens.length, " tokens, expected ", needed,
         " at least: ", options.prompt_tokens, " of the prompt",
         options.teacher_forced ? " and those to be decoded" : "");
  }
  if (model.ssm_layers() == 0) fail("speculation: the model has no layer with a recurrent state");
  check_policy_layers(model.layers(), policy);
  // A ring never holds more than W records: behind more tokens than that a flush has come before the last step.
  const std::int64_t all = options.prompt_tokens - 1 + options.new_tokens, unread = folds(policy) ? options.ring : 1;
  if (!policy.exact() && all <= unread) {
    fail("policy '", policy.text(), "': ", all, " tokens may never read back what it rounds; expected more than ",
         unread);
  }
}

SpeculationResult speculate(const Model& model, Backend& backend, const Tokens& tokens, const Policy& policy,
                            const DraftSources& sources, const SpeculationOptions& options) {
  check_speculation(model, tokens, policy, options);
  const std::int64_t all = tokens.sequences * options.new_tokens;
  std::int64_t done = 0;
  std::mutex progress;
  const auto decoded = [&](std::int64_t count) {
    const std::lock_guard lock(progress);
    done += count;
    if (options.progress) options.progress(done, all);
    if (options.interrupted && options.interrupted()) {
      const std::string counts = std::to_string(done) + " of " + std::to_string(all);
      throw Interrupted("interrupted after " + counts + " tokens of " + policy.text());
    }
  };
  std::vector<SpeculationResult> results(static_cast<std::size_t>(tokens.sequences));
  parallel_for(tokens.sequences, options.threads, [&](std::int64_t i) {
    const Text given(tokens.ids.data() + i * tokens.length, static_cast<std::size_t>(tokens.length));
    const auto source = sources(i);
    results[static_cast<std::size_t>(i)] = Sequence(model, backend, policy, options, given, i).run(*source, decoded);
  });
  SpeculationResult sum;
  for (const SpeculationResult& result : results) merge(sum, result);
  return sum;
}

}  // namespace replayssm
