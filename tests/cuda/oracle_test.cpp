// The oracle on layers that the kernels run: their digits against digits found apart, and beside those of float.

#include "analysis/oracle.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "core/tokens.h"
#include "tests/analysis/fed.h"
#include "tests/cuda/machine_device.h"

namespace replayssm::cuda::tests {
namespace {

using replayssm::oracle::Wide;

/// A layer of a model on some tokens, and the heads that are measured.
struct Measured {
  std::string folder, tokens_file;
  std::int64_t layer;
  std::vector<std::int64_t> heads;
  std::unique_ptr<Model> model = Model::open(folder);

  std::vector<std::int32_t> ids(std::int64_t tokens) const {
    std::vector<std::int32_t> all = read_tokens(tokens_file).ids;
    all.resize(static_cast<std::size_t>(tokens));
    return all;
  }
};

Measured Tiny(const std::string& name, std::int64_t layer) {
  const std::string folder = REPLAYSSM_TEST_DATA "/models/" + name;
  return {folder, folder + "/golden.safetensors", layer, {0, 3, 5}};
}
/// Shapes that the fast kernels know.
Measured Trained(const std::string& name, std::int64_t layer) {
  return {REPLAYSSM_DATA "/" + name, REPLAYSSM_DATA "/sherlock.safetensors", layer, {1, 6}};
}

/// What the layer is fed over some tokens.
RecurrenceCall CallOf(const Measured& layer, Backend& backend, std::int64_t tokens) {
  Runner runner(*layer.model, backend);
  runner.logits(layer.ids(tokens));
  return *runner.cache(static_cast<std::size_t>(layer.layer)).call;
}

class KernelOracle : public OnMachine {
 protected:
  /// What the oracle says of the policies that this machine has kernels for; no runs where there are none.
  OracleResult run(const Measured& layer, std::int64_t tokens, const std::vector<std::string>& policies,
                   OracleOptions options, Scalar activations) const {
    const auto kernels = Kernels(on(), activations);
    const RecurrenceCall call = CallOf(layer, *kernels, 1);
    const RecurrenceShape& shape = *recurrent_layer(*layer.model, layer.layer).recurrence;
    for (const std::string& text : policies) {
      try {
        kernels->advance(*kernels->new_state(shape, parse_policy(text)), call);
        options.on_backend.push_back(parse_policy(text));
      } catch (const NotServed&) {
      }
    }
    if (options.on_backend.empty()) return {};
    options.layer = layer.layer;
    options.heads = layer.heads;
    options.activations = parse_format(activations == Scalar::bf16 ? "bf16" : "fp32");
    const OracleResult out = run_oracle(*layer.model, *kernels, layer.ids(tokens), options);
    EXPECT_EQ(std::ranges::count(out.runs, true, &KeptDigits::on_backend), std::ssize(options.on_backend));
    return out;
  }
};
INSTANTIATE_TEST_SUITE_P(, KernelOracle, testing::ValuesIn(machine_names()));

/// The same digits from the kernels run here, by themselves, and 60 digits on what they are fed.
void Check(const OracleResult& found, Machine& machine, const Measured& on_layer, std::int64_t tokens,
           Scalar activations) {
  const auto kernels = Kernels(machine, activations);
  const RecurrenceCall call = CallOf(on_layer, *kernels, tokens);
  const replayssm::oracle::Fed<float> fed(*kernels, call, parse_format(activations == Scalar::bf16 ? "bf16" : "fp32"));
  const auto& shape = fed.shape;
  const auto P = static_cast<std::size_t>(shape.head_dim), size = P * static_cast<std::size_t>(shape.state_dim);
  std::vector<const KeptDigits*> runs;
  std::vector<std::unique_ptr<RecurrentState>> states;
  std::vector<Values> ys;
  for (const KeptDigits& run : found.runs) {
    if (!run.on_backend) continue;
    EXPECT_EQ(run.precision, Precision::fp32);
    runs.push_back(&run);
    states.push_back(kernels->new_state(shape, run.policy));
    ys.push_back(read_all(*kernels, kernels->advance(*states.back(), call)));
  }
  ASSERT_EQ(found.block_ends.back(), tokens - 1);
  const std::size_t heads = on_layer.heads.size(), width = static_cast<std::size_t>(shape.heads) * P;
  for (std::size_t i = 0; i < heads; ++i) {
    const auto h = static_cast<std::size_t>(on_layer.heads[i]);
    replayssm::oracle::Steps<Wide> truth({is_delta_rule(shape.recurrence), 1, false, parse_format("exact")}, size);
    const auto steps = wide_tokens(fed, on_layer.heads[i]);
    for (std::size_t t = 0; t < steps.size(); ++t) {
      const auto y = truth.advance(steps[t], steps[t]);
      for (std::size_t r = 0; r < runs.size(); ++r) {
        EXPECT_DOUBLE_EQ(runs[r]->y[t * heads + i], replayssm::oracle::digits(ys[r].data() + t * width + h * P, y))
            << runs[r]->policy.text() << ", token " << t << ", head " << h;
      }
    }
    for (std::size_t r = 0; r < runs.size(); ++r) {
      const Values state = states[r]->effective();
      EXPECT_DOUBLE_EQ(runs[r]->state[(found.block_ends.size() - 1) * heads + i],
                       replayssm::oracle::digits(state.data() + h * size, truth.effective()))
          << runs[r]->policy.text() << ", head " << h;
    }
  }
}

TEST_P(KernelOracle, MeasuresWhatTheKernelsCompute) {
  constexpr std::int64_t kTokens = 20;
  const std::vector<std::string> policies = {"eager(state=fp32)", "replay(L=4, state=fp32)",
                                             "replay(L=8, anchor=fp32, read=fp32)",
                                             "replay(L=8, anchor=fp32, read=int8:row, ring=bf16)"};
  bool served = false;
  for (const Measured& layer :
       {Tiny("mamba2", 1), Tiny("qwen3_5", 2), Trained("mamba2-5m", 2), Trained("gdn-hybrid-8m", 5)}) {
    for (const Scalar activations : {Scalar::fp32, Scalar::bf16}) {
      SCOPED_TRACE(layer.folder + (activations == Scalar::bf16 ? " bf16" : " fp32"));
      const OracleResult found = run(layer, kTokens, policies, {.state_every = 8, .threads = 2}, activations);
      if (found.runs.empty()) continue;
      served = true;
      EXPECT_GE(found.confirmed, 50);
      EXPECT_EQ(found.oracles, activations == Scalar::bf16 ? 3 : 2);
      Check(found, on(), layer, kTokens, activations);
    }
  }
  EXPECT_TRUE(served);
}

/// What an error of so many digits is, over all tokens and heads.
double Error(const std::vector<double>& digits) {
  double sum = 0;
  for (const double d : digits) sum += std::pow(10, -2 * d);
  return std::sqrt(sum / static_cast<double>(digits.size()));
}

TEST_P(KernelOracle, KeepsTheDigitsOfFloat) {
  // What stands beside each policy: the same schedule in float on the CPU.
  const std::map<std::string, std::string> beside = {
      {"eager(state=fp32)", "exact"},
      {"replay(L=16, state=fp32)", "replay(L=16, state=exact)"},
      {"replay(L=16, anchor=fp32, read=fp32)", "replay(L=16, state=exact)"},
      {"replay(L=16, anchor=fp32, read=fp32, loop=open)", "replay(L=16, state=exact)"}};
  std::vector<std::string> policies;
  for (const auto& [policy, _] : beside) policies.push_back(policy);
  bool served = false;
  for (const Measured& layer : {Trained("mamba2-5m", 0), Trained("gdn-hybrid-8m", 0), Trained("gdn-hybrid-8m", 6)}) {
    SCOPED_TRACE(layer.folder + " " + std::to_string(layer.layer));
    const OracleResult found = run(layer, 40, policies, {.digits = 20, .state_every = 8, .threads = 2}, Scalar::fp32);
    served = served || !found.runs.empty();
    for (const KeptDigits& kernels : found.runs) {
      if (!kernels.on_backend) continue;
      const auto in_float = std::ranges::find_if(found.runs, [&](const KeptDigits& run) {
        return run.precision == Precision::fp32 && run.policy.text() == beside.at(kernels.policy.text());
      });
      ASSERT_NE(in_float, found.runs.end());
      // Fair for fp32 arithmetic: twice the error of float, whose sums run in another order, and half an ulp.
      const double half_ulp = std::ldexp(1.0, -24);
      EXPECT_LE(Error(kernels.y), 2 * Error(in_float->y) + half_ulp) << kernels.policy.text();
      EXPECT_LE(Error(kernels.state), 2 * Error(in_float->state) + half_ulp) << kernels.policy.text();
    }
  }
  EXPECT_TRUE(served);
}

}  // namespace
}  // namespace replayssm::cuda::tests
