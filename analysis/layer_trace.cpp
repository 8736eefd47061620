#include "analysis/layer_trace.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <optional>

#include "analysis/head_inputs.h"
#include "analysis/state_codes.h"
#include "core/error.h"
#include "core/own_format.h"
#include "core/parallel.h"

namespace replayssm {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

/// The reference's recurrence of one head, step by step, in binary64: what the delta rule's u depends on.
class HeadRun {
 public:
  explicit HeadRun(const RecurrenceShape& shape)
      : shape_(shape), state_(size(shape.head_dim * shape.state_dim), 0.0), decay_(size(shape.state_dim)) {}

  /// u [head_dim] of token t; the state takes the token in.
  void step(const HeadInputs<double>& in, std::int64_t t, double* u) {
    const std::int64_t P = shape_.head_dim, N = shape_.state_dim, D = shape_.decay_dim();
    const Record<double> r = in.record(t);
    if (!is_delta_rule(shape_.recurrence)) {
      for (std::int64_t p = 0; p < P; ++p) u[p] = r.gain * r.v[p];
      return;
    }
    for (std::int64_t n = 0; n < N; ++n) decay_[size(n)] = n < D ? std::exp(r.log_decay[n]) : decay_[0];
    for (std::int64_t p = 0; p < P; ++p) {
      double* s = state_.data() + p * N;
      double readout = 0;
      for (std::int64_t n = 0; n < N; ++n) {
        s[n] *= decay_[size(n)];
        readout += s[n] * r.w[n];
      }
      u[p] = r.gain * (r.v[p] - readout);
      for (std::int64_t n = 0; n < N; ++n) s[n] += u[p] * r.w[n];
    }
  }

 private:
  RecurrenceShape shape_;
  std::vector<double> state_, decay_;
};

/// Whether what is stored is kept as codes. Behind a rotation, whose sums are rounded, a value does not tell its code.
bool has_codes(const Format& format) { return !format.exact() && !format.hadamard && !format.own; }

TraceType code_type(const Element& element) {
  return element.storage_bits == 32   ? TraceType::uint32
         : element.storage_bits == 16 ? TraceType::uint16
                                      : TraceType::uint8;
}

/// Zero points are kept as wide as codes are, in whole bytes.
TraceType zero_type(const Format& format) { return code_type(format.element); }

}  // namespace

std::string layer_group(std::int64_t layer) {
  char text[32];
  std::snprintf(text, sizeof text, "/layers/%02lld", static_cast<long long>(layer));
  return text;
}

std::string policy_group(std::int64_t layer, std::size_t policy) {
  return layer_group(layer) + "/policy_" + std::to_string(policy);
}

TraceSelection parse_trace(std::string_view items, std::string_view layers) {
  TraceSelection out;
  const std::pair<std::string_view, bool*> known[] = {
      {"u", &out.u}, {"w", &out.w}, {"decay", &out.decay}, {"y", &out.y}, {"state", &out.state}};
  for (std::size_t first = 0; first <= items.size();) {
    const std::size_t end = std::min(items.find(',', first), items.size());
    const std::string_view item = items.substr(first, end - first);
    const auto found = std::ranges::find(known, item, &std::pair<std::string_view, bool*>::first);
    if (found == std::end(known)) fail("trace of '", items, "': expected u, w, decay, y or state, found '", item, "'");
    *found->second = true;
    first = end + 1;
  }
  if (layers.empty()) return out;
  Policy policy;
  try {  // the layers of a policy are written the same way
    if (layers.find_first_not_of("0123456789+-") != layers.npos) throw Error("");
    policy = parse_policy("eager(state=exact, layers=" + std::string(layers) + ")");
  } catch (const Error&) {
    fail("layers to trace: expected indices or ranges such as 0-3+7, found '", layers, "'");
  }
  for (const auto& [first, last] : policy.layers) {
    for (std::int64_t layer = first; layer <= last; ++layer) out.layers.push_back(layer);
  }
  return out;
}

