#include "analysis/layer_study.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "analysis/bound.h"
#include "core/delta_rule.h"
#include "core/mamba2.h"
#include "core/parallel.h"

namespace replayssm {
namespace {

double unit_roundoff(Precision precision) { return precision == Precision::fp64 ? 0x1p-53 : 0x1p-24; }

std::vector<double> host(Backend& backend, const Tensor& tensor) {
  std::vector<double> out(static_cast<std::size_t>(tensor.rows * tensor.columns));
  backend.read(tensor, out.data());
  return out;
}

std::vector<double> host(const TensorView& tensor) {
  std::vector<double> out(static_cast<std::size_t>(tensor.elements()));
  widen(tensor, 0, out.size(), out.data());
  return out;
}

/// The inputs of a call in binary64, prepared, with the host memory that they point to.
struct HostInputs {
  RecurrenceShape shape;
  std::vector<std::vector<double>> memory;
  LayerInputs<double> inputs;

  HostInputs(Backend& backend, const RecurrenceCall& call) {
    std::visit([&](const auto& c) { take(backend, c); }, call);
  }

 private:
  Rows<double> rows(Backend& backend, const Tensor& tensor) {
    memory.push_back(host(backend, tensor));
    return {memory.back().data(), tensor.columns};
  }
  const double* vector(const TensorView& tensor) {
    memory.push_back(host(tensor));
    return memory.back().data();
  }
  void take(Backend& backend, const Mamba2Call& c) {
    shape = c.shape;
    inputs =
        prepare(Mamba2Inputs<double>{c.shape, c.x.rows, rows(backend, c.x), rows(backend, c.B), rows(backend, c.C),
                                     rows(backend, c.dt), vector(*c.A_log), vector(*c.dt_bias), c.dt_min, c.dt_max});
  }
  void take(Backend& backend, const DeltaCall& c) {
    shape = c.shape;
    inputs = prepare(DeltaInputs<double>{c.shape, c.v.rows, rows(backend, c.q), rows(backend, c.k), rows(backend, c.v),
                                         rows(backend, c.gate), rows(backend, c.beta), vector(*c.A_log),
                                         vector(*c.dt_bias), c.beta_scale});
  }
};

/// The reference's recurrence of one head, step by step, in binary64.
class HeadTrack {
 public:
  HeadTrack(const RecurrenceShape& shape)
      : shape_(shape), state_(static_cast<std::size_t>(shape.head_dim * shape.state_dim), 0.0) {}

  const std::vector<double>& state() const { return state_; }

  StepFacts step(const Record<double>& r, const double* c) {
    const std::int64_t P = shape_.head_dim, N = shape_.state_dim, D = shape_.decay_dim();
    decay_.resize(static_cast<std::size_t>(N));
    StepFacts facts{.gain = r.gain};
    for (std::int64_t n = 0; n < N; ++n) {
      double& a = decay_[static_cast<std::size_t>(n)];
      a = n < D ? std::exp(r.log_decay[n]) : decay_[0];
      facts.decay = std::max(facts.decay, a);
      facts.w2 += r.w[n] * r.w[n];
      facts.c2 += c[n] * c[n];
    }
    for (std::int64_t p = 0; p < P; ++p) {
      double* s = state_.data() + p * N;
      double readout = 0;
      for (std::int64_t n = 0; n < N; ++n) {
        s[n] *= decay_[static_cast<std::size_t>(n)];
        readout += s[n] * r.w[n];
      }
      const double u = r.gain * (is_delta_rule(shape_.recurrence) ? r.v[p] - readout : r.v[p]);
      facts.u2 += u * u;
      for (std::int64_t n = 0; n < N; ++n) {
        s[n] += u * r.w[n];
        facts.state2 += s[n] * s[n];
      }
    }
    return facts;
  }

 private:
  RecurrenceShape shape_;
  std::vector<double> state_, decay_;
};

/// What is collected of one policy in one layer besides LayerErrors.
struct Collected {
  std::vector<std::vector<LocalBound>> bounds;  // [sequence][head]
  std::vector<double> bound2;                   // by head: sum of bound^2
  std::vector<double> written2, state2;         // by head: of what one store loses, and of the state
  std::vector<double> y_error_by_token[2], y_by_token;
};

class Observer {
 public:
  Observer(const Model& model, Backend& backend, const Tokens& tokens, const std::vector<Policy>& policies, int threads)
      : model_(model), backend_(backend), tokens_(tokens), policies_(policies), threads_(threads) {}

