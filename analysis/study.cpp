#include "analysis/study.h"

#include <algorithm>
#include <cmath>

#include "analysis/archive.h"
#include "core/error.h"
#include "core/parallel.h"

namespace replayssm {

static void archive(Archive& a, LayerResult& result) {
  auto& [layer, kind, y_rel_l2, state_rel_l2, events] = result;  // a new field does not compile until it is saved too
  a(layer, kind, y_rel_l2, state_rel_l2, events);
}

namespace {

constexpr std::int64_t compare_rows = 8;  // rows of one task of the comparison
constexpr std::int64_t logits_bytes = std::int64_t{256} << 20;

SquaredError squared_error(const std::vector<double>& x, const std::vector<double>& reference) {
  SquaredError sum;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double difference = x[i] - reference[i];
    sum += {difference * difference, reference[i] * reference[i]};
  }
  return sum;
}

/// The hidden states of one policy: of each sequence, chunk after chunk.
struct Stream {
  Policy policy;
  std::vector<std::vector<Tensor>> hidden;
};

class Study {
 public:
  Study(const Model& model, Backend& backend, const Tokens& tokens, const std::vector<Policy>& policies,
        const StudyOptions& options)
      : model_(model), backend_(backend), tokens_(tokens), options_(options) {
    streams_.push_back({exact_policy(), {}});
    for (const Policy& policy : policies) {
      streams_.push_back({policy, {}});
      results_.push_back({.policy = policy,
                          .tokens = std::vector<TokenDivergence>(tokens.ids.size()),
                          .divergence = {},
                          .layers = {},
                          .cost = state_cost(model.layers(), policy, tokens.length)});
    }
    const std::int64_t chunks = (tokens.length + options.chunk_tokens - 1) / options.chunk_tokens * tokens.sequences;
    work_ = (std::ssize(model.layers()) + 1) * chunks * std::ssize(streams_);
  }

  std::vector<PolicyResult> run() {
    const std::int64_t layers = std::ssize(model_.layers());
    const auto all = [this](Archive& a) { archive_all(a); };
    if (options_.checkpoint && options_.checkpoint->load(all)) {
      if (options_.progress) options_.progress(done_, work_);
    } else {
      embed();
    }
    while (step_ < layers + tokens_.sequences) {
      step_ < layers ? run_layer(step_) : compare_sequence(step_ - layers);
      if (step_ < layers && options_.layer_done) options_.layer_done(step_);
      ++step_;
      if (options_.checkpoint) options_.checkpoint->save(all);
    }
    for (PolicyResult& result : results_) result.divergence = summarize(result.tokens, tokens_.length);
    return std::move(results_);
  }

 private:
  void embed() {
    for (std::int64_t b = 0; b < tokens_.sequences; ++b) {
      const std::span<const std::int32_t> ids(tokens_.ids.data() + b * tokens_.length,
                                              static_cast<std::size_t>(tokens_.length));
      const Tensor all = disturbed(b, model_.embed(backend_, ids));
      std::vector<Tensor> chunks;
      for (std::int64_t t = 0; t < all.rows; t += options_.chunk_tokens) {
        chunks.push_back(all.range(t, std::min(options_.chunk_tokens, all.rows - t)));
      }
      for (Stream& stream : streams_) stream.hidden.push_back(chunks);
    }
  }

  Tensor disturbed(std::int64_t sequence, Tensor embeddings) {
    if (!options_.disturb) return embeddings;
    std::vector<double> values(static_cast<std::size_t>(embeddings.rows * embeddings.columns));
    backend_.read(embeddings, values.data());
    options_.disturb(sequence, values);
    return backend_.write(values.data(), embeddings.rows, embeddings.columns);
  }

  /// All that the steps so far have left.
  void archive_all(Archive& a) {
    a(step_, done_);
    for (PolicyResult& result : results_) a(result.layers, result.tokens);
    for (Stream& stream : streams_) archive_stream(a, stream);
    if (options_.archive) options_.archive(a);
  }

