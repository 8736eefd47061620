#pragma once

// How the fast kernels cut a step into blocks, and how they lay out their workspace and shared memory.

#include <algorithm>
#include <cstdint>

#include "cuda/decode.h"

namespace replayssm::cuda {

/// What the layout depends on besides the step.
struct Footprint {
  int read_bytes, anchor_bytes;  ///< of a stored element
  bool scaled;                   ///< the read copy or checkpoint has a scale a row
  bool delta, column_decay, split;
  int ring_bytes;        ///< of an element of the ring field that outputs read,
  int flush_ring_bytes;  ///< and of that which flushes read
  int x_bytes, w_bytes;
  bool matrices;  ///< flushes use matrix products: one decay a head, w in bf16
  int batch;      ///< rows that a warp reads at once
};

/// Products of a step that prepare_kernel() leaves for decode_kernel() in the workspace, in floats.
///
/// gates [rows, heads, gate_stride]: e^G (KDA: 1, its decays are in the vectors), dt or beta, D (0 in the delta rule),
/// one unused; e^{g_{j+1} + ... + g_h} of
/// record j (times dt_j in Mamba-2); and, for each vector that outputs multiply the state with, that times w_j .
/// vector. Each list has `slots` places, the last in use being the token at hand. vectors [rows, groups (KDA: heads),
/// vectors, state_dim]: those vectors (see prepare.cuh). products [rows, heads, length (length + 2)], split delta rule,
/// flushing rows only: what feeds the records' u into each other, [length, length]; e^{g_0 + ... + g_i}; beta_i. A
/// counter of tiles that were handed out, and [rows] the rows in the order in which they are taken.
struct Workspace {
  int slots = 0, gate_stride = 0, vectors = 0;
  std::int64_t vector_offset = 0, product_offset = 0, counter_offset = 0, floats = 0;
};

/// Vectors that outputs multiply the state with: c, and for the delta rule w, and w as the ring will hold it.
constexpr int output_vectors(bool delta, bool split) { return !delta ? 1 : split ? 3 : 2; }

inline Workspace lay_out_workspace(const Step& step, bool delta, bool split) {
  const bool columns = has_column_decay(step.shape.recurrence);
  Workspace w;
  w.slots = static_cast<int>((step.length + 3) / 4 * 4);
  const int outputs = output_vectors(delta, split);
  w.gate_stride = 4 + (1 + outputs) * w.slots;
  w.vectors = columns ? outputs + 3 : delta ? outputs : 2;
  w.vector_offset = step.rows * step.shape.heads * w.gate_stride;
  w.product_offset =
      w.vector_offset + step.rows * (columns ? step.shape.heads : step.shape.groups) * w.vectors * step.shape.state_dim;
  w.counter_offset =
      w.product_offset + (delta && split ? step.rows * step.shape.heads * step.length * (step.length + 2) : 0);
  w.floats = w.counter_offset + 4 + step.rows;
  return w;
}

/// How decode_kernel() cuts a step into tiles, and its shared memory; offsets are bytes. A block takes tile after tile
/// through a ring of `stages` buffers, of which each holds a tile's states and all that goes with them.
struct Geometry {
  int tile = 0;       ///< state rows (head, p) of a tile: part of a head, or several heads of a group
  int tiles = 0;      ///< of a sequence
  int piece = 0;      ///< rows of the checkpoint or anchor that a flush takes at once
  int heads = 0;      ///< heads in a tile, at least 1
  int head_rows = 0;  ///< rows of a head in a tile
  int stages = 0, stage_bytes = 0;
  int scale = 0, ring = 0, ring_w = 0, gates = 0, vectors = 0, x = 0;  ///< in a stage, behind the states
  int w = 0, keys = 0, products = 0, barriers = 0, assignments = 0;    ///< in a block, behind the stages
  int shared_bytes = 0;                                                ///< 0: no layout fits
};

/// Barriers of pieces that warps of a flush fetch themselves.
inline constexpr int kPieceBarriers = 16;

/// Stages that fit into shared_limit bytes a block.
inline Geometry lay_out(const Step& step, const Footprint& f, const Workspace& w, int tile, int shared_limit) {
  const int N = static_cast<int>(step.shape.state_dim), P = static_cast<int>(step.shape.head_dim);
  const auto records = static_cast<int>(step.length - 1);
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
  const auto take = [&at](int size, int alignment = 16) {
    const int offset = at;
    at += (size + alignment - 1) / alignment * alignment;
    return offset;
  };
  g.scale = take(f.scaled ? tile * 4 : 0);
  // What outputs read of the ring, or what a flush reads: another field, perhaps, and w.
  const int flush_ring = tile * records * f.flush_ring_bytes;
  g.ring = take(std::max(tile * records * f.ring_bytes, flush_ring + records * N * f.w_bytes));
  g.ring_w = g.ring + flush_ring;
  g.gates = take(g.heads * w.gate_stride * 4);
  g.vectors = take(w.vectors * N * 4);
  g.x = take(tile * f.x_bytes);
  g.stage_bytes = (at + 127) / 128 * 128;

  at = 0;
  g.w = take(f.matrices ? (records + 15) / 16 * 16 * N * 2 : (records + 1) * N * 4);
  const bool solve = f.delta && f.split;
  g.keys = take(!solve           ? 0
                : f.matrices     ? (records + 15) / 16 * 16 * N * 2
                : f.column_decay ? (records + 1) * N * 4
                                 : 0);
  g.products = take(solve ? g.heads * static_cast<int>(step.length * (step.length + 2)) * 4 : 0);
  constexpr int kMost = 4;
  g.barriers = take((2 * kMost + 1 + kPieceBarriers) * 8);
  g.assignments = take(kMost * 16);
  g.stages = std::min(kMost, (shared_limit - at) / g.stage_bytes);
  if (g.stages < 1) return {};
  for (int* offset : {&g.w, &g.keys, &g.products, &g.barriers, &g.assignments}) *offset += g.stages * g.stage_bytes;
  g.shared_bytes = g.stages * g.stage_bytes + at;
  return g;
}

/// The tile that keeps most bytes in flight, up to 40 KiB of state. shared_limit: bytes that a block may have.
inline Geometry plan(const Step& step, const Footprint& f, const Workspace& w, int warps, int blocks,
                     int shared_limit) {
  const std::int64_t P = step.shape.head_dim, group_rows = step.shape.heads / step.shape.groups * P;
  const std::int64_t all_rows = step.shape.heads * P * step.rows;
  const int row_bytes = static_cast<int>(step.shape.state_dim) * f.read_bytes;
  Geometry best;
  double best_score = 0;
  for (int tile = 16; tile <= group_rows && (tile == 16 || tile * row_bytes <= 40 * 1024); tile += 16) {
    const bool part = P % tile == 0, whole = tile % P == 0 && group_rows % tile == 0 && !f.column_decay;
    if (!part && !whole) continue;
    const Geometry g = lay_out(step, f, w, tile, shared_limit);
    if (g.shared_bytes == 0) continue;
    // Warps that cannot share the rows evenly wait for each other; fewer than two stages leave nothing in flight while
    // one is read; tiles that are too few leave blocks idle.
    const int batches = (tile + f.batch - 1) / f.batch, rounds = (batches + warps - 1) / warps;
    double score = static_cast<double>(tile) * batches / (warps * rounds) *
                   (g.stages == 1   ? 0.5
                    : g.stages == 2 ? 1
                                    : 1.1);
    const double full = static_cast<double>(all_rows) / tile / blocks;
    if (full < 1) score *= full;
    if (score >= best_score) best = g, best_score = score;
  }
  return best;
}

}  // namespace replayssm::cuda
