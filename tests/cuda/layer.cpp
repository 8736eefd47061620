#include "tests/cuda/layer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace replayssm::cuda::tests {
namespace {

constexpr std::int64_t kGap = 16;  // elements between slots and rows; keeps an alignment of 16 bytes

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }
std::int64_t bytes_of(Scalar type) { return type == Scalar::fp32 ? 4 : 2; }
std::int64_t up(std::int64_t n) { return (n + 15) / 16 * 16; }

std::vector<float> uniform(std::int64_t n, double low, double high, std::mt19937& random) {
  std::vector<float> x(size(n));
  for (float& value : x) value = static_cast<float>(std::uniform_real_distribution<double>(low, high)(random));
  return x;
}

Parameters parameters_of(const Case& setup, unsigned seed) {
  std::mt19937 random(seed);
  return random_parameters(setup, random);
}

}  // namespace

bool is_delta(const Case& setup) { return is_delta_rule(setup.shape.recurrence); }

Format format_of(Storage storage) { return parse_format(name_of(storage)); }
Format format_of(Scalar type) { return parse_format(name_of(type)); }

std::string name_of(Storage storage) {
  const char* names[] = {"fp32", "fp16", "bf16", "e4m3:row", "int8:row"};
  return names[static_cast<int>(storage)];
}

std::string name_of(Scalar type) {
  const char* names[] = {"fp32", "fp16", "bf16"};
  return names[static_cast<int>(type)];
}

std::string Case::text() const {
  const auto& s = shape;
  const auto n = [](std::int64_t x) { return std::to_string(x); };
  std::string out(name(s.recurrence));
  out += " H" + n(s.heads) + " G" + n(s.groups) + " P" + n(s.head_dim) + " N" + n(s.state_dim) + " L" + n(length);
  out += " " + name_of(state) + (read ? " read " + name_of(*read) : "") + " ring " + name_of(ring);
  if (ring_u) out += " u " + name_of(*ring_u);
  if (is_delta(*this)) out += closed ? " closed" : " open";
  if (committed > 0) out += " T" + n(window) + " W" + n(committed);
  return out + " inputs " + name_of(input) + " y " + name_of(y) + " rows " + n(rows);
}

std::vector<std::uint8_t> encoded(Scalar type, const std::vector<float>& values) {
  std::vector<std::uint8_t> bytes(values.size() * size(bytes_of(type)));
  if (!values.empty()) {
    encode_rows(format_of(type), values.data(), 1, static_cast<std::int64_t>(values.size()),
                reinterpret_cast<std::byte*>(bytes.data()), nullptr);
  }
  return bytes;
}

float value_at(Scalar type, const std::uint8_t* bytes, std::int64_t i) {
  float x = 0;
  replayssm::decode_rows(format_of(type), reinterpret_cast<const std::byte*>(bytes + i * bytes_of(type)), nullptr, 1, 1,
                         &x);
  return x;
}

TokenInputs random_inputs(const Case& setup, std::mt19937& random) {
  const auto& s = setup.shape;
  const std::int64_t tokens = setup.tokens();
  TokenInputs in;
  in.v = uniform(tokens * s.heads * s.head_dim, -1, 1, random);
  in.w = uniform(tokens * s.groups * s.state_dim, -1, 1, random);
  in.c = uniform(tokens * s.groups * s.state_dim, -1, 1, random);
  in.gate = uniform(tokens * s.heads * s.decay_dim(), -6, 3, random);
  if (is_delta(setup)) in.beta = uniform(tokens * s.heads, -3, 3, random);
  for (auto* field : {&in.v, &in.w, &in.c, &in.gate, &in.beta}) {
    round_rows(format_of(setup.input), field->data(), 1, static_cast<std::int64_t>(field->size()));
  }
  return in;
}

Parameters random_parameters(const Case& setup, std::mt19937& random) {
  const auto& s = setup.shape;
  Parameters p;
  p.A_log = uniform(s.heads, -1, 2, random);
  p.dt_bias = uniform(s.heads * s.decay_dim(), -1, 1, random);
  if (!is_delta(setup) && setup.skip) p.D = uniform(s.heads, -1, 1, random);
  return p;
}

