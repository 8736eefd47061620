#include "cuda/bench.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "analysis/cli/cli.h"
#include "analysis/report.h"
#include "analysis/shapes.h"
#include "analysis/traffic.h"
#include "core/error.h"
#include "core/version.h"

namespace replayssm::cli {
namespace {

using Json = nlohmann::ordered_json;
using Words = std::vector<std::string>;
using Numbers = std::vector<std::int64_t>;

/// Which cases to run: every policy of every length at every batch on every shape. An empty list is the suite's.
struct Plan {
  Words kernels;  // shapes by name
  Numbers batches, lengths;
  Words eager;   // state formats
  Words shared;  // state formats
  Words read;    // read formats beside an fp32 anchor
};

struct Suite {
  const char* name;
  Plan plan;
};

const Suite suites[] = {
    {"quick", {{"mamba2", "gdn"}, {256}, {16}, {"fp32", "fp16"}, {"fp32", "fp16", "int8:row"}, {}}},
    {"table",
     {{"mamba2", "gdn"},
      {256},
      {16},
      {"fp32", "fp16", "bf16"},
      {"fp32", "fp16", "bf16", "e4m3:row", "int8:row"},
      {"fp16", "bf16", "e4m3:row", "int8:row"}}},
    {"sweep",
     {{"mamba2", "gdn"},
      {1, 2, 4, 8, 16, 32, 64, 128, 256, 512},
      {4, 8, 16, 32},
      {"fp32", "fp16"},
      {"fp32", "fp16", "int8:row"},
      {"int8:row"}}},
};

/// The layer that a kernel is measured on where no --shape is given.
RecurrenceShape shape_of(const std::string& kernel) {
  if (kernel == "mamba2") return {Recurrence::mamba2, 128, 8, 64, 128};
  if (kernel == "gdn") return {Recurrence::gated_delta, 64, 16, 128, 128};
  return {Recurrence::kda, 32, 32, 128, 128};
}

struct Options {
  std::string suite = "quick", variant = "automatic", activations = "bf16", ring = "bf16", u = "fp32", json;
  Plan given;
  Words shapes, policies;
};

cuda::Scalar scalar(const std::string& text) {
  return text == "fp32" ? cuda::Scalar::fp32 : text == "fp16" ? cuda::Scalar::fp16 : cuda::Scalar::bf16;
}

/// The policies of a plan, as texts. Where the state is shared the delta rule folds in the u that it has cached.
Words policies_of(const Plan& plan, const Options& options, const RecurrenceShape& shape) {
  if (!options.policies.empty()) return options.policies;
  const bool delta = is_delta_rule(shape.recurrence);
  const std::string ring =
      ", ring=" + options.ring + (delta && options.u != options.ring ? ", ring.u=" + options.u : "");
  Words out;
  for (const std::string& format : plan.eager) out.push_back("eager(state=" + format + ")");
  for (const std::int64_t length : plan.lengths) {
    const std::string begin = "replay(L=" + std::to_string(length);
    for (const std::string& format : plan.shared) {
      out.push_back(begin + ", state=" + format + ring + (delta ? ", loop=open)" : ")"));
    }
    for (const std::string& format : plan.read) out.push_back(begin + ", anchor=fp32, read=" + format + ring + ")");
  }
  return out;
}

std::vector<cuda::BenchCase> cases_of(const Options& options) {
  Plan plan;
  for (const Suite& suite : suites) {
    if (suite.name == options.suite) plan = suite.plan;
  }
  const auto take = [](auto& from, const auto& given) {
    if (!given.empty()) from = given;
  };
  const Plan& given = options.given;
  take(plan.kernels, given.kernels);
  take(plan.batches, given.batches);
  take(plan.lengths, given.lengths);
  if (!given.shared.empty() || !given.read.empty()) {
    plan.eager = plan.shared = given.shared;
    plan.read = given.read;
  }
  std::vector<RecurrenceShape> shapes;
  for (const std::string& text : options.shapes) shapes.push_back(parse_shape(text, "--shape").shape);
  if (shapes.empty()) {
    for (const std::string& kernel : plan.kernels) shapes.push_back(shape_of(kernel));
  }
  const cuda::Kernel kernel = options.variant == "fast"      ? cuda::Kernel::fast
                              : options.variant == "generic" ? cuda::Kernel::generic
                                                             : cuda::Kernel::automatic;
  std::vector<cuda::BenchCase> cases;
  for (const RecurrenceShape& shape : shapes) {
    for (const std::int64_t batch : plan.batches) {
      for (const std::string& text : policies_of(plan, options, shape)) {
        cases.push_back({shape, parse_policy(text), batch, scalar(options.activations), kernel});
      }
    }
  }
  return cases;
}

struct Row {
  cuda::BenchCase bench_case;
  cuda::BenchResult result;
  double step_bytes, flush_bytes;  // of all rows, activations included
};

Row measure(const cuda::BenchCase& c) {
  const LayerTraffic layer(c.shape, c.policy);
  const auto rows = static_cast<double>(c.rows);
  const double activations = activation_bytes(c.shape, c.activations == cuda::Scalar::fp32 ? 4 : 2);
  return {c, cuda::bench(c), rows * (layer.mean().total() + activations), rows * (layer.flush().total() + activations)};
}

/// The eager row of the same shape, batch and format of the state or anchor; null where none was measured.
const Row* eager_of(const Row& row, const std::vector<Row>& rows) {
  const auto format = row.bench_case.policy.as_replay().anchor;
  const auto found = std::ranges::find_if(rows, [&](const Row& other) {
    const Replay replay = other.bench_case.policy.as_replay();
    return replay.length == 1 && replay.anchor == format && other.bench_case.rows == row.bench_case.rows &&
           shape_text(other.bench_case.shape) == shape_text(row.bench_case.shape) && other.result.accuracy.passed();
  });
  return found == rows.end() ? nullptr : &*found;
}

void print_head(const cuda::Ceilings& ceilings) {
  std::printf("%s: reads %.0f GB/s, in-place updates %.0f GB/s (read and written)\n", ceilings.device.c_str(),
              1e-9 * ceilings.read, 1e-9 * ceilings.update);
  std::printf(
      "us: one step of one layer, cursors staggered; floor: bytes of the traffic model at the read ceiling; x: eager "
      "of the same state over this; flush: all rows flush\n");
}

void print_shape(const cuda::BenchCase& c, std::size_t width) {
  std::printf("\n%s, batch %lld\n", shape_text(c.shape).c_str(), static_cast<long long>(c.rows));
  std::printf("%-*s       us    floor  share  GB/s   +-%%      x  flush us  flush/eager   y error (allowed)\n",
              static_cast<int>(width), "policy");
}

void print(const Row& row, const Row* eager, const cuda::Ceilings& ceilings, std::size_t width) {
  const cuda::BenchResult& r = row.result;
  std::printf("%-*s ", static_cast<int>(width), row.bench_case.policy.text().c_str());
  if (!r.accuracy.passed()) {
    const cuda::Accuracy& a = r.accuracy;
    std::printf("WRONG, not timed: y differs by %.2g (%.2g allowed), rounded %.2g (%.2g), the state by %.2g (%.2g)\n",
                a.y, a.y_bound, a.y_typed, a.y_typed_bound, a.state, a.state_bound);
    return;
  }
  const double rate = row.step_bytes / r.step.median;
  std::printf("%8.2f %8.2f  %4.0f%% %5.0f %5.1f ", 1e6 * r.step.median, 1e6 * row.step_bytes / ceilings.read,
              100 * rate / ceilings.read, 1e-9 * rate, 50 * (r.step.largest - r.step.least) / r.step.median);
  if (eager) {
    std::printf("%6.2f %9.2f %12.2f", eager->result.step.median / r.step.median, 1e6 * r.flush.median,
                r.flush.median / eager->result.step.median);
  } else {
    std::printf("%6s %9.2f %12s", "-", 1e6 * r.flush.median, "-");
  }
  std::printf("   %.1e (%.1e)\n", r.accuracy.y, r.accuracy.y_bound);
}

Json time_json(const cuda::BenchTime& time, double bytes, const cuda::Ceilings& ceilings) {
  return {{"us", 1e6 * time.median},
          {"us_least", 1e6 * time.least},
          {"us_largest", 1e6 * time.largest},
          {"replays", time.replays},
          {"bytes", bytes},
          {"floor_us", 1e6 * bytes / ceilings.read},
          {"share_of_read_ceiling", bytes / time.median / ceilings.read}};
}

Json report(const std::vector<Row>& rows, const cuda::Ceilings& ceilings, double seconds) {
  Json results = Json::array();
  for (const Row& row : rows) {
    const cuda::BenchResult& r = row.result;
    Json entry = {{"shape", shape_text(row.bench_case.shape)},
                  {"batch", row.bench_case.rows},
                  {"policy", row.bench_case.policy.text()},
                  {"accuracy",
                   {{"passed", r.accuracy.passed()},
                    {"y_rel_l2", r.accuracy.y},
                    {"y_allowed", r.accuracy.y_bound},
                    {"y_typed_rel_l2", r.accuracy.y_typed},
                    {"y_typed_allowed", r.accuracy.y_typed_bound},
                    {"state_rel_l2", r.accuracy.state},
                    {"state_allowed", r.accuracy.state_bound}}}};
    if (r.accuracy.passed()) {
      entry["layers"] = r.layers;
      entry["tokens"] = r.tokens;
      entry["step"] = time_json(r.step, row.step_bytes, ceilings);
      entry["flush"] = time_json(r.flush, row.flush_bytes, ceilings);
      if (const Row* eager = eager_of(row, rows)) {
        entry["eager_over_step"] = eager->result.step.median / r.step.median;
        entry["flush_over_eager"] = r.flush.median / eager->result.step.median;
      }
    }
    results.push_back(std::move(entry));
  }
  return {{"command", "bench"},
          {"version", version()},
          {"device", ceilings.device},
          {"ceilings", {{"read_bytes_per_s", ceilings.read}, {"update_bytes_per_s", ceilings.update}}},
          {"results", results},
          {"seconds", seconds},
          {"provenance", {{"build", build_description()}}}};
}

int run(const Options& options) {
  const std::vector<cuda::BenchCase> cases = cases_of(options);
  for (const cuda::BenchCase& c : cases) cuda::check_case(c);
  check_writable(options.json);
  const auto start = std::chrono::steady_clock::now();
  const cuda::Ceilings ceilings = cuda::measure_ceilings();
  const bool table = options.json != "-";
  std::size_t width = 0;
  for (const cuda::BenchCase& c : cases) width = std::max(width, c.policy.text().size());
  if (table) print_head(ceilings);
  std::vector<Row> rows;
  bool passed = true;
  for (const cuda::BenchCase& c : cases) {
    const bool other = rows.empty() || rows.back().bench_case.rows != c.rows ||
                       shape_text(rows.back().bench_case.shape) != shape_text(c.shape);
    rows.push_back(measure(c));
    passed = passed && rows.back().result.accuracy.passed();
    if (!table) continue;
    if (other) print_shape(c, width);
    print(rows.back(), eager_of(rows.back(), rows), ceilings, width);
    std::fflush(stdout);
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!options.json.empty()) write_text(options.json, report(rows, ceilings, seconds).dump(2) + "\n");
  return passed ? 0 : 1;
}

}  // namespace

Command add_bench(CLI::App& app) {
  auto options = std::make_shared<Options>();
  Options& o = *options;
  const CLI::IsMember scalars({"fp32", "fp16", "bf16"}), formats({"fp32", "fp16", "bf16", "e4m3:row", "int8:row"});
  const CLI::Range count(std::int64_t{1}, std::int64_t{1} << 20);
  std::vector<std::string> names;
  for (const Suite& suite : suites) names.push_back(suite.name);
  app.add_option("--suite", o.suite, "Cases; the other options replace parts of them")
      ->check(CLI::IsMember(names))
      ->capture_default_str();
  const auto list = [&](const char* name, auto& values, const char* job, const auto& check) {
    app.add_option(name, values, job)->delimiter(',')->check(check);
  };
  list("--kernel", o.given.kernels, "Recurrences, each at the shape of a published model: mamba2, gdn, kda",
       CLI::IsMember({"mamba2", "gdn", "kda"}));
  app.add_option("--shape", o.shapes, shape_help)->allow_extra_args(false);
  list("--batch", o.given.batches, "Sequences, such as 1,32,256", count);
  list("--length", o.given.lengths, "Replay lengths L, such as 8,16", CLI::Range(std::int64_t{2}, std::int64_t{1024}));
  list("--storage", o.given.shared, "State formats, eager and shared, such as fp32,fp16,bf16,e4m3:row,int8:row",
       formats);
  list("--read", o.given.read, "Read formats of split states with an fp32 anchor", formats);
  app.add_option("-p,--policy", o.policies, "Policy in place of these, ring=F included; may be given again")
      ->allow_extra_args(false);
  add_format_files(app);
  app.add_option("--activations", o.activations, "Type of the inputs and of y")->check(scalars)->capture_default_str();
  app.add_option("--ring", o.ring, "Type of recorded activations")->check(scalars)->capture_default_str();
  app.add_option("--ring-u", o.u, "Type of the cached u of the delta rule")->check(scalars)->capture_default_str();
  app.add_option("--variant", o.variant, "Which kernels: automatic, fast or generic")
      ->check(CLI::IsMember({"automatic", "fast", "generic"}))
      ->capture_default_str();
  app.add_option("--json", o.json, "Write the result as JSON to a file, or to standard output with -");
  return [options] { return run(*options); };
}

}  // namespace replayssm::cli