/// The file of one layer while the layer is run.
struct LayerTrace::Layer {
  const std::int64_t layer;
  const RecurrenceShape shape;
  const bool narrow;         // computed in fp32: values are stored so, which they fit exactly
  const bool narrow_states;  // the states that a policy rounds are
  std::size_t first_policy = 0, last_policy = 0;
  TraceWriter file;
  std::vector<HeadRun> runs = {};

  std::string at(const char* name) const { return layer_group(layer) + "/" + name; }

  void add(const std::string& path, const std::vector<double>& x) {
    narrow ? file.append(path, std::vector<float>(x.begin(), x.end())) : file.append(path, x);
  }

  void make(const std::string& path, const TraceShape& row, const char* dims, const std::string& text) {
    file.appendable(path, narrow ? TraceType::float32 : TraceType::float64, row, {"1", text});
    file.attribute(path, "dims", std::string(dims));
  }
  void make_readouts(const std::string& path, const std::string& text) {
    make(path, {shape.heads, shape.head_dim}, "token, head, head_dim", text);
  }
  void make_states(const std::string& path, const std::string& text) {
    make(path, {shape.heads, shape.head_dim, shape.state_dim}, "sample, head, head_dim, state_dim", text);
  }

  void make_stored(const std::string& path, const Format& format, const std::string& text) {
    if (!has_codes(format)) return make_states(path, text + ", stored as " + format.text());
    const std::int64_t N = shape.state_dim, bits = format.element.storage_bits;
    const bool scaled = format.scale != Scale::none;
    // The definition of a given name, so that the file tells without another what it holds.
    CodeLayout layout{.format = definition_of(format).text(),
                      .block = scaled ? format.block(shape.head_dim, N) : 0,
                      .scale_layout = "none",
                      .codes_per_item = bits < 8 ? (8 % bits == 0 ? 8 / bits : 0) : 1,
                      .code_bits = bits};
    TraceShape scales = {shape.heads, shape.head_dim};
    if (format.scale == Scale::row) layout.scale_layout = "row";
    if (format.scale == Scale::head) layout.scale_layout = "head", scales = {shape.heads};
    if (format.scale == Scale::tensor) {
      layout.scale_layout = "tensor", scales = {1};
      layout.block = shape.heads * shape.head_dim * N;
    }
    if (format.scale == Scale::tile) {
      layout.scale_layout = "rows";
      scales = {shape.heads, format.scales(shape.head_dim, N)};
    }
    if (format.scale == Scale::group) {
      layout.scale_layout = "along N";
      scales.push_back(format.scales(1, N));
    }
    if (format.rule != ScaleRule::amax) layout.scale_format = format.rule == ScaleRule::nvfp4 ? "e4m3" : "e8m0";
    file.appendable_codes(path, code_type(format.element),
                          {shape.heads, shape.head_dim, bits < 8 ? format.code_bytes(N) : N}, layout,
                          scaled ? std::optional(scales) : std::nullopt, {"code", text});
    file.attribute(path, "dims", std::string("sample, head, head_dim, state_dim"));
    if (format.asymmetric) {
      file.appendable(path + "_zero_points", zero_type(format), scales,
                      {"code", "zero points of " + path + ", two's complement; value = (code - zero point) scale"});
      file.attribute(path, "zero_points", path + "_zero_points");
    }
    if (format.head_scale_width() == 0) return;
    file.appendable(path + "_head_scales", TraceType::float32, {shape.heads}, {"", "scales of the heads of " + path});
    file.attribute(path, "head_scales", path + "_head_scales");
  }
  void add_stored(const std::string& path, const Format& format, const std::vector<double>& state) {
    if (!has_codes(format)) return add(path, state);
    const std::int64_t N = shape.state_dim, parts = format.scale == Scale::tensor ? 1 : shape.heads;
    const std::int64_t rows = shape.heads * shape.head_dim / parts;  // that are stored together
    const auto scales = static_cast<std::ptrdiff_t>(format.scales(rows, N) * format.scale_width());
    std::vector<std::byte> codes, head_scales, block_scales, zero_points;
    const auto append = [](std::vector<std::byte>& to, auto first, auto last) { to.insert(to.end(), first, last); };
    for (std::int64_t part = 0; part < parts; ++part) {
      const double* x = state.data() + part * rows * N;
      const StoredRows stored = narrow_states
                                    ? codes_of_rounded(format, std::vector<float>(x, x + rows * N).data(), rows, N)
                                    : codes_of_rounded(format, x, rows, N);
      const auto first = stored.scales.begin(), blocks = first + format.head_scale_width(), zeros = blocks + scales;
      append(codes, stored.codes.begin(), stored.codes.end());
      append(head_scales, first, blocks);
      append(block_scales, blocks, zeros);
      append(zero_points, zeros, stored.scales.end());
    }
    append_items(code_type(format.element), path, codes);
    if (!block_scales.empty()) {
      append_items(format.scale_width() == 4 ? TraceType::float32 : TraceType::uint8, path + "_scales", block_scales);
    }
    if (!zero_points.empty()) append_items(zero_type(format), path + "_zero_points", zero_points);
    if (!head_scales.empty()) append_items(TraceType::float32, path + "_head_scales", head_scales);
  }

