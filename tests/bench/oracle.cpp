// Time of the oracle: milliseconds per head and token for a state [64, 128], on random inputs.
//
//   bench_oracle
//
// First the literal step alone, on one core, for every arithmetic of the build. Then what `replayssm oracle` spends on
// one set of inputs at 50 digits: gates, norms and recurrence with guard digits, all of it again with twice the digits,
// and the comparison of the two; for more heads and more threads, beside what one head on one thread took. It should be
// the same for more heads, and half of it for two threads. The least of five, processor time and on the wall: other
// work on the machine only adds.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <functional>
#include <random>
#include <string>

#include "analysis/literal_heads.h"

using namespace replayssm;

namespace {

struct Milliseconds {
  double wall = std::numeric_limits<double>::infinity(), processor = wall;  ///< the second of all threads together
};

Milliseconds milliseconds(const std::function<void()>& work) {
  Milliseconds least;
  for (int i = 0; i < 5; ++i) {
    const auto start = std::chrono::steady_clock::now();
    const std::clock_t processor_start = std::clock();
    work();
    const double processor = 1e3 * static_cast<double>(std::clock() - processor_start) / CLOCKS_PER_SEC;
    const double wall = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    least = {std::min(least.wall, wall), std::min(least.processor, processor)};
  }
  return least;
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
  const Milliseconds step = milliseconds([&] {
    for (int t = 0; t < tokens; ++t) {
      literal_step(shape, Record<Real>{v.data(), w.data(), &log_decay, gain}, &decay, c.data(), 64, s.data(), y.data());
    }
  });
  std::printf("%-12s %-11s %4d digits  %6.2f ms\n", std::string(name(recurrence)).c_str(), type, digits,
              step.processor / tokens);
}

RawHead random_head(Recurrence recurrence, std::int64_t tokens, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  RawHead head{{recurrence, 1, 1, 64, 128}, tokens, {}, {-1}, {0.5}, 0, std::numeric_limits<double>::infinity(), 1};
  // x B C dt, or q k v gate beta.
  const std::vector<int> widths =
      is_delta_rule(recurrence) ? std::vector{128, 128, 64, 1, 1} : std::vector{64, 128, 128, 1};
  for (const int width : widths) {
    head.fields.emplace_back();
    for (std::int64_t i = 0; i < tokens * width; ++i) head.fields.back().push_back(normal(random));
  }
  return head;
}

template <class Work, class Check>
void bench_oracle(Recurrence recurrence, int working_digits, int check_digits) {
  const std::int64_t tokens = 64;  // as many as the command takes at once
  double first = 0;
  for (const int threads : {1, 2}) {
    for (const int count : {1, 2, 4, 8}) {
      std::vector<RawHead> heads;
      for (int h = 0; h < count; ++h) heads.push_back(random_head(recurrence, tokens, static_cast<unsigned>(h)));
      CheckedHeads<Work, Check> oracle(heads[0].shape, heads.size(), working_digits, check_digits);
      const Milliseconds all = milliseconds([&] { oracle.advance(heads, threads); });
      const double each = static_cast<double>(count * tokens), wall = all.wall / each;
      if (first == 0) first = wall;
      std::printf(
          "%-12s %d and %d digits, %d heads, %d threads  processor %5.2f ms, wall %5.2f ms, %.2f of the first; "
          "%.0f digits agree\n",
          std::string(name(recurrence)).c_str(), working_digits, check_digits, count, threads, all.processor / each,
          wall, wall / first, oracle.agreement());
    }
  }
}

}  // namespace

int main() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::printf("milliseconds per head and token, state [64, 128]\n");
  for (const Recurrence recurrence : {Recurrence::mamba2, Recurrence::gated_delta}) {
#ifdef REPLAYSSM_HAVE_MPFR
    for (const int digits : {33, 50, 70, 100}) bench_step<RunTimeReal>("MPFR", recurrence, digits);
#endif
    bench_step<QuadReal>("without", recurrence, 33);
    bench_step<FixedReal<70>>("without", recurrence, 70);
    bench_step<FixedReal<140>>("without", recurrence, 140);
  }
  for (const Recurrence recurrence : {Recurrence::mamba2, Recurrence::gated_delta}) {
#ifdef REPLAYSSM_HAVE_MPFR
    bench_oracle<RunTimeReal, RunTimeReal>(recurrence, 70, 100);
#else
    bench_oracle<FixedReal<70>, FixedReal<140>>(recurrence, 70, 140);
#endif
  }
}
