#pragma once

// How the fast kernel cuts a step into tiles, and how it lays out shared memory.

#include <algorithm>
#include <cstdint>

#include "core/format.h"
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
  int y_bytes, append_bytes;  ///< of an element of y, and of what is appended to the ring beside it
  int vector_bytes;           ///< of an element of B and one of C, or k and q
  int gate_bytes;             ///< of an element of the raw gates, KDA
  bool matrices;              ///< flushes use matrix products: one decay a head, w in bf16
  int parts;                  ///< of a vector that outputs multiply the state with, 0: it is in fp32
};

/// Rows that a warp reads at once for outputs.
REPLAYSSM_HOST_DEVICE constexpr int rows_at_once(int read_bytes) { return read_bytes == 4 ? 8 : 32 / read_bytes; }

/// Vectors that outputs multiply the state with: c, and for the delta rule w, and w as the ring will hold it.
constexpr int output_vectors(bool delta, bool split) { return !delta ? 1 : split ? 3 : 2; }

/// Division of 0 <= n < 2^30 by a constant 0 < d < 2^30 (Granlund & Montgomery 1994, theorem 4.2, with 31 + l bits).
struct Divisor {
  std::uint32_t multiplier = 0, shift = 0;
  int d = 1;
  Divisor() = default;
  explicit Divisor(std::int64_t divisor) : d(static_cast<int>(divisor)) {
    while ((std::int64_t{1} << shift) < divisor) ++shift;
    multiplier = static_cast<std::uint32_t>(((std::uint64_t{1} << (31 + shift)) + divisor - 1) / divisor);
  }
  REPLAYSSM_HOST_DEVICE int quotient(int n) const {
    return static_cast<int>((std::uint64_t{static_cast<std::uint32_t>(n)} * multiplier) >> (31 + shift));
  }
};

/// How decode_kernel() cuts a step into tiles, and its shared memory; offsets are bytes. A block takes run after run of
/// tiles of a group (KDA: of a head) through two rings of buffers: `stages` of them hold a tile's states, its records'
/// x or u or v, and its x or v; `briefs` of them what the heads of a run share, worked out before the states come.
///
/// What Prepare leaves in a brief, in floats. gates [heads, gate_stride]: e^G (KDA: 1, its
/// decays are in the vectors); dt or beta; D (0 in the delta rule); the logarithm of the token's own decay (KDA: 0);
/// e^{g_{j+1} + ... + g_h} of record j (times dt_j in Mamba-2; KDA: 1); and, for each vector that outputs multiply the
/// state with, that times w_j . vector (KDA: with the decays inside the product). Each list has `slots` places, of
/// which number `held` is the token at hand. vectors [vectors, state_dim]: see prepare.cuh.
struct Geometry {
  int tile = 0;       ///< state rows (head, p) of a tile: part of a head, or several heads of a group
  int tiles = 0;      ///< of a sequence
  int run = 1;        ///< tiles that share a brief
  int run_heads = 0;  ///< heads in a run
  int piece = 0;      ///< rows of the checkpoint or anchor that a flush takes at once
  int heads = 0;      ///< heads in a tile, at least 1
  int head_rows = 0;  ///< rows of a head in a tile
  int slots = 0, gate_stride = 0, vector_count = 0;
  Divisor by_tiles, by_head_dim, by_group;  ///< the numbers of tiles, of rows of a head, and of heads in a group
  int turns = 0;                            ///< batches of outputs in a tile, negative
  int stages = 0, stage_bytes = 0, briefs = 0, brief_bytes = 0;
  int scale = 0, ring = 0, x = 0, out = 0, out_bytes = 0;  ///< in a stage, behind the states
  int ring_w = 0, ring_gain = 0, ring_log = 0, raw = 0, raw_gates = 0,
      raw_decays = 0;                                                   ///< in a brief: what Prepare reads,
  int gram = 0, gates = 0, vectors = 0, parts = 0, part_factors = 0;    ///< and what it leaves
  int order_rows = 0;                                                   ///< rows that are put in order, or 0
  int brief = 0, order = 0, counts = 0, barriers = 0, assignments = 0;  ///< in a block, behind the stages,
  int progress = 0, position = 0;
  int flush_bytes = 0, w = 0, keys = 0, products = 0;  ///< for flushes; flush_bytes: to their second places, or 0
  int shared_bytes = 0;                                ///< 0: no layout fits
};

