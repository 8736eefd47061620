#pragma once

// How the fast kernel cuts a step into tiles, and how it lays out shared memory.

#include <algorithm>
#include <cstdint>
#include <span>

#include "core/format.h"
#include "cuda/decode.h"

namespace replayssm::cuda {

/// What the layout depends on besides the step.
struct Footprint {
  bool operator==(const Footprint&) const = default;

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
/// What Prepare leaves in a brief, in floats. gates [heads, gate_stride]: e^G (KDA: 1, its decays are in the vectors);
/// dt or beta; D (0 in the delta rule); unused; e^{g_{j+1} + ... + g_h} of record j (times dt_j in Mamba-2; KDA: 1);
/// and, for each vector that outputs multiply the state with, that times w_j . vector (KDA: with the decays inside the
/// product). Each list has `slots` places, of which number `held` is the token at hand. vectors [vectors, state_dim]:
/// see prepare.cuh; or the parts of those that outputs multiply the state with.
struct Geometry {
  int tile = 0;          ///< state rows (head, p) of a tile: part of a head, or several heads of a group
  int tiles = 0;         ///< of a sequence
  int run = 1;           ///< tiles that share a brief,
  int flush_run = 1;     ///< and of a row that flushes; divides run
  int flush_weight = 1;  ///< of a row that flushes against another, when blocks are shared out
  int piece = 0;         ///< rows of the checkpoint or anchor that a flush takes at once
  int heads = 0;         ///< heads in a tile, at least 1
  int head_rows = 0;     ///< rows of a head in a tile
  int slots = 0, gate_stride = 0;
  Divisor by_tiles, by_head_dim, by_group;  ///< the numbers of tiles, of rows of a head, and of heads in a group
  int turns = 0;                            ///< batches of outputs in a tile, negative
  int stages = 0, stage_bytes = 0, briefs = 0, brief_bytes = 0;
  int scale = 0, ring = 0, x = 0, out = 0;  ///< in a stage, behind the states
  int ring_w = 0, ring_gain = 0, ring_log = 0, raw = 0, raw_gates = 0,
      raw_decays = 0;                                                   ///< in a brief: what Prepare reads,
  int gram = 0, gates = 0, vectors = 0, parts = 0, part_factors = 0;    ///< and what it leaves
  int triangles = 0;                                                    ///< for closed loops
  int order_rows = 0;                                                   ///< rows that are put in order, or 0
  int brief = 0, order = 0, counts = 0, barriers = 0, assignments = 0;  ///< in a block, behind the stages,
  int progress = 0, position = 0;
  int w = 0, keys = 0, products = 0;  ///< what the workers arrange for flushes without matrix products
  int shared_bytes = 0;               ///< 0: no layout fits
};

/// Heads in a run, so that a warp has a lane for each.
inline constexpr int kMostHeads = 32;
/// Rows of a step that are put in order: of more, the last ones matter less and their list more.
inline constexpr int kMostOrdered = 2048;
/// The longest ring.
inline constexpr int kMostLength = 64;
/// Stages of a block, and briefs.
inline constexpr int kMostStages = 4, kMostBriefs = 3;
inline constexpr int kAssignmentBytes = 32, kProgressBytes = 128, kPositionBytes = 32, kRawGatesBytes = 20;
/// Between the rows of ring_w.
inline constexpr int kRowGap = 16;
/// Parts of a triangle, of 32 times 16 bytes, and the bytes of one with what lies behind it.
inline constexpr int kTriangleParts = 3, kTriangleBytes = kTriangleParts * 512 + 64;
/// Rows that the warps of a block rebuild at once.
inline constexpr int kFlushRows = 64;
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
  // Measured: runs of flushes should be short where memory does not limit them; and where it does, flushes are best
  // spread over the whole step, half as many blocks again as they would keep busy beginning with them. Else they go
  // first, on all blocks.
  const bool solve = f.delta && f.split, eager = step.length == 1;
  const bool pairs = run % 2 == 0 && (2 * tile % P == 0 || P % (2 * tile) == 0);
  if (solve || (eager && f.anchor_bytes == 4)) {
    g.flush_run = 1;
  } else {
    g.flush_run = (f.anchor_bytes == 2 || f.delta) && f.anchor_bytes < 4 && pairs ? 2 : run;
  }
  constexpr int kAllFirst = 1 << 20;
  if (f.split) {
    g.flush_weight = !solve && f.read_bytes == 2 ? 24 : kAllFirst;
  } else {
    g.flush_weight = f.anchor_bytes == 4 ? 4 : f.anchor_bytes == 2 ? 5 : kAllFirst;
  }
  const int run_heads = std::max(1, run * tile / P), outputs = output_vectors(f.delta, f.split);
  g.slots = static_cast<int>((step.length + 3) / 4 * 4);
  g.gate_stride = 4 + (1 + outputs) * g.slots;
  const int state = tile * N * f.read_bytes;
  g.piece = tile;
  if (f.split) {
    // Rows of one head: as many as the buffer of the read copy holds, or all warps take at once.
    const int most = std::max(state, kFlushRows * N * f.anchor_bytes);
    for (g.piece = g.head_rows; g.piece > 16 && (g.head_rows % g.piece != 0 || g.piece * N * f.anchor_bytes > most);) {
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
  g.out = take(tile * (f.y_bytes + f.append_bytes));
  g.stage_bytes = (at + 127) / 128 * 128;

  at = 0;
  // Matrix products take records 16 at a time, in Mamba-2 with the token at hand.
  const int rows_of_w = f.matrices ? (records + (f.delta ? 15 : 16)) / 16 * 16 : records;
  g.ring_w = take(rows_of_w * (N * f.w_bytes + kRowGap));
  g.ring_gain = take(!f.delta || f.split ? run_heads * records * 4 : 0);
  g.ring_log = take(f.delta ? (f.column_decay ? N : run_heads) * records * 4 : 0);
  g.raw = take(N * f.vector_bytes);
  g.raw_gates = take(run_heads * kRawGatesBytes);
  g.raw_decays = take(f.column_decay ? N * f.gate_bytes : 0);
  g.gates = take(run_heads * g.gate_stride * 4);
  // Flushes read vectors, outputs their parts, but for those of KDA. Columns that are read side by side begin in
  // different banks.
  const int vectors = (f.column_decay ? outputs + 4 : f.delta ? outputs : 2) * N * 4;
  const int parts = outputs * f.parts * (N * 2 + 16);
  g.vectors = take(f.column_decay ? vectors : std::max(vectors, parts));
  g.parts = f.column_decay ? take(parts) : g.vectors;
  g.part_factors = take(16);
  g.gram = take(outputs * g.slots * 4 + N * 2);
  const int flush_heads = std::max(1, g.flush_run * tile / P);
  g.triangles = take(solve && !f.column_decay ? flush_heads * kTriangleBytes : 0);
  g.brief_bytes = (at + 127) / 128 * 128;

  at = 0;
  g.counts = take(128);
  g.progress = take(kProgressBytes);
  g.position = take(kPositionBytes);
  g.barriers = take((2 * kMostStages + 4 * kMostBriefs + 1 + kPieceBarriers) * 8);
  g.assignments = take((kMostBriefs + kMostStages) * kAssignmentBytes);
  const bool arranged = step.length > 1 && !f.matrices, columns = solve && f.column_decay;
  g.w = take(arranged ? (records + 1) * N * 4 : 0);  // the token at hand may be in it
  g.keys = take(columns ? (records + 1) * N * 4 : 0);
  g.products = take(columns ? static_cast<int>(step.length * step.length) * 4 : 0);
  g.order = at;
  // What there should be room for, from the best: a brief in use and two in the making, and the list of rows in order.
  // Of stages two at least, so that one is fetched while the other is read. What fits at all must not depend on how
  // many rows there are.
  const int order_rows = step.rows > kMostOrdered ? 0 : static_cast<int>(step.rows);
  struct Room {
    int stages;
    bool order;
    int briefs;
  };
  static constexpr Room kRooms[] = {{2, true, 3}, {2, true, 2}, {2, false, 2}, {1, true, 2}, {1, false, 2}};
  // Measured: an eager step of 16 bits gains from a third stage more than from a third brief.
  static constexpr Room kEagerRooms[] = {{3, true, 3}, {3, true, 2}, {2, true, 3},
                                         {2, true, 2}, {1, true, 2}, {1, false, 2}};
  std::span<const Room> rooms(kRooms);
  if (eager && f.read_bytes == 2 && !f.split) rooms = kEagerRooms;
  for (auto room = rooms.begin(); room != rooms.end() && g.stages == 0; ++room) {
    g.order_rows = room->order ? order_rows : 0;
    // Rows that are not put in order flush in runs of any length.
    if (solve && g.order_rows == 0 && g.run != g.flush_run) continue;
    g.briefs = room->briefs;
    const int block = at + g.order_rows * 8 + g.briefs * g.brief_bytes;
    const int stages = std::min(kMostStages, (shared_limit - block) / g.stage_bytes);
    if (stages >= room->stages) g.stages = stages;
  }
  if (g.stages < 1) return {};
  g.brief = g.stages * g.stage_bytes;
  const int block = g.brief + g.briefs * g.brief_bytes;
  for (int* offset :
       {&g.order, &g.counts, &g.progress, &g.position, &g.w, &g.keys, &g.products, &g.barriers, &g.assignments}) {
    *offset += block;
  }
  g.shared_bytes = g.order + g.order_rows * 8;
  return g;
}

/// Runs that a block should get at least, and rounds of single tiles at the end of a step.
inline constexpr int kRunsABlock = 6, kLastRounds = 2;

/// The largest tile, up to 40 KiB of state, that leaves room for two stages and three briefs. `blocks`: those that run
/// at a time; shared_limit: bytes that one may have.
inline Geometry plan(const Step& step, const Footprint& f, int blocks, int shared_limit) {
  const std::int64_t P = step.shape.head_dim, group_rows = step.shape.heads / step.shape.groups * P;
  const std::int64_t all_rows = step.shape.heads * P * step.rows;
  const int row_bytes = static_cast<int>(step.shape.state_dim) * f.read_bytes;
  // Stages that are worth more than long runs: measured.
  const int enough = step.length == 1 ? kMostStages : 2;
  Geometry best;
  double best_score = 0;
  for (int tile = 16; tile <= group_rows && (tile == 16 || tile * row_bytes <= 40 * 1024); tile += 16) {
    const bool part = P % tile == 0, whole = tile % P == 0 && group_rows % tile == 0 && !f.column_decay;
    if ((!part && !whole) || tile / P > kMostHeads) continue;
    const std::int64_t group_tiles = (f.column_decay ? P : group_rows) / tile;
    Geometry g = lay_out(step, f, tile, 1, shared_limit);
    if (g.shared_bytes == 0) continue;
    // Runs of up to 128 KiB, as long as every block still gets several and they cost neither a stage that is
    // needed nor the order.
    for (int run = 2; run <= std::min<std::int64_t>(group_tiles, kMostHeads); ++run) {
      const int rows = run * tile;
      if (group_tiles % run != 0 || (rows % P != 0 && P % rows != 0) || rows / P > kMostHeads) continue;
      if (all_rows / rows < kRunsABlock * blocks || rows * row_bytes > 128 * 1024) break;
      const Geometry longer = lay_out(step, f, tile, run, shared_limit);
      if (longer.stages >= std::min(g.stages, enough) && longer.order_rows >= g.order_rows) g = longer;
    }
    // Warps wait for each other at flushes, which take kFlushRows rows at once; fewer than two stages leave nothing in
    // flight while one is read, fewer than three briefs leave little time to prepare; without an order the long
    // flushes of split states are not spread; tiles that are too few leave blocks idle.
    double score = static_cast<double>(tile) * tile / ((tile + kFlushRows - 1) / kFlushRows * kFlushRows);
    if (g.stages < 2) score *= f.delta && f.split ? 0.6 : 0.25;
    if (g.briefs < 3) score *= 0.9;
    if (f.split && g.order_rows == 0 && step.rows <= kMostOrdered) score *= 0.5;
    const double full = static_cast<double>(all_rows) / tile / blocks;
    if (full < 1) score *= full;
    if (score >= best_score) best = g, best_score = score;
  }
  return best;
}

}  // namespace replayssm::cuda
