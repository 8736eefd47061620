// Whole runs against State<double>, whose error State<float> says is fair: exact formats, more than three cycles.

#include <cmath>

#include "core/delta_rule.h"
#include "core/mamba2.h"
#include "core/state.h"
#include "tests/cuda/layer.h"

namespace replayssm::cuda::tests {
namespace {

template <class Real>
std::vector<Real> Wide(const std::vector<float>& x) {
  return {x.begin(), x.end()};
}

/// Row r of the tokens through a State.
template <class Real>
class Reference {
 public:
  Reference(const Layer& layer, const std::vector<TokenInputs>& tokens, std::int64_t r, const std::vector<float>& from)
      : setup_(layer.setup), state_(setup_.shape, policy()) {
    state_.set(Wide<Real>(from).data());
    const auto& s = setup_.shape;
    const auto& p = layer.parameters;
    const auto count = static_cast<std::int64_t>(tokens.size());
    const auto take = [&](std::vector<float> TokenInputs::*field, std::int64_t width, std::vector<Real>& to) {
      for (const TokenInputs& token : tokens) {
        const auto first = (token.*field).begin() + r * width;
        to.insert(to.end(), first, first + width);
      }
      return Rows<Real>{to.data(), width};
    };
    std::vector<Real> v, w, c, gate, beta;
    const auto A_log = Wide<Real>(p.A_log), dt_bias = Wide<Real>(p.dt_bias);
    const Rows<Real> v_rows = take(&TokenInputs::v, s.heads * s.head_dim, v),
                     w_rows = take(&TokenInputs::w, s.groups * s.state_dim, w),
                     c_rows = take(&TokenInputs::c, s.groups * s.state_dim, c),
                     gate_rows = take(&TokenInputs::gate, s.heads * s.decay_dim(), gate);
    y.resize(tokens.size() * static_cast<std::size_t>(s.heads * s.head_dim));
    if (is_delta(setup_)) {
      const Rows<Real> beta_rows = take(&TokenInputs::beta, s.heads, beta);
      state_.advance(prepare(DeltaInputs<Real>{s, count, c_rows, w_rows, v_rows, gate_rows, beta_rows, A_log.data(),
                                               dt_bias.data(), double{setup_.beta_scale}}),
                     y.data());
    } else {
      state_.advance(prepare(Mamba2Inputs<Real>{s, count, v_rows, w_rows, c_rows, gate_rows, A_log.data(),
                                                dt_bias.data(), double{setup_.dt_min}, double{setup_.dt_max}}),
                     y.data());
      for (std::size_t i = 0; i < y.size(); ++i) {
        if (p.D.empty()) break;
        const std::size_t head = i / static_cast<std::size_t>(s.head_dim) % static_cast<std::size_t>(s.heads);
        y[i] += Real(p.D[head]) * v[i];
      }
    }
    for (std::int64_t h = 0; h < s.heads; ++h) {
      state.insert(state.end(), state_.checkpoint(h).begin(), state_.checkpoint(h).end());
    }
  }

  std::vector<Real> y, state;

 private:
  Policy policy() const {
    const std::string states = setup_.read ? "anchor=exact, read=exact" : "state=exact";
    return parse_policy("replay(L=" + std::to_string(setup_.length) + ", " + states +
                        (setup_.closed ? ")" : ", loop=open)"));
  }

  const Case& setup_;
  State<Real> state_;
};

template <class Real>
double Distance(const std::vector<Real>& x, const std::vector<double>& truth) {
  double sum = 0;
  EXPECT_EQ(x.size(), truth.size());
  for (std::size_t i = 0; i < truth.size(); ++i) sum = std::hypot(sum, double{x[i]} - truth[i]);
  return sum;
}

/// Half an ulp of fp32 of every value, as it is rounded when it is stored.
double Rounding(const std::vector<double>& truth) {
  double sum = 0;
  for (const double x : truth) sum = std::hypot(sum, x);
  return std::ldexp(sum, -24);
}

class StateParity : public OnMachine {};
INSTANTIATE_TEST_SUITE_P(, StateParity, testing::ValuesIn(machine_names()));

TEST_P(StateParity, OfWholeRuns) {
  int served = 0;
  for (const Recurrence recurrence : {Recurrence::mamba2, Recurrence::gated_delta, Recurrence::kda}) {
    for (const int length : {1, 4, 16}) {
      for (const bool split : {false, true}) {
        Case setup{.shape = {recurrence, 4, 2, 32, 64}, .length = length, .closed = split, .rows = 2};
        if (split) setup.read = Storage::fp32;
        SCOPED_TRACE(setup.text());
        Layer layer(on(), setup);
        if (!layer.served()) continue;
        ++served;
        const int count = 3 * length + 2;
        std::vector<std::vector<float>> begin;
        for (const std::int32_t at : layer.slot.here) {
          begin.push_back(random_states(setup, 1, layer.random));
          layer.set_state(at, begin.back());
        }
        std::vector<TokenInputs> tokens;
        std::vector<float> y;
        for (int t = 0; t < count; ++t) {
          tokens.push_back(random_inputs(setup, layer.random));
          const auto out = layer.step(tokens.back());
          y.insert(y.end(), out.begin(), out.end());
        }
        const auto width = static_cast<std::size_t>(setup.shape.heads * setup.shape.head_dim);
        for (std::size_t r = 0; r < begin.size(); ++r) {
          const Reference<double> truth(layer, tokens, static_cast<std::int64_t>(r), begin[r]);
          const Reference<float> naive(layer, tokens, static_cast<std::int64_t>(r), begin[r]);
          std::vector<float> mine;
          for (std::size_t t = 0; t < tokens.size(); ++t) {
            const auto first = y.begin() + static_cast<std::ptrdiff_t>((t * begin.size() + r) * width);
            mine.insert(mine.end(), first, first + static_cast<std::ptrdiff_t>(width));
          }
          EXPECT_LE(Distance(mine, truth.y), 2 * Distance(naive.y, truth.y) + Rounding(truth.y)) << "outputs";
          EXPECT_LE(Distance(layer.state(layer.slot.here[r]), truth.state),
                    2 * Distance(naive.state, truth.state) + Rounding(truth.state))
              << "states";
        }
      }
    }
  }
  EXPECT_GT(served, 0);
}

}  // namespace
}  // namespace replayssm::cuda::tests
