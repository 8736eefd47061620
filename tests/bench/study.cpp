// Time of the default KL study beside its floor.
//
//   bench_study [FOLDER...]     default: both shipped models; 2,048 tokens of the held-out text
//
// floor = flops of matrix products / measured rate of Eigen's dgemm
//       + flops of the recurrences / measured rate of multiply-adds in the first-level cache,
// both on every core. Rounding, exponentials, norms, convolutions and the comparison of logits are not in the floor:
// what the ratio is above 1 is theirs. The median of three runs is compared.

#include "analysis/study.h"

#include <Eigen/Core>
#include <algorithm>
#include <array>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <thread>

#include "core/lanes.h"
#include "core/tokens.h"

using namespace replayssm;

namespace {

double seconds_of(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

/// Runs `work` on `threads` threads at once, each with what `prepare` made for it, and returns the flops a second of
/// all together, best of several.
template <class Prepare, class Work>
double rate(int threads, double flops, const Prepare& prepare, const Work& work) {
  double best = 0;
  for (int repeat = 0; repeat < 10; ++repeat) {
    std::barrier start(threads + 1);
    std::vector<std::thread> all;
    for (int i = 0; i < threads; ++i) {
      all.emplace_back([&] {
        auto data = prepare();
        start.arrive_and_wait();
        work(data);
      });
    }
    start.arrive_and_wait();
    const double seconds = seconds_of([&] {
      for (auto& t : all) t.join();
    });
    best = std::max(best, threads * flops / seconds);
  }
  return best;
}

template <class Real>
double gemm_rate(int threads) {
  using Matrix = Eigen::Matrix<Real, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  static constexpr int n = 512, repeats = 8;
  const auto prepare = [] { return std::array<Matrix, 3>{Matrix::Random(n, n), Matrix::Random(n, n), Matrix(n, n)}; };
  return rate(threads, 2.0 * n * n * n * repeats, prepare, [](auto& m) {
    for (int i = 0; i < repeats; ++i) m[2].noalias() = m[0] * m[1].transpose();
  });
}

/// Multiply-adds on twelve independent vectors of 32 bytes, all in registers.
template <class Real>
double fma_rate(int threads) {
  using L = Lanes<Real>;
  static constexpr int vectors = 12, repeats = 10'000'000;
  const auto prepare = [] { return Real(0.999); };
  return rate(threads, 2.0 * L::width * vectors * repeats, prepare, [](Real a) {
    typename L::Vector x[vectors];
    for (auto& v : x) v = L::splat(a);
    const auto factor = L::splat(a), term = L::splat(a * Real(0.001));
    for (int r = 0; r < repeats; ++r) {
      for (auto& v : x) v = mul_add(v, factor, term);
    }
    volatile Real kept = 0;
    for (auto& v : x) kept = kept + L::sum(v);
  });
}

/// Flops of projections and attention for one stream of `tokens` tokens.
double product_flops(const std::string& folder, const Model& model, double tokens) {
  const Weights weights = Weights::open(folder);
  double flops = 2.0 * static_cast<double>(model.vocabulary() * model.hidden()) * tokens;  // the head
  for (const std::string& name : weights.names()) {
    const TensorView& w = weights.at(name);
    if (w.shape.size() != 2 || name.find("embed") != name.npos || name.find("lm_head") != name.npos) continue;
    flops += 2.0 * static_cast<double>(w.elements()) * tokens;
    if (name.find("self_attn.o_proj") != name.npos) flops += 2.0 * static_cast<double>(w.shape[1]) * tokens * tokens;
  }
  return flops;
}

/// Flops of one head and token under a policy: readouts and updates of the state, and the ring's products.
double recurrence_flops(const RecurrenceShape& shape, const Policy& policy) {
  const auto P = static_cast<double>(shape.head_dim), N = static_cast<double>(shape.state_dim);
  const bool delta = is_delta_rule(shape.recurrence);
  const double readouts = delta ? 2 : 1;
  const auto* replay = std::get_if<Replay>(&policy.schedule);
  if (!replay) return P * N * (2 * readouts + 3);
  const auto L = static_cast<double>(replay->length);
  const bool recompute = delta && replay->read && policy.loop == Loop::closed;
  const double ring = (L - 1) / 2 * 2 * readouts * (N + P);
  const double flush = P * N * (1 + 2 * L + 2) / L + (recompute ? 2 * P * N + (L - 1) / 2 * 2 * (N + P) : 0);
  return (L - 1) / L * 2 * readouts * P * N + ring + flush;
}

void bench(const std::string& folder, int cores) {
  const auto model = Model::open(folder);
  Tokens tokens = read_tokens(std::string(REPLAYSSM_DATA) + "/sherlock.safetensors");
  tokens.length = 2048;
  tokens.ids.resize(2048);
  std::vector<Policy> policies = default_policies();
  const auto streams = static_cast<double>(policies.size() + 1);
  const double products = streams * product_flops(folder, *model, 2048);
  double recurrences = 0;
  policies.push_back(exact_policy());
  for (const LayerInfo& layer : model->layers()) {
    if (!layer.recurrence) continue;
    for (const Policy& policy : policies) {
      recurrences += 2048 * static_cast<double>(layer.recurrence->heads) * recurrence_flops(*layer.recurrence, policy);
    }
  }
  policies.pop_back();

  const auto time = [&](Precision precision, int threads) {
    std::vector<double> times;
    for (int i = 0; i < 3; ++i) {
      const auto backend = reference_backend(precision, threads);
      times.push_back(seconds_of([&] { run_study(*model, *backend, tokens, policies, {.threads = threads}); }));
    }
    return median(times);
  };
  const double floor = products / gemm_rate<double>(cores) + recurrences / fma_rate<double>(cores);
  const double floor32 = products / gemm_rate<float>(cores) + recurrences / fma_rate<float>(cores);
  const double all = time(Precision::fp64, cores), one = time(Precision::fp64, 1), fp32 = time(Precision::fp32, cores);
  std::printf("%s: %.0f Gflop in products, %.0f in recurrences\n", folder.c_str(), products * 1e-9, recurrences * 1e-9);
  std::printf("  fp64, %d threads  %6.2f s   floor %5.2f s   ratio %.2f\n", cores, all, floor, all / floor);
  std::printf("  fp64, 1 thread   %6.2f s   %.2f times that of %d\n", one, one / all, cores);
  std::printf("  fp32, %d threads  %6.2f s   floor %5.2f s   ratio %.2f   %.2f times faster than fp64\n", cores, fp32,
              floor32, fp32 / floor32, all / fp32);
}

}  // namespace

int main(int argc, char** argv) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::printf("%d cores; Gflop/s on all: dgemm %.0f, sgemm %.0f, fma fp64 %.0f, fp32 %.0f\n", cores,
              gemm_rate<double>(cores) * 1e-9, gemm_rate<float>(cores) * 1e-9, fma_rate<double>(cores) * 1e-9,
              fma_rate<float>(cores) * 1e-9);
  std::vector<std::string> folders(argv + 1, argv + argc);
  if (folders.empty()) folders = {REPLAYSSM_DATA "/mamba2-5m", REPLAYSSM_DATA "/gdn-hybrid-8m"};
  for (const std::string& folder : folders) bench(folder, cores);
}
