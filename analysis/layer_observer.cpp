#include "analysis/layer_observer.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "analysis/head_inputs.h"
#include "core/parallel.h"

namespace replayssm {
namespace {

double unit_roundoff(Precision precision) { return precision == Precision::fp64 ? 0x1p-53 : 0x1p-24; }

std::vector<double> host(Backend& backend, const Tensor& tensor) {
  std::vector<double> out(static_cast<std::size_t>(tensor.rows * tensor.columns));
  backend.read(tensor, out.data());
  return out;
}

double squares(const std::vector<double>& x) {
  double part[8] = {};  // one sum would wait for its own last addition
  for (std::size_t i = 0; i < x.size(); ++i) part[i % 8] += x[i] * x[i];
  return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
}

ErrorMoments moments_of(const double* x, const double* reference, std::int64_t n) {
  ErrorMoments moments;
  for (std::int64_t i = 0; i < n; ++i) moments.add(x[i], reference[i]);
  return moments;
}

}  // namespace

HeadTrack::HeadTrack(const RecurrenceShape& shape)
    : state_({shape.recurrence, 1, 1, shape.head_dim, shape.state_dim}, exact_policy()),
      now_{1, std::vector<HeadInputs<double>>(1), {}},
      y_(static_cast<std::size_t>(shape.head_dim)),
      decay_(static_cast<std::size_t>(shape.state_dim)) {}

ReferenceStep HeadTrack::step(const HeadInputs<double>& in, std::int64_t t) {
  const RecurrenceShape& shape = state_.shape();
  const Record<double> record = in.record(t);
  now_.heads[0] = {
      .v = {in.v[t]}, .w = {in.w[t]}, .c = {in.c[t]}, .log_decay = {in.log_decay[t]}, .gain = {in.gain[t]}};
  state_.advance_head(0, now_, y_.data(), shape.head_dim);
  if (has_column_decay(shape.recurrence)) {
    for (std::size_t n = 0; n < decay_.size(); ++n) decay_[n] = std::exp(record.log_decay[n]);
  } else {
    std::ranges::fill(decay_, std::exp(record.log_decay[0]));
  }
  const std::vector<double>& state = state_.checkpoint(0);
  const double before2 = std::exchange(state2_, squares(state));
  return {record, decay_.data(), in.c[t], state.data(), before2, state2_};
}

void LayerObserver::operator()(const LayerChunk& chunk) {
  if (chunk.policy >= policies_.size()) return;  // a stream of the attribution
  const RecurrenceShape& shape = *model_.layers()[static_cast<std::size_t>(chunk.layer)].recurrence;
  const auto first = std::ranges::find_if(policies_, [&](const Policy& p) { return p.covers(chunk.layer); });
  if (std::cmp_equal(chunk.policy, first - policies_.begin())) start_chunk(chunk, shape);
  const Key key(chunk.layer, chunk.policy);
  LayerErrors& e = errors_.at(key);
  Collected& c = collected_.at(key);
  add_readouts(chunk.y_local, chunk, shape, e.y_local, e.y_local_by_head, c.y_error_by_token[0], &c.y_by_token);
  add_readouts(chunk.y_propagated, chunk, shape, e.y_propagated, e.y_propagated_by_head, c.y_error_by_token[1],
               nullptr);
  add_states(chunk, shape, e, c);
}

void LayerObserver::finish_layer(std::vector<std::vector<LayerErrors>>& layers) {
  for (auto& [key, errors] : errors_) {
    finish(errors, collected_.at(key), policies_[key.second]);
    layers[key.second].push_back(std::move(errors));
  }
  errors_.clear();
  collected_.clear();
}

/// What all policies share: the reference's state, and its steps, along which every policy's bound runs.
void LayerObserver::start_chunk(const LayerChunk& chunk, const RecurrenceShape& shape) {
  const auto heads = static_cast<std::size_t>(shape.heads);
  reference_state_ = chunk.reference.effective();
  reference_y_ = host(backend_, chunk.y_reference);
  if (chunk.first_token == 0) {
    tracks_.assign(heads, HeadTrack(shape));
    bounds_.assign(policies_.size(), {});
    stalls_.assign(policies_.size(), {});
    for (std::size_t i = 0; i < policies_.size(); ++i) {
      if (!policies_[i].covers(chunk.layer)) continue;
      bounds_[i].assign(heads, LocalBound(shape, policies_[i], unit_roundoff(backend_.recurrence_precision())));
      stalls_[i].assign(heads, StallTrack({shape.recurrence, 1, 1, shape.head_dim, shape.state_dim}, policies_[i]));
      if (chunk.sequence == 0) start_layer({chunk.layer, i}, shape);
    }
    if (chunk.sequence == 0) log_decay_.assign(heads, 0.0), decays_ = 0;
  }
  struct OfPolicy {
    std::vector<LocalBound>& bounds;
    std::vector<StallTrack>& stalls;
    Collected& collected;
  };
  std::vector<OfPolicy> covering;
  for (std::size_t i = 0; i < policies_.size(); ++i) {
    if (!bounds_[i].empty()) covering.push_back({bounds_[i], stalls_[i], collected_.at({chunk.layer, i})});
  }
  std::vector<RawHead> raw;
  for (std::int64_t h = 0; h < shape.heads; ++h) raw.push_back(raw_head(backend_, chunk.call, h));
  chunk_tokens_ = raw.front().tokens;
  parallel_for(shape.heads, threads_, [&](std::int64_t h) {
    const auto head = static_cast<std::size_t>(h);
    const PreparedHead<double> prepared(raw[head]);
    const HeadInputs<double>& in = prepared.head();
    for (std::int64_t t = 0; t < chunk_tokens_; ++t) {
      const ReferenceStep step = tracks_[head].step(in, t);
      for (const OfPolicy& policy : covering) {
        const double b = policy.bounds[head].advance(step);
        policy.collected.bound2[head] += b * b;
      }
      for (std::int64_t d = 0; d < shape.decay_dim(); ++d) {
        log_decay_[head] += in.log_decay[t][d] / static_cast<double>(shape.decay_dim());
      }
    }
    for (const OfPolicy& policy : covering) {
      policy.collected.standstill[head] += policy.stalls[head].advance(in, chunk_tokens_);
    }
  });
  decays_ += chunk_tokens_;
}

void LayerObserver::start_layer(const Key& key, const RecurrenceShape& shape) {
  LayerErrors& e = errors_[key];
  Collected& c = collected_[key];
  const auto heads = static_cast<std::size_t>(shape.heads);
  e.layer = key.first;
  e.kind = model_.layers()[static_cast<std::size_t>(key.first)].kind;
  for (auto* by_head : {&e.y_local_by_head, &e.y_propagated_by_head, &e.state_local_by_head}) by_head->resize(heads);
  e.growth.resize(heads);
  for (auto* sums : {&c.bound2, &c.written2, &c.state2}) sums->assign(heads, 0.0);
  c.standstill.assign(heads, {});
  for (auto& curve : c.y_error_by_token) curve.assign(tokens_.ids.size(), 0.0);
  c.y_by_token.assign(tokens_.ids.size(), 0.0);
}

void LayerObserver::add_readouts(const Tensor& y, const LayerChunk& chunk, const RecurrenceShape& shape,
                                 ErrorMoments& all, std::vector<ErrorMoments>& by_head,
                                 std::vector<double>& error_by_token, std::vector<double>* by_token) {
  const std::vector<double> values = host(backend_, y);
  const std::int64_t H = shape.heads, P = shape.head_dim;
  std::vector<ErrorMoments> moments(static_cast<std::size_t>(chunk_tokens_ * H));
  parallel_for(H, threads_, [&](std::int64_t h) {
    for (std::int64_t i = h; i < chunk_tokens_ * H; i += H) {
      moments[static_cast<std::size_t>(i)] = moments_of(values.data() + i * P, reference_y_.data() + i * P, P);
    }
  });
  const std::int64_t first = (chunk.sequence * tokens_.length + chunk.first_token) * H;
  for (std::int64_t i = 0; i < chunk_tokens_ * H; ++i) {
    const ErrorMoments& m = moments[static_cast<std::size_t>(i)];
    const auto token = static_cast<std::size_t>((first + i) / H);
    by_head[static_cast<std::size_t>(i % H)] += m;
    all += m;
    error_by_token[token] += m.squares;
    if (by_token) (*by_token)[token] += m.reference_squares;
  }
}

void LayerObserver::add_states(const LayerChunk& chunk, const RecurrenceShape& shape, LayerErrors& e, Collected& c) {
  const std::int64_t size = shape.head_dim * shape.state_dim;
  const Format format = policies_[chunk.policy].as_replay().anchor;
  const bool flushed = chunk.local.held() == 0;
  const std::vector<double> local = chunk.local.effective(), propagated = chunk.propagated.effective();
  const std::vector<double> checkpoint = chunk.local.checkpoint(), read_copy = chunk.local.read_copy();
  struct Head {
    ErrorMoments local, propagated, checkpoint, read_copy;
  };
  std::vector<Head> heads(static_cast<std::size_t>(shape.heads));
  Extremes<double> of_tensor;
  if (format.scale == Scale::tensor) {
    of_tensor = extremes(format, reference_state_.data(), shape.heads * shape.head_dim, shape.state_dim);
  }
  parallel_for(shape.heads, threads_, [&](std::int64_t h) {
    const auto head = static_cast<std::size_t>(h);
    const double* reference = reference_state_.data() + h * size;
    const auto compare = [&](const std::vector<double>& x) { return moments_of(x.data() + h * size, reference, size); };
    heads[head].local = compare(local);
    heads[head].propagated = compare(propagated);
    if (flushed) {
      heads[head].checkpoint = compare(checkpoint);
      heads[head].read_copy = compare(read_copy);
    }
    std::vector<double> once(reference, reference + size);
    const Draw draw{.token = static_cast<std::uint32_t>(chunk.first_token), .head = static_cast<std::uint32_t>(h)};
    round_rows(format, once.data(), shape.head_dim, shape.state_dim, draw, &of_tensor);
    for (std::int64_t i = 0; i < size; ++i) {
      const double error = once[static_cast<std::size_t>(i)] - reference[i];
      c.written2[head] += error * error;
      c.state2[head] += reference[i] * reference[i];
    }
  });
  ErrorMoments sample_local, sample_propagated;
  for (std::size_t h = 0; h < heads.size(); ++h) {
    e.state_local_by_head[h] += heads[h].local;
    sample_local += heads[h].local;
    sample_propagated += heads[h].propagated;
    e.checkpoint_local += heads[h].checkpoint;
    e.read_copy_local += heads[h].read_copy;
    e.growth[h].decay = std::exp(log_decay_[h] / static_cast<double>(decays_));
  }
  e.state_local += sample_local;
  e.state_local_by_sample.push_back(sample_local.rel_l2());
  e.state_propagated += sample_propagated;
  e.state_propagated_by_sample.push_back(sample_propagated.rel_l2());
  if (std::ssize(sample_tokens_) < std::ssize(e.state_local_by_sample)) {
    sample_tokens_.push_back(chunk.first_token + chunk_tokens_);
  }
}

void LayerObserver::finish(LayerErrors& e, const Collected& c, const Policy& policy) const {
  const auto length = static_cast<double>(policy.as_replay().length);
  double bound2 = 0;
  for (std::size_t h = 0; h < e.growth.size(); ++h) {
    Growth& g = e.growth[h];
    g.half_life = -std::numbers::ln2 / std::log(g.decay);
    g.sigma = c.state2[h] > 0 ? std::sqrt(c.written2[h] / c.state2[h]) : 0;
    g.predicted = g.sigma / std::sqrt(1 - std::pow(g.decay, 2 * length));
    g.measured = e.state_local_by_head[h].rel_l2();
    g.still = c.standstill[h].share();
    e.bound_by_head.push_back(SquaredError{c.bound2[h], e.y_local_by_head[h].reference_squares}.relative());
    bound2 += c.bound2[h];
  }
  e.bound = SquaredError{bound2, e.y_local.reference_squares}.relative();
  for (std::size_t t = 0; t < c.y_by_token.size(); ++t) {
    const auto relative = [&](double error) { return SquaredError{error, c.y_by_token[t]}.relative(); };
    e.y_local_by_token.push_back(relative(c.y_error_by_token[0][t]));
    e.y_propagated_by_token.push_back(relative(c.y_error_by_token[1][t]));
  }
}

}  // namespace replayssm
