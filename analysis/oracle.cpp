#include "analysis/oracle.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <mutex>
#include <utility>

#include "analysis/literal_heads.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/state.h"

namespace replayssm {
namespace {

constexpr std::int64_t block_tokens = 64;  // that the model runs at once

/// A head as a run is fed: as it is, or each input rounded once and the parameters in fp32.
RawHead rounded(RawHead head, const Format& activations) {
  if (activations.exact()) return head;
  for (auto& field : head.fields) round_rows(activations, field.data(), 1, std::ssize(field));
  const auto to_float = [](double& x) { x = static_cast<double>(static_cast<float>(x)); };
  std::ranges::for_each(head.A_log, to_float);
  std::ranges::for_each(head.dt_bias, to_float);
  for (double* x : {&head.dt_min, &head.dt_max, &head.beta_scale}) to_float(*x);
  return head;
}

void check_finite(const RawHead& head, const Format& activations, std::int64_t layer, std::int64_t index,
                  std::int64_t first_token) {
  for (const auto& field : head.fields) {
    const auto bad = std::ranges::find_if(field, [](double x) { return !std::isfinite(x); });
    if (bad == field.end()) continue;
    const std::int64_t width = std::ssize(field) / head.tokens;
    fail("layer ", layer, ", head ", index, ", token ", first_token + (bad - field.begin()) / width,
         ": the inputs of the recurrence must be finite in ", activations.exact() ? "fp64" : activations.text(),
         ", found ", *bad);
  }
}

/// Every policy's state of every head in one precision.
template <class Real>
using States = std::vector<std::vector<State<Real>>>;

/// One layer: the oracles and the runs that are measured with them. What the runs are fed are the inputs of the layer
/// in fp64, rounded to fp32, and rounded as the backend does; head i has an oracle for each of these feeds in turn.
template <class Work, class Check>
class LayerOracle {
 public:
  LayerOracle(Backend& backend, const OracleOptions& options, OracleResult& result)
      : backend_(backend),
        options_(options),
        result_(result),
        shape_(*result.layer.recurrence),
        feeds_(feeds(options)),
        oracles_(of_one_head(shape_), feeds_.size() * result.heads.size(), result.working_digits, result.check_digits) {
    result.oracles = static_cast<int>(feeds_.size());
    const auto add = [&](const Policy& policy, Precision precision, bool on_backend) {
      const std::size_t values = result.heads.size() * static_cast<std::size_t>(result.tokens);
      result.runs.push_back({policy, precision, on_backend, std::vector<double>(values), {}});
    };
    const auto on_cpu = [&](const std::string& text) {
      const Policy policy = parse_policy(text);
      states64_.emplace_back(result.heads.size(), State<double>(of_one_head(shape_), policy));
      states32_.emplace_back(result.heads.size(), State<float>(of_one_head(shape_), policy));
      add(policy, Precision::fp64, false);
      add(policy, Precision::fp32, false);
    };
    on_cpu("exact");
    for (const std::int64_t length : options.lengths) {
      const std::string replay = "replay(L=" + std::to_string(length) + ", state=exact, order=";
      for (const char* order : {"closed)", "sequential)"}) on_cpu(replay + order);
    }
    for (const Policy& policy : options.on_backend) {
      on_backend_.push_back(backend.new_state(shape_, policy));
      add(policy, backend.recurrence_precision(), true);
    }
  }

  /// A block of tokens from `first_token`; what the layer is fed.
  void advance(const RecurrenceCall& call, std::int64_t first_token) {
    std::vector<RawHead> inputs;
    for (const std::int64_t head : result_.heads) {
      const RawHead raw = raw_head(backend_, call, head);
      for (const Format& feed : feeds_) {
        inputs.push_back(rounded(raw, feed));
        check_finite(inputs.back(), feed, options_.layer, head, first_token);
      }
    }
    first_token_ = first_token;
    tokens_ = inputs.front().tokens;
    result_.block_ends.push_back(first_token + tokens_ - 1);
    for (KeptDigits& run : result_.runs) run.state.resize(result_.block_ends.size() * result_.heads.size());
    const auto start = std::chrono::steady_clock::now();
    oracles_.advance(inputs, options_.threads);
    result_.oracle_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    parallel_for(std::ssize(result_.heads), options_.threads, [&](std::int64_t task) {
      oracles_.work().use_digits();
      const auto head = static_cast<std::size_t>(task);
      run_on_cpu(states64_, Precision::fp64, head, inputs[oracle(head, exact_feed)]);
      run_on_cpu(states32_, Precision::fp32, head, inputs[oracle(head, fp32_feed)]);
    });
    for (std::size_t i = 0; i < on_backend_.size(); ++i) run_on_backend(*on_backend_[i], on_backend_run(i), call);
  }

  double agreement() const { return oracles_.agreement(); }

