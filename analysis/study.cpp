#include "analysis/study.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/parallel.h"

namespace replayssm {
namespace {

constexpr std::int64_t chunk_tokens = 512;  // tokens that go through a layer together
constexpr std::int64_t compare_rows = 8;    // rows of one task of the comparison
constexpr std::int64_t logits_bytes = std::int64_t{256} << 20;

/// The hidden states of one policy: of each sequence, chunk after chunk.
struct Stream {
  Policy policy;
  std::vector<std::vector<Tensor>> hidden;
};

class Study {
 public:
  Study(const Model& model, Backend& backend, const Tokens& tokens, const std::vector<Policy>& policies, int threads,
        const Progress& progress)
      : model_(model), backend_(backend), tokens_(tokens), threads_(threads), progress_(progress) {
    streams_.push_back({exact_policy(), {}});
    for (const Policy& policy : policies) {
      streams_.push_back({policy, {}});
      results_.push_back({.policy = policy,
                          .tokens = std::vector<TokenDivergence>(tokens.ids.size()),
                          .divergence = {},
                          .layers = {},
                          .cost = state_cost(model.layers(), policy, tokens.length)});
    }
    const std::int64_t chunks = (tokens.length + chunk_tokens - 1) / chunk_tokens * tokens.sequences;
    work_ = (std::ssize(model.layers()) + 1) * chunks * std::ssize(streams_);
  }

  std::vector<PolicyResult> run() {
    embed();
    for (std::int64_t layer = 0; layer < std::ssize(model_.layers()); ++layer) run_layer(layer);
    for (std::int64_t b = 0; b < tokens_.sequences; ++b) compare_sequence(b);
    for (PolicyResult& result : results_) result.divergence = summarize(result.tokens, tokens_.length);
    return std::move(results_);
  }

 private:
  void embed() {
    for (std::int64_t b = 0; b < tokens_.sequences; ++b) {
      const std::span<const std::int32_t> ids(tokens_.ids.data() + b * tokens_.length,
                                              static_cast<std::size_t>(tokens_.length));
      const Tensor all = model_.embed(backend_, ids);
      std::vector<Tensor> chunks;
      for (std::int64_t t = 0; t < all.rows; t += chunk_tokens) {
        chunks.push_back(all.range(t, std::min(chunk_tokens, all.rows - t)));
      }
      for (Stream& stream : streams_) stream.hidden.push_back(chunks);
    }
  }

  void run_layer(std::int64_t layer) {
    const LayerInfo& info = model_.layers()[static_cast<std::size_t>(layer)];
    const std::size_t runs = results_.size();
    std::vector<SquaredError> y(runs), state(runs);
    std::vector<RangeEvents> events(runs);
    for (std::int64_t b = 0; b < tokens_.sequences; ++b) {
      const std::vector<bool> same = streams_like_reference(layer, b);
      std::vector<LayerCache> caches(streams_.size());
      for (std::size_t s = 0; info.recurrence && s < streams_.size(); ++s) {
        if (same[s]) continue;
        const Policy& policy = streams_[s].policy;
        caches[s].state = backend_.new_state(*info.recurrence, policy.covers(layer) ? policy : exact_policy());
      }
      const auto sequence = static_cast<std::size_t>(b);
      for (std::size_t c = 0; c < streams_[0].hidden[sequence].size(); ++c) {
        for (std::size_t s = 0; s < streams_.size(); ++s) {
          step();
          Tensor& hidden = streams_[s].hidden[sequence][c];
          if (same[s]) {
            hidden = streams_[0].hidden[sequence][c];
            continue;
          }
          hidden = model_.forward(backend_, layer, hidden, caches[s]);
          if (info.recurrence && s > 0) y[s - 1] += backend_.squared_error(caches[s].readout, caches[0].readout);
        }
      }
      if (!info.recurrence) continue;
      const std::vector<double> reference = caches[0].state->effective();
      for (std::size_t s = 0; s < runs; ++s) {
        if (same[s + 1]) continue;
        const std::vector<double> own = caches[s + 1].state->effective();
        for (std::size_t i = 0; i < own.size(); ++i) {
          const double difference = own[i] - reference[i];
          state[s] += {difference * difference, reference[i] * reference[i]};
        }
        events[s].merge(caches[s + 1].state->events());
      }
    }
    for (std::size_t s = 0; info.recurrence && s < runs; ++s) {
      results_[s].layers.push_back({layer, info.kind, y[s].relative(), state[s].relative(), events[s]});
    }
  }

