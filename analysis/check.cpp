#include "analysis/check.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

#include "core/error.h"
#include "core/random.h"
#include "core/safetensors.h"
#include "core/sha256.h"

namespace replayssm {
namespace {

// docs/check.md says why these.
constexpr double disturbance = 0x1p-24;
constexpr int disturbed_runs = 3;
constexpr double safety = 2;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

double finite_or_nan(double x) { return std::isfinite(x) ? x : kNan; }

/// Whether a count of what the arithmetic decides: it may go to the next.
bool is_count(const std::string& name) {
  return name == "top-1 agreements" || name == "not finite" || name == "overflows" || name == "saturations";
}

/// Whether roundings of the arithmetic have no part in it.
bool is_exact(const std::string& name) {
  return name == "bytes stored" || name == "bytes moved" || name == "flushes" || name == "rounded reads";
}

Subject subject_of(const PolicyResult& result) {
  const DivergenceSummary& d = result.divergence;
  const auto agreements = std::ranges::count_if(result.tokens, [](const auto& token) { return token.top1_agrees; });
  Subject out{result.policy.text(), {}, {}};
  const auto add = [&](std::string name, auto value) {
    out.figures.push_back({std::move(name), finite_or_nan(static_cast<double>(value))});
  };
  add("mean KL", d.kl.mean);
  add("p99 KL", d.kl.p99);
  add("top-1 agreements", agreements);
  add("not finite", d.non_finite);
  add("overflows", result.overflows());
  add("saturations", result.saturations());
  add("bytes stored", result.cost.bytes_stored_per_sequence);
  add("bytes moved", result.cost.bytes_moved_per_token);
  add("flushes", result.cost.flushes);
  add("rounded reads", result.cost.rounded_reads);
  for (const LayerResult& layer : result.layers) {
    const std::string at = "layer " + std::to_string(layer.layer);
    add(at + " y local", layer.y_rel_l2.local);
    add(at + " y", layer.y_rel_l2.propagated);
    add(at + " state local", layer.state_rel_l2.local);
    add(at + " state", layer.state_rel_l2.propagated);
  }
  return out;
}

/// Up to two digits, never down.
double rounded_up(double x) {
  if (!(x > 0) || !std::isfinite(x)) return x;
  for (double next = x;; next *= 1 + 0x1p-8) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1e", next);
    double out = 0;
    std::from_chars(text, text + std::strlen(text), out);
    if (out >= x) return out;
  }
}

/// Noise of its own for every run, sequence and element.
void disturb(int run, std::int64_t sequence, std::span<double> values) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    const Words4 words = philox4x32_10(
        {{static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(i >> 32), static_cast<std::uint32_t>(sequence), 0}},
        static_cast<std::uint64_t>(run));
    values[i] *= 1 + disturbance * (words.word[0] * 0x1p-31 - 1);  // uniform in -1 .. 1
  }
}

/// What becomes of states in one format: of two tokens, since stochastic rounding draws anew for each.
class Converter {
 public:
  Converter(const Format& format, std::uint64_t seed) : format_(format), seed_(seed) {}

  void convert(const TrialState& state) {
    for (std::uint32_t token = 0; token < 2; ++token) {
      const Draw draw{.place = {seed_, 0, static_cast<std::uint32_t>(state.layer)},
                      .token = token,
                      .head = static_cast<std::uint32_t>(state.head)};
      if (!format_.own) encode<double>(state, draw, codes_);
      const std::vector<double> rounded = round<double>(state, draw, values_);
      for (std::size_t i = 0; i < rounded.size(); ++i) {
        const double x = state.values[i], difference = rounded[i] - x;
        error_ += {difference * difference, x * x};
      }
      if (!format_.own) encode<float>(state, draw, in_float_);
      round<float>(state, draw, in_float_);
    }
  }

  void add_fingerprints(const std::string& name, std::vector<Fingerprint>& out) const {
    out.push_back({name, values_.hex()});
    if (!format_.own) out.push_back({name + ", codes", codes_.hex()});
    out.push_back({name + " in float", in_float_.hex()});
  }
  double error() const { return error_.relative(); }
  const RangeLoss& lost() const { return lost_; }

 private:
  template <class Real>
  static std::vector<Real> in(const TrialState& state) {
    std::vector<Real> values;
    for (const double x : state.values) values.push_back(static_cast<Real>(x));
    return values;
  }