 private:
  static constexpr std::size_t exact_feed = 0, fp32_feed = 1;

  static std::vector<Format> feeds(const OracleOptions& options) {
    std::vector<Format> out = {parse_format("exact"), parse_format("fp32")};
    if (!options.on_backend.empty() && std::ranges::find(out, options.activations) == out.end()) {
      out.push_back(options.activations);
    }
    return out;
  }
  static RecurrenceShape of_one_head(const RecurrenceShape& shape) {
    return {shape.recurrence, 1, 1, shape.head_dim, shape.state_dim};
  }

  std::size_t oracle(std::size_t head, std::size_t feed) const { return head * feeds_.size() + feed; }
  /// Of the results: those of the CPU come first, in pairs.
  KeptDigits& on_backend_run(std::size_t i) { return result_.runs[2 * states64_.size() + i]; }

  template <class Real>
  void run_on_cpu(States<Real>& states, Precision precision, std::size_t head, const RawHead& raw) {
    const std::int64_t P = shape_.head_dim;
    const std::size_t of_fp32 = precision == Precision::fp32 ? 1 : 0;
    const PreparedHead<Real> in(raw);
    std::vector<Real> y(static_cast<std::size_t>(tokens_ * P));
    for (std::size_t p = 0; p < states.size(); ++p) {
      State<Real>& state = states[p][head];
      state.advance_head(0, in.inputs, y.data(), P);
      record(result_.runs[2 * p + of_fp32], head, of_fp32 ? fp32_feed : exact_feed, y.data(), P,
             state.effective(0).data());
    }
  }

  /// All heads of the layer, of which the chosen ones are measured.
  void run_on_backend(RecurrentState& state, KeptDigits& run, const RecurrenceCall& call) {
    const std::int64_t P = shape_.head_dim, width = shape_.heads * P;
    const auto feed = static_cast<std::size_t>(std::ranges::find(feeds_, options_.activations) - feeds_.begin());
    std::vector<double> y(static_cast<std::size_t>(tokens_ * width));
    backend_.read(backend_.advance(state, call), y.data());
    const std::vector<double> s = state.effective();
    parallel_for(std::ssize(result_.heads), options_.threads, [&](std::int64_t task) {
      oracles_.work().use_digits();
      const auto head = static_cast<std::size_t>(task);
      const std::int64_t of_layer = result_.heads[head];
      record(run, head, feed, y.data() + of_layer * P, width, s.data() + of_layer * P * shape_.state_dim);
    });
  }

  /// One head over the block: y of its tokens, y_stride apart, and the state behind them.
  template <class Real>
  void record(KeptDigits& run, std::size_t head, std::size_t feed, const Real* y, std::int64_t y_stride,
              const Real* state) {
    const LiteralHeads<Work>& truth = oracles_.work();
    const std::int64_t P = shape_.head_dim;
    const std::size_t heads = result_.heads.size();
    const double most = options_.digits;
    for (std::int64_t t = 0; t < tokens_; ++t) {
      run.y[static_cast<std::size_t>(first_token_ + t) * heads + head] =
          std::min(most, correct_digits(y + t * y_stride, truth.y(oracle(head, feed)).data() + t * P, P));
    }
    run.state[(result_.block_ends.size() - 1) * heads + head] =
        std::min(most, correct_digits(state, truth.state(oracle(head, feed)).data(), P * shape_.state_dim));
  }

