// Raw traces: codes that give a state back bit for bit, and files that hold what the study saw.

#include "analysis/layer_trace.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "analysis/layer_report.h"
#include "analysis/state_codes.h"
#include "core/tokens.h"
#include "tests/support/model_files.h"

namespace replayssm {
namespace {

std::vector<Format> all_formats() {
  std::vector<Format> formats;
  for (const Element& element : elements()) {
    if (!element.integer) formats.push_back({element, Scale::none});
    if (element.name == "fp32") continue;
    formats.push_back({element, Scale::row});
    formats.push_back({element, Scale::group, ScaleRule::amax, 5});
    formats.push_back({element, Scale::tile, ScaleRule::amax, 2});
    formats.push_back({element, Scale::head});
    formats.push_back(
        {.element = element, .scale = Scale::row, .cap = 0.75 * decode<double>(element, element.max_code)});
    formats.push_back({element, Scale::row, ScaleRule::ceil});
    formats.push_back({element, Scale::group, ScaleRule::floor, 4});
  }
  for (const NamedFormat& named : named_formats()) formats.push_back(named.format);
  return formats;
}

template <class Real>
bool same_values(const std::vector<Real>& a, const std::vector<Real>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(&a[i], &b[i], sizeof(Real)) != 0 && !(std::isnan(a[i]) && std::isnan(b[i]))) return false;
  }
  return true;
}

template <class Real>
class CodesOf : public testing::Test {};
using Reals = testing::Types<float, double>;
TYPED_TEST_SUITE(CodesOf, Reals);

TYPED_TEST(CodesOf, EveryFormatGivesItsRowsBack) {
  using Real = TypeParam;
  const std::int64_t heads = 500, rows = 2, n = 33;  // odd: the last code of an int4 row has a byte of its own
  std::mt19937 random(7);
  std::normal_distribution<double> normal;
  std::vector<Real> state;
  for (std::int64_t r = 0; r < heads * rows; ++r) {
    // Rows of every size that float has a scale for, down to where the scale itself is subnormal or underflows.
    const int exponent = static_cast<int>(random() % 280) - 155;
    for (std::int64_t i = 0; i < n; ++i) state.push_back(static_cast<Real>(std::ldexp(normal(random), exponent)));
  }
  std::fill_n(state.begin(), n, Real(0));
  state[20] = Real(-0.0);
  state[30] = std::numeric_limits<Real>::quiet_NaN();
  state[50] = -std::numeric_limits<Real>::infinity();
  for (const Format& format : all_formats()) {
    for (std::int64_t h = 0; h < heads; ++h) {
      const auto head = state.begin() + h * rows * n;
      std::vector<Real> rounded(head, head + rows * n), back(rounded.size());
      round_rows(format, rounded.data(), rows, n);
      const StoredRows stored = codes_of_rounded(format, rounded.data(), rows, n);
      EXPECT_EQ(stored.codes.size(), static_cast<std::size_t>(rows * format.code_bytes(n)));
      EXPECT_EQ(stored.scales.size(), static_cast<std::size_t>(format.scale_bytes(rows, n)));
      decode_rows(format, stored.codes.data(), stored.scales.data(), rows, n, back.data());
      EXPECT_TRUE(same_values(back, rounded)) << format.text();
    }
  }
}

TEST(CodesOf, WhatIsNotRoundedIsRefused) {
  const std::vector<double> row = {1, 1.0 / 3, -2, 0.1};
  for (const char* format :
       {"bf16", "e4m3:row", "int8:row", "int4:row", "mxfp4", "nvfp4", "int8:group2", "int8:head"}) {
    expect_error([&] { codes_of_rounded(parse_format(format), row.data(), 1, 4); }, {"row 0", format});
  }
  expect_error([&] { codes_of_rounded(parse_format("exact"), row.data(), 1, 4); }, {"exact"});
}

TEST(ParseTrace, ReadsItemsAndLayers) {
  const TraceSelection some = parse_trace("y,decay", "0-2+7");
  EXPECT_TRUE(some.y && some.decay && !some.u && !some.w && !some.state);
  EXPECT_EQ(some.layers, (std::vector<std::int64_t>{0, 1, 2, 7}));
  EXPECT_TRUE(parse_trace("u,w,decay,y,state", "").layers.empty());
  for (const char* items : {"", "x", "u,", ",u", "u w", "u,,w"}) {
    expect_error([&] { parse_trace(items, ""); }, {items, "expected u, w, decay, y or state"});
  }
  for (const char* layers : {"a", "3-1", "1,2", "0)", "-1", "0, loop=open"}) {
    expect_error([&] { parse_trace("u", layers); }, {"0-3+7", layers});
  }
}

