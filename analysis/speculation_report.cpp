#include "analysis/speculation_report.h"

#include <algorithm>

#include "analysis/report_json.h"
#include "analysis/table.h"

namespace replayssm {
namespace {

/// Bytes of states and rings: stored of one sequence, moved for a decoded token, all SSM layers together.
struct StateBytes {
  double stored = 0, moved = 0;
};

struct StateBytesOf {
  StateBytes eager, replay, snapshots, speculative;
};

double real(std::int64_t n) { return static_cast<double>(n); }

Policy eager_of(const Policy& policy) { return eager_beside(policy, policy.as_replay().anchor); }

StateBytesOf state_bytes(const Model& model, const SpeculationResult& result) {
  const Policy &policy = result.policy, exact = exact_policy();
  // What a ring of W + T slots takes is what a replay of one more stores; a state of length 1 keeps snapshots there.
  const std::int64_t slots = result.room.window + result.room.committed;
  StateBytesOf out;
  for (std::size_t i = 0; i < model.layers().size(); ++i) {
    const auto& shape = model.layers()[i].recurrence;
    if (!shape) continue;
    const bool covered = policy.covers(static_cast<std::int64_t>(i));
    const Policy& own = covered ? policy : exact;
    const bool snapshots = own.as_replay().length == 1;
    const LayerTraffic eager(*shape, covered ? eager_of(policy) : exact), replay(*shape, own);
    const LayerTraffic ring(*shape, snapshots ? own : with_length(own, slots + 1));
    out.eager.stored += eager.stored();
    out.eager.moved += eager.mean().total();
    out.replay.stored += replay.stored();
    out.replay.moved += replay.mean().total();
    out.snapshots.stored += real(1 + result.room.window) * eager.stored();
    out.speculative.stored += snapshots ? real(1 + slots) * ring.stored() : ring.stored();
  }
  out.snapshots.moved = result.snapshots.total() / real(result.tokens);
  out.speculative.moved = result.moved.total() / real(result.tokens);
  return out;
}

Json state_json(const StateBytes& bytes) {
  return {{"bytes_stored_per_sequence", bytes.stored}, {"bytes_moved_per_token", bytes.moved}};
}

const char* name(Demand demand) {
  switch (demand) {
    case Demand::nothing:
      return "nothing";
    case Demand::tokens:
      return "tokens";
    case Demand::bits:
      return "bits";
  }
  return "";
}

Json comparison_json(const TextComparison& c) {
  Json first = nullptr;
  if (c.first) {
    first = {{"sequence", c.first->sequence},
             {"position", c.first->position},
             {"token", c.first->token},
             {"plain_token", c.first->plain_token},
             {"logit_gap", c.first->gap}};
  }
  return {{"demand", name(c.demand)},     {"passed", c.passed()},
          {"compared", c.compared},       {"same_tokens", c.same_tokens},
          {"same_logits", c.same_logits}, {"largest_logit_difference", c.largest_difference},
          {"states", c.states},           {"same_states", c.same_states},
          {"first_divergence", first}};
}

Json spacing_json(const SpeculationResult& result) {
  Json counts = Json::array();
  double sum = 0;
  for (const auto& [tokens, count] : result.spacing) {
    counts.push_back({{"tokens", tokens}, {"flushes", count}});
    sum += real(tokens * count);
  }
  return {{"mean", result.spacing.empty() ? Json(nullptr) : Json(sum / real(result.flushes()))}, {"counts", counts}};
}

Json speculation_result_json(const Model& model, const SpeculationResult& r, const TrafficQuestion& question) {
  const StateBytesOf bytes = state_bytes(model, r);
  Json batches = Json::array();
  for (const DecodeSeconds& s : decode_seconds(model, r, question)) {
    batches.push_back({{"batch", s.batch},
                       {"eager_us_per_token", 1e6 * s.eager},
                       {"replay_us_per_token", 1e6 * s.replay},
                       {"snapshots_us_per_token", 1e6 * s.snapshots},
                       {"speculative_us_per_token", 1e6 * s.speculative},
                       {"over_eager", s.eager / s.speculative},
                       {"over_replay", s.replay / s.speculative},
                       {"over_snapshots", s.snapshots / s.speculative}});
  }
  return {{"policy", r.policy.text()},
          {"ring", r.room.committed},
          {"passed", r.passed()},
          {"tokens", r.tokens},
          {"steps", r.steps},
          {"tokens_per_step", r.tokens_per_step()},
          {"drafts", r.drafts},
          {"accepted", r.accepted},
          {"acceptance_rate", r.acceptance()},
          {"discarded_windows", r.discarded},
          {"steps_by_committed_tokens", r.committed},
          {"rollbacks", r.rollbacks()},
          {"steps_by_rollback_depth", r.rolled_back},
          {"steps_by_ring_occupancy", r.held},
          {"flushes", r.flushes()},
          {"flush_spacing", spacing_json(r)},
          {"state",
           {{"speculative", state_json(bytes.speculative)},
            {"snapshots", state_json(bytes.snapshots)},
            {"eager", state_json(bytes.eager)},
            {"replay", state_json(bytes.replay)}}},
          {"predicted", batches},
          {"plain_decoding",
           {{"same_flushes", comparison_json(r.same_flushes)}, {"own_schedule", comparison_json(r.own_schedule)}}}};
}

/// "0: 12  3: 4" of what there is any of, from index `first` on.
std::string histogram_text(const std::vector<std::int64_t>& counts, std::size_t first = 0) {
  std::string out;
  for (std::size_t i = first; i < counts.size(); ++i) {
    if (counts[i] > 0) out += (out.empty() ? "" : "  ") + std::to_string(i) + ": " + std::to_string(counts[i]);
  }
  return out.empty() ? "none" : out;
}

std::string spacing_text(const SpeculationResult& r) {
  std::string out = std::to_string(r.flushes());
  if (r.spacing.empty()) return out;
  out += ", by the tokens before each  ";
  std::vector<std::int64_t> counts(static_cast<std::size_t>(r.spacing.rbegin()->first) + 1);
  for (const auto& [tokens, count] : r.spacing) counts[static_cast<std::size_t>(tokens)] = count;
  return out + histogram_text(counts);
}

std::string comparison_text(const TextComparison& c) {
  std::string out = c.passed() ? (c.demand == Demand::nothing ? "" : "passed: ") : "FAILED: ";
  out += "the same token at " + std::to_string(c.same_tokens) + " of " + std::to_string(c.compared) +
         ", the same logits bit for bit at " + std::to_string(c.same_logits);
  if (c.states > 0)
    out += "; " + std::to_string(c.same_states) + " of " + std::to_string(c.states) + " states at the end";
  if (c.same_logits < c.compared) out += "; largest difference of logits" + number_text(" %.1e", c.largest_difference);
  if (c.first) {
    out += "; first divergence: sequence " + std::to_string(c.first->sequence) + ", position " +
           std::to_string(c.first->position) + ", token " + std::to_string(c.first->token) + ", plainly " +
           std::to_string(c.first->plain_token) + number_text(" by a logit gap of %.1e", c.first->gap);
  }
  return out;
}

}  // namespace

std::vector<DecodeSeconds> decode_seconds(const Model& model, const SpeculationResult& result,
                                          const TrafficQuestion& question) {
  const Roofline roofline = question.roofline();
  const double weights = real(model.step_weight_bytes()), tokens = real(result.tokens);
  double activations = 0;
  for (const LayerInfo& layer : model.layers()) {
    if (layer.recurrence) activations += activation_bytes(*layer.recurrence, roofline.activation_bytes);
  }
  std::vector<DecodeSeconds> out;
  for (const std::int64_t batch : question.batches) {
    const auto plain = [&](const Policy& policy) {
      return weights / roofline.bandwidth + step_seconds(model.layers(), policy, batch, roofline);
    };
    const auto steps = [&](const StepBytes& moved) {
      const double of_sequence = moved.total() + activations * real(result.window_tokens);
      return (weights * real(result.steps) + real(batch) * of_sequence) / tokens / roofline.bandwidth;
    };
    out.push_back({.batch = batch,
                   .eager = plain(eager_of(result.policy)),
                   .replay = plain(result.policy),
                   .snapshots = steps(result.snapshots),
                   .speculative = steps(result.moved)});
  }
  return out;
}

std::string speculation_text(const Model& model, const SpeculationResult& r, const TrafficQuestion& question) {
  const StateBytesOf bytes = state_bytes(model, r);
  std::string out = r.policy.text() + ", ring of " + std::to_string(r.room.committed) + "\n";
  const auto line = [&](const char* what, const std::string& text) { out += std::string("  ") + what + text + "\n"; };
  line("accepted      ", std::to_string(r.accepted) + " of " + std::to_string(r.drafts) + " drafts (" +
                             number_text("%.1f", 100 * r.acceptance()) + " %), " +
                             number_text("%.3f", r.tokens_per_step()) + " tokens a step, " + std::to_string(r.steps) +
                             " steps");
  line("committed     ", "steps by tokens  " + histogram_text(r.committed));
  line("rolled back   ", std::to_string(r.rollbacks()) + " times, by depth  " + histogram_text(r.rolled_back, 1));
  if (r.discarded > 0) line("discarded     ", std::to_string(r.discarded) + " windows");
  line("ring          ", "steps by records met  " + histogram_text(r.held));
  line("flushes       ", spacing_text(r));
  line("same flushes  ", comparison_text(r.same_flushes));
  line("own schedule  ", comparison_text(r.own_schedule));
  std::vector<std::vector<std::string>> rows = {{"  states and rings", "stored", "moved/token", ""}};
  const auto row = [&](const char* what, const StateBytes& b) {
    rows.push_back(
        {what, bytes_text(b.stored), bytes_text(b.moved), number_text("x %.2f", b.moved / bytes.speculative.moved)});
  };
  row("  speculative", bytes.speculative);
  row("  snapshots", bytes.snapshots);
  row("  plain, eager", bytes.eager);
  row("  plain, replay", bytes.replay);
  out += aligned(rows);
  rows = {{"  us/token, by bytes: batch", "eager", "replay", "snapshots", "speculative", "x eager", "x replay",
           "x snapshots", ""}};
  for (const DecodeSeconds& s : decode_seconds(model, r, question)) {
    const auto us = [](double seconds) { return number_text("%.4g", 1e6 * seconds); };
    const auto over = [&](double seconds) { return number_text("%.2f", seconds / s.speculative); };
    rows.push_back({"  " + std::to_string(s.batch), us(s.eager), us(s.replay), us(s.snapshots), us(s.speculative),
                    over(s.eager), over(s.replay), over(s.snapshots), ""});
  }
  return out + aligned(rows);
}

std::string speculation_json(const Model& model, const RunFacts& facts, const SpeculationOptions& options,
                             const std::string& drafts, const std::vector<SpeculationResult>& results,
                             const TrafficQuestion& question) {
  Json out = run_json(model, facts);
  out["reference"] = "plain decoding";
  out["window"] = options.window;
  out["prompt_tokens"] = options.prompt_tokens;
  out["new_tokens"] = options.new_tokens;
  out["teacher_forced"] = options.teacher_forced;
  out["drafts"] = drafts;
  out["bandwidth_gb_per_s"] = question.bandwidth;
  out["weight_bytes_per_step"] = model.step_weight_bytes();
  out["passed"] = std::ranges::all_of(results, &SpeculationResult::passed);
  out["results"] = Json::array();
  for (const SpeculationResult& result : results) {
    out["results"].push_back(speculation_result_json(model, result, question));
  }
  return out.dump(2) + "\n";
}

}  // namespace replayssm
