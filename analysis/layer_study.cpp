#include "analysis/layer_study.h"

#include <algorithm>
#include <cmath>

#include "analysis/archive.h"
#include "analysis/layer_observer.h"
#include "core/real.h"

namespace replayssm {

// A new field does not compile until it is saved too.
static void archive(Archive& a, LayerErrors& errors) {
  auto& [layer, kind, y_local, y_propagated, state_local, state_propagated, checkpoint_local, read_copy_local,
         y_local_by_head, y_propagated_by_head, state_local_by_head, y_local_by_token, y_propagated_by_token,
         state_local_by_sample, state_propagated_by_sample, growth, bound, bound_by_head] = errors;
  a(layer, kind, y_local, y_propagated, state_local, state_propagated, checkpoint_local, read_copy_local,
    y_local_by_head, y_propagated_by_head, state_local_by_head, y_local_by_token, y_propagated_by_token,
    state_local_by_sample, state_propagated_by_sample, growth, bound, bound_by_head);
}

namespace {

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
    // bf16 has 7 bits of mantissa; below its smallest normal number the last place stays where it is.
    const double in_ulps = size / (power_of_two_below(std::max(std::abs(reference), 0x1p-126)) * 0x1p-7);
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

static std::vector<std::int64_t> heads_where(const std::vector<Growth>& growth, bool (*wanted)(const Growth&)) {
  std::vector<std::int64_t> heads;
  for (std::size_t h = 0; h < growth.size(); ++h) {
    if (wanted(growth[h])) heads.push_back(static_cast<std::int64_t>(h));
  }
  return heads;
}

std::vector<std::int64_t> LayerErrors::lawless() const {
  return heads_where(growth, [](const Growth& g) { return !g.holds(); });
}

std::vector<std::int64_t> LayerErrors::stalled() const {
  return heads_where(growth, [](const Growth& g) { return g.stalls(); });
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
  LayerObserver observer(model, backend, tokens, policies, options.threads);
  std::vector<std::vector<LayerErrors>> layers(policies.size());
  options.local = true;
  options.observe = [&, also = options.observe](const LayerChunk& chunk) {
    observer(chunk);
    if (also && chunk.policy < policies.size()) also(chunk);
  };
  options.layer_done = [&, also = options.layer_done](std::int64_t layer) {
    observer.finish_layer(layers);
    if (also) also(layer);
  };
  options.archive = [&](Archive& a) { a(layers, observer.sample_tokens()); };
  std::vector<PolicyResult> results = run_study(model, backend, tokens, streams, options);

  LayerStudy study;
  std::size_t next = policies.size();
  for (std::size_t i = 0; i < policies.size(); ++i) {
    PolicyLayers policy{std::move(results[i]), std::move(layers[i]), {}};
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

std::vector<Policy> default_layer_policies() {
  std::vector<Policy> policies;
  for (const char* text :
       {"replay(L=4, state=e4m3:row)", "replay(L=16, state=e4m3:row)", "replay(L=16, anchor=fp32, read=e4m3:row)"}) {
    policies.push_back(parse_policy(text));
  }
  return policies;
}

}  // namespace replayssm