struct Setup {
  const char* model;
  Precision precision;
};

class LayerTraceOf : public testing::TestWithParam<Setup> {
 protected:
  void SetUp() override { fs::create_directories(folder_); }
  void TearDown() override { fs::remove_all(folder_); }

  static Tokens two_sequences() {
    Tokens tokens{{}, 2, 21};
    for (int i = 0; i < 42; ++i) tokens.ids.push_back(i * i % 97);
    return tokens;
  }

  /// A study with a trace of everything, also given to `see` chunk by chunk.
  void run(const string& items, const std::function<void(const LayerChunk&)>& see = {}) {
    TraceSelection selection = parse_trace(items, "");
    LayerTrace trace(*model_, *backend_, tokens_, policies_, selection, 8, 2, folder_);
    StudyOptions options{.threads = 2, .chunk_tokens = 8};
    options.observe = [&](const LayerChunk& chunk) {
      if (see) see(chunk);
      trace.observe(chunk);
    };
    options.layer_done = [&](std::int64_t layer) { trace.finish_layer(layer); };
    const LayerStudy study = run_layer_study(*model_, *backend_, tokens_, policies_, options, true);
    RunFacts facts;
    facts.tokens = 21;
    facts.sequences = 2;
    write_layers(path_, *model_, facts, tokens_, study, &trace);
    bytes_ = trace.bytes();
  }
  std::vector<double> host(const Tensor& x) {
    std::vector<double> out(static_cast<std::size_t>(x.rows * x.columns));
    backend_->read(x, out.data());
    return out;
  }
  static double bytes_in(const TraceReader& file, const string& name) {
    std::int64_t count = 1;
    for (const std::int64_t dim : file.shape(name)) count *= dim;
    const TraceType type = file.type(name);
    const int width = type == TraceType::float64 ? 8 : type == TraceType::uint8 ? 1 : type == TraceType::uint16 ? 2 : 4;
    return static_cast<double>(count * width);
  }
  bool narrow() const { return GetParam().precision == Precision::fp32; }

  std::vector<double> read(const TraceReader& file, const string& name) const {
    if (file.type(name) == TraceType::float64) return file.read<double>(name).values;
    const auto values = file.read<float>(name).values;
    return {values.begin(), values.end()};
  }

  template <class Real>
  std::vector<double> decoded(const Format& format, const string& bytes, const string& scales,
                              const string& head_scales, std::int64_t rows, std::int64_t n) const {
    const auto heads = std::ssize(bytes) / (rows * format.code_bytes(n));
    const auto share = [&](const string& all, std::int64_t h) {
      const std::size_t size = all.size() / static_cast<std::size_t>(heads);
      return all.substr(static_cast<std::size_t>(h) * size, size);
    };
    std::vector<double> all;
    for (std::int64_t h = 0; h < heads; ++h) {
      std::vector<Real> out(static_cast<std::size_t>(rows * n));
      const string codes = share(bytes, h), of_head = share(head_scales, h) + share(scales, h);
      decode_rows(format, reinterpret_cast<const std::byte*>(codes.data()), of_head.data(), rows, n, out.data());
      all.insert(all.end(), out.begin(), out.end());
    }
    return all;
  }
  string bytes_of(const TraceReader& file, const string& name) const {
    const auto take = [](const auto& values) {
      return string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof values[0]);
    };
    switch (file.type(name)) {
      case TraceType::uint8:
        return take(file.read<std::uint8_t>(name).values);
      case TraceType::uint16:
        return take(file.read<std::uint16_t>(name).values);
      case TraceType::uint32:
        return take(file.read<std::uint32_t>(name).values);
      default:
        return take(file.read<float>(name).values);
    }
  }
  /// A dataset of codes in doubles, with nothing but what the file says about it.
  std::vector<double> read_codes(const TraceReader& file, const string& name, const RecurrenceShape& shape) const {
    if (file.type(name) == TraceType::float64 || file.type(name) == TraceType::float32) return read(file, name);
    const Format format = parse_format(std::get<string>(file.attribute(name, "format")));
    const auto named_by = [&](const char* attribute) {
      return bytes_of(file, std::get<string>(file.attribute(name, attribute)));
    };
    const string scales = format.scale == Scale::none ? "" : named_by("scales");
    const string head_scales = format.head_scale_width() == 0 ? "" : named_by("head_scales");
    EXPECT_EQ(file.attribute(name, "code_bits"), TraceAttribute(std::int64_t{format.element.storage_bits}));
    EXPECT_EQ(
        file.attribute(name, "block"),
        TraceAttribute(format.scale == Scale::none ? std::int64_t{0} : format.block(shape.head_dim, shape.state_dim)));
    if (format.scale != Scale::none) {
      EXPECT_EQ(file.attribute(name, "scale_format"), TraceAttribute(format.rule == ScaleRule::amax    ? "fp32"
                                                                     : format.rule == ScaleRule::nvfp4 ? "e4m3"
                                                                                                       : "e8m0"));
    }
    const auto decode = narrow() ? &LayerTraceOf::decoded<float> : &LayerTraceOf::decoded<double>;
    return (this->*decode)(format, bytes_of(file, name), scales, head_scales, shape.head_dim, shape.state_dim);
  }

  const fs::path folder_ = fs::path(testing::TempDir()) / ("layer_trace_" + std::to_string(getpid()));
  const string path_ = (folder_ / "run.h5").string();
  const std::unique_ptr<Model> model_ = Model::open(golden_folder(GetParam().model));
  const std::unique_ptr<Backend> backend_ = reference_backend(GetParam().precision, 2);
  const Tokens tokens_ = two_sequences();
  std::vector<Policy> policies_ = {parse_policy("eager(state=int4:row)"),
                                   parse_policy("replay(L=4, state=e4m3:row)"),
                                   parse_policy("replay(L=3, anchor=fp32, read=int8:row)"),
                                   parse_policy("replay(L=4, state=bf16, layers=0+2)"),
                                   parse_policy("replay(L=4, anchor=exact, read=e5m2)"),
                                   parse_policy("eager(state=nvfp4)"),
                                   parse_policy("replay(L=4, state=mxfp6_e3m2:ceil)"),
                                   parse_policy("replay(L=3, anchor=int16:group8, read=mxfp8_e4m3)"),
                                   parse_policy("replay(L=4, anchor=int8:tile3, read=e4m3:head)"),
                                   parse_policy("replay(L=3, anchor=int8:row:sr, read=mxfp4:rz)"),
                                   parse_policy("replay(L=4, anchor=custom(e=4,m=5), read=int8:row:hadamard)")};
  double bytes_ = 0;
};

