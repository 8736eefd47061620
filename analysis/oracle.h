#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "analysis/study.h"
#include "core/backend.h"
#include "core/model.h"
#include "core/policy.h"

namespace replayssm {

/// What an oracle computes and how far it goes.
struct OracleOptions {
  std::int64_t layer = 0;
  std::vector<std::int64_t> heads = {};      ///< ascending; empty: all
  int digits = 50;                           ///< decimal digits that are asked for, from 1
  int guard = 20;                            ///< digits carried beyond these, from 0
  std::vector<std::int64_t> lengths = {16};  ///< replay lengths L to measure, each in both orders
  std::int64_t state_every = 64;             ///< tokens between two looks at the states, a divisor of 64
  /// Policies whose states the backend advances too, all heads of the layer at once: where it leaves them to a device's
  /// kernels, what these make of them. Their formats may round.
  std::vector<Policy> on_backend = {};
  Format activations = parse_format("exact");  ///< to which the backend rounds each input of such a state, once
  int threads = 1;
  Progress progress = {};
};

/// The correct decimal digits of one schedule in one precision: -log10 of the relative L2 error, at most the digits
/// that the oracle was asked for (which is also what a value without any error gets), minus infinity where a value is
/// not finite. On the CPU nothing is rounded but arithmetic: every format of the policy is exact.
struct KeptDigits {
  Policy policy;
  Precision precision;
  bool on_backend;            ///< of OracleOptions::on_backend
  std::vector<double> y;      ///< of y = S c before D x, over head_dim: [tokens, heads]
  std::vector<double> state;  ///< of what a flush would rebuild, over the head's state, at the end of each block of
                              ///< `state_every` tokens: [blocks, heads]
};

struct OracleResult {
  LayerInfo layer;
  std::vector<std::int64_t> heads;
  std::int64_t tokens = 0;
  std::vector<std::int64_t> block_ends;  ///< the last token of each block, 0-based
  int working_digits = 0, check_digits = 0;
  std::string arithmetic;     ///< of the oracle, for people
  int oracles = 0;            ///< of every head, each on its own inputs (see run_oracle)
  double oracle_seconds = 0;  ///< that they took, with their check
  int confirmed = 0;          ///< digits to which the two runs of the oracle agree, everywhere
  std::vector<KeptDigits> runs;
};

/// The most digits, guard digits included, that this build's oracle can work with.
int max_oracle_digits();

/// A layer of the model by its number. Throws Error for one out of range or without a recurrence.
const LayerInfo& recurrent_layer(const Model& model, std::int64_t layer);

/// Measures how many digits of one layer's recurrence each schedule and precision keeps.
///
/// The model runs up to the layer in binary64 with an exact state. What the layer then feeds its recurrence - the raw
/// inputs of every token, A_log and dt_bias - enters the oracle exactly, which computes softplus, exponentials, norms
/// and the literal sequential recurrence of core/literal.h with digits + guard (at least 17) decimal digits. Against it
/// stand the eager state and replays of every length in both orders, in binary64 and in binary32, then the policies
/// that the backend runs. The binary32 runs take the same inputs rounded once to binary32, those of the backend inputs
/// rounded to `activations` (with A_log, dt_bias and the limits of dt in binary32), and each is measured against an
/// oracle that takes these rounded inputs too: what is measured is what comes after them.
///
/// The oracle checks itself: all of it is computed again with at least twice the digits asked for, and `confirmed` is
/// the least -log10 of the relative L2 difference of the two, over all y and states, at most working_digits.
/// Results do not depend on the number of threads, which share heads and rows.
/// Throws Error for a layer, a head, digits, a length or `state_every` out of range, a layer without a recurrence or
/// one that a policy of the backend does not cover, activations with a scale, a backend that is not fp64, no tokens or
/// an unknown one, an input that is not finite, for more digits than the build can work with, and what the backend
/// throws.
OracleResult run_oracle(const Model& model, Backend& backend, std::span<const std::int32_t> ids,
                        const OracleOptions& options);

}  // namespace replayssm
