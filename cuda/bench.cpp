#include "cuda/bench.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "cuda/bench_device.h"
#include "cuda/bench_layers.h"
#include "cuda/bench_reference.h"

namespace replayssm::cuda {
namespace {

/// First, middle and last of n.
std::vector<std::int64_t> sample(std::int64_t n) {
  const std::set<std::int64_t> some = {0, n / 2, n - 1};
  return {some.begin(), some.end()};
}

/// The larger, and NaN if one is.
double worse(double a, double b) { return std::isnan(a) || a > b ? a : b; }

/// The time of one of the `steps` steps that launch() puts on the stream.
template <class Launch>
BenchTime time_steps(const Stream& stream, std::int64_t steps, Launch&& launch) {
  const Graph graph(stream, launch);
  const std::vector<double> seconds = time_runs(stream, 0.25, [&] { graph.run(stream); });
  const Spread all = spread(seconds);
  const auto n = static_cast<double>(steps);
  return {all.median / n, all.least / n, all.largest / n, std::ssize(seconds)};
}

/// Runs the tokens that fill rings and states, and compares them with the reference.
Accuracy warm_up(const BenchCase& c, const Layers& layers, const Stream& stream) {
  const std::vector<std::int64_t> rows = sample(c.rows), heads = sample(c.shape.heads);
  const std::int64_t P = c.shape.head_dim, T = layers.warm_tokens();
  std::vector<std::vector<double>> found(rows.size());  // y, as in Trajectory
  const std::int64_t typed_from = T - c.policy.as_replay().length;
  for (std::int64_t t = 0; t < T; ++t) {
    const Scalar y_type = t < typed_from ? Scalar::fp32 : c.activations;
    layers.token(t, y_type);
    stream.wait();
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (t < layers.joins(rows[i])) continue;
      const std::vector<double> y = layers.y(t, rows[i], y_type);
      for (const std::int64_t h : heads) found[i].insert(found[i].end(), y.begin() + h * P, y.begin() + (h + 1) * P);
    }
  }

  // The largest differences of the kernels and of State<float>.
  Accuracy kernel, single;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const HostSequence sequence = layers.sequence(rows[i], T);
    const Trajectory expected = follow<double>(c, layers.parameters(), sequence, heads);
    const Trajectory in_float = follow<float>(c, layers.parameters(), sequence, heads);
    const std::int64_t width = std::ssize(heads) * P;
    for (std::int64_t t = layers.joins(rows[i]), at = 0; t < T; ++t, at += width) {
      double& error = t < typed_from ? kernel.y : kernel.y_typed;
      error = worse(relative_l2(found[i], expected.y, at, width), error);
      single.y = worse(relative_l2(in_float.y, expected.y, at, width), single.y);
    }
    const auto compare = [&](const std::vector<double>& state, auto member) {
      kernel.state = worse(relative_l2(state, expected.*member, 0, std::ssize(state)), kernel.state);
      single.state = worse(relative_l2(in_float.*member, expected.*member, 0, std::ssize(state)), single.state);
    };
    compare(layers.states(rows[i], heads, false), &Trajectory::state);
    if (c.policy.as_replay().read) compare(layers.states(rows[i], heads, true), &Trajectory::read);
  }
  kernel.y_bound = 2 * single.y + state_roundings(c);
  kernel.y_typed_bound = kernel.y_bound + y_rounding(c);
  kernel.state_bound = 2 * single.state + state_roundings(c);
  return kernel;
}

}  // namespace

BenchResult bench(const BenchCase& c) {
  if (!available()) fail("no CUDA device, or a build without CUDA kernels");
  const std::int64_t L = c.policy.as_replay().length;
  const Stream stream;
  const Layers layers(c, stream);
  BenchResult result;
  result.accuracy = warm_up(c, layers, stream);
  result.layers = layers.layers();
  result.tokens = layers.sets();
  if (!result.accuracy.passed()) return result;

  const std::int64_t tokens = layers.sets(), steps = tokens * layers.layers();
  result.step = time_steps(stream, steps, [&] {
    for (std::int64_t t = 0; t < tokens; ++t)
      layers.token(tokens + t, c.activations);  // the rows have all joined before
  });
  layers.all_hold(L - 1);
  result.flush = L == 1 ? result.step : time_steps(stream, steps, [&] {
    for (std::int64_t t = 0; t < tokens; ++t) layers.standing_token(t);
  });
  return result;
}

}  // namespace replayssm::cuda