 private:
  void append_items(TraceType type, const std::string& path, const std::vector<std::byte>& bytes) {
    switch (type) {
      case TraceType::float32:
        return append_as<float>(path, bytes);
      case TraceType::uint32:
        return append_as<std::uint32_t>(path, bytes);
      case TraceType::uint16:
        return append_as<std::uint16_t>(path, bytes);
      default:
        return append_as<std::uint8_t>(path, bytes);
    }
  }
  template <class Item>
  void append_as(const std::string& path, const std::vector<std::byte>& bytes) {
    std::vector<Item> items(bytes.size() / sizeof(Item));
    std::memcpy(items.data(), bytes.data(), bytes.size());
    file.append(path, items);
  }
};

LayerTrace::LayerTrace(const Model& model, Backend& backend, const Tokens& tokens, const std::vector<Policy>& policies,
                       const TraceSelection& selection, std::int64_t chunk_tokens, int threads,
                       std::filesystem::path folder)
    : model_(model),
      backend_(backend),
      tokens_(tokens),
      policies_(policies),
      selection_(selection),
      chunk_tokens_(chunk_tokens),
      threads_(threads),
      folder_(std::move(folder)) {
  const auto& all = model.layers();
  const auto covered = [&](std::int64_t layer) {
    return std::ranges::any_of(policies, [&](const Policy& policy) { return policy.covers(layer); });
  };
  for (const std::int64_t layer : selection_.layers) {
    if (layer >= std::ssize(all)) {
      fail("layers to trace: the model has no layer ", layer, ", its layers are 0-", all.size() - 1);
    }
    if (!all[size(layer)].recurrence) fail("layers to trace: layer ", layer, " keeps no recurrent state");
    if (!covered(layer)) fail("layers to trace: no policy covers layer ", layer);
  }
  for (std::int64_t layer = 0; selection.layers.empty() && layer < std::ssize(all); ++layer) {
    if (all[size(layer)].recurrence && covered(layer)) selection_.layers.push_back(layer);
  }
}

LayerTrace::~LayerTrace() = default;

std::filesystem::path LayerTrace::file_of(std::int64_t layer) const {
  char name[32];
  std::snprintf(name, sizeof name, "layer_%02lld.h5", static_cast<long long>(layer));
  return folder_ / name;
}

