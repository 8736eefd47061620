#include "cuda/bench_layers.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>

#include "cuda/codes.cuh"
#include "cuda/serving.h"

namespace replayssm::cuda {
namespace {

constexpr std::int64_t kLeastTokens = 16;  // of a graph, so that its start does not count
constexpr std::int64_t kMostLayers = 512;
constexpr std::int64_t kCachesCovered = 4;  // the states of all layers are so many times the second level cache

Scalar ring_type(const Policy& policy, const char* field) {
  return scalar_of(policy.as_replay().ring.of(field), policy, std::string("ring.") + field);
}

/// `n` numbers on the device as doubles.
std::vector<double> widen(const Format& format, const void* codes, const float* scales, std::int64_t rows,
                          std::int64_t n) {
  std::vector<std::byte> host(static_cast<std::size_t>(rows * format.code_bytes(n)));
  std::vector<float> host_scales(static_cast<std::size_t>(scales ? rows : 0));
  check(cudaMemcpy(host.data(), codes, host.size(), cudaMemcpyDeviceToHost), "copying results");
  if (scales) {
    check(cudaMemcpy(host_scales.data(), scales, host_scales.size() * sizeof(float), cudaMemcpyDeviceToHost),
          "copying results");
  }
  std::vector<double> out(static_cast<std::size_t>(rows * n));
  replayssm::decode_rows(format, host.data(), host_scales.data(), rows, n, out.data());
  return out;
}

}  // namespace

void check_case(const BenchCase& c) {
  const Replay replay = c.policy.as_replay();
  const bool delta = is_delta_rule(c.shape.recurrence);
  const auto refuse = [&](const auto&... why) { fail("policy '", c.policy.text(), "': ", why...); };
  if (c.rows < 1) fail("batch ", c.rows, ": expected at least 1");
  if (c.policy.order == Order::sequential) refuse("the kernels know order=closed only");
  storage_of(replay.anchor, c.policy, "states");
  if (replay.read) storage_of(*replay.read, c.policy, "states");
  if (replay.length == 1) {
    if (replay.read) refuse("a split state needs L of at least 2");
    return;
  }
  const std::vector<const char*> fields = delta ? std::vector{"v", "k", "u"} : std::vector{"x", "B"};
  for (const char* field : fields) ring_type(c.policy, field);
  for (const char* gate : {"dt", "g", "beta"}) {
    const Format format = replay.ring.of(gate);
    if (!format.exact() && format != parse_format("fp32")) refuse("the kernels keep ring.", gate, " in fp32");
  }
}

std::int64_t Layers::set_elements(std::int64_t width) const {
  constexpr std::int64_t alignment = 128;  // 256 bytes of the smallest type
  return (case_.rows * width + alignment - 1) / alignment * alignment;
}

Layers::Part Layers::take(std::int64_t elements, std::int64_t bytes) {
  if (elements == 0) return {};
  constexpr std::int64_t alignment = 256;
  const Part part{layer_bytes_, elements};
  layer_bytes_ += (case_.rows * elements * bytes + alignment - 1) / alignment * alignment;
  return part;
}

Layers::Pool Layers::pool(const Format& format) {
  const RecurrenceShape& s = case_.shape;
  const Storage storage = storage_of(format, case_.policy, "states");
  const std::int64_t rows = s.heads * s.head_dim;
  return {format, storage, take(rows * s.state_dim, cuda::bytes_of(storage)),
          take(has_scale(storage) ? rows : 0, sizeof(float))};
}

Layers::Layers(const BenchCase& c, const Stream& stream) : case_(c), stream_(stream) {
  check_case(c);
  const RecurrenceShape& s = c.shape;
  const Replay replay = c.policy.as_replay();
  const bool delta = is_delta_rule(s.recurrence);
  length_ = replay.length;
  closed_loop_ = delta && length_ > 1 && c.policy.loop == Loop::closed;
  state_ = pool(replay.anchor);
  if (replay.read) read_ = pool(*replay.read);
  if (length_ > 1) {
    const std::int64_t vectors = s.heads * length_ * s.head_dim;
    if (!delta || closed_loop_) {
      v_type_ = ring_type(c.policy, delta ? "v" : "x");
      v_ = take(vectors, cuda::bytes_of(v_type_));
      gain_ = take(s.heads * length_, sizeof(float));
    }
    if (delta) {
      u_type_ = ring_type(c.policy, "u");
      u_ = take(vectors, cuda::bytes_of(u_type_));
      log_decay_ = take(s.heads * length_ * s.decay_dim(), sizeof(float));
    }
    w_type_ = ring_type(c.policy, delta ? "k" : "B");
    w_ = take(s.groups * length_ * s.state_dim, cuda::bytes_of(w_type_));
  }
  cudaDeviceProp device{};
  int current = 0;
  check(cudaGetDevice(&current), "asking for the device");
  check(cudaGetDeviceProperties(&device, current), "asking for the device");
  layers_ =
      std::clamp((kCachesCovered * device.l2CacheSize + layer_bytes_ - 1) / layer_bytes_, std::int64_t{2}, kMostLayers);
  sets_ = (kLeastTokens + length_ - 1) / length_ * length_;

  const std::int64_t G = s.groups * s.state_dim, V = s.heads * s.head_dim;
  if (delta) {
    inputs_.push_back({G, 0, 1, {}});
    inputs_.push_back({G, 0, 1, {}});
    inputs_.push_back({V, 0, 1, {}});
    inputs_.push_back({s.heads * s.decay_dim(), 0, 0.5f, {}});
    inputs_.push_back({s.heads, 0, 1, {}});
  } else {
    inputs_.push_back({V, 0, 1, {}});
    inputs_.push_back({G, 0, 1, {}});
    inputs_.push_back({G, 0, 1, {}});
    inputs_.push_back({s.heads, 0, 0.5f, {}});
  }
  const std::int64_t element = cuda::bytes_of(c.activations);
  std::int64_t needed = layers_ * layer_bytes_ + sets_ * set_elements(V) * static_cast<std::int64_t>(sizeof(float));
  for (const Input& i : inputs_) needed += sets_ * set_elements(i.width) * element;
  std::size_t free = 0, all = 0;
  check(cudaMemGetInfo(&free, &all), "asking for free memory");
  if (static_cast<std::size_t>(needed) > free) {
    fail("batch ", c.rows, " of policy '", c.policy.text(), "': needs ", needed >> 20, " MiB of device memory, ",
         free >> 20, " MiB are free");
  }
  memory_ = Buffer(layers_ * layer_bytes_);
  memory_.zero();
  y_ = Buffer(sets_ * set_elements(V) * static_cast<std::int64_t>(sizeof(float)));
  std::uint64_t seed = 0;
  for (Input& i : inputs_) {
    const std::int64_t n = sets_ * set_elements(i.width);
    i.data = Buffer(n * element);
    fill_normal(c.activations, i.data.at(), n, i.mean, i.deviation, ++seed, stream);
  }
  make_parameters();

  std::vector<std::int32_t> slots;
  for (std::int64_t t = 0; t < length_; ++t) {
    for (std::int64_t r = 0; r < c.rows; ++r) slots.push_back(t >= joins(r) ? static_cast<std::int32_t>(r) : -1);
  }
  slots_ = Buffer(slots);
  held_ = Buffer(std::vector<std::int32_t>(static_cast<std::size_t>(c.rows), 0));
  workspace_ = Buffer(static_cast<std::int64_t>(kWorkspaceBytes));
  workspace_.zero();
  stream.wait();
}

void Layers::make_parameters() {
  const RecurrenceShape& s = case_.shape;
  std::mt19937_64 bits(1);
  const auto uniform = [&] { return static_cast<double>(bits() >> 11) * 0x1p-53; };
  const auto between = [&](double low, double high) { return low * std::pow(high / low, uniform()); };
  std::vector<float> A_log, dt_bias, D;
  for (std::int64_t h = 0; h < s.heads; ++h) {
    // dt = softplus(dt_bias) from 0.001 to 0.1, as models are initialised, and A from 1 to 10.
    A_log.push_back(static_cast<float>(std::log(between(1, 10))));
    for (std::int64_t d = 0; d < s.decay_dim(); ++d) {
      dt_bias.push_back(static_cast<float>(std::log(std::expm1(between(0.001, 0.1)))));
    }
    D.push_back(static_cast<float>(0.1 * uniform()));  // small: D x shall not hide an error of S c
  }
  parameters_ = {{A_log.begin(), A_log.end()}, {dt_bias.begin(), dt_bias.end()}, {D.begin(), D.end()}};
  A_log_ = Buffer(A_log);
  dt_bias_ = Buffer(dt_bias);
  D_ = Buffer(D);
}

std::int64_t Layers::warm_tokens() const { return length_ * std::max<std::int64_t>(4, (8 + length_ - 1) / length_); }

void Layers::all_hold(std::int64_t records) const {
  const std::vector<std::int32_t> held(static_cast<std::size_t>(case_.rows), static_cast<std::int32_t>(records));
  check(cudaMemcpy(held_.at(), held.data(), held.size() * sizeof(std::int32_t), cudaMemcpyHostToDevice), "copying");
}

Activations Layers::input(std::size_t i, std::int64_t set) const {
  const std::int64_t width = inputs_[i].width, element = cuda::bytes_of(case_.activations);
  return {case_.activations, inputs_[i].data.at(set * set_elements(width) * element), width};
}

StatePool Layers::on_device(const Pool& pool, std::int64_t layer) const {
  return {pool.storage, place(pool.codes, layer), place<float>(pool.scales, layer), pool.codes.elements,
          pool.scales.elements};
}

void* Layers::y_of(std::int64_t set, Scalar type) const {
  return y_.at(set * set_elements(case_.shape.heads * case_.shape.head_dim) * cuda::bytes_of(type));
}

void Layers::fill(Step& step, std::int64_t layer) const {
  const auto field = [&](Scalar type, const Part& part) { return RingField{type, place(part, layer), part.elements}; };
  step.shape = case_.shape;
  step.length = length_;
  step.rows = step.slots = case_.rows;
  step.held = length_ > 1 ? held_.at<std::int32_t>() : nullptr;
  step.state = on_device(state_, layer);
  if (case_.policy.as_replay().read) step.read = on_device(read_, layer);
  step.ring = {length_,
               field(v_type_, v_),
               field(u_type_, u_),
               field(w_type_, w_),
               field(Scalar::fp32, gain_),
               field(Scalar::fp32, log_decay_)};
  step.workspace = workspace_.at();
  step.y_stride = case_.shape.heads * case_.shape.head_dim;
}

Mamba2Step Layers::mamba2_step(std::int64_t layer, std::int64_t set) const {
  Mamba2Step step;
  step.x = input(0, set), step.B = input(1, set), step.C = input(2, set), step.dt = input(3, set);
  step.A_log = A_log_.at<float>(), step.dt_bias = dt_bias_.at<float>(), step.D = D_.at<float>();
  fill(step, layer);
  return step;
}

DeltaStep Layers::delta_step(std::int64_t layer, std::int64_t set) const {
  DeltaStep step;
  step.closed_loop = closed_loop_;
  step.q = input(0, set), step.k = input(1, set), step.v = input(2, set);
  step.gate = input(3, set), step.beta = input(4, set);
  step.A_log = A_log_.at<float>(), step.dt_bias = dt_bias_.at<float>();
  fill(step, layer);
  return step;
}

void Layers::decode_all(std::int64_t set, const std::int32_t* slot, Scalar y_type) const {
  for (std::int64_t layer = 0; layer < layers_; ++layer) {
    const auto launch = [&](auto step) {
      step.slot = slot;
      step.y_type = y_type;
      step.y = y_of(set, y_type);
      cuda::decode(step, stream_, case_.kernel);
    };
    is_delta_rule(case_.shape.recurrence) ? launch(delta_step(layer, set)) : launch(mamba2_step(layer, set));
  }
}

void Layers::token(std::int64_t t, Scalar y_type) const {
  const std::int64_t table = std::min(t, length_ - 1);
  const auto* slot = slots_.at<std::int32_t>(table * case_.rows * static_cast<std::int64_t>(sizeof(std::int32_t)));
  decode_all(t % sets_, slot, y_type);
  if (length_ > 1) advance_cursors(case_.rows, slot, held_.at<std::int32_t>(), length_, stream_);
}

void Layers::standing_token(std::int64_t t) const {
  decode_all(t % sets_,
             slots_.at<std::int32_t>((length_ - 1) * case_.rows * static_cast<std::int64_t>(sizeof(std::int32_t))),
             case_.activations);
}

HostSequence Layers::sequence(std::int64_t row, std::int64_t tokens) const {
  HostSequence out{tokens - joins(row), {}};
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    const std::int64_t width = inputs_[i].width, element = cuda::bytes_of(case_.activations);
    std::vector<std::vector<double>> of_set;
    for (std::int64_t set = 0; set < std::min(sets_, tokens); ++set) {
      of_set.push_back(widen(stored_format(case_.activations),
                             inputs_[i].data.at((set * set_elements(width) + row * width) * element), nullptr, 1,
                             width));
    }
    std::vector<double> all;
    for (std::int64_t t = joins(row); t < tokens; ++t) {
      const auto& one = of_set[static_cast<std::size_t>(t % sets_)];
      all.insert(all.end(), one.begin(), one.end());
    }
    out.inputs.push_back(std::move(all));
  }
  return out;
}

std::vector<double> Layers::y(std::int64_t token, std::int64_t row, Scalar y_type) const {
  const std::int64_t V = case_.shape.heads * case_.shape.head_dim;
  const auto* begin = static_cast<const std::byte*>(y_of(token % sets_, y_type));
  return widen(stored_format(y_type), begin + row * V * cuda::bytes_of(y_type), nullptr, 1, V);
}

std::vector<double> Layers::states(std::int64_t row, const std::vector<std::int64_t>& heads, bool read) const {
  const RecurrenceShape& s = case_.shape;
  const Pool& pool = read ? read_ : state_;
  std::vector<double> out;
  for (const std::int64_t head : heads) {
    const std::int64_t rows = (row * s.heads + head) * s.head_dim;  // before this head
    const auto* scales = place<float>(pool.scales, 0);
    const auto one = widen(pool.format, place<std::byte>(pool.codes, 0) + rows * pool.format.code_bytes(s.state_dim),
                           scales ? scales + rows : nullptr, s.head_dim, s.state_dim);
    out.insert(out.end(), one.begin(), one.end());
  }
  return out;
}

}  // namespace replayssm::cuda
