#pragma once

// Private to analysis: parts that several reports share; pulls in the JSON library.

#include <nlohmann/json.hpp>

#include "analysis/report.h"
#include "core/trace.h"

namespace replayssm {

using Json = nlohmann::ordered_json;

/// The head of every report: command, version, model, tokens, device, provenance.
Json run_json(const Model& model, const RunFacts& facts);

/// The figures of one policy, with its layers.
Json result_json(const PolicyResult& result);

/// The group /run: attributes that say what was run, and the tokens.
void write_run(TraceWriter& file, const Model& model, const RunFacts& facts, const Tokens& tokens);

/// The group /policies/K of policy K: figures of every token, `shape` [sequences, length], and errors of every layer.
void write_policy(TraceWriter& file, std::size_t k, const PolicyResult& result, const TraceShape& shape);

}  // namespace replayssm
