// A check against the baseline that comes with a model finds every planted defect, and nothing in a clean run.

#include <gtest/gtest.h>

#include "analysis/baseline.h"
#include "core/tokens.h"
#include "tests/analysis/planted_formats.h"
#include "tests/support/model_files.h"

namespace replayssm {
namespace {

// As the formats of the baseline are defined; m = 0 are integers.
const LiteralFormat bf16{7, -126, 0x1.fep127, false, -1}, fp16{10, -14, 65504, false, -1};
const LiteralFormat int8_row{0, 0, 127, true, 64}, e4m3_head{3, -6, 448, true, 0};
const LiteralFormat mx_ceil{3, -6, 448, true, 32, true}, bf16_sr{7, -126, 0x1.fep127, false, -1, false, true};

/// A format of the baseline's, in the policy that it is stored with, and what stands in its place.
struct Planted {
  string name, format, policy;  // of the policy, F is the format
  RoundFunction function;
  bool clean = false, in_runs_only = false;  // in_runs_only: conversions of single states do not show it
};

std::vector<Planted> planted() {
  const string shared = "replay(L=16, state=F)", split = "replay(L=16, anchor=fp32, read=F)";
  const auto literal = [&](const char* name, const char* format, const LiteralFormat& f, Defect defect) {
    return Planted{name, format, shared, literal_function(f, defect), defect == Defect::none};
  };
  const LiteralFormat e4m3_row{3, -6, 448, true, 64};
  return {
      literal("clean-bf16", "bf16", bf16, Defect::none),
      literal("clean-fp16", "fp16", fp16, Defect::none),
      literal("clean-int8-row", "int8:row", int8_row, Defect::none),
      literal("clean-e4m3-head", "e4m3:head", e4m3_head, Defect::none),
      literal("clean-mxfp8-ceil", "mxfp8_e4m3:ceil", mx_ceil, Defect::none),
      literal("clean-bf16-sr", "bf16:sr", bf16_sr, Defect::none),
      {"clean-copy", "e4m3:row", split, literal_function(e4m3_row, Defect::none), true},
      literal("truncation", "bf16", bf16, Defect::truncates),
      literal("truncation-of-codes", "int8:row", int8_row, Defect::truncates),
      literal("ties-away", "bf16", bf16, Defect::ties_away),
      literal("ties-away-in-codes", "int8:row", int8_row, Defect::ties_away),
      literal("double-rounding", "bf16", bf16, Defect::twice_through_float),
      literal("scale-up", "mxfp8_e4m3:ceil", mx_ceil, Defect::scale_one_up),
      literal("scale-up-an-ulp", "int8:row", int8_row, Defect::scale_one_up),
      literal("scale-down", "mxfp8_e4m3:ceil", mx_ceil, Defect::scale_one_down),
      literal("scale-down-an-ulp", "int8:row", int8_row, Defect::scale_one_down),
      literal("floor-for-ceil", "mxfp8_e4m3:ceil", mx_ceil, Defect::floor_for_ceil),
      literal("row-for-head", "e4m3:head", e4m3_head, Defect::row_for_head),
      literal("saturation-for-inf", "fp16", fp16, Defect::saturates_for_inf),
      literal("subnormals-flushed", "fp16", fp16, Defect::flushes_subnormals),
      literal("noise-without-carry", "bf16:sr", bf16_sr, Defect::noise_without_carry),
      {"residual-dropped", "int8:row:ef=int4", shared, literal_function(int8_row, Defect::none), false, true},
      {"stale-copy", "e4m3:row", split, one_flush_stale(literal_function(e4m3_row, Defect::none)), false, true},
  };
}

string with(const string& policy, const string& format) {
  string text = policy;
  return text.replace(text.find("=F") + 1, 1, format);
}

const Subject& named(const std::vector<Subject>& subjects, const string& name) {
  const auto found = std::ranges::find(subjects, name, &Subject::name);
  EXPECT_NE(found, subjects.end()) << name;
  return *found;
}

/// A subject without what a function from outside has not: codes, the arithmetic of floats, and sizes of scales.
Subject comparable(Subject subject, const string& name) {
  subject.name = name;
  std::erase_if(subject.fingerprints,
                [](const Fingerprint& p) { return p.name.ends_with(", codes") || p.name.ends_with(" in float"); });
  std::erase_if(subject.figures, [](const Figure& f) {
    return f.name == "bytes stored" || f.name == "bytes moved" || f.name == "bits an element" ||
           f.name.starts_with("overflows") || f.name.starts_with("saturations");
  });
  return subject;
}

string listed(const std::vector<Finding>& findings) {
  string text;
  for (const Finding& f : findings) {
    if (f.verdict != Finding::Verdict::same) text += f.subject + ": " + f.name + "\n";
  }
  return text;
}

TEST(PlantedDefects, AreFoundOneByOne) {
  const fs::path folder = fs::path(REPLAYSSM_DATA) / "gdn-hybrid-8m";
  const Baseline baseline = read_baseline(folder / "baseline.json");
  const auto model = Model::open(folder);
  const auto backend = reference_backend(Precision::fp64, 1);
  Tokens tokens = read_tokens(folder / baseline.tokens.path);
  tokens.length = baseline.length;
  tokens.ids.resize(static_cast<std::size_t>(baseline.length));
  ASSERT_EQ(tokens_sha256(tokens), baseline.tokens.sha256);
  const std::vector<TrialState> states = read_states((folder / baseline.states.path).string());

  const std::vector<Planted> all = planted();
  std::vector<Policy> policies;
  std::vector<Format> formats;
  for (const Planted& p : all) {
    formats.push_back(register_format(p.name, 8, p.function));
    policies.push_back(parse_policy(with(p.policy, p.name)));
  }
  // One thread: the stale copy remembers. One run of each has nothing to do with the next.
  const std::vector<Subject> runs = check_policies(*model, *backend, tokens, policies, {.threads = 1});
  const std::vector<Subject> conversions = check_formats(states, formats, baseline.seed);
  for (std::size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(all[i].name);
    const string policy = with(all[i].policy, all[i].format);
    const auto of_run =
        compare_subjects({comparable(named(baseline.policies, policy), policy)}, {comparable(runs[i], policy)});
    const auto of_format = compare_subjects({comparable(named(baseline.formats, all[i].format), all[i].format)},
                                            {comparable(conversions[i], all[i].format)});
    const auto outside = [](const std::vector<Finding>& findings) {
      return std::ranges::count(findings, Finding::Verdict::outside, &Finding::verdict);
    };
    if (all[i].clean) {
      EXPECT_EQ(outside(of_run) + outside(of_format), 0) << listed(of_run) << listed(of_format);
    } else {
      EXPECT_GT(outside(all[i].in_runs_only ? of_run : of_format), 0);
    }
  }
}

}  // namespace
}  // namespace replayssm
