// Layers of real models on the kernels, through the backend: their errors beside those of the reference in float, and
// what a state says of itself.

#include "cuda/backend.h"

#include <algorithm>
#include <cmath>

#include "analysis/layer_study.h"
#include "core/error.h"
#include "core/tokens.h"
#include "tests/cuda/layer.h"
#include "tests/cuda/machine_device.h"
#include "tests/support/forward.h"

namespace replayssm::cuda::tests {
namespace {

constexpr std::int64_t kTokens = 40;

/// Applies `change` to every tensor of a call.
template <class Change>
RecurrenceCall Changed(RecurrenceCall call, Change&& change) {
  if (auto* mamba2 = std::get_if<Mamba2Call>(&call)) {
    for (Tensor* x : {&mamba2->x, &mamba2->B, &mamba2->C, &mamba2->dt}) *x = change(*x);
  } else {
    auto& delta = std::get<DeltaCall>(call);
    for (Tensor* x : {&delta.q, &delta.k, &delta.v, &delta.gate, &delta.beta}) *x = change(*x);
  }
  return call;
}

/// The values as a tensor of the backend's scalars.
template <class Real>
Tensor TensorOf(Backend& backend, const Values& values, std::int64_t rows) {
  Tensor out = backend.zeros(rows, std::ssize(values) / rows);
  auto* data = static_cast<Real*>(out.storage.get()) + out.offset;
  for (std::int64_t t = 0; t < rows; ++t) {
    for (std::int64_t i = 0; i < out.columns; ++i) {
      data[t * out.stride + i] = static_cast<Real>(values[static_cast<std::size_t>(t * out.columns + i)]);
    }
  }
  return out;
}

/// What the SSM layers of a model are fed over some tokens, with an exact state, in binary64.
struct Fed {
  std::unique_ptr<Model> model;
  std::unique_ptr<Backend> host = Reference();
  std::vector<std::pair<RecurrenceShape, RecurrenceCall>> layers;