double LayerTrace::bytes() const {
  const double real = backend_.precision() == Precision::fp32 ? 4 : 8;
  const auto tokens = static_cast<double>(tokens_.ids.size());
  const auto samples = static_cast<double>(tokens_.sequences * ((tokens_.length + chunk_tokens_ - 1) / chunk_tokens_));
  double sum = 0;
  for (const std::int64_t layer : selection_.layers) {
    const RecurrenceShape& shape = *model_.layers()[size(layer)].recurrence;
    const auto width = static_cast<double>(shape.heads * shape.head_dim);
    const auto w = static_cast<double>(shape.groups * shape.state_dim);
    const auto decay = static_cast<double>(shape.heads * shape.decay_dim());
    const double state = width * static_cast<double>(shape.state_dim);
    sum += 8 * tokens * ((selection_.u ? width : 0) + (selection_.w ? w : 0) + (selection_.decay ? decay : 0));
    if (selection_.y) sum += real * tokens * width;
    if (selection_.state) sum += real * samples * state;
    for (const Policy& policy : policies_) {
      if (!policy.covers(layer)) continue;
      if (selection_.y) sum += 2 * real * tokens * width;
      if (!selection_.state) continue;
      const Replay schedule = policy.as_replay();
      const auto stored = [&](const Format& f) {
        if (!has_codes(f)) return real * state;
        return static_cast<double>(f.state_code_bytes(shape.heads, shape.head_dim, shape.state_dim) +
                                   f.state_scale_bytes(shape.heads, shape.head_dim, shape.state_dim));
      };
      sum += 2 * samples * (real * state + stored(schedule.anchor) + (schedule.read ? stored(*schedule.read) : 0));
    }
  }
  return sum;
}

void LayerTrace::start_layer(const LayerChunk& chunk) {
  std::filesystem::remove(file_of(chunk.layer));  // of a run that was ended in this layer
  const LayerInfo& info = model_.layers()[size(chunk.layer)];
  const RecurrenceShape shape = *info.recurrence;
  layer_.reset(new Layer{chunk.layer, shape, backend_.precision() == Precision::fp32,
                         backend_.recurrence_precision() == Precision::fp32, chunk.policy, chunk.policy,
                         TraceWriter(file_of(chunk.layer).string())});
  for (std::size_t i = chunk.policy; i < policies_.size(); ++i) {
    if (policies_[i].covers(chunk.layer)) layer_->last_policy = i;
  }
  layer_->file.attribute(layer_group(chunk.layer), "kind", info.kind);
  const auto make = [&](bool wanted, const char* name, const TraceShape& row, const char* dims) {
    if (!wanted) return;
    const std::string text = std::string(name) + " of S <- S decay + u w^T, in binary64 from the layer's inputs";
    layer_->file.appendable(layer_->at(name), TraceType::float64, row, {"1", text});
    layer_->file.attribute(layer_->at(name), "dims", std::string(dims));
  };
  make(selection_.u, "u", {shape.heads, shape.head_dim}, "token, head, head_dim");
  make(selection_.w, "w", {shape.groups, shape.state_dim}, "token, group, state_dim");
  make(selection_.decay, "decay", {shape.heads, shape.decay_dim()}, "token, head, decay_dim");
  if (selection_.y) layer_->make_readouts(layer_->at("y"), "y = S c of the reference");
  if (selection_.state) layer_->make_states(layer_->at("state"), "S of the reference at the end of each chunk");
}

void LayerTrace::start_policy(const LayerChunk& chunk) {
  const Policy& policy = policies_[chunk.policy];
  const Replay schedule = policy.as_replay();
  const std::string group = policy_group(chunk.layer, chunk.policy);
  layer_->file.attribute(group, "policy", policy.text());
  for (const std::string run : {"local", "propagated"}) {
    const std::string text = ", " + run + " run";
    if (selection_.y) layer_->make_readouts(group + "/y_" + run, "y = S c" + text);
    if (!selection_.state) continue;
    layer_->make_states(group + "/state_" + run, "S that a flush would rebuild" + text);
    layer_->make_stored(group + "/checkpoint_" + run, schedule.anchor, "stored checkpoint or anchor" + text);
    if (schedule.read) layer_->make_stored(group + "/read_copy_" + run, *schedule.read, "what outputs read" + text);
  }
}

