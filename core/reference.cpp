#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>

#include "core/backend.h"
#include "core/delta_rule.h"
#include "core/error.h"
#include "core/mamba2.h"
#include "core/parallel.h"

namespace replayssm {
namespace {

constexpr std::int64_t token_block = 64;  // rows of one task of an elementwise operation

template <class Real>
using Matrix = Eigen::Matrix<Real, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class Real>
using MatrixView = Eigen::Map<Matrix<Real>, Eigen::Unaligned, Eigen::OuterStride<>>;
template <class Real>
using ConstMatrixView = Eigen::Map<const Matrix<Real>, Eigen::Unaligned, Eigen::OuterStride<>>;
template <class Real>
using Row = Eigen::Map<Eigen::Array<Real, 1, Eigen::Dynamic>>;
template <class Real>
using ConstRow = Eigen::Map<const Eigen::Array<Real, 1, Eigen::Dynamic>>;

/// Scratch of the calling thread that grows and is never given back; on a cache line, so that vector code splits it
/// the same way every time.
template <class Real, int Use>
Real* scratch(std::int64_t count) {
  struct alignas(64) Line {
    char bytes[64];
  };
  thread_local std::vector<Line> memory;
  const std::size_t lines = (static_cast<std::size_t>(count) * sizeof(Real) + 63) / 64;
  if (memory.size() < lines) memory.resize(lines);
  return reinterpret_cast<Real*>(memory.data());
}

/// What advance() needs of a state, whatever its kind.
template <class Real>
class HostState : public RecurrentState {
 public:
  virtual const RecurrenceShape& shape() const = 0;
  virtual void advance(const LayerInputs<Real>& inputs, Real* y, std::int64_t y_stride, int threads) = 0;
};

/// A State or a SpeculativeState.
template <class Real, class Kept>
class ReferenceState : public HostState<Real> {
 public:
  template <class... Made>
  explicit ReferenceState(const Made&... made) : state_(made...) {}
  RangeEvents events() const override { return state_.events(); }
  std::vector<double> effective() override {
    return all_heads([this](std::int64_t h) { return state_.effective(h); });
  }
  std::vector<double> checkpoint() const override {
    return all_heads([this](std::int64_t h) { return state_.checkpoint(h); });
  }
  std::vector<double> read_copy() const override {
    return all_heads([this](std::int64_t h) { return state_.read_copy(h); });
  }
  const RecurrenceShape& shape() const override { return state_.shape(); }

 protected:
  Kept state_;

 private:
  template <class HeadState>
  std::vector<double> all_heads(HeadState&& head_state) const {
    std::vector<double> all;
    for (std::int64_t h = 0; h < shape().heads; ++h) {
      const std::vector<Real>& one = head_state(h);
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }
};

template <class Real>
class PlainState : public ReferenceState<Real, State<Real>> {
 public:
  using ReferenceState<Real, State<Real>>::ReferenceState;
  void fold() override { this->state_.fold(); }
  std::int64_t held() const override { return this->state_.held(); }
  void advance(const LayerInputs<Real>& inputs, Real* y, std::int64_t y_stride, int threads) override {
    this->state_.advance(inputs, y, y_stride, threads);
  }
};

template <class Real>
class VerifiedState : public ReferenceState<Real, SpeculativeState<Real>> {
 public:
  using ReferenceState<Real, SpeculativeState<Real>>::ReferenceState;
  void accept(std::int64_t n) override { this->state_.accept(n); }
  void rollback(std::int64_t n) override { this->state_.rollback(n); }
  SpeculationStatus speculation() const override { return this->state_.status(); }
  std::int64_t held() const override { return speculation().held; }
  void advance(const LayerInputs<Real>& inputs, Real* y, std::int64_t y_stride, int threads) override {
    this->state_.verify(inputs, y, y_stride, threads);
  }
};

template <class Real>
class ReferenceBackend : public Backend {
 public:
  ReferenceBackend(int threads, Products products) : threads_(threads), products_(products) {}