  void archive_stream(Archive& a, Stream& stream) {
    stream.hidden.resize(static_cast<std::size_t>(tokens_.sequences));
    std::vector<double> values;  // holds fp32 exactly too
    for (std::size_t b = 0; b < stream.hidden.size(); ++b) {
      const std::vector<Tensor>& reference = streams_[0].hidden[b];
      std::vector<Tensor>& chunks = stream.hidden[b];
      bool same = !a.reading() && &stream != &streams_[0] && chunks[0].storage == reference[0].storage;
      a(same);
      if (same) {
        chunks = reference;
        continue;
      }
      const std::int64_t size = options_.chunk_tokens, columns = model_.hidden();
      chunks.resize(static_cast<std::size_t>((tokens_.length + size - 1) / size));
      for (std::size_t c = 0; c < chunks.size(); ++c) {
        const std::int64_t rows = std::min(size, tokens_.length - static_cast<std::int64_t>(c) * size);
        values.resize(static_cast<std::size_t>(rows * columns));
        if (!a.reading()) backend_.read(chunks[c], values.data());
        a(values);
        if (a.reading()) chunks[c] = backend_.write(values.data(), rows, columns);
      }
    }
  }

  /// What a study keeps of one policy while it runs through one SSM layer.
  struct Errors {
    SquaredError y, y_local, state, state_local;
    RangeEvents events;
  };

  void run_layer(std::int64_t layer) {
    const LayerInfo& info = model_.layers()[static_cast<std::size_t>(layer)];
    std::vector<Errors> errors(results_.size());
    for (std::int64_t b = 0; b < tokens_.sequences; ++b) {
      info.recurrence ? run_recurrent(layer, *info.recurrence, b, errors) : run_other(layer, b);
    }
    for (std::size_t s = 0; info.recurrence && s < results_.size(); ++s) {
      const Errors& e = errors[s];
      LayerResult result{layer, info.kind, {}, {}, e.events};
      result.y_rel_l2.propagated = e.y.relative();
      result.state_rel_l2.propagated = e.state.relative();
      if (options_.local) {
        result.y_rel_l2.local = e.y_local.relative();
        result.state_rel_l2.local = e.state_local.relative();
      }
      results_[s].layers.push_back(result);
    }
  }

  void run_other(std::int64_t layer, std::int64_t b) {
    const std::vector<bool> same = like_reference(layer, b);
    std::vector<LayerCache> caches(streams_.size());
    for_chunks(b, [&](std::size_t c, std::int64_t) {
      for_streams([&](std::size_t s) { forward(layer, b, c, s, same[s], caches[s]); });
    });
  }

  void run_recurrent(std::int64_t layer, const RecurrenceShape& shape, std::int64_t b, std::vector<Errors>& errors) {
    const std::vector<bool> same = like_reference(layer, b), equal_inputs = with_reference_inputs(b);
    std::vector<LayerCache> caches(streams_.size());
    std::vector<std::unique_ptr<RecurrentState>> own_local(streams_.size());
    const auto covered = [&](std::size_t s) { return streams_[s].policy.covers(layer); };
    const StatePlace place{options_.seed, static_cast<std::uint32_t>(b), static_cast<std::uint32_t>(layer)};
    for (std::size_t s = 0; s < streams_.size(); ++s) {
      if (same[s]) continue;
      caches[s].state = backend_.new_state(shape, covered(s) ? streams_[s].policy : exact_policy(), place);
      // A stream that enters with the reference's inputs is its own local run.
      const bool separate = options_.local && s > 0 && covered(s) && !equal_inputs[s];
      if (separate) own_local[s] = backend_.new_state(shape, streams_[s].policy, place);
    }
    const LayerCache& reference = caches[0];
    for_chunks(b, [&](std::size_t c, std::int64_t first_token) {
      for_streams([&](std::size_t s) {
        forward(layer, b, c, s, same[s], caches[s]);
        if (s == 0 || same[s]) return;
        Errors& e = errors[s - 1];
        e.y += backend_.squared_error(caches[s].readout, reference.readout);
        if (!options_.local || !covered(s)) return;
        const Tensor y = own_local[s] ? backend_.advance(*own_local[s], *reference.call) : caches[s].readout;
        e.y_local += backend_.squared_error(y, reference.readout);
        RecurrentState& local = own_local[s] ? *own_local[s] : *caches[s].state;
        if (options_.observe) {
          options_.observe({layer, b, first_token, s - 1, *reference.call, reference.readout, caches[s].readout, y,
                            *reference.state, *caches[s].state, local});
        }
      });
    });
    const std::vector<double> last = reference.state->effective();
    for (std::size_t s = 1; s < streams_.size(); ++s) {
      if (same[s]) continue;
      Errors& e = errors[s - 1];
      e.state += squared_error(caches[s].state->effective(), last);
      e.events.merge(caches[s].state->events());
      if (options_.local && covered(s)) {
        e.state_local += squared_error((own_local[s] ? own_local[s] : caches[s].state)->effective(), last);
      }
    }
  }