TEST_P(LayerTraceOf, HoldsWhatTheStudySaw) {
  std::map<string, std::vector<double>> seen;
  const auto add = [&](const string& name, const std::vector<double>& values) {
    seen[name].insert(seen[name].end(), values.begin(), values.end());
  };
  run("u,w,decay,y,state", [&](const LayerChunk& c) {
    const string layer = "/layers/0" + std::to_string(c.layer) + "/";
    const string policy = layer + "policy_" + std::to_string(c.policy) + "/";
    if (c.policy == 0) {
      add(layer + "y", host(c.y_reference));
      add(layer + "state", c.reference.effective());
    }
    add(policy + "y_local", host(c.y_local));
    add(policy + "y_propagated", host(c.y_propagated));
    for (const string run : {"local", "propagated"}) {
      RecurrentState& state = run == "local" ? c.local : c.propagated;
      add(policy + "state_" + run, state.effective());
      add(policy + "checkpoint_" + run, state.checkpoint());
      if (policies_[c.policy].as_replay().read) add(policy + "read_copy_" + run, state.read_copy());
    }
  });
  const TraceReader file(path_);
  EXPECT_TRUE(file.complete());
  double bytes = 0;
  for (const auto& [name, values] : seen) {
    const RecurrenceShape& shape = *model_->layers()[static_cast<std::size_t>(name[9] - '0')].recurrence;
    EXPECT_TRUE(same_values(read_codes(file, name, shape), values)) << name;
    bytes += bytes_in(file, name);
    for (const char* scales : {"_scales", "_head_scales"}) {
      if (file.contains(name + scales)) bytes += bytes_in(file, name + scales);
    }
  }
  for (std::int64_t i = 0; i < std::ssize(model_->layers()); ++i) {
    const auto& shape = model_->layers()[static_cast<std::size_t>(i)].recurrence;
    const string layer = "/layers/0" + std::to_string(i) + "/";
    EXPECT_EQ(file.contains(layer + "y"), shape.has_value());
    if (!shape) continue;
    EXPECT_EQ(file.shape(layer + "u"), (TraceShape{42, shape->heads, shape->head_dim}));
    EXPECT_EQ(file.shape(layer + "w"), (TraceShape{42, shape->groups, shape->state_dim}));
    EXPECT_EQ(file.shape(layer + "decay"), (TraceShape{42, shape->heads, shape->decay_dim()}));
    EXPECT_EQ(file.shape(layer + "y"), (TraceShape{42, shape->heads, shape->head_dim}));
    EXPECT_EQ(file.shape(layer + "state"), (TraceShape{6, shape->heads, shape->head_dim, shape->state_dim}));
    bytes +=
        8.0 * 42 *
        static_cast<double>(shape->heads * (shape->head_dim + shape->decay_dim()) + shape->groups * shape->state_dim);
    EXPECT_EQ(std::get<string>(file.attribute(layer + "policy_0", "policy")), "eager(state=int4:row)");
  }
  EXPECT_EQ(bytes_, bytes);
}