  Fed(const std::string& folder, const std::string& tokens_file) : model(Model::open(folder)) {
    Tokens tokens = read_tokens(tokens_file);
    tokens.ids.resize(static_cast<std::size_t>(kTokens));
    Runner runner(*model, *host);
    runner.logits(tokens.ids);
    for (std::size_t i = 0; i < model->layers().size(); ++i) {
      if (model->layers()[i].recurrence) layers.emplace_back(*model->layers()[i].recurrence, *runner.cache(i).call);
    }
  }
  RecurrenceCall in_float(Backend& to, const RecurrenceCall& call) const {
    return Changed(call, [&](const Tensor& x) { return TensorOf<float>(to, read_all(*host, x), x.rows); });
  }
};

Fed Tiny(const std::string& name) {
  const std::string folder = REPLAYSSM_TEST_DATA "/models/" + name;
  return Fed(folder, folder + "/golden.safetensors");
}
/// The first and the last layer of a trained model: shapes that the fast kernels know.
Fed Trained(const std::string& name) {
  Fed fed(REPLAYSSM_DATA "/" + name, REPLAYSSM_DATA "/sherlock.safetensors");
  fed.layers = {fed.layers.front(), fed.layers.back()};
  return fed;
}

struct Advanced {
  std::unique_ptr<RecurrentState> state;
  Values y;
};

Advanced Advance(Backend& backend, const RecurrenceShape& shape, const std::string& policy,
                 const RecurrenceCall& call) {
  Advanced run{backend.new_state(shape, parse_policy(policy)), {}};
  run.y = read_all(backend, backend.advance(*run.state, call));
  return run;
}

/// The same on a machine; no y where it has no kernel.
Advanced OnKernels(Machine& machine, const RecurrenceShape& shape, const std::string& policy,
                   const RecurrenceCall& call) {
  const auto kernels = Kernels(machine);
  try {
    return Advance(*kernels, shape, policy, call);
  } catch (const NotServed&) {
    return {};
  }
}

double Distance(const Values& a, const Values& b) {
  EXPECT_EQ(a.size(), b.size());
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}
double Norm(const Values& a) { return Distance(a, Values(a.size(), 0)); }

/// What is fair for fp32 arithmetic: twice the error of State<float>, whose sums run in another order, and half an ulp.
double Fair(const Values& in_float, const Values& truth) {
  return 2 * Distance(in_float, truth) + std::ldexp(Norm(truth), -24);
}

constexpr const char* kPlain[] = {"eager(state=fp32)", "replay(L=4, state=fp32)", "replay(L=16, state=fp32)",
                                  "replay(L=16, state=fp32, loop=open)", "replay(L=8, anchor=fp32, read=fp32)"};

void CheckArithmetic(Machine& machine, const Fed& fed) {
  const auto in_float = Reference(Precision::fp32);
  for (const auto& [shape, call] : fed.layers) {
    const Advanced truth = Advance(*fed.host, shape, "exact", call);
    for (const char* policy : kPlain) {
      SCOPED_TRACE(std::string(name(shape.recurrence)) + " " + policy);
      const Advanced run = OnKernels(machine, shape, policy, call);
      if (run.y.empty()) continue;
      const Advanced naive = Advance(*in_float, shape, policy, fed.in_float(*in_float, call));
      EXPECT_LE(Distance(run.y, truth.y), Fair(naive.y, truth.y));
      const Values state = truth.state->effective();
      EXPECT_LE(Distance(run.state->effective(), state), Fair(naive.state->effective(), state));
      EXPECT_EQ(run.state->held(), naive.state->held());
    }
  }
}

/// Of the error that storing n elements in a format makes, what fp32 arithmetic may turn round. An element comes out on
/// the other side where arithmetic, say 4 roundings of 2^-24, carries it over a midpoint: of elements spaced by 2^-m to
/// 2^-m-1, relative, at most a share of 2 * 4 * 2^-24 / 2^-m-1. A number of that mean stays below mean + 4 sqrt(mean) +
/// 4. Each is off by a spacing, where the error of the format is 1/sqrt(12) spacing in all n.
double Flipped(const Format& format, std::int64_t n) {
  if (format.exact() || format == parse_format("fp32")) return 0;  // nothing beyond arithmetic's own
  const auto elements = static_cast<double>(n);
  const double mean = elements * 2 * 4 * std::ldexp(1.0, -24 + format.element.mantissa_bits + 1);
  return std::sqrt(12 * (mean + 4 * std::sqrt(mean) + 4) / elements);
}

void CheckRounded(Machine& machine, const Fed& fed) {
  std::vector<std::string> policies;
  for (const std::string format : {"fp16", "bf16", "e4m3:row", "int8:row"}) {
    for (const std::string& policy :
         {"eager(state=" + format + ")", "replay(L=4, state=" + format + ")", "replay(L=8, state=" + format + ")",
          "replay(L=8, anchor=fp32, read=" + format + ")",
          "replay(L=8, anchor=bf16, read=" + format + ", loop=open)"}) {
      policies.push_back(policy);
    }
  }
  for (const char* ring : {"bf16", "fp16"}) {
    policies.push_back(std::string("replay(L=8, state=bf16, loop=open, ring=") + ring + ")");
    policies.push_back(std::string("replay(L=8, anchor=fp32, read=int8:row, ring=") + ring + ")");
  }
  const auto in_float = Reference(Precision::fp32);
  for (const auto& [shape, call] : fed.layers) {
    const RecurrenceCall floats = fed.in_float(*in_float, call);
    const Advanced truth = Advance(*fed.host, shape, "exact", call), plain = Advance(*in_float, shape, "exact", floats);
    for (const std::string& policy : policies) {
      SCOPED_TRACE(std::string(name(shape.recurrence)) + " " + policy);
      const Advanced run = OnKernels(machine, shape, policy, call);
      if (run.y.empty()) continue;
      const Advanced expected = Advance(*fed.host, shape, policy, call),
                     naive = Advance(*in_float, shape, policy, floats);
      const Replay replay = parse_policy(policy).as_replay();
      const std::int64_t written = kTokens / replay.length * shape.heads * shape.head_dim * shape.state_dim;
      double share = Flipped(replay.anchor, written);
      share += Flipped(replay.ring.activations, kTokens * shape.heads * shape.head_dim);
      if (replay.read) share += Flipped(*replay.read, written);
      const double error = Distance(expected.y, truth.y);
      double allowed = 2 * Distance(naive.y, expected.y) + share * error + Fair(plain.y, truth.y);
      if (is_delta_rule(shape.recurrence) && parse_policy(policy).loop == Loop::closed) {
        const Format ring = replay.ring.activations;  // the cached u is rounded by the kernels alone
        if (!ring.exact()) allowed += std::ldexp(Norm(truth.y), -ring.element.mantissa_bits - 1);
      }
      EXPECT_LE(Distance(run.y, expected.y), allowed) << "error of the format " << error;
    }
  }
}

class KernelBackend : public OnMachine {};
INSTANTIATE_TEST_SUITE_P(, KernelBackend, testing::ValuesIn(machine_names()));

TEST_P(KernelBackend, KeepsTheDigitsOfFloat) {
  for (const char* model : {"mamba2", "qwen3_5"}) CheckArithmetic(on(), Tiny(model));
  for (const char* model : {"mamba2-5m", "gdn-hybrid-8m"}) CheckArithmetic(on(), Trained(model));
}

TEST_P(KernelBackend, RoundsAsTheReferenceDoes) {
  // Of the few elements of a tiny model one alone may weigh as much as what is allowed.
  for (const char* model : {"mamba2-5m", "gdn-hybrid-8m"}) CheckRounded(on(), Trained(model));
}

TEST_P(KernelBackend, DoesNotDependOnTheCalls) {
  const Fed fed = Trained("gdn-hybrid-8m");
  const auto& [shape, call] = fed.layers.front();
  for (const char* policy : {"eager(state=bf16)", "replay(L=8, anchor=fp32, read=e4m3:row, ring=bf16)"}) {
    const Advanced whole = OnKernels(on(), shape, policy, call);
    if (whole.y.empty()) continue;
    const auto kernels = Kernels(on());
    const auto state = kernels->new_state(shape, parse_policy(policy));
    Values y;
    for (std::int64_t first = 0, count = 1; first < kTokens;
         first += count, count = std::min(count + 2, kTokens - first)) {
      const auto part = Changed(call, [&, n = count](const Tensor& x) { return x.range(first, n); });
      const Values more = read_all(*kernels, kernels->advance(*state, part));
      y.insert(y.end(), more.begin(), more.end());
    }
    EXPECT_EQ(y, whole.y) << policy;
    EXPECT_EQ(state->effective(), whole.state->effective()) << policy;
    EXPECT_EQ(state->held(), whole.state->held()) << policy;
  }
}

TEST_P(KernelBackend, StatesSayWhatIsStored) {
  const Fed fed = Trained("mamba2-5m");
  const auto& [shape, call] = fed.layers.front();
  const std::string policy = "replay(L=16, anchor=fp32, read=int8:row)";
  const Advanced run = OnKernels(on(), shape, policy, call);  // 40 tokens: two flushes, 8 records
  if (run.y.empty()) GTEST_SKIP() << "no kernel";
  EXPECT_EQ(run.state->held(), 8);
  const auto first = [&](std::int64_t n) { return [n](const Tensor& x) { return x.range(0, n); }; };
  const Advanced flushed = OnKernels(on(), shape, policy, Changed(call, first(32)));
  EXPECT_EQ(flushed.state->held(), 0);
  EXPECT_EQ(flushed.state->effective(), flushed.state->checkpoint());
  EXPECT_EQ(run.state->checkpoint(), flushed.state->checkpoint()) << "records do not change the anchor";
  EXPECT_NE(run.state->effective(), run.state->checkpoint());
  const Values anchor = run.state->checkpoint();
  std::vector<float> copy(anchor.begin(), anchor.end());
  round_rows(parse_format("int8:row"), copy.data(), shape.heads * shape.head_dim, shape.state_dim);
  EXPECT_EQ(run.state->read_copy(), Values(copy.begin(), copy.end()));
  EXPECT_FALSE(run.state->events().overflows_counted);
  EXPECT_FALSE(run.state->events().first_non_finite);
}

TEST_P(KernelBackend, FeedsRoundedActivations) {
  const Fed fed = Trained("mamba2-5m");
  const auto& [shape, call] = fed.layers.front();
  const Format bf16 = parse_format("bf16");
  const RecurrenceCall rounded = Changed(call, [&](const Tensor& x) {
    Values values = read_all(*fed.host, x);
    round_rows(bf16, values.data(), 1, std::ssize(values));
    return TensorOf<double>(*fed.host, values, x.rows);
  });
  Advanced wide = OnKernels(on(), shape, "replay(L=8, state=fp32)", rounded);
  if (wide.y.empty()) GTEST_SKIP() << "no kernel";
  round_rows(bf16, wide.y.data(), 1, std::ssize(wide.y));
  const auto kernels = Kernels(on(), Scalar::bf16);
  EXPECT_EQ(Advance(*kernels, shape, "replay(L=8, state=fp32)", call).y, wide.y);
}

TEST_P(KernelBackend, LeavesTheExactStateToTheHost) {
  const Fed fed = Tiny("mamba2");
  const auto& [shape, call] = fed.layers.front();
  const auto kernels = Kernels(on());
  EXPECT_EQ(Advance(*kernels, shape, "exact", call).y, Advance(*fed.host, shape, "exact", call).y);
  EXPECT_EQ(kernels->precision(), Precision::fp64);
  EXPECT_EQ(kernels->recurrence_precision(), Precision::fp32);
}

TEST_P(KernelBackend, SaysWhereValuesCeaseToBeFinite) {
  const Fed fed = Trained("mamba2-5m");
  const auto& [shape, call] = fed.layers.front();
  auto broken = std::get<Mamba2Call>(call);
  Values x = read_all(*fed.host, broken.x);
  // Beyond fp16 when it is stored, an output later when it is read; fp32 holds it.
  x[static_cast<std::size_t>(5 * broken.x.columns + shape.head_dim + 3)] = 1e30;
  broken.x = TensorOf<double>(*fed.host, x, broken.x.rows);
  const Advanced run = OnKernels(on(), shape, "eager(state=fp16)", broken);
  if (run.y.empty()) GTEST_SKIP() << "no kernel";
  EXPECT_EQ(run.state->events().first_non_finite, (RangeEvents::Event{6, 1}));
  const auto short_of_it = Changed(broken, [](const Tensor& all) { return all.range(0, 6); });
  const Advanced last = OnKernels(on(), shape, "eager(state=fp16)", short_of_it);
  EXPECT_EQ(last.state->events().first_non_finite, (RangeEvents::Event{5, 1})) << "found in the stored state";
  EXPECT_FALSE(OnKernels(on(), shape, "eager(state=fp32)", broken).state->events().first_non_finite);
}

TEST_P(KernelBackend, StudiesLayers) {
  const std::string folder = REPLAYSSM_TEST_DATA "/models/qwen3_5";
  const auto model = Model::open(folder);
  Tokens tokens = read_tokens(folder + "/golden.safetensors");
  tokens.sequences = 1;
  tokens.length = kTokens;
  tokens.ids.resize(static_cast<std::size_t>(kTokens));
  const auto kernels = Kernels(on());
  const std::vector<Policy> policies = {parse_policy("replay(L=4, state=e4m3:row)"),
                                        parse_policy("replay(L=8, anchor=fp32, read=e4m3:row)")};
  try {
    const LayerStudy study =
        run_layer_study(*model, *kernels, tokens, policies, {.threads = 2, .chunk_tokens = 8}, true);
    for (const PolicyLayers& policy : study.policies) {
      EXPECT_FALSE(policy.result.overflows_counted());
      for (const LayerErrors& e : policy.layers) {
        EXPECT_GT(e.y_local.rel_l2(), 0);
        EXPECT_LE(e.y_local.rel_l2(), e.bound) << policy.result.policy.text() << ", layer " << e.layer;
      }
    }
  } catch (const NotServed&) {
    GTEST_SKIP() << "no kernel";
  }
}

TEST(KernelPolicies, Refused) {
  const auto message = [](const char* policy, Recurrence recurrence = Recurrence::gated_delta) -> std::string {
    try {
      check_policy({recurrence, 4, 2, 16, 16}, parse_policy(policy));
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  for (const char* policy : {"exact", "eager(state=int8:row)", "replay(L=8, state=fp16, ring=exact)",
                             "replay(L=8, anchor=bf16, read=e4m3:row, ring=bf16, ring.k=fp16)"}) {
    EXPECT_EQ(message(policy), "");
  }
  const auto expect = [&](const char* policy, const char* part) {
    EXPECT_NE(message(policy).find(part), std::string::npos) << message(policy);
    EXPECT_NE(message(policy).find(parse_policy(policy).text()), std::string::npos) << message(policy);
  };
  expect("replay(L=8, state=bf16, order=sequential)", "order=closed");
  expect("eager(state=tf32)", "found tf32");
  expect("replay(L=8, state=exact, ring=bf16)", "found exact");
  expect("replay(L=8, anchor=fp32, read=e5m2)", "found e5m2");
  expect("replay(L=8, state=bf16, ring.k=e4m3)", "ring.k");
  expect("replay(L=8, state=bf16, ring.g=bf16)", "ring.g in fp32, found bf16");
  EXPECT_EQ(message("replay(L=8, state=bf16, ring.g=bf16)", Recurrence::mamba2), "");
  EXPECT_THROW(check_policy({Recurrence::mamba2, 1, 1, 64, 512}, parse_policy("eager(state=bf16)")), Error);
}

}  // namespace
}  // namespace replayssm::cuda::tests
