// How the CPU step divides its workspace between the segments of a tile.
#ifndef LOSSD_KERNELS_CPU_TILE_MEMORY_H_
#define LOSSD_KERNELS_CPU_TILE_MEMORY_H_

#include <cstdint>
#include <span>

#include "kernels/cpu/arithmetic.h"
#include "kernels/cpu/row_order.h"
#include "kernels/cpu/segments/logit_sums.h"
#include "kernels/cpu/segments/row_sums.h"
#include "kernels/cpu/segments/soft_sums.h"
#include "kernels/cpu/soft_tile.h"
#include "kernels/cpu/workspace.h"
#include "kernels/linear_cross_entropy.h"
#include "kernels/segment_tree.h"

namespace lossd::kernels::cpu {

// Rows of dX that travel between ranks at once.
inline constexpr int64_t kExchangeRows = 128;

struct TileSize {
  int64_t rows = 0;
  int64_t hidden = 0;
  Arithmetic arithmetic = Arithmetic::kSimd;
  RowRecord record = RowRecord::kFull;  // with a teacher always that
  const TeacherSize* teacher = nullptr;
  int64_t threads = 1;  // that have scratch
};

// What segments and ranks tell each other.
struct ExchangeSize {
  int32_t segments = 0;          // of all ranks; 0: there is one rank
  int64_t staged_row_bytes = 0;  // of whole logits: what one row has of them
};
struct ExchangeMemory {
  RowSums* sums = nullptr;        // [segments, rows]
  SoftSums* soft_sums = nullptr;  // [segments, rows]; with a teacher
  TopEntry* top = nullptr;        // [segments, rows, as many as are wanted]
  float* label_logits = nullptr;  // [ranks, rows]
  int64_t dx_rows = 0;
  float* dx = nullptr;  // [segments - 1, dx_rows, hidden]
  // Logits want none of the other sums but these.
  LogitSums* logit_sums = nullptr;  // [segments, rows]
  char* staged = nullptr;           // [rows, staged_row_bytes]
};

struct TileMemory {
  PerSegment<Workspace> segments;  // those of this rank; they share hidden states and scratch
  PerSegment<SoftTile> soft;       // with a teacher; they share row states too
  ExchangeMemory exchange;
};

// Lays out a workspace at `base`, which may be null to learn the size only. `entries`: of each segment of
// this rank. Returns its bytes, or INT64_MAX if they do not fit.
int64_t LayOut(const TileSize& size, std::span<const int64_t> entries, const ExchangeSize& exchange,
               void* base, TileMemory* memory);

// The tile by which all ranks of a shard divide a batch: `size` with the rows and threads that fit `bytes`, 0
// rows if none do. All processors get scratch, or as many as take half of what one row with one thread
// leaves.
TileSize LargestTile(int64_t bytes, TileSize size, const Shard& shard, int64_t staged_row_bytes = 0);
// Bytes in which the largest tile has size.rows, and room for one row of whole logits. One row takes the
// least that a step works with, on any number of processors.
int64_t WorkspaceBytes(const TileSize& size, const Shard& shard);
int64_t StagedRowBytes(const Shard& shard);

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_TILE_MEMORY_H_