  template <class Real>
  std::vector<Real> round(const TrialState& state, const Draw& draw, Sha256& digest) {
    std::vector<Real> values = in<Real>(state);
    lost_ += round_rows(format_, values.data(), state.rows, state.n, draw);
    // The sign and payload of a NaN that an operation makes are the processor's.
    for (Real& x : values) x = std::isnan(x) ? std::numeric_limits<Real>::quiet_NaN() : x;
    digest.update(std::as_bytes(std::span(values)));
    return values;
  }

  template <class Real>
  void encode(const TrialState& state, const Draw& draw, Sha256& digest) const {
    std::vector<std::byte> codes(static_cast<std::size_t>(state.rows * format_.code_bytes(state.n)));
    std::vector<std::byte> scales(static_cast<std::size_t>(format_.scale_bytes(state.rows, state.n)));
    encode_rows(format_, in<Real>(state).data(), state.rows, state.n, codes.data(), scales.data(), draw);
    digest.update(codes);
    digest.update(scales);
  }

  const Format& format_;
  const std::uint64_t seed_;
  Sha256 values_, codes_, in_float_;
  SquaredError error_;
  RangeLoss lost_;
};

Subject subject_of(const Format& format, const std::vector<TrialState>& states, const std::vector<TrialState>& hard,
                   std::uint64_t seed) {
  Subject out{format.text(), {}, {}};
  if (!states.empty()) {
    Converter converter(format, seed);
    for (const TrialState& state : states) converter.convert(state);
    const std::int64_t rows = states[0].rows, n = states[0].n;
    const auto bytes = static_cast<double>(rows * format.code_bytes(n) + format.scale_bytes(rows, n));
    out.figures = {{"bits an element", 8 * bytes / static_cast<double>(rows * n)},
                   {"error of the states", finite_or_nan(converter.error())},
                   {"overflows in the states", static_cast<double>(converter.lost().overflows)},
                   {"saturations in the states", static_cast<double>(converter.lost().saturations)}};
    converter.add_fingerprints("states", out.fingerprints);
  }
  for (std::size_t i = 0; i < hard.size();) {
    const std::string name = hard[i].name;
    Converter converter(format, seed);
    for (; i < hard.size() && hard[i].name == name; ++i) converter.convert(hard[i]);
    converter.add_fingerprints(name, out.fingerprints);
  }
  return out;
}

template <class Item>
const Item* find_named(const std::vector<Item>& items, const std::string& name) {
  const auto at = std::ranges::find(items, name, &Item::name);
  return at == items.end() ? nullptr : &*at;
}

Finding::Verdict verdict(const Figure& stored, double found) {
  if (stored.value == found || (std::isnan(stored.value) && std::isnan(found))) return Finding::Verdict::same;
  return std::abs(found - stored.value) <= stored.margin ? Finding::Verdict::within : Finding::Verdict::outside;
}

}  // namespace

std::vector<Subject> check_policies(const Model& model, Backend& backend, const Tokens& tokens,
                                    const std::vector<Policy>& policies, StudyOptions options) {
  options.local = true;
  std::vector<Subject> subjects;
  for (const PolicyResult& result : run_study(model, backend, tokens, policies, options)) {
    subjects.push_back(subject_of(result));
  }
  return subjects;
}

void set_margins(std::vector<Subject>& subjects, const Model& model, Backend& backend, const Tokens& tokens,
                 const std::vector<Policy>& policies, const StudyOptions& options) {
  std::vector<std::vector<Subject>> runs;
  for (int run = 1; run <= disturbed_runs; ++run) {
    StudyOptions disturbed = options;
    disturbed.disturb = [run](std::int64_t sequence, std::span<double> values) { disturb(run, sequence, values); };
    runs.push_back(check_policies(model, backend, tokens, policies, disturbed));
  }
  for (std::size_t s = 0; s < subjects.size(); ++s) {
    for (std::size_t f = 0; f < subjects[s].figures.size(); ++f) {
      Figure& figure = subjects[s].figures[f];
      figure.margin = 0;
      if (is_exact(figure.name) || std::isnan(figure.value)) continue;
      for (const auto& run : runs) {
        const double change = std::abs(run[s].figures[f].value - figure.value);
        if (change > figure.margin) figure.margin = change;
      }
      figure.margin = rounded_up(safety * figure.margin);
      if (is_count(figure.name)) figure.margin = std::max(figure.margin, 1.0);
    }
  }
}

