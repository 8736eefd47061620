// Faults planted in what rolls back: the text check has to see each.

#include <gtest/gtest.h>

#include <map>

#include "analysis/speculation.h"
#include "tests/support/model_files.h"

namespace replayssm {
namespace {

/// The reference, of which a test overrides what is to be wrong.
class Faulty : public Backend {
 public:
  Precision precision() const override { return host_->precision(); }
  Tensor zeros(std::int64_t rows, std::int64_t columns) override { return host_->zeros(rows, columns); }
  Tensor embed(const TensorView& table, std::span<const std::int32_t> ids) override { return host_->embed(table, ids); }
  Tensor linear(const Tensor& x, const TensorView& w, const TensorView* b) override { return host_->linear(x, w, b); }
  void add(Tensor& x, const Tensor& y) override { host_->add(x, y); }
  Tensor rms_norm(const Tensor& x, const TensorView& w, double epsilon, NormWeight kind, std::int64_t group) override {
    return host_->rms_norm(x, w, epsilon, kind, group);
  }
  Tensor causal_conv_silu(const Tensor& x, const TensorView& w, const TensorView* b, ConvWindow& window) override {
    return host_->causal_conv_silu(x, w, b, window);
  }
  void multiply_silu(Tensor& x, const Tensor& gate) override { host_->multiply_silu(x, gate); }
  void multiply_sigmoid(Tensor& x, const Tensor& gate) override { host_->multiply_sigmoid(x, gate); }
  Tensor add_skip(const Tensor& y, const Tensor& x, const TensorView& D) override { return host_->add_skip(y, x, D); }
  Tensor take(const Tensor& x, std::int64_t period, std::int64_t first, std::int64_t count) override {
    return host_->take(x, period, first, count);
  }
  void rope(Tensor& x, std::int64_t dim, std::int64_t rotary, double theta, std::int64_t position) override {
    host_->rope(x, dim, rotary, theta, position);
  }
  Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& shape,
                   AttentionCache& cache) override {
    return host_->attention(q, k, v, shape, cache);
  }
  std::unique_ptr<RecurrentState> new_state(const RecurrenceShape& s, const Policy& p, const StatePlace& at) override {
    return host_->new_state(s, p, at);
  }
  std::unique_ptr<RecurrentState> new_speculative_state(const RecurrenceShape& s, const Policy& p,
                                                        const Speculation& room, const StatePlace& at) override {
    return host_->new_speculative_state(s, p, room, at);
  }
  Tensor advance(RecurrentState& state, const RecurrenceCall& call) override { return host_->advance(state, call); }
  SquaredError squared_error(const Tensor& x, const Tensor& y) override { return host_->squared_error(x, y); }
  void read(const Tensor& x, double* out) override { host_->read(x, out); }
  Tensor write(const double* values, std::int64_t rows, std::int64_t columns) override {
    return host_->write(values, rows, columns);
  }

 private:
  const std::unique_ptr<Backend> host_ = reference_backend(Precision::fp64, 1, Products::one_token);
};

/// Convolutions go on from all inputs that they ever had, rejected ones too.
class StaleConvolution : public Faulty {
 public:
  Tensor causal_conv_silu(const Tensor& x, const TensorView& w, const TensorView* b, ConvWindow& window) override {
    Tensor& last = last_[&window];
    if (window.inputs.storage) window.inputs = last;
    const Tensor y = Faulty::causal_conv_silu(x, w, b, window);
    last = window.inputs;
    return y;
  }

 private:
  std::map<const ConvWindow*, Tensor> last_;
};

/// Attention sees the keys and values of rejected tokens too.
class StaleAttention : public Faulty {
 public:
  Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& shape,
                   AttentionCache& cache) override {
    std::int64_t& longest = longest_[&cache];
    cache.length = std::max(cache.length, longest);
    const Tensor y = Faulty::attention(q, k, v, shape, cache);
    longest = cache.length;
    return y;
  }

 private:
  std::map<const AttentionCache*, std::int64_t> longest_;
};