  /// Streams that have not left the reference yet and do not leave it here: their result is the reference's own.
  std::vector<bool> streams_like_reference(std::int64_t layer, std::int64_t sequence) const {
    const bool recurrent = model_.layers()[static_cast<std::size_t>(layer)].recurrence.has_value();
    const auto first = [&](const Stream& s) { return s.hidden[static_cast<std::size_t>(sequence)][0].storage; };
    std::vector<bool> same(streams_.size(), false);
    for (std::size_t s = 1; s < streams_.size(); ++s) {
      same[s] = first(streams_[s]) == first(streams_[0]) && !(recurrent && streams_[s].policy.covers(layer));
    }
    return same;
  }

  /// Logits and divergence of one sequence, in blocks of positions whose buffers stay under logits_bytes: the logits,
  /// and 16 bytes a logit that the reference keeps.
  void compare_sequence(std::int64_t b) {
    const std::int64_t vocabulary = model_.vocabulary();
    const std::int64_t block =
        std::clamp(logits_bytes / (vocabulary * 40) / compare_rows * compare_rows, compare_rows, std::int64_t{256});
    std::vector<double> logits(static_cast<std::size_t>(std::min(block, tokens_.length) * vocabulary));
    const auto sequence = static_cast<std::size_t>(b);
    std::int64_t position = 0;
    for (std::size_t c = 0; c < streams_[0].hidden[sequence].size(); ++c) {
      const std::int64_t chunk = streams_[0].hidden[sequence][c].rows;
      for (std::int64_t t = 0; t < chunk; t += block, position += block) {
        position = std::min(position, tokens_.length);
        const std::int64_t rows = std::min(block, chunk - t), first = b * tokens_.length + position;
        std::vector<std::int32_t> next(static_cast<std::size_t>(rows), -1);
        for (std::int64_t i = 0; i < rows && position + i + 1 < tokens_.length; ++i) {
          next[static_cast<std::size_t>(i)] = tokens_.ids[static_cast<std::size_t>(first + i + 1)];
        }
        read_logits(streams_[0].hidden[sequence][c].range(t, rows), logits);
        const std::int64_t tasks = (rows + compare_rows - 1) / compare_rows;
        std::vector<std::optional<ReferenceBlock<double>>> reference(static_cast<std::size_t>(tasks));
        parallel_for(tasks, threads_, [&](std::int64_t i) {
          const std::int64_t r = i * compare_rows;
          reference[static_cast<std::size_t>(i)].emplace(logits.data() + r * vocabulary,
                                                         std::min(compare_rows, rows - r), vocabulary, first + r);
        });
        for (std::size_t s = 0; s < results_.size(); ++s) {
          read_logits(streams_[s + 1].hidden[sequence][c].range(t, rows), logits);
          parallel_for(tasks, threads_, [&](std::int64_t i) {
            const std::int64_t r = i * compare_rows;
            compare(*reference[static_cast<std::size_t>(i)], logits.data() + r * vocabulary, next.data() + r,
                    results_[s].tokens.data() + first + r, OnNonFinite::record);
          });
        }
      }
      for (std::size_t s = 0; s < streams_.size(); ++s) step();
    }
  }

  void read_logits(const Tensor& hidden, std::vector<double>& out) {
    backend_.read(model_.logits(backend_, model_.final_norm(backend_, hidden)), out.data());
  }