  Precision precision() const override { return sizeof(Real) == 8 ? Precision::fp64 : Precision::fp32; }

  Tensor zeros(std::int64_t rows, std::int64_t columns) override {
    Tensor t = make(rows, columns);
    std::fill_n(data(t), rows * t.stride, Real(0));
    return t;
  }

  Tensor embed(const TensorView& table, std::span<const std::int32_t> ids) override {
    const std::int64_t width = table.shape.at(1);
    Tensor out = make(std::ssize(ids), width);
    for (std::int64_t t = 0; t < out.rows; ++t) {
      const auto id = static_cast<std::size_t>(ids[static_cast<std::size_t>(t)]);
      widen(table, id * static_cast<std::size_t>(width), static_cast<std::size_t>(width), row(out, t));
    }
    return out;
  }

  Tensor linear(const Tensor& x, const TensorView& weight, const TensorView* bias) override {
    const std::int64_t outputs = weight.shape.at(0), inputs = weight.shape.at(1);
    Tensor y = make(x.rows, outputs);
    // A task owns a tile of the result. The tile is wide enough that packing and widening stay small beside the
    // product, and depends on the shapes alone.
    const std::int64_t width = std::clamp<std::int64_t>((outputs / 8 + 15) / 16 * 16, 64, 512);
    const std::int64_t tiles = (outputs + width - 1) / width;
    parallel_for(tiles, threads_, [&](std::int64_t tile) {
      const std::int64_t first = tile * width, count = std::min(width, outputs - first);
      Real* w = scratch<Real, 0>(count * inputs);
      widen(weight, static_cast<std::size_t>(first * inputs), static_cast<std::size_t>(count * inputs), w);
      const ConstMatrixView<Real> W(w, count, inputs, Eigen::OuterStride<>(inputs));
      MatrixView<Real> Y(data(y) + first, y.rows, count, Eigen::OuterStride<>(y.stride));
      const std::int64_t rows = product_rows(x.rows);
      for (std::int64_t t = 0; t < x.rows; t += rows) {
        Y.middleRows(t, rows).noalias() = matrix(x.range(t, rows)) * W.transpose();
      }
      if (bias) {
        Real* b = scratch<Real, 1>(count);
        widen(*bias, static_cast<std::size_t>(first), static_cast<std::size_t>(count), b);
        Y.rowwise() += ConstRow<Real>(b, count).matrix();
      }
    });
    return y;
  }

  void add(Tensor& x, const Tensor& y) override {
    for_rows(x.rows, [&](std::int64_t t) { array(x, t) += array(y, t); });
  }

  Tensor rms_norm(const Tensor& x, const TensorView& weight, double epsilon, NormWeight kind,
                  std::int64_t group) override {
    Tensor y = make(x.rows, x.columns);
    std::vector<Real> w = vector(weight);
    if (kind == NormWeight::one_plus) {
      for (Real& v : w) v += Real(1);
    }
    const std::int64_t period = std::ssize(w);
    for_rows(x.rows, [&](std::int64_t t) {
      for (std::int64_t g = 0; g < x.columns; g += group) {
        const ConstRow<Real> in(row(x, t) + g, group);
        const Real mean = in.square().sum() / Real(group);
        const Real scale = Real(1) / std::sqrt(mean + Real(epsilon));
        Row<Real>(row(y, t) + g, group) = in * scale * ConstRow<Real>(w.data() + g % period, group);
      }
    });
    return y;
  }