  Backend& backend_;
  const OracleOptions& options_;
  OracleResult& result_;
  RecurrenceShape shape_;      // of the layer
  std::vector<Format> feeds_;  // to which its inputs are rounded
  CheckedHeads<Work, Check> oracles_;
  States<double> states64_;
  States<float> states32_;
  std::vector<std::unique_ptr<RecurrentState>> on_backend_;
  std::int64_t first_token_ = 0, tokens_ = 0;  // of the block
};

template <class Work, class Check>
void measure(const Model& model, Backend& backend, std::span<const std::int32_t> ids, const OracleOptions& options,
             OracleResult& result) {
  LayerOracle<Work, Check> oracle(backend, options, result);
  std::vector<LayerCache> caches(static_cast<std::size_t>(options.layer + 1));
  for (std::size_t i = 0; i < caches.size(); ++i) {
    if (const auto& shape = model.layers()[i].recurrence) caches[i].state = backend.new_state(*shape, exact_policy());
  }
  const Tensor all = model.embed(backend, ids);
  for (std::int64_t t = 0; t < all.rows; t += block_tokens) {
    Tensor x = all.range(t, std::min(block_tokens, all.rows - t));
    for (std::size_t i = 0; i < caches.size(); ++i) {
      x = model.forward(backend, static_cast<std::int64_t>(i), x, caches[i]);
    }
    for (std::int64_t first = 0; first < x.rows; first += options.state_every) {
      const std::int64_t count = std::min(options.state_every, x.rows - first);
      oracle.advance(part_of(*caches.back().call, first, count), t + first);
    }
    if (options.progress) options.progress(t + x.rows, all.rows);
  }
  // No agreement goes beyond the digits that there are.
  result.confirmed = static_cast<int>(std::clamp(oracle.agreement(), 0.0, static_cast<double>(result.working_digits)));
}

/// The work for one choice of arithmetic.
using Measure = decltype(&measure<QuadReal, FixedReal<70>>);

// choose(): the arithmetic that has the digits asked for; they become those that it has.
#ifdef REPLAYSSM_HAVE_MPFR
constexpr int most_digits = 10'000;

Measure choose(OracleResult& result) {
  result.arithmetic = std::string("MPFR ") + mpfr_get_version();
  return measure<RunTimeReal, RunTimeReal>;
}
#else
constexpr int most_digits = 140;

template <class Work, class Check>
bool suffices(OracleResult& result) {
  constexpr int work = std::numeric_limits<Work>::digits10, check = std::numeric_limits<Check>::digits10;
  if (result.working_digits > work || result.check_digits > check) return false;
  result.working_digits = work;
  result.check_digits = check;
  return true;
}

Measure choose(OracleResult& result) {
  result.arithmetic = "Boost.Multiprecision";
  if (suffices<QuadReal, FixedReal<70>>(result)) return measure<QuadReal, FixedReal<70>>;
  if (suffices<FixedReal<70>, FixedReal<140>>(result)) return measure<FixedReal<70>, FixedReal<140>>;
  suffices<FixedReal<most_digits>, FixedReal<2 * most_digits>>(result);
  return measure<FixedReal<most_digits>, FixedReal<2 * most_digits>>;
}
#endif

void check_options(const Model& model, const Backend& backend, std::size_t tokens, const OracleOptions& options) {
  const LayerInfo& layer = recurrent_layer(model, options.layer);
  for (std::size_t i = 0; i < options.heads.size(); ++i) {
    const std::int64_t head = options.heads[i], last = layer.recurrence->heads - 1;
    if (head < 0 || head > last) fail("head ", head, ": expected 0 .. ", last, ", the heads of layer ", options.layer);
    if (i > 0 && head <= options.heads[i - 1])
      fail("heads must ascend, found ", head, " behind ", options.heads[i - 1]);
  }
  if (options.guard < 0 || options.guard >= most_digits) {
    fail("guard digits ", options.guard, ": expected 0 .. ", most_digits - 1);
  }
  if (options.digits < 1 || options.digits > most_digits - options.guard) {
    fail("digits ", options.digits, ": this build works with 1 .. ", most_digits - options.guard, " and ",
         options.guard, " guard digits");
  }
  // Else the blocks of the model, whose products depend on them in their last places, would depend on it.
  if (options.state_every < 1 || block_tokens % options.state_every != 0) {
    fail("states are looked at every so many tokens, a divisor of ", block_tokens, ", found ", options.state_every);
  }
  for (const Policy& policy : options.on_backend) {
    if (!policy.covers(options.layer)) fail("policy '", policy.text(), "' does not cover layer ", options.layer);
  }
  if (options.activations.scale != Scale::none) {
    fail("activations have no scale, found ", options.activations.text());
  }
  if (backend.precision() != Precision::fp64) fail("the oracle takes the inputs of an fp64 backend, found fp32");
  if (tokens == 0) fail("the oracle needs at least one token, found none");
}

}  // namespace

int max_oracle_digits() { return most_digits; }

const LayerInfo& recurrent_layer(const Model& model, std::int64_t layer) {
  const auto& layers = model.layers();
  if (layer < 0 || layer >= std::ssize(layers)) {
    fail("layer ", layer, ": expected 0 .. ", layers.size() - 1, ", the layers of the model");
  }
  const LayerInfo& info = layers[static_cast<std::size_t>(layer)];
  if (!info.recurrence) fail("layer ", layer, " is of kind ", info.kind, ": expected one with a recurrence");
  return info;
}

OracleResult run_oracle(const Model& model, Backend& backend, std::span<const std::int32_t> ids,
                        const OracleOptions& options) {
  check_options(model, backend, ids.size(), options);
  OracleResult result;
  result.layer = recurrent_layer(model, options.layer);
  result.heads = options.heads;
  for (std::int64_t h = 0; options.heads.empty() && h < result.layer.recurrence->heads; ++h) result.heads.push_back(h);
  result.tokens = std::ssize(ids);
  result.working_digits = std::max(options.digits + options.guard, std::numeric_limits<double>::max_digits10);
  result.check_digits = std::max(2 * options.digits, result.working_digits + 20);
  const Measure run = choose(result);
  static std::mutex one_at_a_time;  // see set_working_digits()
  const std::lock_guard lock(one_at_a_time);
  run(model, backend, ids, options, result);
  return result;
}

}  // namespace replayssm
