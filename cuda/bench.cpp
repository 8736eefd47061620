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
  for (std::int64_t t = 0; t < T; ++t) {
    layers.token(t);
    stream.wait();
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (t < layers.joins(rows[i])) continue;
      const std::vector<double> y = layers.y(t, rows[i]);
      for (const std::int64_t h : heads) found[i].insert(found[i].end(), y.begin() + h * P, y.begin() + (h + 1) * P);
    }
  }

  // The largest differences of the kernels and of State<float>.
  Accuracy kernel, single;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const HostSequence sequence = layers.sequence(rows[i], T);
    const Trajectory expected = follow<double>(c, layers.parameters(), sequence, heads);
    const Trajectory in_float = follow<float>(c, layers.parameters(), sequence, heads);
    const std::size_t width = heads.size() * static_cast<std::size_t>(P);
    for (std::size_t at = 0; at < expected.y.size(); at += width) {
      kernel.y = worse(relative_l2(found[i], expected.y, at, at + width), kernel.y);
      single.y = worse(relative_l2(in_float.y, expected.y, at, at + width), single.y);
    }
    const auto compare = [&](const std::vector<double>& state, const auto& of) {
      kernel.state = worse(relative_l2(state, of(expected), 0, state.size()), kernel.state);
      single.state = worse(relative_l2(of(in_float), of(expected), 0, state.size()), single.state);
    };
    compare(
        layers.states(rows[i], heads, false), [](const Trajectory& t) -> const auto& { return t.state; });
    if (c.policy.as_replay().read) {
      compare(
          layers.states(rows[i], heads, true), [](const Trajectory& t) -> const auto& { return t.read; });
    }
  }
  kernel.y_bound = 2 * single.y + roundings_to_y(c);
  kernel.state_bound = 2 * single.state + roundings_to_state(c);
  return kernel;
}

}  // namespace

BenchResult bench(const BenchCase& c) {
  if (!available()) fail("no CUDA device, or a build without CUDA kernels");
  if (c.rows < 1) fail("batch ", c.rows, ": expected at least 1");
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
    for (std::int64_t t = 0; t < tokens; ++t) layers.token(tokens + t);  // the rows have all joined before
  });
  layers.all_hold(L - 1);
  result.flush = L == 1 ? result.step : time_steps(stream, steps, [&] {
    for (std::int64_t t = 0; t < tokens; ++t) layers.standing_token(t);
  });
  return result;
}

}  // namespace replayssm::cuda
