// Time of the oracle: milliseconds per head and token for a state [64, 128], with MPFR (where the build has it) and
// without.
//
//   bench_oracle [FOLDER]     default: the shipped Mamba-2 model
//
// First the literal step alone, on one core, beside its floor: as many multiply-adds of the same type on numbers in the
// first-level cache. Then whole runs of the oracle on a layer of a model - four oracles, since it runs on two sets of
// inputs and checks itself, and everything that is measured with them - for more heads and more threads. Medians of
// five.

#include "analysis/oracle.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <random>
#include <thread>

#include "core/literal.h"
#include "core/tokens.h"

using namespace replayssm;

namespace {

double milliseconds(const std::function<void()>& work) {
  std::vector<double> times;
  for (int i = 0; i < 5; ++i) {
    const auto start = std::chrono::steady_clock::now();
    work();
    times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }
  std::ranges::sort(times);
  return times[2];
}

/// Numbers in (-1, 1) that use every digit of Real.
template <class Real>
std::vector<Real> numbers(std::size_t count) {
  std::mt19937_64 random(1);
  std::vector<Real> out;
  for (std::size_t i = 0; i < count; ++i) out.push_back(sin(Real(static_cast<double>(random() >> 11))));
  return out;
}

template <class Real>
void bench_step(const char* type, Recurrence recurrence, int digits) {
  set_working_digits<Real>(digits);
  const RecurrenceShape shape{recurrence, 1, 1, 64, 128};
  const int tokens = 4;
  std::vector<Real> s = numbers<Real>(64 * 128), v = numbers<Real>(64), w = numbers<Real>(128), c = w, y = v;
  for (Real& k : w) k /= 8;  // the delta rule contracts for |k| < 1
  const Real log_decay(0), decay = exp(Real(-0.01)), gain(0.5);
  const double step = milliseconds([&] {
    for (int t = 0; t < tokens; ++t) {
      literal_step(shape, Record<Real>{v.data(), w.data(), &log_decay, gain}, &decay, c.data(), 64, s.data(), y.data());
    }
  });
  const int per_element = is_delta_rule(recurrence) ? 4 : 3;
  const double floor = milliseconds([&] {
    for (int i = 0; i < tokens * 64 * per_element; ++i) {
      for (std::size_t n = 0; n < 128; ++n) add_product(y[n % 8], w[n], c[n]);
    }
  });
  std::printf("%-11s %-12s %4d digits  %6.2f ms per head and token  %.2f times its floor\n", type,
              std::string(name(recurrence)).c_str(), digits, step / tokens, step / floor);
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  for (const Recurrence recurrence : {Recurrence::mamba2, Recurrence::gated_delta}) {
#ifdef REPLAYSSM_HAVE_MPFR
    for (const int digits : {33, 50, 70, 100, 500}) bench_step<RunTimeReal>("MPFR", recurrence, digits);
#endif
    bench_step<QuadReal>("without", recurrence, 33);
    bench_step<FixedReal<70>>("without", recurrence, 70);
    bench_step<FixedReal<140>>("without", recurrence, 140);
  }

  const std::string folder = argc > 1 ? argv[1] : REPLAYSSM_DATA "/mamba2-5m";
  const auto model = Model::open(folder);
  Tokens tokens = read_tokens(REPLAYSSM_DATA "/sherlock.safetensors");
  tokens.ids.resize(32);
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  double one = 0;
  for (const auto& [heads, threads] : {std::pair<std::int64_t, int>{1, 1}, {4, 1}, {1, cores}, {4, cores}}) {
    OracleOptions options{.threads = threads};
    for (std::int64_t h = 0; h < heads; ++h) options.heads.push_back(h);
    const auto backend = reference_backend(Precision::fp64, threads);
    const double each = milliseconds([&] { run_oracle(*model, *backend, tokens.ids, options); }) /
                        static_cast<double>(heads * std::ssize(tokens.ids));
    if (one == 0) one = each;
    std::printf("%s, 50 digits, %lld heads, %d threads: %.2f ms per head and token, %.2f times faster than the first\n",
                folder.c_str(), static_cast<long long>(heads), threads, each, one / each);
  }
}
