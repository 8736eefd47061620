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

constexpr std::int64_t block_tokens = 64;  // tokens between two looks at the state

RawHead rounded_to_float(RawHead head) {
  const auto round = [](double& x) { x = static_cast<double>(static_cast<float>(x)); };
  for (auto& field : head.fields) std::ranges::for_each(field, round);
  std::ranges::for_each(head.A_log, round);
  std::ranges::for_each(head.dt_bias, round);
  for (double* x : {&head.dt_min, &head.dt_max, &head.beta_scale}) round(*x);
  return head;
}

void check_finite(const RawHead& head, std::int64_t layer, std::int64_t index, std::int64_t first_token) {
  for (const auto& field : head.fields) {
    const auto bad = std::ranges::find_if(field, [](double x) { return !std::isfinite(x); });
    if (bad == field.end()) continue;
    const std::int64_t width = std::ssize(field) / head.tokens;
    fail("layer ", layer, ", head ", index, ", token ", first_token + (bad - field.begin()) / width,
         ": the inputs of the recurrence must be finite in fp32 and fp64, found ", *bad);
  }
}

/// Every policy's state of every head in one precision.
template <class Real>
using States = std::vector<std::vector<State<Real>>>;

/// One layer: the oracles and the runs that are measured with them. Head i has two oracles: number
/// 2 i on the inputs in binary64, number 2 i + 1 on these rounded to binary32.
template <class Work, class Check>
class LayerOracle {
 public:
  LayerOracle(const RecurrenceShape& shape, const OracleOptions& options, OracleResult& result)
      : options_(options),
        result_(result),
        shape_{shape.recurrence, 1, 1, shape.head_dim, shape.state_dim},
        oracles_(shape_, 2 * result.heads.size(), result.working_digits, result.check_digits) {
    const std::size_t values = result.heads.size() * static_cast<std::size_t>(result.tokens);
    const auto add = [&](const std::string& text) {
      const Policy policy = parse_policy(text);
      states64_.emplace_back(result.heads.size(), State<double>(shape_, policy));
      states32_.emplace_back(result.heads.size(), State<float>(shape_, policy));
      for (const Precision precision : {Precision::fp64, Precision::fp32}) {
        result.runs.push_back({policy, precision, std::vector<double>(values), {}});
      }
    };
    add("exact");
    for (const std::int64_t length : options.lengths) {
      const std::string replay = "replay(L=" + std::to_string(length) + ", state=exact, order=";
      for (const char* order : {"closed)", "sequential)"}) add(replay + order);
    }
  }

  /// A block of tokens from `first_token`; what every head is fed.
  void advance(const std::vector<RawHead>& heads, std::int64_t first_token) {
    std::vector<RawHead> inputs;
    for (std::size_t i = 0; i < heads.size(); ++i) {
      inputs.push_back(heads[i]);
      inputs.push_back(rounded_to_float(heads[i]));
      check_finite(inputs.back(), options_.layer, result_.heads[i], first_token);
    }
    result_.block_ends.push_back(first_token + heads.front().tokens - 1);
    for (KeptDigits& run : result_.runs) run.state.resize(result_.block_ends.size() * heads.size());
    const auto start = std::chrono::steady_clock::now();
    oracles_.advance(inputs, options_.threads);
    result_.oracle_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    parallel_for(std::ssize(heads), options_.threads, [&](std::int64_t head) {
      oracles_.work().use_digits();
      const auto i = static_cast<std::size_t>(2 * head);
      measure(states64_, Precision::fp64, inputs[i], i, first_token);
      measure(states32_, Precision::fp32, inputs[i + 1], i + 1, first_token);
    });
  }

  double agreement() const { return oracles_.agreement(); }

 private:
  template <class Real>
  void measure(States<Real>& states, Precision precision, const RawHead& raw, std::size_t oracle,
               std::int64_t first_token) {
    const std::size_t head = oracle / 2, heads = result_.heads.size();
    const std::int64_t P = shape_.head_dim;
    const double most = options_.digits;
    const PreparedHead<Real> in(raw);
    std::vector<Real> y(static_cast<std::size_t>(raw.tokens * P));
    for (std::size_t p = 0; p < states.size(); ++p) {
      State<Real>& state = states[p][head];
      KeptDigits& run = result_.runs[2 * p + (precision == Precision::fp32 ? 1 : 0)];
      state.advance_head(0, in.inputs, y.data(), P);
      for (std::int64_t t = 0; t < raw.tokens; ++t) {
        run.y[static_cast<std::size_t>(first_token + t) * heads + head] =
            std::min(most, correct_digits(y.data() + t * P, oracles_.work().y(oracle).data() + t * P, P));
      }
      const std::vector<Real> s = state.effective(0);
      run.state[(result_.block_ends.size() - 1) * heads + head] =
          std::min(most, correct_digits(s.data(), oracles_.work().state(oracle).data(), std::ssize(s)));
    }
  }

  const OracleOptions& options_;
  OracleResult& result_;
  RecurrenceShape shape_;  // of one head
  CheckedHeads<Work, Check> oracles_;
  States<double> states64_;
  States<float> states32_;
};

template <class Work, class Check>
void measure(const Model& model, Backend& backend, std::span<const std::int32_t> ids, const OracleOptions& options,
             OracleResult& result) {
  LayerOracle<Work, Check> oracle(*result.layer.recurrence, options, result);
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
    std::vector<RawHead> heads;
    for (const std::int64_t head : result.heads) {
      heads.push_back(raw_head(backend, *caches.back().call, head));
    }
    oracle.advance(heads, t);
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
  const auto& layers = model.layers();
  if (options.layer < 0 || options.layer >= std::ssize(layers)) {
    fail("layer ", options.layer, ": expected 0 .. ", layers.size() - 1, ", the layers of the model");
  }
  const LayerInfo& layer = layers[static_cast<std::size_t>(options.layer)];
  if (!layer.recurrence) {
    fail("layer ", options.layer, " is of kind ", layer.kind, ": expected one with a recurrence");
  }
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
  if (backend.precision() != Precision::fp64) fail("the oracle takes the inputs of an fp64 backend, found fp32");
  if (tokens == 0) fail("the oracle needs at least one token, found none");
}

}  // namespace

int max_oracle_digits() { return most_digits; }

OracleResult run_oracle(const Model& model, Backend& backend, std::span<const std::int32_t> ids,
                        const OracleOptions& options) {
  check_options(model, backend, ids.size(), options);
  OracleResult result;
  result.layer = model.layers()[static_cast<std::size_t>(options.layer)];
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