std::vector<Format> formats_of(const std::vector<Policy>& policies) {
  std::vector<Format> formats;
  const auto add = [&](const Format& format) {
    for (const Format* f = &format; f; f = f->residual) {
      if (!f->exact() && std::ranges::find(formats, *f) == formats.end()) formats.push_back(*f);
    }
  };
  for (const Policy& policy : policies) {
    const Replay replay = policy.as_replay();
    add(replay.anchor);
    if (replay.read) add(*replay.read);
    add(replay.ring.activations);
    for (const auto& [field, format] : replay.ring.fields) add(format);
  }
  return formats;
}

std::vector<Subject> check_formats(const std::vector<TrialState>& states, const std::vector<Format>& formats,
                                   std::uint64_t seed) {
  const std::vector<TrialState> hard = hard_values();
  std::vector<Subject> subjects;
  for (const Format& format : formats) subjects.push_back(subject_of(format, states, hard, seed));
  return subjects;
}

std::vector<TrialState> read_states(const std::string& path) {
  const SafetensorsFile file(path);
  std::vector<TrialState> states;
  for (const TensorView& tensor : file.tensors()) {
    TrialState state{tensor.name, 0, 0, 0, 0, {}};
    int read = 0;
    long long layer = 0, head = 0;
    if (std::sscanf(tensor.name.c_str(), "layer.%4lld.head.%4lld%n", &layer, &head, &read) != 2 ||
        read != static_cast<int>(tensor.name.size()) || layer < 0 || head < 0 || tensor.dtype != Dtype::f64 ||
        tensor.shape.size() != 2 || tensor.elements() == 0) {
      fail(path, ": tensor ", in_quotes(tensor.name), ": expected layer.I.head.H, F64 [rows, n], found ",
           tensor.describe());
    }
    state.layer = layer;
    state.head = head;
    state.rows = tensor.shape[0];
    state.n = tensor.shape[1];
    state.values.resize(static_cast<std::size_t>(tensor.elements()));
    widen(tensor, 0, state.values.size(), state.values.data());
    if (!std::ranges::all_of(state.values, [](double x) { return std::isfinite(x); })) {
      fail(path, ": tensor ", in_quotes(tensor.name), " holds a value that is not finite");
    }
    states.push_back(std::move(state));
  }
  if (states.empty()) fail(path, ": holds no states");
  return states;
}

std::vector<Finding> compare_subjects(const std::vector<Subject>& stored, const std::vector<Subject>& found) {
  std::vector<Finding> out;
  const auto figure = [&](const std::string& subject, const std::string& name, const Figure* before,
                          const Figure* now) {
    Finding f{.subject = subject, .name = name, .stored_digest = {}, .found_digest = {}};
    f.stored = before ? before->value : kNan;
    f.margin = before ? before->margin : 0;
    f.found = now ? now->value : kNan;
    f.verdict = before && now ? verdict(*before, now->value) : Finding::Verdict::outside;
    out.push_back(std::move(f));
  };
  const auto print = [&](const std::string& subject, const std::string& name, const Fingerprint* before,
                         const Fingerprint* now) {
    Finding f{.subject = subject, .name = name, .stored_digest = {}, .found_digest = {}};
    f.stored_digest = before ? before->digest : "none";
    f.found_digest = now ? now->digest : "none";
    f.verdict = f.stored_digest == f.found_digest ? Finding::Verdict::same : Finding::Verdict::outside;
    out.push_back(std::move(f));
  };
  // What is stored in its order, then what is new.
  const auto pairs = [](const auto& before, const auto& now, const auto& each) {
    for (const auto& item : before) each(item.name, &item, find_named(now, item.name));
    for (const auto& item : now) {
      if (!find_named(before, item.name)) each(item.name, decltype (&item)(nullptr), &item);
    }
  };
  pairs(stored, found, [&](const std::string& subject, const Subject* before, const Subject* now) {
    const Subject none{subject, {}, {}};
    const Subject &a = before ? *before : none, &b = now ? *now : none;
    pairs(a.figures, b.figures, [&](const auto& name, const auto* x, const auto* y) { figure(subject, name, x, y); });
    pairs(a.fingerprints, b.fingerprints,
          [&](const auto& name, const auto* x, const auto* y) { print(subject, name, x, y); });
  });
  return out;
}

}  // namespace replayssm