  Tensor causal_conv_silu(const Tensor& x, const TensorView& weight, const TensorView* bias,
                          ConvWindow& window) override {
    const std::int64_t channels = x.columns, K = weight.elements() / channels;
    if (!window.inputs.storage) window.inputs = zeros(K - 1, channels);
    const Tensor before = window.inputs;
    const std::vector<Real> w = vector(weight);
    std::vector<Real> taps(w.size()), b(static_cast<std::size_t>(channels), Real(0));  // taps [K, channels]
    for (std::int64_t c = 0; c < channels; ++c) {
      for (std::int64_t k = 0; k < K; ++k)
        taps[static_cast<std::size_t>(k * channels + c)] = w[static_cast<std::size_t>(c * K + k)];
    }
    if (bias) b = vector(*bias);
    Tensor y = make(x.rows, channels);
    const auto input = [&](std::int64_t t) { return t < 0 ? row(before, before.rows + t) : row(x, t); };
    for_rows(x.rows, [&](std::int64_t t) {
      Row<Real> out(row(y, t), channels);
      out = ConstRow<Real>(b.data(), channels);
      for (std::int64_t k = 0; k < K; ++k) {
        out += ConstRow<Real>(taps.data() + k * channels, channels) * ConstRow<Real>(input(t - K + 1 + k), channels);
      }
      out /= Real(1) + (-out).exp();
    });
    const std::int64_t kept = std::min(K - 1 + window.history, before.rows + x.rows);
    window.inputs = make(kept, channels);
    window.spare = kept - (K - 1);
    for (std::int64_t k = 0; k < kept; ++k) std::copy_n(input(x.rows - kept + k), channels, row(window.inputs, k));
    return y;
  }

  void multiply_silu(Tensor& x, const Tensor& gate) override {
    for_rows(x.rows, [&](std::int64_t t) { array(x, t) *= array(gate, t) / (Real(1) + (-array(gate, t)).exp()); });
  }

  void multiply_sigmoid(Tensor& x, const Tensor& gate) override {
    for_rows(x.rows, [&](std::int64_t t) { array(x, t) /= Real(1) + (-array(gate, t)).exp(); });
  }

  Tensor add_skip(const Tensor& y, const Tensor& x, const TensorView& D) override {
    Tensor out = make(y.rows, y.columns);
    const std::vector<Real> d = vector(D);
    const std::int64_t P = y.columns / std::ssize(d);
    for_rows(y.rows, [&](std::int64_t t) {
      for (std::int64_t h = 0; h < std::ssize(d); ++h) {
        Row<Real>(row(out, t) + h * P, P) = ConstRow<Real>(row(y, t) + h * P, P) +
                                            d[static_cast<std::size_t>(h)] * ConstRow<Real>(row(x, t) + h * P, P);
      }
    });
    return out;
  }

  Tensor take(const Tensor& x, std::int64_t period, std::int64_t first, std::int64_t count) override {
    Tensor out = make(x.rows, x.columns / period * count);
    for_rows(x.rows, [&](std::int64_t t) {
      for (std::int64_t i = 0; i < x.columns / period; ++i) {
        std::copy_n(row(x, t) + i * period + first, count, row(out, t) + i * count);
      }
    });
    return out;
  }