void LayerTrace::add_reference(const LayerChunk& chunk) {
  Layer& layer = *layer_;
  const RecurrenceShape& shape = layer.shape;
  if (chunk.first_token == 0) layer.runs.assign(size(shape.heads), HeadRun(shape));
  if (selection_.u || selection_.w || selection_.decay) {
    const std::int64_t T = chunk.y_reference.rows, H = shape.heads, G = shape.groups, P = shape.head_dim,
                       N = shape.state_dim, D = shape.decay_dim();
    std::vector<double> u(size(T * H * P)), w(size(T * G * N)), decay(size(T * H * D));
    parallel_for(H, threads_, [&](std::int64_t h) {
      const PreparedHead<double> prepared(raw_head(backend_, chunk.call, h));
      const HeadInputs<double>& in = prepared.head();
      const std::int64_t group = shape.group(h);
      const bool first_of_group = h == 0 || shape.group(h - 1) != group;
      for (std::int64_t t = 0; t < T; ++t) {
        if (selection_.u) layer.runs[size(h)].step(in, t, u.data() + (t * H + h) * P);
        if (first_of_group) std::copy_n(in.w[t], N, w.data() + (t * G + group) * N);
        for (std::int64_t d = 0; d < D; ++d) decay[size((t * H + h) * D + d)] = std::exp(in.log_decay[t][d]);
      }
    });
    if (selection_.u) layer.file.append(layer.at("u"), u);
    if (selection_.w) layer.file.append(layer.at("w"), w);
    if (selection_.decay) layer.file.append(layer.at("decay"), decay);
  }
  if (selection_.y) layer.add(layer.at("y"), host(chunk.y_reference));
  if (selection_.state) layer.add(layer.at("state"), chunk.reference.effective());
}

void LayerTrace::add_run(const std::string& run, const LayerChunk& chunk, const Tensor& y, RecurrentState& state) {
  const std::string group = policy_group(chunk.layer, chunk.policy);
  const Replay schedule = policies_[chunk.policy].as_replay();
  if (selection_.y) layer_->add(group + "/y_" + run, host(y));
  if (!selection_.state) return;
  layer_->add(group + "/state_" + run, state.effective());
  layer_->add_stored(group + "/checkpoint_" + run, schedule.anchor, state.checkpoint());
  if (schedule.read) layer_->add_stored(group + "/read_copy_" + run, *schedule.read, state.read_copy());
}

std::vector<double> LayerTrace::host(const Tensor& x) const {
  std::vector<double> out(size(x.rows * x.columns));
  backend_.read(x, out.data());
  return out;
}

void LayerTrace::observe(const LayerChunk& chunk) {
  if (std::ranges::find(selection_.layers, chunk.layer) == selection_.layers.end()) return;
  if (!layer_) start_layer(chunk);
  if (chunk.first_token == 0 && chunk.sequence == 0) start_policy(chunk);
  if (chunk.policy == layer_->first_policy) add_reference(chunk);
  add_run("local", chunk, chunk.y_local, chunk.local);
  add_run("propagated", chunk, chunk.y_propagated, chunk.propagated);
  if (chunk.policy == layer_->last_policy) layer_->file.flush();
}

void LayerTrace::finish_layer(std::int64_t layer) {
  if (!layer_ || layer_->layer != layer) return;
  layer_->file.finish();
  layer_.reset();
}

void LayerTrace::copy_to(TraceWriter& file) const {
  for (const std::int64_t layer : selection_.layers) file.copy(file_of(layer).string(), layer_group(layer));
}

}  // namespace replayssm
