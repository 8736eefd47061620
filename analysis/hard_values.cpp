#include "analysis/hard_values.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/random.h"

namespace replayssm {
namespace {

constexpr std::int64_t rows = 16, columns = 64;

// Largest values: e2m1, int4, e2m3, e3m2, the element of mxint8, int8, the cap of e4m3fnuz, e4m3, int16, e5m2, fp16,
// and nvfp4, whose two scales are 1 at 448 times 6.
constexpr double largest_values[] = {6, 7, 7.5, 28, 127.0 / 64, 127, 240, 448, 32767, 57344, 65504, 2688};

/// Whole numbers that look random.
class Numbers {
 public:
  /// In 0 .. count - 1.
  std::uint32_t below(std::uint32_t count) {
    const Words4 words = philox4x32_10({{next_++, 0, 0, 0}}, 0);
    return words.word[0] % count;
  }
  double sign() { return below(2) == 0 ? 1 : -1; }

 private:
  std::uint32_t next_ = 0;
};

TrialState head_of(std::string name, std::vector<double> values) {
  values.resize(static_cast<std::size_t>(rows * columns));
  return {std::move(name), 0, 0, rows, columns, std::move(values)};
}

/// A number between two neighbours of some format, below `top`.
double midpoint(double top, Numbers& numbers) {
  constexpr int mantissas[] = {1, 2, 3, 7, 10, 0, 0};
  const int m = mantissas[numbers.below(std::size(mantissas))];
  if (m == 0) {  // of integers, and of those in steps of 2^-6
    const double step = top < 2 ? 0x1p-6 : 1;
    return step * (numbers.below(static_cast<std::uint32_t>(top / step)) + 0.5);
  }
  const int exponent = std::ilogb(top) - static_cast<int>(numbers.below(20));
  const double x = std::ldexp(1 + (2 * numbers.below(1U << m) + 1) * std::ldexp(1, -m - 1), exponent);
  return x < top ? x : x / 2;
}

TrialState ties(double top, Numbers& numbers) {
  std::vector<double> values;
  for (std::int64_t row = 0; row < rows; ++row) {
    values.push_back(numbers.sign() * top);
    for (std::int64_t i = 1; i < columns; i += 3) {
      const double x = midpoint(top, numbers), sign = numbers.sign();
      for (const double off : {0.0, 0x1p-45, -0x1p-45}) values.push_back(sign * x * (1 + off));
    }
  }
  return head_of("ties", std::move(values));
}

TrialState scales(double top, Numbers& numbers) {
  std::vector<double> values;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t first = 0; first < columns; first += 16) {  // blocks differ too
      constexpr double beside[] = {1, 1 + 0x1p-20, 1 - 0x1p-20, 1.25, 0.75};
      const double edge = row % 4 == 3 ? std::ldexp(1, std::ilogb(top)) : top * beside[numbers.below(5)];
      const double amax = std::ldexp(edge, static_cast<int>(numbers.below(41)) - 20);
      values.push_back(numbers.sign() * amax);
      for (int i = 1; i < 16; ++i) {
        const double sign = numbers.sign();
        values.push_back(sign * amax * numbers.below(1U << 24) * 0x1p-24);
      }
    }
  }
  return head_of("scales", std::move(values));
}

std::vector<TrialState> range() {
  using Limits = std::numeric_limits<double>;
  std::vector<double> values;
  for (int e = -1074; e <= 1023; ++e) {
    for (const double x : {1.0, 1.25, 1.5, 1.75}) values.push_back((e % 2 == 0 ? 1 : -1) * std::ldexp(x, e));
  }
  for (const double top : largest_values) {
    for (const double x : {1.0, 1.03125, 1.0625, 1.09375, 1.5}) values.insert(values.end(), {x * top, -x * top});
  }
  for (const double x : {464.0, 465.0, 61439.0, 61440.0, 65519.0, 65520.0, 0x1.fep127, 0x1.fefffep127, 0x1.ffp127,
                         0x1.fffffep127, 0x1.fffffefp127, 0x1.ffffffp127, Limits::max(), Limits::denorm_min()}) {
    values.insert(values.end(), {x, -x});
  }
  std::vector<TrialState> heads;
  const std::int64_t size = rows * columns;
  for (std::int64_t first = 0; first < std::ssize(values); first += size) {
    const auto from = values.begin() + first;
    heads.push_back(head_of("range", {from, from + std::min(size, std::ssize(values) - first)}));
  }
  return heads;
}

TrialState specials() {
  using Limits = std::numeric_limits<double>;
  std::vector<double> values(static_cast<std::size_t>(rows * columns));
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    values[static_cast<std::size_t>(i)] = (i % 2 == 0 ? 1 : -1) * std::ldexp(1 + static_cast<double>(i % 7) / 8, -3);
  }
  const auto put = [&](std::int64_t row, std::int64_t i, double x) {
    values[static_cast<std::size_t>(row * columns + i)] = x;
  };
  put(1, 5, Limits::quiet_NaN());
  put(3, 40, Limits::infinity());
  put(5, 63, -Limits::infinity());
  for (std::int64_t i = 0; i < columns; i += 3) put(7, i, i % 2 == 0 ? 0.0 : -0.0);
  for (std::int64_t i = 0; i < columns; ++i) {
    put(9, i, 0.0);
    put(11, i, -0.0);
    put(13, i, i % 2 == 0 ? 1e-40 : -3e-40);
  }
  return head_of("specials", std::move(values));
}

}  // namespace

std::vector<TrialState> hard_values() {
  Numbers numbers;
  std::vector<TrialState> heads;
  for (const double top : largest_values) heads.push_back(ties(top, numbers));
  for (const double top : largest_values) heads.push_back(scales(top, numbers));
  for (TrialState& head : range()) heads.push_back(std::move(head));
  heads.push_back(specials());
  // nvfp4 has one scale for all of a head, which one NaN spoils: without it, what else is special.
  heads.push_back(heads.back());
  for (double& x : heads.back().values) x = std::isfinite(x) ? x : 1;
  return heads;
}

}  // namespace replayssm
