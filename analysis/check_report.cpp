#include "analysis/check_report.h"

#include <cmath>
#include <limits>
#include <utility>

#include "analysis/report_json.h"
#include "analysis/table.h"

namespace replayssm {
namespace {

bool more_is_better(const std::string& name) { return name == "top-1 agreements"; }

std::string verdict_text(const Finding& f) {
  if (f.verdict == Finding::Verdict::same) return "same";
  if (f.verdict == Finding::Verdict::within) return "within";
  if (f.is_fingerprint() || std::isnan(f.found) || std::isnan(f.stored)) return "DIFFERS";
  return (f.found > f.stored) == more_is_better(f.name) ? "BETTER" : "WORSE";
}

/// The first digits of a digest: enough to see that two differ.
std::string short_digest(const std::string& digest) { return digest.substr(0, 8); }

double change(const Finding& f) { return f.found - f.stored; }

std::vector<std::string> row_of(const Finding& f) {
  if (f.is_fingerprint()) {
    return {f.subject, f.name, short_digest(f.stored_digest), short_digest(f.found_digest), "", "", verdict_text(f)};
  }
  const std::string relative = f.stored != 0 ? number_text(" (%+.2g %%)", 100 * change(f) / std::abs(f.stored)) : "";
  return {f.subject,
          f.name,
          number_text("%.6g", f.stored),
          number_text("%.6g", f.found),
          number_text("%+.2g", change(f)) + relative,
          number_text("%.2g", f.margin),
          verdict_text(f)};
}

/// In an attribute of XML 1.0, which has no control characters.
std::string in_xml(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
    }
  }
  return out;
}

std::string message_of(const Finding& f) {
  if (f.is_fingerprint()) return "expected " + f.stored_digest + ", found " + f.found_digest;
  return "expected " + number_text("%.17g", f.stored) + " within " + number_text("%.2g", f.margin) + ", found " +
         number_text("%.17g", f.found);
}

}  // namespace

Verdicts count_verdicts(const std::vector<Finding>& findings) {
  Verdicts count;
  for (const Finding& f : findings) {
    ++(f.verdict == Finding::Verdict::same     ? count.same
       : f.verdict == Finding::Verdict::within ? count.within
                                               : count.outside);
  }
  return count;
}

std::string check_table(const std::vector<Finding>& findings) {
  std::vector<std::vector<std::string>> rows = {
      {"policy or format", "what", "baseline", "found", "change", "margin", ""}};
  for (const Finding& f : findings) {
    if (f.verdict != Finding::Verdict::same) rows.push_back(row_of(f));
  }
  const Verdicts count = count_verdicts(findings);
  return (rows.size() > 1 ? aligned(rows) : "") + std::to_string(findings.size()) +
         " figures and fingerprints: " + std::to_string(count.same) + " the same to the last bit, " +
         std::to_string(count.within) + " within their margins, " + std::to_string(count.outside) + " outside\n";
}

std::string check_json(const Model& model, const RunFacts& facts, const std::string& baseline,
                       const std::vector<Finding>& findings) {
  const Verdicts count = count_verdicts(findings);
  Json out = run_json(model, facts);
  out["baseline"] = baseline;
  out["passed"] = count.outside == 0;
  out["same"] = count.same;
  out["within"] = count.within;
  out["outside"] = count.outside;
  out["findings"] = Json::array();
  for (const Finding& f : findings) {
    Json entry = {{"subject", f.subject}, {"name", f.name}, {"verdict", verdict_text(f)}};
    if (f.is_fingerprint()) {
      entry["baseline"] = f.stored_digest;
      entry["found"] = f.found_digest;
    } else {
      entry["baseline"] = f.stored;
      entry["margin"] = f.margin;
      entry["found"] = f.found;
    }
    out["findings"].push_back(std::move(entry));
  }
  return out.dump(2) + "\n";
}

std::string check_junit(const std::string& suite, const std::vector<Finding>& findings) {
  const std::string counts = " tests=\"" + std::to_string(findings.size()) + "\" failures=\"" +
                             std::to_string(count_verdicts(findings).outside) + "\" errors=\"0\"";
  std::string out = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites" + counts + ">\n  <testsuite name=\"" +
                    in_xml(suite) + "\"" + counts + ">\n";
  for (const Finding& f : findings) {
    out += "    <testcase classname=\"" + in_xml(f.subject) + "\" name=\"" + in_xml(f.name) + "\"";
    if (f.verdict != Finding::Verdict::outside) {
      out += "/>\n";
      continue;
    }
    out += ">\n      <failure type=\"" + verdict_text(f) + "\" message=\"" + in_xml(message_of(f)) +
           "\"/>\n    </testcase>\n";
  }
  return out + "  </testsuite>\n</testsuites>\n";
}

}  // namespace replayssm
