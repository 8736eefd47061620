#include "cuda/backend.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "cuda/slot.h"

namespace replayssm::cuda {
namespace {

/// Whether the kernels are not asked: the reference.
bool stays(const Policy& policy) { return policy.as_replay().length == 1 && policy.exact(); }

class SlotState : public RecurrentState {
 public:
  SlotState(std::shared_ptr<StepDevice> device, const RecurrenceShape& shape, const Policy& policy, Scalar activations)
      : slot_(std::move(device), shape, policy, activations) {}

  RangeEvents events() const override {
    RangeEvents out;
    out.overflows_counted = false;
    out.first_non_finite = first_non_finite_;
    const std::int64_t size = slot_.shape().head_dim * slot_.shape().state_dim;
    if (out.first_non_finite || slot_.steps() == 0) return out;
    for (const auto& state : {slot_.checkpoint(), slot_.read_copy()}) {
      const auto found = std::ranges::find_if_not(state, [](double x) { return std::isfinite(x); });
      if (found == state.end()) continue;
      out.first_non_finite = RangeEvents::Event{slot_.steps() - 1, (found - state.begin()) / size};
      break;
    }
    return out;
  }
  std::int64_t width() const { return slot_.shape().heads * slot_.shape().head_dim; }
  std::int64_t held() const override { return slot_.held(); }
  std::vector<double> effective() override { return slot_.effective(); }
  std::vector<double> checkpoint() const override { return slot_.checkpoint(); }
  std::vector<double> read_copy() const override { return slot_.read_copy(); }

  std::vector<double> advance(const SlotInputs& inputs) {
    const std::int64_t before = slot_.steps();
    std::vector<double> y = slot_.advance(inputs);
    if (!first_non_finite_) {
      const auto found = std::ranges::find_if_not(y, [](double x) { return std::isfinite(x); });
      const std::int64_t P = slot_.shape().head_dim, H = slot_.shape().heads, i = found - y.begin();
      if (found != y.end()) first_non_finite_ = RangeEvents::Event{before + i / (H * P), i / P % H};
    }
    return y;
  }

 private:
  Slot slot_;
  std::optional<RangeEvents::Event> first_non_finite_;
};

class KernelBackend : public Backend {
 public:
  KernelBackend(std::unique_ptr<Backend> host, std::shared_ptr<StepDevice> device, Scalar activations)
      : host_(std::move(host)), device_(std::move(device)), activations_(activations) {}

  // The kernels refuse stochastic rounding: only a state that stays has a use for its place.
  std::unique_ptr<RecurrentState> new_state(const RecurrenceShape& shape, const Policy& policy,
                                            const StatePlace& place) override {
    if (stays(policy)) return host_->new_state(shape, policy, place);
    return std::make_unique<SlotState>(device_, shape, policy, activations_);
  }

  Tensor advance(RecurrentState& state, const RecurrenceCall& call) override {
    auto* on_device = dynamic_cast<SlotState*>(&state);
    if (!on_device) return host_->advance(state, call);
    const SlotInputs inputs = std::visit([this](const auto& c) { return inputs_of(c); }, call);
    const std::vector<double> y = on_device->advance(inputs);
    return host_->write(y.data(), inputs.tokens, on_device->width());
  }

  Precision recurrence_precision() const override { return Precision::fp32; }

  // Everything else is the host's.
  Precision precision() const override { return host_->precision(); }
  Tensor zeros(std::int64_t rows, std::int64_t columns) override { return host_->zeros(rows, columns); }
  Tensor embed(const TensorView& table, std::span<const std::int32_t> ids) override { return host_->embed(table, ids); }
  Tensor linear(const Tensor& x, const TensorView& weight, const TensorView* bias) override {
    return host_->linear(x, weight, bias);
  }
  void add(Tensor& x, const Tensor& y) override { host_->add(x, y); }
  Tensor rms_norm(const Tensor& x, const TensorView& weight, double epsilon, NormWeight kind,
                  std::int64_t group) override {
    return host_->rms_norm(x, weight, epsilon, kind, group);
  }
  Tensor causal_conv_silu(const Tensor& x, const TensorView& weight, const TensorView* bias,
                          ConvWindow& window) override {
    return host_->causal_conv_silu(x, weight, bias, window);
  }
  void multiply_silu(Tensor& x, const Tensor& gate) override { host_->multiply_silu(x, gate); }
  void multiply_sigmoid(Tensor& x, const Tensor& gate) override { host_->multiply_sigmoid(x, gate); }
  Tensor add_skip(const Tensor& y, const Tensor& x, const TensorView& D) override { return host_->add_skip(y, x, D); }
  Tensor take(const Tensor& x, std::int64_t period, std::int64_t first, std::int64_t count) override {
    return host_->take(x, period, first, count);
  }
  void rope(Tensor& x, std::int64_t head_dim, std::int64_t rotary_dim, double theta, std::int64_t position) override {
    host_->rope(x, head_dim, rotary_dim, theta, position);
  }
  Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& shape,
                   AttentionCache& cache) override {
    return host_->attention(q, k, v, shape, cache);
  }
  SquaredError squared_error(const Tensor& x, const Tensor& reference) override {
    return host_->squared_error(x, reference);
  }
  void read(const Tensor& x, double* out) override { host_->read(x, out); }
  Tensor write(const double* values, std::int64_t rows, std::int64_t columns) override {
    return host_->write(values, rows, columns);
  }

 private:
  std::vector<std::vector<double>> activations(std::initializer_list<const Tensor*> tensors) {
    std::vector<std::vector<double>> out;
    for (const Tensor* tensor : tensors) {
      out.emplace_back(static_cast<std::size_t>(tensor->rows * tensor->columns));
      host_->read(*tensor, out.back().data());
    }
    return out;
  }

  static std::vector<float> parameters(const TensorView& tensor) {
    std::vector<float> out(static_cast<std::size_t>(tensor.elements()));
    widen(tensor, 0, out.size(), out.data());
    return out;
  }

  SlotInputs inputs_of(const Mamba2Call& call) {
    return {.tokens = call.x.rows,
            .activations = activations({&call.x, &call.B, &call.C, &call.dt}),
            .A_log = parameters(*call.A_log),
            .dt_bias = parameters(*call.dt_bias),
            .dt_min = static_cast<float>(call.dt_min),
            .dt_max = static_cast<float>(call.dt_max)};
  }

  SlotInputs inputs_of(const DeltaCall& call) {
    return {.tokens = call.v.rows,
            .activations = activations({&call.q, &call.k, &call.v, &call.gate, &call.beta}),
            .A_log = parameters(*call.A_log),
            .dt_bias = parameters(*call.dt_bias),
            .beta_scale = static_cast<float>(call.beta_scale)};
  }

  std::unique_ptr<Backend> host_;
  std::shared_ptr<StepDevice> device_;
  Scalar activations_;
};

}  // namespace

void check_policy(const RecurrenceShape& shape, const Policy& policy) {
  if (!stays(policy)) serve(shape, policy);
}

std::unique_ptr<Backend> backend(std::unique_ptr<Backend> host, std::shared_ptr<StepDevice> device,
                                 Scalar activations) {
  return std::make_unique<KernelBackend>(std::move(host), std::move(device), activations);
}

}  // namespace replayssm::cuda