  /// body(stream) for the reference, then for all others: side by side where nobody looks on. Threads that have run out
  /// of streams help inside those of others.
  template <class Body>
  void for_streams(Body&& body) {
    body(0);
    const int together = options_.observe ? 1 : options_.threads;
    parallel_for(std::ssize(results_), together, [&](std::int64_t s) { body(static_cast<std::size_t>(s) + 1); });
    for (std::size_t s = 0; s < streams_.size(); ++s) step();
  }

  /// body(index, first token) for every chunk of a sequence.
  template <class Body>
  void for_chunks(std::int64_t b, Body&& body) {
    const auto& chunks = streams_[0].hidden[static_cast<std::size_t>(b)];
    std::int64_t first = 0;
    for (std::size_t c = 0; c < chunks.size(); ++c) {
      if (options_.interrupted && options_.interrupted()) stop();
      const std::int64_t rows = chunks[c].rows;
      body(c, first);
      first += rows;
    }
  }

  void forward(std::int64_t layer, std::int64_t b, std::size_t chunk, std::size_t s, bool same, LayerCache& cache) {
    const auto sequence = static_cast<std::size_t>(b);
    Tensor& hidden = streams_[s].hidden[sequence][chunk];
    hidden = same ? streams_[0].hidden[sequence][chunk] : model_.forward(backend_, layer, hidden, cache);
  }

  /// Streams whose hidden states are still the reference's own.
  std::vector<bool> with_reference_inputs(std::int64_t sequence) const {
    const auto first = [&](const Stream& s) { return s.hidden[static_cast<std::size_t>(sequence)][0].storage; };
    std::vector<bool> equal;
    for (const Stream& stream : streams_) equal.push_back(first(stream) == first(streams_[0]));
    return equal;
  }