std::vector<float> random_states(const Case& setup, std::int64_t slots, std::mt19937& random) {
  return uniform(slots * setup.shape.heads * setup.shape.head_dim * setup.shape.state_dim, -1, 1, random);
}

Layer::Layer(Machine& machine, const Case& the_setup, unsigned seed)
    : Layer(machine, the_setup, parameters_of(the_setup, seed + 77), seed) {}

Layer::Layer(Machine& machine, const Case& the_setup, const Parameters& the_parameters, unsigned seed)
    : setup(the_setup),
      parameters(the_parameters),
      slots(setup.rows + 2),
      capacity(setup.committed > 0 ? setup.committed + setup.window + 1
               : setup.length == 1 ? 0
                                   : setup.length + 1),
      random(seed),
      slot(machine),
      held(machine),
      pool(machine),
      copy(machine),
      v(machine),
      u(machine),
      w(machine),
      gain(machine),
      log_decay(machine),
      y(machine),
      workspace(machine),
      machine_(machine),
      A_log_(machine),
      dt_bias_(machine),
      D_(machine),
      in_v_(machine),
      in_w_(machine),
      in_c_(machine),
      in_gate_(machine),
      in_beta_(machine) {
  make_memory();
  connect();
  const std::vector<float> zero(size(setup.shape.heads * setup.shape.head_dim * setup.shape.state_dim), 0.0F);
  for (std::int64_t s = 0; s < slots; ++s) put_state(s, zero);
  write_states();
  for (std::int64_t r = 0; r < setup.rows; ++r) fill_records(r);
  for (Stored* field : {&w, &v, &u, &gain, &log_decay}) {
    if (!field->bytes.here.empty()) field->bytes.write();
  }
}

void Layer::make_pool(Stored& to, Storage storage) {
  const auto& s = setup.shape;
  const Format format = format_of(storage);
  to.stride = up(s.heads * s.head_dim * s.state_dim) + kGap;
  to.bytes.write(std::vector<std::uint8_t>(size(format.code_bytes(to.stride) * slots), 0xFF));
  if (format.scale == Scale::row) {
    to.scale_stride = up(s.heads * s.head_dim) + kGap;
    to.scales.write(std::vector<float>(size(to.scale_stride * slots), std::numeric_limits<float>::quiet_NaN()));
  }
}

RingField Layer::make_field(Stored& to, Scalar type, std::int64_t elements) {
  to.stride = up(elements * capacity) + kGap;
  to.bytes.write(std::vector<std::uint8_t>(size(to.stride * slots * bytes_of(type)), 0xFF));
  return {type, to.bytes.there(), to.stride};
}

void Layer::make_memory() {
  const auto& s = setup.shape;
  // Slots in an order of their own, so that no row has the slot of its number.
  std::vector<std::int32_t> order(size(slots));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  slot.write({order.begin(), order.begin() + setup.rows});
  std::vector<std::int32_t> records(size(setup.rows), 0);
  if (setup.staggered) {
    for (std::size_t r = 0; r < records.size(); ++r) records[r] = static_cast<std::int32_t>(r % size(setup.length));
  }
  held.write(records);
  make_pool(pool, setup.state);
  if (setup.read) make_pool(copy, *setup.read);
  y_stride_ = up(s.heads * s.head_dim) + kGap;
  y.write(std::vector<std::uint8_t>(size(y_stride_ * setup.tokens() * bytes_of(setup.y)), 0xFF));
  A_log_.write(parameters.A_log);
  dt_bias_.write(parameters.dt_bias);
  if (!parameters.D.empty()) D_.write(parameters.D);
}