  void rope(Tensor& x, std::int64_t head_dim, std::int64_t rotary_dim, double theta, std::int64_t position) override {
    const std::int64_t half = rotary_dim / 2;
    for_rows(x.rows, [&](std::int64_t t) {
      for (std::int64_t i = 0; i < half; ++i) {
        // Angles in binary64 in every precision: in fp32 those of late positions would be off by whole digits.
        const double angle = static_cast<double>(position + t) *
                             std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(rotary_dim));
        const Real c = static_cast<Real>(std::cos(angle)), s = static_cast<Real>(std::sin(angle));
        for (std::int64_t h = 0; h < x.columns; h += head_dim) {
          Real &a = row(x, t)[h + i], &b = row(x, t)[h + half + i];
          const Real rotated = a * c - b * s;
          b = b * c + a * s;
          a = rotated;
        }
      }
    });
  }

  Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& shape,
                   AttentionCache& cache) override {
    append(cache.keys, cache.length, k);
    append(cache.values, cache.length, v);
    const std::int64_t before = cache.length, d = shape.head_dim;
    const std::int64_t block = product_rows(token_block), blocks = (q.rows + block - 1) / block;
    cache.length += q.rows;
    Tensor y = make(q.rows, q.columns);
    parallel_for(blocks * shape.heads, threads_, [&](std::int64_t task) {
      const std::int64_t head = task % shape.heads, kv = head / (shape.heads / shape.kv_heads);
      const std::int64_t first = task / shape.heads * block, count = std::min(block, q.rows - first);
      const std::int64_t seen = before + first + count;
      const auto K = matrix(cache.keys.slice(kv * d, d).range(0, seen));
      const auto V = matrix(cache.values.slice(kv * d, d).range(0, seen));
      MatrixView<Real> scores(scratch<Real, 0>(count * seen), count, seen, Eigen::OuterStride<>(seen));
      scores.noalias() = matrix(q.slice(head * d, d).range(first, count)) * K.transpose();
      const Real scale = Real(1) / std::sqrt(Real(d));
      for (std::int64_t t = 0; t < count; ++t) {
        const std::int64_t visible = before + first + t + 1;
        Row<Real> s(&scores(t, 0), seen);
        auto head_part = s.head(visible);
        head_part = ((head_part - head_part.maxCoeff()) * scale).exp();
        head_part /= head_part.sum();
        s.tail(seen - visible).setZero();
      }
      MatrixView<Real> out(row(y, first) + head * d, count, d, Eigen::OuterStride<>(y.stride));
      out.noalias() = scores * V;
    });
    return y;
  }

  std::unique_ptr<RecurrentState> new_state(const RecurrenceShape& shape, const Policy& policy,
                                            const StatePlace& place) override {
    return std::make_unique<PlainState<Real>>(shape, policy, place);
  }

  std::unique_ptr<RecurrentState> new_speculative_state(const RecurrenceShape& shape, const Policy& policy,
                                                        const Speculation& room, const StatePlace& place) override {
    return std::make_unique<VerifiedState<Real>>(shape, policy, room, place);
  }

  Tensor advance(RecurrentState& state, const RecurrenceCall& call) override {
    return std::visit([&](const auto& c) { return advance_prepared(state, c); }, call);
  }

  SquaredError squared_error(const Tensor& x, const Tensor& reference) override {
    std::vector<SquaredError> rows(static_cast<std::size_t>(x.rows));
    for_rows(x.rows, [&](std::int64_t t) {
      const auto ref = array(reference, t).template cast<double>();
      rows[static_cast<std::size_t>(t)] = {(array(x, t).template cast<double>() - ref).square().sum(),
                                           ref.square().sum()};
    });
    SquaredError sum;
    for (const SquaredError& r : rows) sum += r;
    return sum;
  }

  void read(const Tensor& x, double* out) override {
    for_rows(x.rows, [&](std::int64_t t) { std::copy_n(row(x, t), x.columns, out + t * x.columns); });
  }

  Tensor write(const double* values, std::int64_t rows, std::int64_t columns) override {
    Tensor x = make(rows, columns);
    for_rows(rows, [&](std::int64_t t) {
      for (std::int64_t i = 0; i < columns; ++i) row(x, t)[i] = static_cast<Real>(values[t * columns + i]);
    });
    return x;
  }