  /// Layers of one policy, once the study is over.
  std::vector<LayerErrors> layers_of(std::size_t policy) {
    std::vector<LayerErrors> out;
    for (auto& [key, errors] : errors_) {
      if (key.second == policy) out.push_back(finish(errors, collected_.at(key), policies_[policy]));
    }
    return out;
  }
  const std::vector<std::int64_t>& sample_tokens() const { return sample_tokens_; }

  void operator()(const LayerChunk& chunk) {
    if (chunk.policy >= policies_.size()) return;  // a stream of the attribution
    if (chunk.policy == first_policy_of(chunk.layer)) start_chunk(chunk);
    const RecurrenceShape& shape = *model_.layers()[static_cast<std::size_t>(chunk.layer)].recurrence;
    const Key key(chunk.layer, chunk.policy);
    LayerErrors& e = errors_.at(key);
    Collected& c = collected_.at(key);
    add_readouts(host(backend_, chunk.y_local), chunk, shape, e.y_local, e.y_local_by_head, c.y_error_by_token[0],
                 &c.y_by_token);
    add_readouts(host(backend_, chunk.y_propagated), chunk, shape, e.y_propagated, e.y_propagated_by_head,
                 c.y_error_by_token[1], nullptr);
    add_states(chunk, shape, e, c);
  }

 private:
  using Key = std::pair<std::int64_t, std::size_t>;

  std::size_t first_policy_of(std::int64_t layer) const {
    std::size_t i = 0;
    while (!policies_[i].covers(layer)) ++i;
    return i;
  }

  /// What all policies share: the reference's state, and its steps, along which every policy's bound runs.
  void start_chunk(const LayerChunk& chunk) {
    const HostInputs host_inputs(backend_, chunk.call);
    const RecurrenceShape& shape = host_inputs.shape;
    const auto heads = static_cast<std::size_t>(shape.heads);
    chunk_tokens_ = host_inputs.inputs.tokens;
    reference_state_ = chunk.reference.effective();
    reference_y_ = host(backend_, chunk.y_reference);
    std::vector<Collected*> covered;
    for (std::size_t i = 0; i < policies_.size(); ++i) {
      if (!policies_[i].covers(chunk.layer)) continue;
      const Key key(chunk.layer, i);
      if (!errors_.contains(key)) start_layer(key, shape);
      covered.push_back(&collected_[key]);
    }
    if (chunk.first_token == 0) {
      tracks_.assign(heads, HeadTrack(shape));
      if (chunk.sequence == 0) log_decay_.assign(heads, 0.0), decays_ = 0;
    }
    const auto sequence = static_cast<std::size_t>(chunk.sequence);
    parallel_for(shape.heads, threads_, [&](std::int64_t h) {
      const auto head = static_cast<std::size_t>(h);
      const HeadInputs<double>& in = host_inputs.inputs.heads[head];
      for (std::int64_t t = 0; t < chunk_tokens_; ++t) {
        const StepFacts facts = tracks_[head].step(in.record(t), in.c[t]);
        for (Collected* c : covered) {
          const double bound = c->bounds[sequence][head].advance(facts, tracks_[head].state().data());
          c->bound2[head] += bound * bound;
        }
        for (std::int64_t d = 0; d < shape.decay_dim(); ++d) {
          log_decay_[head] += in.log_decay[t][d] / static_cast<double>(shape.decay_dim());
        }
      }
    });
    decays_ += chunk_tokens_;
  }

  void start_layer(const Key& key, const RecurrenceShape& shape) {
    LayerErrors& e = errors_[key];
    Collected& c = collected_[key];
    const auto heads = static_cast<std::size_t>(shape.heads);
    const LocalBound bound(shape, policies_[key.second], unit_roundoff(backend_.recurrence_precision()));
    e.layer = key.first;
    e.kind = model_.layers()[static_cast<std::size_t>(key.first)].kind;
    for (auto* by_head : {&e.y_local_by_head, &e.y_propagated_by_head, &e.state_local_by_head}) by_head->resize(heads);
    e.growth.resize(heads);
    c.bounds.assign(static_cast<std::size_t>(tokens_.sequences), std::vector<LocalBound>(heads, bound));
    for (auto* sums : {&c.bound2, &c.written2, &c.state2}) sums->assign(heads, 0.0);
    for (auto& curve : c.y_error_by_token) curve.assign(tokens_.ids.size(), 0.0);
    c.y_by_token.assign(tokens_.ids.size(), 0.0);
  }

