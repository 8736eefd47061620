#pragma once

#include <string>
#include <vector>

#include "analysis/check.h"
#include "analysis/report.h"

namespace replayssm {

/// One format under one schedule, beside the one that is judged.
struct Standing {
  Format format;
  double bytes = 0;  ///< of state and ring of one sequence
  DivergenceSummary divergence;
  double worst_y = 0;      ///< largest relative L2 error of y of a layer, in the policy's own run
  double state_error = 0;  ///< relative L2 error of the stored states, converted once; NaN without states
  // Of the mean KL, this format's minus the judged one's, token by token, and its standard error by batch means.
  double difference = 0, difference_sem = 0;
};

/// A schedule, such as `replay(L=16, state=F)`, with the judged format first and then its neighbours.
struct Comparison {
  std::string schedule;
  std::vector<Standing> standings;
};

/// Runs `format` under every schedule of the policies (a policy without the format of its eager state, shared
/// checkpoint or read copy), beside those of the policies' formats under that schedule that store as many bytes; where
/// there are none, the nearest with fewer and the nearest with more. All run on the same tokens.
/// Throws Error as run_study() does, and where no policy has a format to change.
std::vector<Comparison> compare_neighbours(const Model& model, Backend& backend, const Tokens& tokens,
                                           const Format& format, const std::vector<Policy>& policies,
                                           const std::vector<TrialState>& states, const StudyOptions& options);

/// One table a schedule, and where the format stands: a difference counts from two standard errors on, for which it
/// takes two blocks of 64 tokens.
std::string neighbours_table(const std::vector<Comparison>& comparisons);

/// The same as JSON text.
std::string neighbours_json(const Model& model, const RunFacts& facts, const std::vector<Comparison>& comparisons);

}  // namespace replayssm