/// Recurrent states keep all tokens of a window, unless the whole of it is accepted anyway.
class StaleState : public Faulty {
 public:
  std::unique_ptr<RecurrentState> new_speculative_state(const RecurrenceShape& s, const Policy& p,
                                                        const Speculation& room, const StatePlace& at) override {
    return std::make_unique<Kept>(Faulty::new_speculative_state(s, p, room, at));
  }
  Tensor advance(RecurrentState& state, const RecurrenceCall& call) override {
    auto* kept = dynamic_cast<Kept*>(&state);
    return Faulty::advance(kept ? *kept->state : state, call);
  }

 private:
  struct Kept : RecurrentState {
    explicit Kept(std::unique_ptr<RecurrentState> s) : state(std::move(s)) {}
    void accept(std::int64_t) override { state->accept(state->speculation().pending); }
    SpeculationStatus speculation() const override { return state->speculation(); }
    RangeEvents events() const override { return state->events(); }
    std::int64_t held() const override { return state->held(); }
    std::vector<double> effective() override { return state->effective(); }
    std::vector<double> checkpoint() const override { return state->checkpoint(); }
    std::vector<double> read_copy() const override { return state->read_copy(); }
    std::unique_ptr<RecurrentState> state;
  };
};

/// Products of a whole window, whose sums run in another order than those of its tokens alone.
class ProductsOfWindows : public Faulty {
 public:
  Tensor linear(const Tensor& x, const TensorView& w, const TensorView* b) override { return host_->linear(x, w, b); }

 private:
  const std::unique_ptr<Backend> host_ = reference_backend(Precision::fp64, 1);
};

class PlantedTest : public testing::TestWithParam<const char*> {
 protected:
  const std::unique_ptr<Model> model_ = Model::open(golden_folder(GetParam()));

  /// Steps of one accepted and three rejected drafts, through windows that roll back at every step.
  TextComparison compared(Backend& backend, const string& policy = "replay(L=8, state=exact)") const {
    Tokens tokens{{}, 1, 40};
    for (std::int32_t i = 0; i < 40; ++i) tokens.ids.push_back(i * i % 97);
    const DraftSources sources = [&](std::int64_t) { return counted(known_text(tokens.ids), {2}, 97); };
    const SpeculationOptions options{
        .window = 5, .ring = 12, .prompt_tokens = 8, .new_tokens = 24, .teacher_forced = true};
    const SpeculationResult r = speculate(*model_, backend, tokens, parse_policy(policy), sources, options);
    EXPECT_EQ(r.rollbacks(), 11);  // but for the last step, whose window is short
    return r.same_flushes;
  }
  template <class Backend>
  void expect_caught() const {
    for (const string policy : {"replay(L=8, state=exact)", "replay(L=8, state=exact, order=sequential)"}) {
      Backend backend;
      const TextComparison c = compared(backend, policy);
      EXPECT_FALSE(c.passed());
      EXPECT_GE(c.same_logits, 2);  // those of the first step, before anything was taken back
      EXPECT_LT(c.same_logits, 24);
      EXPECT_GT(c.largest_difference, 1e-9);  // no matter of rounding: of that there is less than 1e-12 in fp64
    }
  }
};

TEST_P(PlantedTest, NothingIsWrongWithoutAFault) {
  Faulty none;
  const TextComparison c = compared(none);
  EXPECT_TRUE(c.passed());
  EXPECT_EQ(c.same_logits, 24);
}

TEST_P(PlantedTest, AConvolutionThatIsNotRolledBackIsCaught) { expect_caught<StaleConvolution>(); }
TEST_P(PlantedTest, AStateThatIsNotRolledBackIsCaught) { expect_caught<StaleState>(); }

TEST_P(PlantedTest, ProductsThatDependOnTheWindowAreCaught) {
  ProductsOfWindows backend;
  const TextComparison c = compared(backend);
  EXPECT_FALSE(c.passed());
  EXPECT_EQ(c.same_tokens, 24);  // of random weights none is that close
  EXPECT_LT(c.largest_difference, 1e-9);
}

using PlantedHybridTest = PlantedTest;
TEST_P(PlantedHybridTest, AnAttentionCacheThatIsNotRolledBackIsCaught) { expect_caught<StaleAttention>(); }

INSTANTIATE_TEST_SUITE_P(Models, PlantedTest, testing::Values("mamba2", "qwen3_5"));
INSTANTIATE_TEST_SUITE_P(Models, PlantedHybridTest, testing::Values("qwen3_5"));

}  // namespace
}  // namespace replayssm
