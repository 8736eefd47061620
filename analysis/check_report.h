#pragma once

#include <string>
#include <vector>

#include "analysis/check.h"
#include "analysis/report.h"

namespace replayssm {

/// How many figures and fingerprints came out how.
struct Verdicts {
  std::int64_t same = 0, within = 0, outside = 0;
};
Verdicts count_verdicts(const std::vector<Finding>& findings);

/// What is not the same as it was, one row a figure or fingerprint, and a last line that counts.
std::string check_table(const std::vector<Finding>& findings);

/// The check as JSON text: the head of every report, and every finding. No value that is not finite: null.
std::string check_json(const Model& model, const RunFacts& facts, const std::string& baseline,
                       const std::vector<Finding>& findings);

/// The check as JUnit XML: one test suite, one test case a finding, `classname` the policy or format. The same findings
/// give the same text; there are no times in it.
std::string check_junit(const std::string& suite, const std::vector<Finding>& findings);

}  // namespace replayssm