/// Heads in a run, so that a warp has a lane for each.
inline constexpr int kMostHeads = 32;
/// Rows of a step that are put in order: of more, the last ones matter less and their list more.
inline constexpr int kMostOrdered = 2048;
/// The longest ring.
inline constexpr int kMostLength = 64;
/// Stages of a block, and briefs.
inline constexpr int kMostStages = 4, kMostBriefs = 4;
inline constexpr int kAssignmentBytes = 32, kProgressBytes = 128, kPositionBytes = 32, kRawGatesBytes = 20;
/// Barriers of pieces that warps of a flush fetch themselves.
inline constexpr int kPieceBarriers = 16;

/// Stages that fit into shared_limit bytes a block.
inline Geometry lay_out(const Step& step, const Footprint& f, int tile, int run, int shared_limit) {
  const int N = static_cast<int>(step.shape.state_dim), P = static_cast<int>(step.shape.head_dim);
  const auto records = static_cast<int>(step.length - 1);
  Geometry g;
  g.tile = tile;
  g.heads = std::max(1, tile / P);
  g.head_rows = std::min(tile, P);
  g.tiles = static_cast<int>(step.shape.heads * P / tile);
  g.by_tiles = Divisor(g.tiles);
  g.by_head_dim = Divisor(P);
  g.by_group = Divisor(step.shape.heads / step.shape.groups);
  g.turns = -(tile + rows_at_once(f.read_bytes) - 1) / rows_at_once(f.read_bytes);
  g.run = run;
  g.run_heads = std::max(1, run * tile / P);
  const int outputs = output_vectors(f.delta, f.split);
  g.slots = static_cast<int>((step.length + 3) / 4 * 4);
  g.gate_stride = 4 + (1 + outputs) * g.slots;
  g.vector_count = f.column_decay ? outputs + 4 : f.delta ? outputs : 2;
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
  g.ring = take(tile * records * std::max(f.ring_bytes, f.flush_ring_bytes));
  g.x = take(tile * f.x_bytes);
  g.out_bytes = tile * (f.y_bytes + f.append_bytes);
  g.out = take(2 * g.out_bytes);
  g.stage_bytes = (at + 127) / 128 * 128;

  at = 0;
  g.ring_w = take(records * N * f.w_bytes);
  g.ring_gain = take(!f.delta || f.split ? g.run_heads * records * 4 : 0);
  g.ring_log = take(f.delta ? (f.column_decay ? N : g.run_heads) * records * 4 : 0);
  g.raw = take(N * f.vector_bytes);
  g.raw_gates = take(g.run_heads * kRawGatesBytes);
  g.raw_decays = take(f.column_decay ? N * f.gate_bytes : 0);
  g.gates = take(g.run_heads * g.gate_stride * 4);
  g.vectors = take(g.vector_count * N * 4);
  // Columns that are read side by side begin in different banks.
  g.parts = take(outputs * f.parts * (N * 2 + 16));
  g.part_factors = take(16);
  g.gram = take(outputs * g.slots * 4 + N * 2);
  g.brief_bytes = (at + 127) / 128 * 128;

  at = 0;
  g.order_rows = step.rows > kMostOrdered ? 0 : static_cast<int>(step.rows);
  g.order = take(g.order_rows * 8);
  g.counts = take(128);
  g.progress = take(kProgressBytes);
  g.position = take(kPositionBytes);
  g.barriers = take((2 * kMostStages + 4 * kMostBriefs + 1 + kPieceBarriers) * 8);
  g.assignments = take((kMostBriefs + kMostStages) * kAssignmentBytes);
  // What flushes arrange; twice, if there is room: while slow warps are at one, others may begin the next.
  const int begin = at;
  g.w = take(f.matrices ? (records + 16) / 16 * 16 * N * 2 : (records + 1) * N * 4);  // the token at hand may be in it
  const bool solve = f.delta && f.split;
  g.keys = take(!solve           ? 0
                : f.matrices     ? (records + 15) / 16 * 16 * N * 2
                : f.column_decay ? (records + 1) * N * 4
                                 : 0);
  g.products = take(solve ? g.heads * static_cast<int>(step.length * (step.length + 1)) * 4 : 0);
  // As much as fits of: two stages, so that one is fetched while the other is read; flush arrays twice; and briefs, one
  // in use and two in the making.
  const int arrays = at - begin;
  for (const bool twice : {true, false}) {
    for (int briefs = 3; briefs >= 2 && g.stages < 2; --briefs) {
      g.flush_bytes = twice ? arrays : 0;
      g.briefs = briefs;
      g.stages = std::min(kMostStages, (shared_limit - at - g.flush_bytes - briefs * g.brief_bytes) / g.stage_bytes);
    }
  }
  if (g.stages < 1) return {};
  at += g.flush_bytes;
  g.brief = g.stages * g.stage_bytes;
  const int block = g.brief + g.briefs * g.brief_bytes;
  for (int* offset :
       {&g.order, &g.counts, &g.progress, &g.position, &g.w, &g.keys, &g.products, &g.barriers, &g.assignments}) {
    *offset += block;
  }
  g.shared_bytes = block + at;
  return g;
}