// S <- S decay + u w^T from nothing but the file gives the states of the file.
TEST_P(LayerTraceOf, StepsRebuildTheStates) {
  run("u,w,decay,state");
  const TraceReader file(path_);
  for (std::int64_t i = 0; i < std::ssize(model_->layers()); ++i) {
    const auto& shape = model_->layers()[static_cast<std::size_t>(i)].recurrence;
    if (!shape) continue;
    const string layer = "/layers/0" + std::to_string(i) + "/";
    EXPECT_FALSE(file.contains(layer + "y"));
    const auto u = file.read<double>(layer + "u").values, w = file.read<double>(layer + "w").values,
               decay = file.read<double>(layer + "decay").values, states = read(file, layer + "state");
    const std::int64_t H = shape->heads, P = shape->head_dim, N = shape->state_dim, D = shape->decay_dim(),
                       G = shape->groups;
    double squares = 0, errors = 0;
    for (std::int64_t sequence = 0, sample = 0; sequence < 2; ++sequence) {
      std::vector<double> S(static_cast<std::size_t>(H * P * N), 0.0);
      for (std::int64_t t = 0; t < 21; ++t) {
        const std::int64_t row = sequence * 21 + t;
        for (std::int64_t h = 0; h < H; ++h) {
          for (std::int64_t p = 0; p < P; ++p) {
            for (std::int64_t n = 0; n < N; ++n) {
              double& s = S[static_cast<std::size_t>((h * P + p) * N + n)];
              s = s * decay[static_cast<std::size_t>((row * H + h) * D + (D > 1 ? n : 0))] +
                  u[static_cast<std::size_t>((row * H + h) * P + p)] *
                      w[static_cast<std::size_t>((row * G + shape->group(h)) * N + n)];
            }
          }
        }
        if ((t + 1) % 8 != 0 && t != 20) continue;
        for (std::size_t k = 0; k < S.size(); ++k) {
          const double reference = states[static_cast<std::size_t>(sample) * S.size() + k];
          squares += reference * reference;
          errors += (S[k] - reference) * (S[k] - reference);
        }
        ++sample;
      }
    }
    // Either side rounds each step's readout of N terms, decay, gain and update: under N + 40 roundings, exp and
    // softplus of a few ulps included, of the size of the state or of u w^T, whose row norms the states' own exceed by
    // 2^4 at most here; what one step has rounded decays later. 21 steps.
    const double roundoff = narrow() ? 0x1p-24 : 0x1p-53;
    EXPECT_LE(std::sqrt(errors / squares), 21 * static_cast<double>(N + 40) * 16 * roundoff) << layer;
    EXPECT_GT(squares, 0);
  }
}

TEST_P(LayerTraceOf, LayersThatCannotBeTracedAreRefused) {
  const auto make = [&](std::vector<std::int64_t> layers) {
    TraceSelection selection = parse_trace("y", "");
    selection.layers = std::move(layers);
    LayerTrace(*model_, *backend_, tokens_, policies_, selection, 8, 1, folder_);
  };
  make({0});
  expect_error([&] { make({0, 99}); }, {"no layer 99"});
  for (std::int64_t i = 0; i < std::ssize(model_->layers()); ++i) {
    if (!model_->layers()[static_cast<std::size_t>(i)].recurrence) {
      expect_error([&] { make({i}); }, {"layer " + std::to_string(i), "no recurrent state"});
    }
  }
  policies_ = {parse_policy("eager(state=bf16, layers=0)")};
  expect_error([&] { make({1}); }, {"no policy covers layer 1"});
}

INSTANTIATE_TEST_SUITE_P(Golden, LayerTraceOf,
                         testing::Values(Setup{"mamba2", Precision::fp64}, Setup{"mamba2", Precision::fp32},
                                         Setup{"qwen3_5", Precision::fp64}, Setup{"qwen3_5", Precision::fp32}),
                         [](const auto& setup) {
                           return string(setup.param.model) +
                                  (setup.param.precision == Precision::fp64 ? "_fp64" : "_fp32");
                         });

}  // namespace
}  // namespace replayssm
