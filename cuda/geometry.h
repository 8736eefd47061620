#pragma once

// How a fast decode kernel cuts its work and lays out shared memory.

#include <algorithm>
#include <cstdint>

#include "cuda/decode.h"

namespace replayssm::cuda {

/// Offsets are bytes from the start of a block's shared memory.
struct Geometry {
  int tile = 0;        ///< state rows (head, p) of a block
  int tiles = 0;       ///< blocks a sequence
  int piece = 0;       ///< rows of the checkpoint or anchor that a flush takes at once
  int heads = 0;       ///< heads in a tile, at least 1
  int head_rows = 0;   ///< rows of a head in a tile
  int scale = 0, ring = 0, w = 0, gates = 0, keys = 0, updates = 0, products = 0, raw_x = 0, raw_c = 0, raw_k = 0;
  int vectors = 0, total_decay = 0, log_decay = 0, gain = 0, coefficient = 0, gram = 0, weight = 0, barrier = 0;
  int shared_bytes = 0;  ///< 0: no layout fits
};

/// What the layout depends on besides the step.
struct Footprint {
  int read_bytes, anchor_bytes;  ///< of a stored element
  bool scaled;                   ///< the read copy or checkpoint has a scale a row
  bool delta, column_decay, split;
  int vectors;                   ///< that outputs multiply the state with
  int ring_bytes;                ///< of an element of the staged ring field, the larger of v and u where both may be
  int w_bytes, x_bytes, c_bytes;
  int batch;  ///< rows that a warp reads at once
};

inline Geometry lay_out(const Step& step, const Footprint& f, int tile) {
  const int N = static_cast<int>(step.shape.state_dim), P = static_cast<int>(step.shape.head_dim);
  const int L = static_cast<int>(step.length), records = L - 1;
  Geometry g;
  g.tile = tile;
  g.heads = std::max(1, tile / P);
  g.head_rows = std::min(tile, P);
  g.tiles = static_cast<int>(step.shape.heads * P / tile);
  const int state = tile * N * f.read_bytes;
  g.piece = tile;
  if (f.split) {
    // Rows of one head, as many as the buffer of the read copy holds.
    for (g.piece = g.head_rows; g.piece > 16 && (g.head_rows % g.piece != 0 || g.piece * N * f.anchor_bytes > state);) {
      g.piece -= 16;
    }
  }
  int at = std::max(state, g.piece * N * f.anchor_bytes);
  const auto take = [&at](int size) {
    const int offset = at;
    at += (size + 15) / 16 * 16;
    return offset;
  };
  g.scale = take(f.scaled ? tile * 4 : 0);
  g.ring = take(tile * records * f.ring_bytes);
  g.w = take(L * (N + 4) * 4);
  g.gates = take(f.column_decay ? L * N * 4 : 0);
  g.keys = take(f.column_decay && f.split ? L * (N + 4) * 4 : 0);
  g.updates = take(f.delta ? (f.split ? L * g.piece : tile) * 4 : 0);
  g.products = take(f.delta && f.split ? (L * L + L) * 4 : 0);
  g.raw_x = take(tile * f.x_bytes);
  g.raw_c = take(N * f.c_bytes);
  g.raw_k = take(N * f.c_bytes);
  g.vectors = take(3 * N * 4);
  g.total_decay = take(f.column_decay ? N * 4 : g.heads * 4);
  g.log_decay = take(g.heads * L * 4);
  g.gain = take(g.heads * L * 4);
  g.coefficient = take(g.heads * L * 4);
  g.gram = take(f.vectors * L * 4);
  g.weight = take(g.heads * f.vectors * L * 4);
  g.barrier = take(8);
  g.shared_bytes = at;
  return g;
}

/// The tile of the largest buffer up to 40 KiB, about 32 KiB; smaller ones where the card would not be full.
/// shared_limit: bytes of shared memory that a block may have.
inline Geometry plan(const Step& step, const Footprint& f, int multiprocessors, int shared_limit) {
  const std::int64_t P = step.shape.head_dim, group_rows = step.shape.heads / step.shape.groups * P;
  const std::int64_t all_rows = step.shape.heads * P * step.rows;
  const int row_bytes = static_cast<int>(step.shape.state_dim) * f.read_bytes;
  Geometry best;
  double best_score = 0;
  // A smaller tile beside a larger one that would leave room for fewer than four blocks on a multiprocessor.
  for (int tile = f.batch; tile <= group_rows && tile * row_bytes <= 40 * 1024; tile += f.batch) {
    const bool part = P % tile == 0, whole = tile % P == 0 && group_rows % tile == 0 && !f.column_decay;
    if (!part && !whole) continue;
    const Geometry g = lay_out(step, f, tile);
    if (g.shared_bytes > shared_limit) continue;
    // Bytes in flight, discounted where four warps cannot share the rows evenly or blocks are too few for the card.
    const int batches = (tile + f.batch - 1) / f.batch, rounds = (batches + 3) / 4;
    double score = static_cast<double>(tile) * batches / (4 * rounds);
    const std::int64_t blocks = all_rows / tile, wanted = 2LL * multiprocessors;
    if (g.shared_bytes > shared_limit / 4) score *= static_cast<double>(shared_limit / g.shared_bytes) / 4;
    if (blocks < wanted) score *= static_cast<double>(blocks) / static_cast<double>(wanted);
    if (score >= best_score) best = g, best_score = score;
  }
  return best;
}

}  // namespace replayssm::cuda