  /// Of these the streams, without the reference, that the layer leaves as they are: they share its results.
  std::vector<bool> like_reference(std::int64_t layer, std::int64_t sequence) const {
    const bool recurrent = model_.layers()[static_cast<std::size_t>(layer)].recurrence.has_value();
    std::vector<bool> same = with_reference_inputs(sequence);
    for (std::size_t s = 0; s < streams_.size(); ++s) {
      if (s == 0 || (recurrent && streams_[s].policy.covers(layer))) same[s] = false;
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
    for_chunks(b, [&](std::size_t c, std::int64_t first_token) {
      const std::int64_t chunk = streams_[0].hidden[sequence][c].rows;
      for (std::int64_t t = 0; t < chunk; t += block) {
        const std::int64_t rows = std::min(block, chunk - t), position = first_token + t;
        const std::int64_t first = b * tokens_.length + position;
        std::vector<std::int32_t> next(static_cast<std::size_t>(rows), -1);
        for (std::int64_t i = 0; i < rows && position + i + 1 < tokens_.length; ++i) {
          next[static_cast<std::size_t>(i)] = tokens_.ids[static_cast<std::size_t>(first + i + 1)];
        }
        read_logits(streams_[0].hidden[sequence][c].range(t, rows), logits);
        const std::int64_t tasks = (rows + compare_rows - 1) / compare_rows;
        std::vector<std::optional<ReferenceBlock<double>>> reference(static_cast<std::size_t>(tasks));
        parallel_for(tasks, options_.threads, [&](std::int64_t i) {
          const std::int64_t r = i * compare_rows;
          reference[static_cast<std::size_t>(i)].emplace(logits.data() + r * vocabulary,
                                                         std::min(compare_rows, rows - r), vocabulary, first + r);
        });
        for (std::size_t s = 0; s < results_.size(); ++s) {
          read_logits(streams_[s + 1].hidden[sequence][c].range(t, rows), logits);
          parallel_for(tasks, options_.threads, [&](std::int64_t i) {
            const std::int64_t r = i * compare_rows;
            compare(*reference[static_cast<std::size_t>(i)], logits.data() + r * vocabulary, next.data() + r,
                    results_[s].tokens.data() + first + r, OnNonFinite::record);
          });
        }
      }
      for (std::size_t s = 0; s < streams_.size(); ++s) step();
    });
  }

  void read_logits(const Tensor& hidden, std::vector<double>& out) {
    backend_.read(model_.logits(backend_, model_.final_norm(backend_, hidden)), out.data());
  }

  [[noreturn]] void stop() const {
    const std::int64_t layers = std::ssize(model_.layers());
    const std::string where = step_ < layers ? "in layer " + std::to_string(step_) + " of " + std::to_string(layers)
                                             : "behind the last layer";
    throw Interrupted("interrupted " + where);
  }

  void step() {
    ++done_;
    if (options_.progress) options_.progress(done_, work_);
  }

  const Model& model_;
  Backend& backend_;
  const Tokens& tokens_;
  const StudyOptions& options_;
  std::vector<Stream> streams_;  // the reference first
  std::vector<PolicyResult> results_;
  std::int64_t step_ = 0;  // layers that are done, and then sequences that are compared
  std::int64_t done_ = 0, work_ = 0;
};

}  // namespace

std::int64_t PolicyResult::overflows() const {
  std::int64_t sum = 0;
  for (const LayerResult& layer : layers) sum += layer.events.overflows;
  return sum;
}

std::int64_t PolicyResult::saturations() const {
  std::int64_t sum = 0;
  for (const LayerResult& layer : layers) sum += layer.events.saturations;
  return sum;
}

bool PolicyResult::overflows_counted() const {
  return std::ranges::all_of(layers, [](const LayerResult& layer) { return layer.events.overflows_counted; });
}

std::optional<std::pair<RangeEvents::Event, std::int64_t>> PolicyResult::first_non_finite() const {
  std::optional<std::pair<RangeEvents::Event, std::int64_t>> first;
  for (const LayerResult& layer : layers) {
    const auto& event = layer.events.first_non_finite;
    if (event && (!first || event->step < first->first.step)) first = {*event, layer.layer};
  }
  return first;
}

void check_policy_layers(std::span<const LayerInfo> layers, const Policy& policy) {
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
}

void check_policy(const Model& model, const Policy& policy, std::int64_t tokens) {
  const auto& layers = model.layers();
  check_policy_layers(layers, policy);
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
                                    const std::vector<Policy>& policies, const StudyOptions& options) {
  if (tokens.ids.empty()) fail("a study needs at least one token");
  if (options.chunk_tokens < 1) fail("a study needs chunks of at least 1 token, found ", options.chunk_tokens);
  for (const Policy& policy : policies) check_policy(model, policy, tokens.length);
  return Study(model, backend, tokens, policies, options).run();
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