void Layer::connect() {
  const auto& s = setup.shape;
  Step& step = common();
  step.shape = s;
  step.length = setup.length;
  step.rows = setup.rows;
  step.slots = slots;
  step.slot = slot.there();
  step.held = held.there();
  step.state = {setup.state, pool.bytes.there(), pool.scales.there(), pool.stride, pool.scale_stride};
  if (setup.read) {
    step.read = {*setup.read, copy.bytes.there(), copy.scales.there(), copy.stride, copy.scale_stride};
  }
  step.y_type = setup.y;
  step.y = y.there();
  step.y_stride = y_stride_;
  const bool values = !is_delta(setup) || setup.closed, updates = is_delta(setup);
  if (capacity > 0) {
    step.ring.capacity = capacity;
    step.ring.w = make_field(w, setup.ring, s.groups * s.state_dim);
    if (values) step.ring.v = make_field(v, setup.ring, s.heads * s.head_dim);
    if (values) step.ring.gain = make_field(gain, Scalar::fp32, s.heads);
    if (updates) step.ring.u = make_field(u, setup.u_type(), s.heads * s.head_dim);
    if (updates) step.ring.log_decay = make_field(log_decay, Scalar::fp32, s.heads * s.decay_dim());
  }
  mamba2.A_log = delta.A_log = A_log_.there();
  mamba2.dt_bias = delta.dt_bias = dt_bias_.there();
  mamba2.D = D_.there();
  mamba2.dt_min = setup.dt_min;
  mamba2.dt_max = setup.dt_max;
  delta.closed_loop = setup.closed;
  delta.beta_scale = setup.beta_scale;
  step.workspace = workspace.write(std::vector<std::uint8_t>(kWorkspaceBytes, 0));
}

/// Records that a row which does not begin with an empty ring already has.
void Layer::fill_records(std::int64_t row) {
  const auto& s = setup.shape;
  const std::int64_t P = s.head_dim, N = s.state_dim, D = s.decay_dim();
  for (std::int64_t j = 0; j < held.here[size(row)]; ++j) {
    const auto put = [&](Stored& field, Scalar type, std::int64_t units, std::int64_t width, auto&& value) {
      if (field.bytes.here.empty()) return;
      for (std::int64_t i = 0; i < units; ++i) {
        std::vector<float> x = value(width);
        const auto code = encoded(type, x);
        const std::int64_t at = slot.here[size(row)] * field.stride + (i * capacity + j) * width;
        std::copy(code.begin(), code.end(), field.bytes.here.begin() + at * bytes_of(type));
      }
    };
    const auto between = [this](double low, double high) {
      return [this, low, high](std::int64_t n) { return uniform(n, low, high, random); };
    };
    const auto key = [&](std::int64_t n) {
      std::vector<float> x = uniform(n, -1, 1, random);
      const float norm = std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 1e-6F));
      for (float& value : x) value /= is_delta(setup) ? norm : 1.0F;
      return x;
    };
    put(w, setup.ring, s.groups, N, key);
    put(v, setup.ring, s.heads, P, between(-1, 1));
    put(u, setup.u_type(), s.heads, P, between(-1, 1));
    put(gain, Scalar::fp32, s.heads, 1, between(0.01, 1));
    put(log_decay, Scalar::fp32, s.heads, D, between(-1, -0.001));
  }
}

bool Layer::served() {
  std::mt19937 any(1);
  set_inputs(random_inputs(setup, any));
  return is_delta(setup) ? machine_.serves(delta) : machine_.serves(mamba2);
}

void Layer::set_state(std::int64_t at, const std::vector<float>& state) {
  put_state(at, state);
  write_states();
}

void Layer::put_state(std::int64_t at, const std::vector<float>& state) {
  const auto& s = setup.shape;
  const std::int64_t rows = s.heads * s.head_dim, N = s.state_dim;
  const auto put = [&](Stored& to, Storage storage, const std::vector<float>& values) {
    const Format format = format_of(storage);
    auto* codes = reinterpret_cast<std::byte*>(to.bytes.here.data()) + format.code_bytes(at * to.stride);
    float* scales = format.scale == Scale::row ? to.scales.here.data() + at * to.scale_stride : nullptr;
    replayssm::encode_rows(format, values.data(), rows, N, codes, scales);
  };
  put(pool, setup.state, state);
  if (setup.read) put(copy, *setup.read, this->state(at));
}

void Layer::fill_states() {
  for (std::int64_t at = 0; at < slots; ++at) put_state(at, random_states(setup, 1, random));
  write_states();
}

void Layer::pad() {
  if (setup.rows <= 2) return;
  slot.here[0] = -1;
  slot.here[2] = static_cast<std::int32_t>(slots);
  slot.write();
}

void Layer::write_states() {
  for (Stored* to : {&pool, &copy}) {
    if (!to->bytes.here.empty()) to->bytes.write();
    if (!to->scales.here.empty()) to->scales.write();
  }
}

