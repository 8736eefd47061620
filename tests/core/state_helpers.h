#pragma once

// What the tests of State share: recurrences by scalar, inputs made of tokens, and everything a state shows.

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "core/policy.h"
#include "core/state.h"
#include "tests/core/oracle.h"

namespace replayssm {

using oracle::Token;
using oracle::Wide;

template <Recurrence recurrence_, class Real_>
struct Kind {
  static constexpr Recurrence recurrence = recurrence_;
  using Real = Real_;
  static RecurrenceShape shape(std::int64_t p, std::int64_t n, std::int64_t heads = 1, std::int64_t groups = 1) {
    return {recurrence, heads, groups, p, n};
  }
};
using Kinds = testing::Types<Kind<Recurrence::mamba2, float>, Kind<Recurrence::mamba2, double>,
                             Kind<Recurrence::gated_delta, float>, Kind<Recurrence::gated_delta, double>,
                             Kind<Recurrence::kda, float>, Kind<Recurrence::kda, double>>;

/// Tokens [head][token].
template <class Real>
using Stream = std::vector<std::vector<Token<Real>>>;

template <class Real>
Stream<Real> RandomStream(const RecurrenceShape& shape, std::size_t tokens, unsigned seed = 1) {
  Stream<Real> stream;
  for (std::int64_t h = 0; h < shape.heads; ++h) {
    stream.push_back(oracle::random_tokens<Real>(shape, tokens, seed * 1000 + static_cast<unsigned>(h)));
  }
  return stream;
}

/// Tokens begin .. end - 1 of every head, as a state takes them.
template <class Real>
LayerInputs<Real> Inputs(const Stream<Real>& stream, std::size_t begin, std::size_t end) {
  LayerInputs<Real> out;
  out.tokens = static_cast<std::int64_t>(end - begin);
  for (const auto& tokens : stream) {
    std::vector<std::vector<Real>> fields(6);
    for (std::size_t t = begin; t < end; ++t) {
      const Token<Real>& x = tokens[t];
      const std::vector<Real>* rows[] = {&x.v, &x.w, &x.c, &x.g};
      for (std::size_t i = 0; i < 4; ++i) fields[i].insert(fields[i].end(), rows[i]->begin(), rows[i]->end());
      fields[4].push_back(x.gain);
      if (x.rate) fields[5] = {*x.rate};
    }
    const auto rows = [&](std::size_t i) {
      return Rows<Real>{fields[i].data(),
                        end == begin ? 0 : static_cast<std::int64_t>(fields[i].size() / (end - begin))};
    };
    out.heads.push_back({.v = rows(0),
                         .w = rows(1),
                         .c = rows(2),
                         .log_decay = rows(3),
                         .gain = rows(4),
                         .rate = fields[5].empty() ? nullptr : fields[5].data()});
    for (auto& field : fields) out.storage.push_back(std::move(field));
  }
  return out;
}

template <class Real>
Stream<Real> OneHead(std::vector<Token<Real>> tokens) {
  return {std::move(tokens)};
}

/// Advances every head by tokens begin .. end - 1; y [tokens, heads head_dim].
template <class Real>
std::vector<Real> Advance(State<Real>& state, const Stream<Real>& stream, std::size_t begin, std::size_t end) {
  const auto width = static_cast<std::size_t>(state.shape().heads * state.shape().head_dim);
  std::vector<Real> y((end - begin) * width);
  state.advance(Inputs(stream, begin, end), y.data());
  return y;
}

/// Whether two arrays hold the same values bit for bit, -0 apart from 0 and a NaN equal to itself.
template <class Real>
bool SameBits(const std::vector<Real>& a, const std::vector<Real>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(Real)) == 0);
}

/// Everything that a state shows, head by head.
template <class Real>
std::vector<Real> Shown(State<Real>& state, bool with_read_copy = true) {
  std::vector<Real> all;
  for (std::int64_t h = 0; h < state.shape().heads; ++h) {
    all.insert(all.end(), state.checkpoint(h).begin(), state.checkpoint(h).end());
    if (with_read_copy) all.insert(all.end(), state.read_copy(h).begin(), state.read_copy(h).end());
    const std::vector<Real> effective = state.effective(h);
    all.insert(all.end(), effective.begin(), effective.end());
  }
  return all;
}

inline bool operator==(const RangeEvents& a, const RangeEvents& b) {
  return a.overflows == b.overflows && a.first_overflow == b.first_overflow &&
         a.first_non_finite == b.first_non_finite && a.saturations == b.saturations;
}

/// Policies of every kind: eager, shared, split; both orders; both loops; exact and rounded rings and states.
inline std::vector<std::string> PoliciesOfEveryKind() {
  std::vector<std::string> all = {"exact",
                                  "eager(state=bf16)",
                                  "eager(state=int8:row)",
                                  "replay(L=1, read=bf16)",
                                  "eager(state=nvfp4)",
                                  "eager(state=mxfp4:ceil)",
                                  "replay(L=5, state=mxfp8_e4m3)",
                                  "replay(L=4, anchor=fp32, read=nvfp4, ring.u=mxint8, loop=open)",
                                  "eager(state=bf16:sr)",
                                  "replay(L=3, anchor=bf16:sr=8, read=e4m3:row:rz, ring=fp16:sr)",
                                  "replay(L=6, state=int8:row:hadamard)",
                                  "eager(state=int4:row:ef=int4)",
                                  "eager(state=int8:tensor:asym)",
                                  "replay(L=3, state=e4m3:tensor:hadamard:ef=(bf16:sr))",
                                  "replay(L=4, anchor=bf16:ef=e4m3, read=int4:tensor:ef=int4, order=sequential)"};
  for (const char* states :
       {"state=exact", "state=e4m3:row", "anchor=exact, read=bf16", "anchor=fp32, read=int4:row"}) {
    for (const char* ring : {"", ", ring=bf16", ", ring.u=bf16"}) {
      for (const char* rest : {"", ", order=sequential", ", loop=open", ", order=sequential, loop=open"}) {
        all.push_back(std::string("replay(L=7, ") + states + ring + rest + ")");
      }
    }
  }
  return all;
}

}  // namespace replayssm
