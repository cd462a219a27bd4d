// The returns that need whole rows (rows/row_returns.h) of a vocabulary in segments: what each segment finds
// of a row goes to all ranks, and the one that answers writes what they make of it.
#ifndef LOSSD_KERNELS_CUDA_SHARD_RETURNS_H_
#define LOSSD_KERNELS_CUDA_SHARD_RETURNS_H_

#include <cstdint>
#include <span>

#include "kernels/cuda/memory/result.h"
#include "kernels/cuda/rows/row_kernels.h"
#include "kernels/cuda/segment_part.h"
#include "kernels/linear_cross_entropy.h"
#include "kernels/shard.h"

namespace lossd::kernels::cuda {

class ShardStreams;  // sharded_step.h

class ShardReturns {
 public:
  // Rows that are worked on at once, at most, and the memory that takes, the same on all ranks.
  static constexpr int64_t kMostRows = 1024;
  static int64_t Bytes(const Shard& shard, int64_t rows);

  // `wanted` is the batch's, on every rank; `memory` is of Bytes, 8-byte aligned. `streams` may be null where
  // there is one rank. All outlive this.
  ShardReturns(const Shard& shard, ShardStreams* streams, const RowReturns& wanted, void* memory)
      : shard_(shard), streams_(streams), wanted_(wanted), memory_(memory) {}

  // Tells of rows `first` to `first` + `rows` of the tile, at most kMostRows, whose logits the parts have:
  // one part of each of this rank's segments. `tile` has the returns, or none where another rank answers. All
  // ranks call it for the same rows.
  Result Tell(const TileRows& tile, std::span<const SegmentPart> parts, int32_t first, int32_t rows,
              cudaStream_t stream) const;

 private:
  const Shard& shard_;
  ShardStreams* const streams_;
  const RowReturns& wanted_;
  void* const memory_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_SHARD_RETURNS_H_
