// What a layer keeps rolls back with its state: short convolutions, attention caches, and whole models.

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "core/model.h"
#include "core/tokens.h"
#include "tests/support/forward.h"
#include "tests/support/model_files.h"

namespace replayssm {
namespace {

std::string Refusal(std::span<LayerCache> layers, std::int64_t n, bool back) {
  try {
    back ? rollback(layers, n) : accept(layers, n);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(SpeculativeLayers, ConvolutionWindow) {
  const auto backend = reference_backend(Precision::fp64, 1);
  const float ones[] = {1, 1, 1, 1};
  const TensorView weight{"weight", Dtype::f32, {1, 1, 4}, reinterpret_cast<const std::byte*>(ones), sizeof ones, ""};
  std::vector<LayerCache> layers(1);
  LayerCache& cache = layers[0];
  cache.conv_window.history = 5;
  // silu(x) is x where e^-x is below half an ulp.
  const auto conv = [&](const std::vector<double>& x) {
    const auto count = static_cast<std::int64_t>(x.size());
    cache.position += count;
    return read_all(*backend,
                    backend->causal_conv_silu(backend->write(x.data(), count, 1), weight, nullptr, cache.conv_window));
  };
  const auto window = [&] {
    const Values all = read_all(*backend, cache.conv_window.inputs);
    return Values(all.end() - 3, all.end());
  };
  conv({1, 2, 4});
  accept(layers, 3);
  conv({8, 16, 32});
  accept(layers, 1);
  EXPECT_EQ(window(), (Values{2, 4, 8}));
  EXPECT_EQ(conv({64}), (Values{78}));
  EXPECT_EQ(Refusal(layers, 1, true), "rollback(1): 1 tokens of layer 0 wait for accept()");
  EXPECT_EQ(Refusal(layers, 2, false), "accept(2): 1 tokens wait for it");
  accept(layers, 1);
  rollback(layers, 3);
  EXPECT_EQ(window(), (Values{0, 1, 2}));
  EXPECT_EQ(cache.position, 2);
  EXPECT_EQ(Refusal(layers, 3, true), "rollback(3): layer 0 can take back 2 tokens, down to its checkpoint");
  cache.conv_window = {};
  conv({1, 2});
  EXPECT_EQ(Refusal(layers, 1, false),
            "accept(1): the convolution of layer 0 keeps 0 tokens that can be taken back, not 1; its history is 0");
}

TEST(SpeculativeLayers, PlainStatesRefuse) {
  std::vector<LayerCache> layers(1);
  layers[0].state = reference_backend(Precision::fp32, 1)->new_state({Recurrence::mamba2, 1, 1, 1, 1}, exact_policy());
  EXPECT_NE(Refusal(layers, 0, false).find("the recurrent state is not a speculative one"), std::string::npos);
}

/// Random windows of right tokens and wrong drafts, accepted and taken back; the logits of the committed tokens.
Values Windows(const Model& model, Backend& backend, const std::vector<std::int32_t>& ids, const Policy& policy,
               unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(random() % static_cast<unsigned>(n)); };
  const Speculation room{.window = 4, .committed = 7};
  std::vector<LayerCache> caches(model.layers().size());
  for (std::size_t i = 0; i < caches.size(); ++i) {
    caches[i].conv_window.history = room.committed;
    if (const auto& shape = model.layers()[i].recurrence) {
      caches[i].state = backend.new_speculative_state(*shape, policy, room);
    }
  }
  const std::int64_t V = model.vocabulary(), total = std::ssize(ids);
  Values logits;
  for (std::int64_t at = 0; at < total;) {
    const std::int64_t T = 1 + below(4), n = std::min(below(T + 1), total - at);
    std::vector<std::int32_t> window(ids.begin() + at, ids.begin() + at + n);
    while (std::ssize(window) < T) window.push_back(static_cast<std::int32_t>(below(V)));
    Tensor x = model.embed(backend, window);
    for (std::size_t i = 0; i < caches.size(); ++i) {
      x = model.forward(backend, static_cast<std::int64_t>(i), x, caches[i]);
    }
    const Values some = read_all(backend, model.logits(backend, model.final_norm(backend, x)));
    accept(caches, n);
    logits.insert(logits.end(), some.begin(), some.begin() + n * V);
    at += n;
    const auto ssm = std::ranges::find_if(caches, [](const LayerCache& c) { return c.state != nullptr; });
    if (const std::int64_t held = ssm->state->held(); at < total && held > 0 && below(4) == 0) {
      const std::int64_t back = 1 + below(held);
      rollback(caches, back);
      at -= back;
      logits.resize(static_cast<std::size_t>(at * V));
    }
  }
  return logits;
}

// An order of additions is a choice of rounding errors, so two orders in binary64 differ by at most twice the error of
// one; and that is the error of the same model in fp32, scaled by the ratio of the precisions, 2^-29.
TEST(SpeculativeLayers, WholeModelsRollBack) {
  for (const char* name : {"mamba2", "mamba2_tied", "qwen3_5"}) {
    const auto model = Model::open(golden_folder(name));
    const std::vector<std::int32_t> ids = read_tokens(golden_file(name)).ids;
    const auto wide = reference_backend(Precision::fp64, 1), narrow = reference_backend(Precision::fp32, 1);
    const Values whole = Runner(*model, *wide).logits(ids);
    const double bound = 2 * std::ldexp(relative_l2(Runner(*model, *narrow).logits(ids), whole), -29);
    for (const char* policy : {"exact", "replay(L=16, state=exact)", "replay(L=16, anchor=exact, read=exact)"}) {
      for (unsigned seed = 1; seed <= 5; ++seed) {
        EXPECT_LE(relative_l2(Windows(*model, *wide, ids, parse_policy(policy), seed), whole), bound)
            << name << ", " << policy << ", seed " << seed;
      }
    }
  }
}

}  // namespace
}  // namespace replayssm
