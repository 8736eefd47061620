#include "cuda/slot.h"

#include <cmath>
#include <numeric>

#include "core/format.h"
#include "cuda/codes.cuh"

namespace replayssm::cuda {
namespace {

constexpr std::int64_t kAlignment = 256;
constexpr std::int64_t kRowAlignment = 16;  // elements from row to row of the activations

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }
std::int64_t up(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }

/// Places for arrays, one after the other.
class Places {
 public:
  std::int64_t take(std::int64_t bytes) {
    const std::int64_t at = end_;
    end_ += up(bytes, kAlignment);
    return at;
  }
  std::int64_t end() const { return end_; }

 private:
  std::int64_t end_ = 0;
};

std::vector<std::int64_t> input_widths(const RecurrenceShape& s) {
  const std::int64_t values = s.heads * s.head_dim, keys = s.groups * s.state_dim;
  if (is_delta_rule(s.recurrence)) return {keys, keys, values, s.heads * s.decay_dim(), s.heads};
  return {values, keys, keys, s.heads};
}

}  // namespace

Slot::Slot(std::shared_ptr<StepDevice> device, const RecurrenceShape& shape, const Policy& policy, Scalar activations)
    : device_(std::move(device)), shape_(shape), serving_(serve(shape, policy)), activations_(activations) {
  const bool delta = is_delta_rule(shape.recurrence);
  const std::int64_t rows = shape.heads * shape.head_dim, records = serving_.length - 1;
  if (delta) step_.emplace<DeltaStep>().closed_loop = serving_.closed_loop;
  Step& step = std::visit([](auto& s) -> Step& { return s; }, step_);

  // Once to count the bytes, once to place the arrays.
  const auto lay_out = [&](Places& places) {
    const auto place = [&](std::int64_t bytes) -> void* {
      const std::int64_t at = places.take(bytes);
      return memory_.bytes() > 0 && bytes > 0 ? memory_.at(at) : nullptr;
    };
    const auto pool = [&](Storage storage) {
      const std::int64_t scales = has_scale(storage) ? rows : 0;
      StatePool out{storage, place(rows * shape.state_dim * bytes_of(storage)), nullptr, rows * shape.state_dim,
                    scales};
      out.scales = static_cast<float*>(place(scales * bytes_of(Scalar::fp32)));
      return out;
    };
    const auto field = [&](Scalar type, std::int64_t elements) {
      return RingField{type, place(elements * bytes_of(type)), elements};
    };
    step.state = pool(serving_.state);
    if (serving_.read) step.read = pool(*serving_.read);
    step.ring.capacity = records;
    const bool values = !delta || serving_.closed_loop;
    if (values) step.ring.v = field(serving_.v, records * rows);
    if (values) step.ring.gain = field(Scalar::fp32, records * shape.heads);
    if (delta) step.ring.u = field(serving_.u, records * rows);
    if (delta) step.ring.log_decay = field(Scalar::fp32, records * shape.heads * shape.decay_dim());
    step.ring.w = field(serving_.w, records * shape.groups * shape.state_dim);
    A_log_ = static_cast<float*>(place(shape.heads * bytes_of(Scalar::fp32)));
    dt_bias_ = static_cast<float*>(place(shape.heads * shape.decay_dim() * bytes_of(Scalar::fp32)));
    step.slot = static_cast<const std::int32_t*>(place(sizeof(std::int32_t)));  // zero: the only slot
    cursors_ = static_cast<std::int32_t*>(place(serving_.length * static_cast<std::int64_t>(sizeof(std::int32_t))));
  };
  Places counted, placed;
  lay_out(counted);
  memory_ = Memory(device_, size(counted.end()));
  lay_out(placed);

  std::vector<std::int32_t> cursors(size(serving_.length));
  std::iota(cursors.begin(), cursors.end(), 0);
  device_->write(cursors_, cursors.data(), cursors.size() * sizeof(std::int32_t));
  step.shape = shape;
  step.length = serving_.length;
  step.rows = step.slots = 1;
  step.y_type = activations;
  workspace_ = Memory(device_, kWorkspaceBytes);
  device_->write(workspace_.at(), std::vector<std::byte>(kWorkspaceBytes).data(), kWorkspaceBytes);
  step.workspace = workspace_.at();
}

