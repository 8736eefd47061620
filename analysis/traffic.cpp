#include "analysis/traffic.h"

namespace replayssm {
namespace {

double real(std::int64_t n) { return static_cast<double>(n); }

/// Bytes of `rows` rows of n elements of a field of a record.
struct Field {
  const Replay& replay;
  double activation(const char* name, std::int64_t rows, std::int64_t n) const { return bytes(name, 2, rows, n); }
  double gate(const char* name, std::int64_t rows, std::int64_t n) const { return bytes(name, 4, rows, n); }

 private:
  double bytes(const char* name, double exact, std::int64_t rows, std::int64_t n) const {
    const Format format = replay.ring.of(name);
    return real(rows) * (format.exact() ? exact * real(n) : real(format.code_bytes(n) + format.scale_bytes(1, n)));
  }
};

/// The sum over `count` output-only steps that meet first, first + 1, ... records, starting with an empty ring.
StepBytes outputs(const LayerTraffic& layer, std::int64_t count) {
  if (count == 0) return {};
  const StepBytes first = layer.output(0);
  const double record = layer.output(1).ring_read, n = real(count);
  return {n * first.state_read,     n * first.state_write, n * first.scales,
          record * n * (n - 1) / 2, n * first.ring_append, n * first.residuals};
}

double moved(const LayerTraffic& layer, std::int64_t L, std::int64_t tokens) {
  const std::int64_t flushes = tokens / L;
  return real(flushes) * (outputs(layer, L - 1).total() + layer.flush().total()) + outputs(layer, tokens % L).total();
}

}  // namespace

StepBytes& StepBytes::operator+=(const StepBytes& other) {
  state_read += other.state_read;
  state_write += other.state_write;
  scales += other.scales;
  ring_read += other.ring_read;
  ring_append += other.ring_append;
  residuals += other.residuals;
  return *this;
}

LayerTraffic::LayerTraffic(const RecurrenceShape& shape, const Policy& policy) {
  const Replay replay = policy.as_replay();
  length_ = replay.length;
  split_ = replay.read.has_value();
  const auto state = [&](const Format& format) {
    const std::int64_t heads = shape.heads, rows = shape.head_dim, n = shape.state_dim;
    const Format* kept = format.residual;
    const std::int64_t residual =
        kept ? kept->state_code_bytes(heads, rows, n) + kept->state_scale_bytes(heads, rows, n) : 0;
    return Stored{real(format.state_code_bytes(heads, rows, n)), real(format.state_scale_bytes(heads, rows, n)),
                  real(residual)};
  };
  anchor_ = state(replay.anchor);
  if (split_) copy_ = state(*replay.read);

  const Field field{replay};
  const std::int64_t H = shape.heads, G = shape.groups, P = shape.head_dim, N = shape.state_dim;
  if (!is_delta_rule(shape.recurrence)) {
    const double all = field.activation("x", H, P) + field.activation("B", G, N) + field.gate("dt", H, 1);
    record_ = {all, all, all};
    return;
  }
  const double u = field.activation("u", H, P);
  const double common = field.activation("k", G, N) + field.gate("g", H, shape.decay_dim());
  record_ = {u + common, u + common, u + common};
  if (policy.loop == Loop::closed) {
    const double raw = field.activation("v", H, P) + field.gate("beta", H, 1);
    record_.appended += raw;
    record_.flush = raw + common;
  }
}

double LayerTraffic::stored() const {
  const auto all = [](const Stored& s) { return s.codes + s.scales + s.residual; };
  return all(anchor_) + all(copy_) + real(length_ - 1) * record_.appended;
}

StepBytes LayerTraffic::output(std::int64_t held) const {
  const auto& read = split_ ? copy_ : anchor_;
  return {read.codes, 0, read.scales, real(held) * record_.output, record_.appended, 0};
}

StepBytes LayerTraffic::flush() const {
  return {anchor_.codes,
          anchor_.codes + copy_.codes,
          2 * anchor_.scales + copy_.scales,
          real(length_ - 1) * record_.flush,
          0,
          2 * (anchor_.residual + copy_.residual)};
}

StepBytes LayerTraffic::mean() const {
  StepBytes sum = outputs(*this, length_ - 1);
  sum += flush();
  const double L = real(length_);
  return {sum.state_read / L, sum.state_write / L, sum.scales / L,
          sum.ring_read / L,  sum.ring_append / L, sum.residuals / L};
}

StepBytes LayerTraffic::verify(std::int64_t held, std::int64_t window, bool flushes) const {
  if (length_ == 1) return snapshots(window);
  StepBytes step = output(held);
  if (flushes) {
    step = flush();
    step.ring_read = real(held) * record_.flush;
  }
  step.ring_append = real(window) * record_.appended;
  return step;
}

StepBytes LayerTraffic::snapshots(std::int64_t window) const {
  const double moved = 1 + real(window);
  return {anchor_.codes, real(window) * anchor_.codes, moved * anchor_.scales, 0, 0, moved * anchor_.residual};
}

double activation_bytes(const RecurrenceShape& shape, double bytes) {
  const std::int64_t heads = shape.heads * 2 * shape.head_dim;  // x or v, and y
  const std::int64_t groups = shape.groups * 2 * shape.state_dim;
  const std::int64_t gates = shape.heads * (is_delta_rule(shape.recurrence) ? shape.decay_dim() + 1 : 1);
  return bytes * real(heads + groups + gates);
}

StateCost state_cost(std::span<const LayerInfo> layers, const Policy& policy, std::int64_t tokens) {
  StateCost cost;
  if (tokens < 1) return cost;
  const Replay replay = policy.as_replay();
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (!layers[i].recurrence) continue;
    const bool covered = policy.covers(static_cast<std::int64_t>(i));
    const LayerTraffic layer(*layers[i].recurrence, covered ? policy : exact_policy());
    cost.bytes_stored_per_sequence += layer.stored();
    cost.bytes_moved_per_token += moved(layer, covered ? replay.length : 1, tokens) / real(tokens);
  }
  const std::int64_t L = replay.length, rest = tokens % L;
  cost.flushes = tokens / L;
  cost.ring_reads = cost.flushes * (L * (L - 1) / 2) + rest * (rest - 1) / 2;
  if (cost.flushes > 0) {  // steps before the first flush read the zero state
    const std::int64_t later_flushes = cost.flushes - 1, later_outputs = tokens - L - later_flushes;
    if (replay.read && !replay.read->exact()) cost.read_copy_reads = later_outputs;
    const bool outputs_rounded = replay.read ? !replay.read->exact() : !replay.anchor.exact();
    cost.rounded_reads = (outputs_rounded ? later_outputs : 0) + (replay.anchor.exact() ? 0 : later_flushes);
  }
  return cost;
}

}  // namespace replayssm