/// Runs that a block should get at least, and rounds of single tiles at the end of a step.
inline constexpr int kRunsABlock = 6, kLastRounds = 2;

/// The largest tile, up to 40 KiB of state, that the warps share evenly and that leaves room for more than one stage.
/// shared_limit: bytes that a block may have.
inline Geometry plan(const Step& step, const Footprint& f, int warps, int blocks, int shared_limit) {
  const std::int64_t P = step.shape.head_dim, group_rows = step.shape.heads / step.shape.groups * P;
  const std::int64_t all_rows = step.shape.heads * P * step.rows;
  const int row_bytes = static_cast<int>(step.shape.state_dim) * f.read_bytes;
  Geometry best;
  double best_score = 0;
  for (int tile = 16; tile <= group_rows && (tile == 16 || tile * row_bytes <= 40 * 1024); tile += 16) {
    const bool part = P % tile == 0, whole = tile % P == 0 && group_rows % tile == 0 && !f.column_decay;
    if ((!part && !whole) || tile / P > kMostHeads) continue;
    const std::int64_t group_tiles = (f.column_decay ? P : group_rows) / tile;
    Geometry g = lay_out(step, f, tile, 1, shared_limit);
    if (g.shared_bytes == 0) continue;
    // Runs of up to 128 KiB, as long as every block still gets several and they cost no stage.
    for (int run = 2; run <= std::min<std::int64_t>(group_tiles, kMostHeads); ++run) {
      const int rows = run * tile;
      if (group_tiles % run != 0 || (rows % P != 0 && P % rows != 0) || rows / P > kMostHeads) continue;
      if (all_rows / rows < kRunsABlock * blocks || rows * row_bytes > 128 * 1024) break;
      const Geometry longer = lay_out(step, f, tile, run, shared_limit);
      if (longer.stages >= g.stages) g = longer;
    }
    // Warps that cannot share the rows evenly wait for each other; fewer than two stages leave nothing in flight while
    // one is read; tiles that are too few leave blocks idle.
    const int batches = -g.turns, rounds = (batches + warps - 1) / warps;
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