std::vector<double> Slot::advance(const SlotInputs& in) {
  const Format format = stored_format(activations_);
  const std::int64_t element = bytes_of(activations_), width = shape_.heads * shape_.head_dim;
  std::vector<std::int64_t> widths = input_widths(shape_), offsets;
  widths.push_back(width);  // y
  Places places;
  for (const std::int64_t w : widths) offsets.push_back(places.take(in.tokens * up(w, kRowAlignment) * element));
  if (tokens_.bytes() < size(places.end())) tokens_ = Memory(device_, size(places.end()));

  std::vector<std::byte> staged(size(offsets.back()));
  for (std::size_t i = 0; i < in.activations.size(); ++i) {
    for (std::int64_t t = 0; t < in.tokens; ++t) {
      encode_rows(format, in.activations[i].data() + t * widths[i], 1, widths[i],
                  staged.data() + offsets[i] + t * up(widths[i], kRowAlignment) * element, nullptr);
    }
  }
  device_->write(tokens_.at(), staged.data(), staged.size());
  device_->write(A_log_, in.A_log.data(), in.A_log.size() * sizeof(float));
  device_->write(dt_bias_, in.dt_bias.data(), in.dt_bias.size() * sizeof(float));
  rates_ = in.A_log;

  const auto at = [&](std::size_t i, std::int64_t t) {
    return tokens_.at(offsets[i] + t * up(widths[i], kRowAlignment) * element);
  };
  const auto input = [&](std::size_t i, std::int64_t t) {
    return Activations{activations_, at(i, t), up(widths[i], kRowAlignment)};
  };
  for (std::int64_t t = 0; t < in.tokens; ++t) {
    const auto run = [&](auto& step) {
      step.A_log = A_log_;
      step.dt_bias = dt_bias_;
      step.held = cursors_ + held_;
      step.y = at(widths.size() - 1, t);
      step.y_stride = up(width, kRowAlignment);
      device_->decode(step);
    };
    if (auto* mamba2 = std::get_if<Mamba2Step>(&step_)) {
      mamba2->x = input(0, t), mamba2->B = input(1, t), mamba2->C = input(2, t), mamba2->dt = input(3, t);
      mamba2->dt_min = in.dt_min, mamba2->dt_max = in.dt_max;
      run(*mamba2);
    } else {
      auto& delta = std::get<DeltaStep>(step_);
      delta.q = input(0, t), delta.k = input(1, t), delta.v = input(2, t);
      delta.gate = input(3, t), delta.beta = input(4, t);
      delta.beta_scale = in.beta_scale;
      run(delta);
    }
    held_ = held_ == serving_.length - 1 ? 0 : held_ + 1;
    ++steps_;
  }

  staged.resize(size(in.tokens * up(width, kRowAlignment) * element));
  device_->read(staged.data(), at(widths.size() - 1, 0), staged.size());
  std::vector<double> y(size(in.tokens * width));
  for (std::int64_t t = 0; t < in.tokens; ++t) {
    decode_rows(format, staged.data() + t * up(width, kRowAlignment) * element, nullptr, 1, width,
                y.data() + t * width);
  }
  return y;
}

std::vector<double> Slot::stored(const StatePool& pool, Storage storage) const {
  const std::int64_t rows = shape_.heads * shape_.head_dim;
  std::vector<std::byte> codes(size(rows * shape_.state_dim * bytes_of(storage)));
  std::vector<float> scales(size(has_scale(storage) ? rows : 0));
  device_->read(codes.data(), pool.codes, codes.size());
  if (!scales.empty()) device_->read(scales.data(), pool.scales, scales.size() * sizeof(float));
  std::vector<float> out(size(rows * shape_.state_dim));
  decode_rows(stored_format(storage), codes.data(), scales.data(), rows, shape_.state_dim, out.data());
  return {out.begin(), out.end()};
}

/// All records of a field, [units, capacity, width].
std::vector<double> Slot::records(const RingField& field, std::int64_t units, std::int64_t width) const {
  if (!field.data) return {};
  const std::int64_t n = units * step().ring.capacity * width;
  std::vector<std::byte> codes(size(n * bytes_of(field.type)));
  device_->read(codes.data(), field.data, codes.size());
  std::vector<double> out(size(n));
  decode_rows(stored_format(field.type), codes.data(), nullptr, 1, n, out.data());
  return out;
}

std::vector<double> Slot::effective() const {
  std::vector<double> state = checkpoint();
  if (held_ == 0) return state;
  const std::int64_t P = shape_.head_dim, N = shape_.state_dim, D = shape_.decay_dim(), capacity = step().ring.capacity;
  const bool delta = is_delta_rule(shape_.recurrence), cached = delta && !serving_.closed_loop;
  const Ring& ring = step().ring;
  const auto v = records(ring.v, shape_.heads, P), u = records(ring.u, shape_.heads, P);
  const auto w = records(ring.w, shape_.groups, N), gain = records(ring.gain, shape_.heads, 1);
  const auto log_decay = records(ring.log_decay, shape_.heads, D);
  for (std::int64_t h = 0; h < shape_.heads; ++h) {
    const double rate = -std::exp(double{rates_[size(h)]});
    for (std::int64_t j = 0; j < held_; ++j) {
      const std::int64_t record = h * capacity + j;
      const double* key = w.data() + (shape_.group(h) * capacity + j) * N;
      for (std::int64_t p = 0; p < P; ++p) {
        double* s = state.data() + (h * P + p) * N;
        double readout = 0;
        for (std::int64_t n = 0; n < N; ++n) {
          s[n] *= std::exp(delta ? log_decay[size(record * D + (D > 1 ? n : 0))] : rate * gain[size(record)]);
          readout += s[n] * key[n];
        }
        const auto i = size(record * P + p);
        const double value = cached ? u[i] : gain[size(record)] * (delta ? v[i] - readout : v[i]);
        for (std::int64_t n = 0; n < N; ++n) s[n] += value * key[n];
      }
    }
  }
  return state;
}

}  // namespace replayssm::cuda