 private:
  static Tensor make(std::int64_t rows, std::int64_t columns) {
    // The row length is rounded up to whole cache lines: vector code then splits every row the same way, whatever the
    // block of tokens it lies in.
    constexpr std::int64_t line = 64 / static_cast<std::int64_t>(sizeof(Real));
    const std::int64_t stride = (columns + line - 1) / line * line;
    const auto bytes = static_cast<std::size_t>(std::max<std::int64_t>(rows * stride, line)) * sizeof(Real);
    void* memory = std::aligned_alloc(64, bytes);
    if (!memory) throw std::bad_alloc();
    return {std::shared_ptr<void>(memory, std::free), 0, rows, columns, stride};
  }
  static Real* data(const Tensor& t) { return static_cast<Real*>(t.storage.get()) + t.offset; }
  static Real* row(const Tensor& t, std::int64_t i) { return data(t) + i * t.stride; }
  static Row<Real> array(const Tensor& t, std::int64_t i) { return Row<Real>(row(t, i), t.columns); }
  static Rows<Real> rows(const Tensor& t) { return {data(t), t.stride}; }
  static ConstMatrixView<Real> matrix(const Tensor& t) {
    return ConstMatrixView<Real>(data(t), t.rows, t.columns, Eigen::OuterStride<>(t.stride));
  }
  static std::vector<Real> vector(const TensorView& t) {
    std::vector<Real> out(static_cast<std::size_t>(t.elements()));
    widen(t, 0, out.size(), out.data());
    return out;
  }

  /// Rows of one matrix product, of `many` that could go into it.
  std::int64_t product_rows(std::int64_t many) const { return products_ == Products::one_token ? 1 : many; }

  /// body(t) for every row, in tasks of token_block rows.
  template <class Body>
  void for_rows(std::int64_t count, Body&& body) {
    parallel_for((count + token_block - 1) / token_block, threads_, [&](std::int64_t block) {
      const std::int64_t end = std::min(count, (block + 1) * token_block);
      for (std::int64_t t = block * token_block; t < end; ++t) body(t);
    });
  }

  /// Writes `rows` at row `length`, doubling the capacity when it is used up.
  static void append(Tensor& cache, std::int64_t length, const Tensor& added) {
    if (!cache.storage || cache.rows < length + added.rows) {
      Tensor grown = make(std::max(2 * length, length + added.rows), added.columns);
      if (cache.storage) std::copy_n(data(cache), length * cache.stride, data(grown));
      cache = grown;
    }
    for (std::int64_t t = 0; t < added.rows; ++t) std::copy_n(row(added, t), added.columns, row(cache, length + t));
  }

  auto by_rows() {
    return [this](std::int64_t count, auto&& body) { for_rows(count, body); };
  }

  Tensor advance_prepared(RecurrentState& state, const Mamba2Call& call) {
    const std::vector<Real> A_log = vector(*call.A_log), dt_bias = vector(*call.dt_bias);
    return advance_heads(
        state, prepare(Mamba2Inputs<Real>{call.shape, call.x.rows, rows(call.x), rows(call.B), rows(call.C),
                                          rows(call.dt), A_log.data(), dt_bias.data(), call.dt_min, call.dt_max},
                       by_rows()));
  }

  Tensor advance_prepared(RecurrentState& state, const DeltaCall& call) {
    const std::vector<Real> A_log = vector(*call.A_log), dt_bias = vector(*call.dt_bias);
    return advance_heads(state, prepare(DeltaInputs<Real>{call.shape, call.v.rows, rows(call.q), rows(call.k),
                                                          rows(call.v), rows(call.gate), rows(call.beta), A_log.data(),
                                                          dt_bias.data(), call.beta_scale},
                                        by_rows()));
  }

  Tensor advance_heads(RecurrentState& state, const LayerInputs<Real>& inputs) {
    auto& s = dynamic_cast<HostState<Real>&>(state);
    const RecurrenceShape& shape = s.shape();
    Tensor y = make(inputs.tokens, shape.heads * shape.head_dim);
    s.advance(inputs, data(y), y.stride, threads_);
    return y;
  }

  int threads_;
  Products products_;
};

}  // namespace

std::unique_ptr<Backend> reference_backend(Precision precision, int threads, Products products) {
  if (threads < 1) fail("threads must be at least 1, found ", threads);
  if (precision == Precision::fp32) return std::make_unique<ReferenceBackend<float>>(threads, products);
  return std::make_unique<ReferenceBackend<double>>(threads, products);
}

}  // namespace replayssm
