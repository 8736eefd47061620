#include "analysis/neighbours.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "analysis/report_json.h"
#include "analysis/table.h"
#include "core/error.h"

namespace replayssm {
namespace {

/// What a new format takes the place of.
Format& slot(Policy& policy) {
  if (auto* eager = std::get_if<Eager>(&policy.schedule)) return eager->state;
  auto& replay = std::get<Replay>(policy.schedule);
  return replay.read ? *replay.read : replay.anchor;
}

Policy with_format(Policy policy, const Format& format) {
  slot(policy) = format;
  return policy;
}

struct Candidate {
  Policy policy;
  double bytes;
};

/// Those at the bytes of the first, or else the nearest to either side.
std::vector<Candidate> nearest(const Candidate& first, std::vector<Candidate> others) {
  std::ranges::stable_sort(others, {}, &Candidate::bytes);
  const auto [from, to] = std::ranges::equal_range(others, first.bytes, {}, &Candidate::bytes);
  std::vector<Candidate> out = {first};
  if (from != to) {
    out.insert(out.end(), from, to);
    return out;
  }
  const auto of_bytes = [&](double bytes) {
    std::ranges::copy_if(others, std::back_inserter(out), [=](const Candidate& c) { return c.bytes == bytes; });
  };
  if (from != others.begin()) of_bytes(std::prev(from)->bytes);
  if (to != others.end()) of_bytes(to->bytes);
  return out;
}

std::string schedule_text(Policy policy) {
  const auto* replay = std::get_if<Replay>(&policy.schedule);
  const std::string name = replay && replay->read ? "read=" : "state=", word = name + slot(policy).text();
  std::string text = policy.text();
  return text.replace(text.find(word), word.size(), name + "F");
}

std::vector<std::vector<Candidate>> groups_of(const Model& model, std::int64_t tokens, const Format& format,
                                              const std::vector<Policy>& policies) {
  const auto candidate = [&](const Policy& policy) {
    return Candidate{policy, state_cost(model.layers(), policy, tokens).bytes_stored_per_sequence};
  };
  std::vector<std::vector<Candidate>> groups;
  std::vector<Policy> schedules;
  for (Policy policy : policies) {
    if (slot(policy).exact()) continue;
    const Policy schedule = with_format(policy, Format());
    if (std::ranges::find(schedules, schedule) != schedules.end()) continue;
    schedules.push_back(schedule);
    std::vector<Candidate> others;
    for (Policy other : policies) {
      if (slot(other).exact() || slot(other) == format || with_format(other, Format()) != schedule) continue;
      others.push_back(candidate(other));
    }
    groups.push_back(nearest(candidate(with_format(policy, format)), std::move(others)));
  }
  if (groups.empty()) fail("no policy of the baseline has a format whose place another could take");
  return groups;
}

double worst_y(const PolicyResult& result) {
  double worst = 0;
  for (const LayerResult& layer : result.layers) worst = std::max(worst, layer.y_rel_l2.propagated);
  return worst;
}

double state_error(const std::vector<TrialState>& states, const Format& format, std::uint64_t seed) {
  const std::vector<Subject> subjects = check_formats(states, {format}, seed);
  for (const Figure& figure : subjects.front().figures) {
    if (figure.name == "error of the states") return figure.value;
  }
  return std::numeric_limits<double>::quiet_NaN();
}

/// Whether a difference is more than chance: two standard errors, which chance alone exceeds in one case of twenty.
bool stands_out(const Standing& s) { return std::abs(s.difference) > 2 * s.difference_sem; }

std::string verdict(const Standing& judged, const Standing& other) {
  if (!(std::isfinite(judged.divergence.kl.mean) && std::isfinite(other.divergence.kl.mean))) return "not finite";
  const double ratio = other.divergence.kl.mean / judged.divergence.kl.mean;
  const std::string bytes = judged.bytes == other.bytes  ? " at the same bytes"
                            : judged.bytes > other.bytes ? " for more bytes"
                                                         : " for fewer bytes";
  if (std::isnan(other.difference_sem)) return "not told apart: too few tokens";
  if (!stands_out(other)) return "neither nearer nor farther beyond chance" + bytes;
  return ratio >= 1 ? number_text("%.3g times nearer", ratio) + bytes
                    : number_text("%.3g times farther", 1 / ratio) + bytes;
}

}  // namespace

std::vector<Comparison> compare_neighbours(const Model& model, Backend& backend, const Tokens& tokens,
                                           const Format& format, const std::vector<Policy>& policies,
                                           const std::vector<TrialState>& states, const StudyOptions& options) {
  const auto groups = groups_of(model, tokens.length, format, policies);
  std::vector<Policy> all;
  for (const auto& group : groups) {
    for (const Candidate& candidate : group) all.push_back(candidate.policy);
  }
  const std::vector<PolicyResult> results = run_study(model, backend, tokens, all, options);
  std::vector<Comparison> out;
  std::size_t next = 0;
  for (const auto& group : groups) {
    Comparison comparison{schedule_text(group.front().policy), {}};
    const PolicyResult& judged = results[next];
    for (Candidate candidate : group) {
      const PolicyResult& result = results[next++];
      std::vector<double> difference;
      for (std::size_t t = 0; t < result.tokens.size(); ++t) {
        difference.push_back(result.tokens[t].kl - judged.tokens[t].kl);
      }
      const Format& own = slot(candidate.policy);
      comparison.standings.push_back({.format = own,
                                      .bytes = candidate.bytes,
                                      .divergence = result.divergence,
                                      .worst_y = worst_y(result),
                                      .state_error = state_error(states, own, options.seed),
                                      .difference = result.divergence.kl.mean - judged.divergence.kl.mean,
                                      .difference_sem = batch_means_error(difference, tokens.length)});
    }
    out.push_back(std::move(comparison));
  }
  return out;
}

std::string neighbours_table(const std::vector<Comparison>& comparisons) {
  std::string out;
  for (const Comparison& c : comparisons) {
    const Standing& judged = c.standings.front();
    std::vector<std::vector<std::string>> rows = {{c.schedule, "stored", "mean KL", "+-", "p99", "top-1 %", "worst y",
                                                   "one store", judged.format.text() + " is"}};
    for (const Standing& s : c.standings) {
      rows.push_back({s.format.text(), bytes_text(s.bytes), number_text("%.3e", s.divergence.kl.mean),
                      number_text("%.0e", s.divergence.kl.sem), number_text("%.3e", s.divergence.kl.p99),
                      number_text("%.2f", 100 * s.divergence.top1_agreement), number_text("%.2e", s.worst_y),
                      number_text("%.2e", s.state_error), &s == &judged ? "" : verdict(judged, s)});
    }
    out += (out.empty() ? "" : "\n") + aligned(rows);
  }
  return out;
}

std::string neighbours_json(const Model& model, const RunFacts& facts, const std::vector<Comparison>& comparisons) {
  Json out = run_json(model, facts);
  out["comparisons"] = Json::array();
  for (const Comparison& c : comparisons) {
    Json standings = Json::array();
    for (const Standing& s : c.standings) {
      standings.push_back(
          {{"format", s.format.text()},
           {"bytes_stored_per_sequence", s.bytes},
           {"kl", {{"mean", s.divergence.kl.mean}, {"sem", s.divergence.kl.sem}, {"p99", s.divergence.kl.p99}}},
           {"top1_agreement", s.divergence.top1_agreement},
           {"worst_y_rel_l2", s.worst_y},
           {"state_rel_l2", s.state_error},
           {"kl_difference", {{"mean", s.difference}, {"sem", s.difference_sem}}}});
    }
    out["comparisons"].push_back({{"schedule", c.schedule}, {"standings", standings}});
  }
  return out.dump(2) + "\n";
}

}  // namespace replayssm