  void step() {
    if (progress_) progress_(++done_, work_);
  }

  const Model& model_;
  Backend& backend_;
  const Tokens& tokens_;
  const int threads_;
  const Progress& progress_;
  std::vector<Stream> streams_;  // the reference first
  std::vector<PolicyResult> results_;
  std::int64_t done_ = 0, work_ = 0;
};

}  // namespace

std::int64_t PolicyResult::overflows() const {
  std::int64_t sum = 0;
  for (const LayerResult& layer : layers) sum += layer.events.overflows;
  return sum;
}

std::optional<std::pair<RangeEvents::Event, std::int64_t>> PolicyResult::first_non_finite() const {
  std::optional<std::pair<RangeEvents::Event, std::int64_t>> first;
  for (const LayerResult& layer : layers) {
    const auto& event = layer.events.first_non_finite;
    if (event && (!first || event->step < first->first.step)) first = {*event, layer.layer};
  }
  return first;
}

void check_policy(const Model& model, const Policy& policy, std::int64_t tokens) {
  const auto& layers = model.layers();
  const auto is_ssm = [&](std::int64_t i) {
    return i < std::ssize(layers) && layers[static_cast<std::size_t>(i)].recurrence.has_value();
  };
  for (const auto& [first, last] : policy.layers) {
    for (std::int64_t i = first; i <= last; ++i) {
      if (is_ssm(i)) continue;
      if (i >= std::ssize(layers))
        fail("policy '", policy.text(), "': the model has no layer ", i, ", its layers are 0-", layers.size() - 1);
      fail("policy '", policy.text(), "': layer ", i, " is ", layers[static_cast<std::size_t>(i)].kind,
           " and keeps no recurrent state");
    }
  }
  if (const auto* replay = std::get_if<Replay>(&policy.schedule)) {
    for (const auto& [field, format] : replay->ring.fields) {
      const bool used = std::any_of(layers.begin(), layers.end(), [&, &name = field](const LayerInfo& layer) {
        if (!layer.recurrence) return false;
        if (!is_delta_rule(layer.recurrence->recurrence)) return name == "x" || name == "B" || name == "dt";
        if (policy.loop == Loop::open) return name == "u" || name == "k" || name == "g";
        return name == "v" || name == "k" || name == "g" || name == "beta";
      });
      if (!used) fail("policy '", policy.text(), "': no ring of this model holds the field '", field, "'");
    }
  }
  if (policy.exact()) return;
  const StateCost cost = state_cost(layers, policy, tokens);
  const auto* replay = std::get_if<Replay>(&policy.schedule);
  const bool ring_read = replay && !replay->ring.exact() && cost.ring_reads > 0;
  if (cost.rounded_reads == 0 && !ring_read) {
    fail("policy '", policy.text(), "' reads nothing rounded back in ", tokens, " tokens, so it would measure nothing");
  }
  if (replay && replay->read && !replay->read->exact() && cost.read_copy_reads == 0) {
    fail("policy '", policy.text(), "' never reads its read copy in ", tokens, " tokens");
  }
}

std::vector<PolicyResult> run_study(const Model& model, Backend& backend, const Tokens& tokens,
                                    const std::vector<Policy>& policies, int threads, const Progress& progress) {
  if (tokens.ids.empty()) fail("a study needs at least one token");
  for (const Policy& policy : policies) check_policy(model, policy, tokens.length);
  return Study(model, backend, tokens, policies, threads, progress).run();
}

std::vector<Policy> default_policies() {
  std::vector<Policy> policies;
  for (const std::string format : {"bf16", "e4m3:row", "int8:row"}) {
    for (const std::string& policy : {"eager(state=" + format + ")", "replay(L=16, state=" + format + ")",
                                      "replay(L=16, anchor=fp32, read=" + format + ")"}) {
      policies.push_back(parse_policy(policy));
    }
  }
  return policies;
}

}  // namespace replayssm
