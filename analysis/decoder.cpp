#include "analysis/decoder.h"

#include <algorithm>

namespace replayssm {

Decoder::Decoder(const Model& model, Backend& backend, const Policy& policy, const std::optional<Speculation>& room,
                 const StatePlace& place)
    : model_(model), backend_(backend), policy_(policy), caches_(model.layers().size()) {
  for (std::size_t i = 0; i < caches_.size(); ++i) {
    const auto& shape = model.layers()[i].recurrence;
    const Policy& own = policy.covers(static_cast<std::int64_t>(i)) ? policy : exact_policy();
    const StatePlace at{place.seed, place.slot, static_cast<std::uint32_t>(i)};
    if (room) caches_[i].conv_window.history = room->committed;
    if (!shape) continue;
    caches_[i].state =
        room ? backend.new_speculative_state(*shape, own, *room, at) : backend.new_state(*shape, own, at);
  }
}

Tensor Decoder::forward(std::span<const std::int32_t> ids) {
  Tensor x = model_.embed(backend_, ids);
  for (std::size_t i = 0; i < caches_.size(); ++i) {
    x = model_.forward(backend_, static_cast<std::int64_t>(i), x, caches_[i]);
  }
  return x;
}

std::vector<double> Decoder::logits(std::span<const std::int32_t> ids) {
  const Tensor all = model_.logits(backend_, model_.final_norm(backend_, forward(ids)));
  std::vector<double> out(static_cast<std::size_t>(all.rows * all.columns));
  backend_.read(all, out.data());
  return out;
}

void Decoder::fold() {
  for (std::size_t i = 0; i < caches_.size(); ++i) {
    if (caches_[i].state && policy_.covers(static_cast<std::int64_t>(i))) caches_[i].state->fold();
  }
}

std::int32_t greedy(std::span<const double> logits) {
  return static_cast<std::int32_t>(std::ranges::max_element(logits) - logits.begin());
}

}  // namespace replayssm