  void add_readouts(const std::vector<double>& y, const LayerChunk& chunk, const RecurrenceShape& shape,
                    ErrorMoments& all, std::vector<ErrorMoments>& by_head, std::vector<double>& error_by_token,
                    std::vector<double>* by_token) {
    const std::int64_t width = shape.heads * shape.head_dim;
    for (std::int64_t t = 0; t < chunk_tokens_; ++t) {
      const auto token = static_cast<std::size_t>(chunk.sequence * tokens_.length + chunk.first_token + t);
      for (std::int64_t h = 0; h < shape.heads; ++h) {
        ErrorMoments moments;
        for (std::int64_t p = 0; p < shape.head_dim; ++p) {
          const auto i = static_cast<std::size_t>(t * width + h * shape.head_dim + p);
          moments.add(y[i], reference_y_[i]);
        }
        by_head[static_cast<std::size_t>(h)] += moments;
        all += moments;
        error_by_token[token] += moments.squares;
        if (by_token) (*by_token)[token] += moments.reference_squares;
      }
    }
  }

  static ErrorMoments moments_of(const std::vector<double>& x, const std::vector<double>& reference) {
    ErrorMoments moments;
    for (std::size_t i = 0; i < x.size(); ++i) moments.add(x[i], reference[i]);
    return moments;
  }

  void add_states(const LayerChunk& chunk, const RecurrenceShape& shape, LayerErrors& e, Collected& c) {
    const std::vector<double>& reference = reference_state_;
    const std::vector<double> local = chunk.local.effective();
    const std::size_t size = reference.size() / static_cast<std::size_t>(shape.heads);
    const Format format = policies_[chunk.policy].as_replay().anchor;
    ErrorMoments sample;
    for (std::size_t h = 0; h < static_cast<std::size_t>(shape.heads); ++h) {
      ErrorMoments moments;
      for (std::size_t i = h * size; i < (h + 1) * size; ++i) moments.add(local[i], reference[i]);
      e.state_local_by_head[h] += moments;
      sample += moments;

      std::vector<double> once(reference.begin() + static_cast<std::ptrdiff_t>(h * size),
                               reference.begin() + static_cast<std::ptrdiff_t>((h + 1) * size));
      round_rows(format, once.data(), shape.head_dim, shape.state_dim);
      for (std::size_t i = 0; i < size; ++i) {
        const double x = reference[h * size + i];
        c.written2[h] += (once[i] - x) * (once[i] - x);
        c.state2[h] += x * x;
      }
      e.growth[h].decay = std::exp(log_decay_[h] / static_cast<double>(decays_));
    }
    e.state_local += sample;
    e.state_local_by_sample.push_back(sample.rel_l2());
    const ErrorMoments propagated = moments_of(chunk.propagated.effective(), reference);
    e.state_propagated += propagated;
    e.state_propagated_by_sample.push_back(propagated.rel_l2());
    if (chunk.local.held() == 0) {
      e.checkpoint_local += moments_of(chunk.local.checkpoint(), reference);
      e.read_copy_local += moments_of(chunk.local.read_copy(), reference);
    }
    if (std::ssize(sample_tokens_) < std::ssize(e.state_local_by_sample)) {
      sample_tokens_.push_back(chunk.first_token + chunk_tokens_);
    }
  }

  LayerErrors finish(LayerErrors& e, const Collected& c, const Policy& policy) {
    const auto length = static_cast<double>(policy.as_replay().length);
    double bound2 = 0;
    for (std::size_t h = 0; h < e.growth.size(); ++h) {
      Growth& g = e.growth[h];
      g.half_life = -std::numbers::ln2 / std::log(g.decay);
      g.sigma = c.state2[h] > 0 ? std::sqrt(c.written2[h] / c.state2[h]) : 0;
      g.predicted = g.sigma / std::sqrt(1 - std::pow(g.decay, 2 * length));
      g.measured = e.state_local_by_head[h].rel_l2();
      e.bound_by_head.push_back(SquaredError{c.bound2[h], e.y_local_by_head[h].reference_squares}.relative());
      bound2 += c.bound2[h];
    }
    e.bound = SquaredError{bound2, e.y_local.reference_squares}.relative();
    for (std::size_t t = 0; t < c.y_by_token.size(); ++t) {
      const auto relative = [&](double error) { return SquaredError{error, c.y_by_token[t]}.relative(); };
      e.y_local_by_token.push_back(relative(c.y_error_by_token[0][t]));
      e.y_propagated_by_token.push_back(relative(c.y_error_by_token[1][t]));
    }
    return std::move(e);
  }