std::vector<float> Layer::decoded(const Stored& from, Storage storage, std::int64_t at) const {
  const auto& s = setup.shape;
  const Format format = format_of(storage);
  std::vector<float> x(size(s.heads * s.head_dim * s.state_dim));
  const auto* codes = reinterpret_cast<const std::byte*>(from.bytes.here.data()) + format.code_bytes(at * from.stride);
  const float* scales = format.scale == Scale::row ? from.scales.here.data() + at * from.scale_stride : nullptr;
  replayssm::decode_rows(format, codes, scales, s.heads * s.head_dim, s.state_dim, x.data());
  return x;
}

std::vector<float> Layer::record(const Stored& field, Scalar type, std::int64_t units, std::int64_t width,
                                 std::int64_t at, std::int64_t j) const {
  std::vector<float> x;
  for (std::int64_t i = 0; i < units; ++i) {
    const std::int64_t first = at * field.stride + (i * capacity + j) * width;
    for (std::int64_t k = 0; k < width; ++k) x.push_back(value_at(type, field.bytes.here.data(), first + k));
  }
  return x;
}

Activations Layer::upload(Array<std::uint8_t>& to, const std::vector<float>& from, std::int64_t width, bool wide) {
  const Scalar type = wide ? Scalar::fp32 : setup.input;
  const std::int64_t stride = up(width) + kGap, b = bytes_of(type);
  std::vector<std::uint8_t> bytes(size(stride * setup.tokens() * b), 0xFF);
  const auto codes = encoded(type, from);
  for (std::int64_t r = 0; r < setup.tokens(); ++r) {
    std::copy_n(codes.begin() + r * width * b, width * b, bytes.begin() + r * stride * b);
  }
  return {type, to.write(std::move(bytes)), stride};
}

void Layer::set_inputs(const TokenInputs& in) {
  const auto& s = setup.shape;
  const Activations v_in = upload(in_v_, in.v, s.heads * s.head_dim, setup.wide_v),
                    w_in = upload(in_w_, in.w, s.groups * s.state_dim),
                    c_in = upload(in_c_, in.c, s.groups * s.state_dim, setup.wide_c),
                    gate_in = upload(in_gate_, in.gate, s.heads * s.decay_dim());
  if (is_delta(setup)) {
    delta.v = v_in;
    delta.k = w_in;
    delta.q = c_in;
    delta.gate = gate_in;
    delta.beta = upload(in_beta_, in.beta, s.heads);
  } else {
    mamba2.x = v_in;
    mamba2.B = w_in;
    mamba2.C = c_in;
    mamba2.dt = gate_in;
  }
}

std::vector<float> Layer::step(const TokenInputs& in) {
  set_inputs(in);
  if (is_delta(setup)) {
    machine_.decode(delta);
  } else {
    machine_.decode(mamba2);
  }
  machine_.advance_cursors(setup.rows, slot.there(), held.there(), setup.length);
  return fetch();
}

std::vector<float> Layer::fetch() {
  const auto& s = setup.shape;
  held.read();
  for (Stored* stored : {&pool, &copy, &v, &u, &w, &gain, &log_decay}) {
    stored->bytes.read();
    stored->scales.read();
  }
  y.read();
  std::vector<float> out;
  for (std::int64_t r = 0; r < setup.tokens(); ++r) {
    for (std::int64_t i = 0; i < s.heads * s.head_dim; ++i) {
      out.push_back(value_at(setup.y, y.here.data(), r * y_stride_ + i));
    }
  }
  return out;
}

namespace {

/// Scales that nobody wrote are NaN, which is not equal to itself.
std::vector<std::uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<std::uint32_t> bits(values.size());
  if (!values.empty()) std::memcpy(bits.data(), values.data(), values.size() * sizeof(float));
  return bits;
}

}  // namespace

void ExpectSame(const Layer& a, const Layer& b) {
  for (const auto field :
       {&Layer::pool, &Layer::copy, &Layer::v, &Layer::u, &Layer::w, &Layer::gain, &Layer::log_decay}) {
    EXPECT_EQ((a.*field).bytes.here, (b.*field).bytes.here);
    EXPECT_EQ(bits_of((a.*field).scales.here), bits_of((b.*field).scales.here));
  }
  EXPECT_EQ(a.y.here, b.y.here);
  EXPECT_EQ(a.held.here, b.held.here);
}

}  // namespace replayssm::cuda::tests
