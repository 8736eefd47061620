#include "analysis/state_codes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/error.h"

namespace replayssm {
namespace {

template <class Real>
class RowCodes {
 public:
  RowCodes(const Format& format, std::int64_t n) : format_(format), n_(n), back_(static_cast<std::size_t>(n)) {}

  /// Codes and scale of a row, or false where it is none of the format's.
  bool find(const Real* row, std::byte* codes, float* scale) {
    encode_rows(format_, row, 1, n_, codes, scale);
    if (reads_back(row, codes, scale)) return true;
    if (format_.scale != Scale::row) return false;
    Real largest(0);  // of those that did not overflow
    for (std::int64_t i = 0; i < n_; ++i) {
      if (std::isfinite(row[i])) largest = std::max(largest, std::abs(row[i]));
    }
    *scale = 1;
    divide(row, codes, *scale);
    if (reads_back(row, codes, scale)) return true;  // nothing but zeros and overflows
    // The largest element is one of the codes times the scale, rounded once: that leaves three scales for each code.
    for (std::uint32_t code = format_.element.max_code; code > 0; --code) {
      const Real quotient = largest / decode<Real>(format_.element, code);
      if (!(quotient <= static_cast<Real>(std::numeric_limits<float>::max()))) break;
      const auto near = static_cast<float>(quotient);
      constexpr float up = std::numeric_limits<float>::infinity();
      for (const float candidate : {near, std::nextafter(near, 0.0F), std::nextafter(near, up)}) {
        *scale = candidate;
        if (!(candidate > 0)) continue;
        divide(row, codes, candidate);
        if (reads_back(row, codes, scale)) return true;
      }
    }
    return false;
  }

 private:
  /// Codes of row / scale.
  void divide(const Real* row, std::byte* codes, float scale) {
    for (std::int64_t i = 0; i < n_; ++i) back_[static_cast<std::size_t>(i)] = row[i] / static_cast<Real>(scale);
    encode_rows({format_.element, Scale::none}, back_.data(), 1, n_, codes, nullptr);
  }

  bool reads_back(const Real* row, const std::byte* codes, const float* scale) {
    decode_rows(format_, codes, scale, 1, n_, back_.data());
    return std::equal(back_.begin(), back_.end(), row, [](const Real& a, const Real& b) {
      return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b));
    });
  }

  const Format& format_;
  const std::int64_t n_;
  std::vector<Real> back_;
};

}  // namespace

template <class Real>
StoredRows codes_of_rounded(const Format& format, const Real* data, std::int64_t rows, std::int64_t n) {
  const auto row_bytes = static_cast<std::size_t>(format.code_bytes(n));
  StoredRows out;
  out.codes.resize(static_cast<std::size_t>(rows) * row_bytes);
  out.scales.resize(format.scale == Scale::row ? static_cast<std::size_t>(rows) : 0);
  RowCodes<Real> row_codes(format, n);
  for (std::int64_t r = 0; r < rows; ++r) {
    const auto i = static_cast<std::size_t>(r);
    float* scale = out.scales.empty() ? nullptr : &out.scales[i];
    if (row_codes.find(data + r * n, out.codes.data() + i * row_bytes, scale)) continue;
    fail("row ", r, " of a state holds values that ", format.text(), " does not have");
  }
  return out;
}

template StoredRows codes_of_rounded(const Format&, const float*, std::int64_t, std::int64_t);
template StoredRows codes_of_rounded(const Format&, const double*, std::int64_t, std::int64_t);

}  // namespace replayssm
