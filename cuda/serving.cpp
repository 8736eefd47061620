#include "cuda/serving.h"

#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "cuda/generic.h"

namespace replayssm::cuda {
namespace {

constexpr std::pair<const char*, Storage> kStorages[] = {{"fp32", Storage::fp32},
                                                         {"fp16", Storage::fp16},
                                                         {"bf16", Storage::bf16},
                                                         {"e4m3:row", Storage::e4m3_row},
                                                         {"int8:row", Storage::int8_row}};
constexpr std::pair<const char*, Scalar> kScalars[] = {
    {"fp32", Scalar::fp32}, {"fp16", Scalar::fp16}, {"bf16", Scalar::bf16}};

template <class Table>
auto find(const Table& table, const Format& format, const Policy& policy, const std::string& what) {
  std::string known;
  for (const auto& [text, type] : table) {
    if (parse_format(text) == format) return type;
    known += (known.empty() ? "" : ", ") + std::string(text);
  }
  fail("policy '", policy.text(), "': the kernels keep ", what, " in one of ", known, ", found ", format.text());
}

Scalar ring_type(const Policy& policy, const Replay& replay, const std::string& field) {
  const Format format = replay.ring.of(field);
  return format.exact() ? Scalar::fp32 : scalar_of(format, policy, "ring." + field);
}

}  // namespace

Serving serve(const RecurrenceShape& shape, const Policy& policy) {
  const Replay replay = policy.as_replay();
  const bool delta = is_delta_rule(shape.recurrence);
  const auto refuse = [&](const auto&... why) { fail("policy '", policy.text(), "': ", why...); };
  for (const std::int64_t dim : {shape.head_dim, shape.state_dim}) {
    if (dim > generic::kMaxDim) refuse("the kernels hold dimensions up to ", generic::kMaxDim, ", found ", dim);
  }
  if (policy.order == Order::sequential) refuse("the kernels know order=closed only");
  Serving out{.length = replay.length, .state = storage_of(replay.anchor, policy, "states"), .read = {}};
  if (replay.read) out.read = storage_of(*replay.read, policy, "read copies");
  if (replay.length == 1) return out;

  const std::vector<const char*> gates = delta ? std::vector{"g", "beta"} : std::vector{"dt"};
  for (const char* gate : gates) {
    const Format format = replay.ring.of(gate);
    if (!format.exact() && format != parse_format("fp32")) {
      refuse("the kernels keep ring.", gate, " in fp32, found ", format.text());
    }
  }
  out.v = ring_type(policy, replay, delta ? "v" : "x");
  out.w = ring_type(policy, replay, delta ? "k" : "B");
  if (delta) out.u = ring_type(policy, replay, "u");
  const bool rounds = out.v != Scalar::fp32 || out.u != Scalar::fp32 || out.w != Scalar::fp32;
  out.closed_loop = delta && policy.loop == Loop::closed && (out.read || rounds);
  return out;
}

Storage storage_of(const Format& format, const Policy& policy, const std::string& what) {
  return find(kStorages, format, policy, what);
}
Scalar scalar_of(const Format& format, const Policy& policy, const std::string& what) {
  return find(kScalars, format, policy, what);
}

Format stored_format(Storage type) { return parse_format(kStorages[static_cast<std::size_t>(type)].first); }
Format stored_format(Scalar type) { return parse_format(kScalars[static_cast<std::size_t>(type)].first); }

}  // namespace replayssm::cuda