  const Model& model_;
  Backend& backend_;
  const Tokens& tokens_;
  const std::vector<Policy>& policies_;
  const int threads_;
  std::map<Key, LayerErrors> errors_;
  std::map<Key, Collected> collected_;
  std::vector<std::int64_t> sample_tokens_;
  // Of the chunk at hand, for all policies:
  std::int64_t chunk_tokens_ = 0, decays_ = 0;
  std::vector<HeadTrack> tracks_;
  std::vector<double> log_decay_, reference_state_, reference_y_;
};

Attribution attribution_of(const std::vector<PolicyResult>& alone, const PolicyLayers& policy) {
  Attribution out;
  out.whole = policy.result.divergence.kl.mean;
  for (std::size_t i = 0; i < alone.size(); ++i) {
    const LayerErrors& errors = policy.layers[i];
    const double kl = alone[i].divergence.kl.mean;
    out.layers.emplace_back(errors.layer, kl);
    out.sum += kl;
    for (std::size_t h = 0; h < errors.y_local_by_head.size(); ++h) {
      const double share = errors.y_local.squares > 0 ? errors.y_local_by_head[h].squares / errors.y_local.squares : 0;
      out.heads.push_back({errors.layer, static_cast<std::int64_t>(h), kl * share});
    }
  }
  std::ranges::stable_sort(out.layers, [](const auto& a, const auto& b) { return a.second > b.second; });
  std::ranges::stable_sort(out.heads, [](const auto& a, const auto& b) { return a.share > b.share; });
  return out;
}

}  // namespace

void ErrorMoments::add(double value, double reference) {
  const double error = value - reference, size = std::abs(error);
  count += 1;
  sum += error;
  squares += error * error;
  reference_squares += reference * reference;
  largest = std::max(largest, size);
  if (reference != 0 && std::isfinite(reference)) {
    constexpr int bf16_mantissa = 7;
    const double in_ulps = std::ldexp(size, bf16_mantissa - std::ilogb(reference));
    ulps += in_ulps;
    largest_ulps = std::max(largest_ulps, in_ulps);
  }
}

ErrorMoments& ErrorMoments::operator+=(const ErrorMoments& other) {
  count += other.count;
  sum += other.sum;
  squares += other.squares;
  reference_squares += other.reference_squares;
  largest = std::max(largest, other.largest);
  ulps += other.ulps;
  largest_ulps = std::max(largest_ulps, other.largest_ulps);
  return *this;
}

double ErrorMoments::rel_l2() const { return SquaredError{squares, reference_squares}.relative(); }

double ErrorMoments::bias() const { return sum == 0 ? 0 : sum / count / std::sqrt(reference_squares / count); }

double ErrorMoments::spread() const {
  const double mean = sum / count, variance = squares / count - mean * mean;
  return squares == 0 ? 0 : std::sqrt(std::max(variance, 0.0) / (reference_squares / count));
}

double ErrorMoments::mean_ulps() const { return count == 0 ? 0 : ulps / count; }

bool Growth::holds() const {
  if (half_life < 4 || sigma == 0) return true;
  return measured <= 2 * predicted && predicted <= 2 * measured;
}

std::vector<std::int64_t> LayerErrors::lawless() const {
  std::vector<std::int64_t> heads;
  for (std::size_t h = 0; h < growth.size(); ++h) {
    if (!growth[h].holds()) heads.push_back(static_cast<std::int64_t>(h));
  }
  return heads;
}

LayerStudy run_layer_study(const Model& model, Backend& backend, const Tokens& tokens,
                           const std::vector<Policy>& policies, StudyOptions options, bool attribute) {
  std::vector<Policy> streams = policies;
  for (const Policy& policy : policies) {
    for (std::int64_t i = 0; attribute && i < std::ssize(model.layers()); ++i) {
      if (!model.layers()[static_cast<std::size_t>(i)].recurrence || !policy.covers(i)) continue;
      streams.push_back(policy);
      streams.back().layers = {{i, i}};
    }
  }
  Observer observer(model, backend, tokens, policies, options.threads);
  options.local = true;
  options.observe = [&](const LayerChunk& chunk) { observer(chunk); };
  std::vector<PolicyResult> results = run_study(model, backend, tokens, streams, options);

  LayerStudy study;
  std::size_t next = policies.size();
  for (std::size_t i = 0; i < policies.size(); ++i) {
    PolicyLayers policy{std::move(results[i]), observer.layers_of(i), {}};
    if (attribute) {
      const auto count = policy.layers.size();
      policy.attribution = attribution_of({results.begin() + static_cast<std::ptrdiff_t>(next),
                                           results.begin() + static_cast<std::ptrdiff_t>(next + count)},
                                          policy);
      next += count;
    }
    study.policies.push_back(std::move(policy));
  }
  study.sample_tokens = observer.sample_tokens();
  return study;
}

}  // namespace replayssm
