#pragma once

// How far the next-token distributions of a run are from those of the reference, position by position.

#include <cstdint>
#include <span>
#include <vector>

namespace replayssm {

/// The softmax of the reference at a block of positions, computed once and compared with any number of runs.
///
///     shifted_v = x_v - max(x),  sum = sum_v e^shifted_v,  p_v = e^shifted_v / sum
///
/// logits [rows, vocabulary], finite or -Inf (a suppressed token, p = 0); first_row is the position of the first row in
/// its run and serves error messages only. Logits are widened to binary64 and nothing is rounded below that. It keeps
/// no pointer to the logits and takes 16 bytes for each of them. Results depend on values alone, not on where the
/// buffers lie. Throws Error naming the row for a NaN, a +Inf or a row of nothing but -Inf.
template <class Real>
class ReferenceBlock {
 public:
  ReferenceBlock(const Real* logits, std::int64_t rows, std::int64_t vocabulary, std::int64_t first_row = 0);

  struct Row {
    const double* shifted;      ///< [vocabulary] x - max(x)
    const double* probability;  ///< [vocabulary] p; below about 1e-307 it is 0
    double sum;                 ///< sum of e^shifted
    bool suppressed;            ///< some logit is -Inf
    bool tie;                   ///< the maximum is attained by several tokens
  };
  Row row(std::int64_t r) const;

  std::int64_t rows() const { return static_cast<std::int64_t>(facts_.size()); }
  std::int64_t vocabulary() const { return vocabulary_; }
  std::int64_t first_row() const { return first_row_; }

 private:
  // Rows start on cache lines, so that the split into vectors and rest is the same for every row and every block.
  struct alignas(64) Line {
    double value[8];
  };
  struct Facts {
    double sum;
    bool suppressed, tie;
  };

  std::int64_t vocabulary_, first_row_, lines_per_row_;
  std::vector<Line> shifted_, probability_;
  std::vector<Facts> facts_;
};

/// The divergence of one position. KL and NLL in nats; a position without a next token has NaN in nll, reference_nll
/// and delta_p; a position whose run logits are no distribution has NaN in kl, kl_reverse, nll and delta_p.
struct TokenDivergence {
  double kl;             ///< KL(reference || run), over the full vocabulary
  double kl_reverse;     ///< KL(run || reference)
  double nll;            ///< -log p_run(next token)
  double reference_nll;  ///< -log p_reference(next token)
  double delta_p;        ///< p_run(next token) - p_reference(next token)
  bool top1_agrees;      ///< the run's argmax (lowest index among equals) attains the reference's maximum
  bool top1_tie;         ///< several tokens attain the reference's maximum, exactly; any of them agrees
};

/// What compare() does with a row of run logits that has a NaN, a +Inf or nothing but -Inf.
enum class OnNonFinite {
  error,   ///< throw Error naming the row
  record,  ///< set kl, kl_reverse, nll and delta_p to NaN, top1_agrees to false
};

/// Compares the run's next-token distributions q with the reference's p.
///
///     KL(p || q) = sum_v p_v d_v + (q_v - p_v),    d_v = log p_v - log q_v
///
/// (The second term sums to zero in exact arithmetic; in rounded arithmetic it cancels what the normalisation of p and
/// q leaves.) run_logits [rows, vocabulary], finite or -Inf; next_token [rows], -1 for none, else in [0, vocabulary);
/// out [rows]. Logits are widened to binary64, in which everything is computed. Identical logits give exactly 0;
/// otherwise the total may be below 0 by some 1e-16 and is never clamped. A token suppressed in both adds 0, in the run
/// only makes kl +Inf, in the reference only makes kl_reverse +Inf. A distance from the maximum beyond the range of
/// binary64 counts as suppression. Identical inputs give identical bits, wherever the buffers lie. May be called from
/// several threads at once. Throws Error for a next token out of range and, under OnNonFinite::error, for run logits
/// that are no distribution.
template <class Real>
void compare(const ReferenceBlock<Real>& reference, const Real* run_logits, const std::int32_t* next_token,
             TokenDivergence* out, OnNonFinite on_non_finite = OnNonFinite::error);

/// Distribution over positions of a divergence, in nats.
struct DivergenceStatistics {
  double mean;           ///< over the positions that are not infinite; NaN if all are
  double sem;            ///< standard error of the mean by batch means; NaN if a position is infinite
  double p50, p90, p99;  ///< over all positions, linear interpolation between order statistics
  double max;            ///< over all positions, so +Inf if one is
  std::int64_t infinite;
};

/// Change of the reference token's probability, over the predicted tokens.
struct ProbabilityChange {
  double rms, p1, p99;
};

/// A run against the reference, over all positions. If a position of the run is not finite, the statistics of kl,
/// kl_reverse and delta_p, nll and nll_delta are NaN: a mean over the positions before a run broke would flatter it.
struct DivergenceSummary {
  DivergenceStatistics kl, kl_reverse;
  double top1_agreement;   ///< share of all positions that agree, those that are not finite counting as disagreement
  std::int64_t top1_ties;  ///< positions where the reference's maximum is tied
  double nll;              ///< mean over the predicted tokens; NaN without any
  double nll_reference;    ///< the same of the reference
  double nll_delta;        ///< mean of the differences, run - reference
  ProbabilityChange delta_p;
  std::int64_t positions;   ///< all
  std::int64_t predicted;   ///< those with a next token: T - 1 of a sequence of T
  std::int64_t non_finite;  ///< positions where the run's logits were no distribution
};

/// Quantile of ascending values by linear interpolation between order statistics at position q (n - 1), q in [0, 1].
/// NaN for no values; between a finite and an infinite value it is infinite.
double quantile(std::span<const double> ascending, double q);

/// Standard error of a mean over correlated positions, by batch means.
///
///     sem = sqrt(sum_b (m_b - mean(m))^2 / (n (n - 1))),   m_b the mean of block b of n
///
/// values [sequences * sequence_length]. Blocks are 64 consecutive tokens of one sequence; the incomplete block at the
/// end of a sequence is left out if there are at least two full blocks in all. NaN for fewer than two blocks.
double batch_means_error(std::span<const double> values, std::int64_t sequence_length);

/// Summarises positions [sequences * sequence_length], sequence after sequence. Throws Error if there are none or their
/// number is no multiple of sequence_length.
DivergenceSummary summarize(std::span<const TokenDivergence> tokens, std::int64_t sequence_length);

}  // namespace replayssm
