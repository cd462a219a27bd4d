#include "kernels/cuda/shard_returns.h"

#include "kernels/cuda/rows/part_returns.h"
#include "kernels/cuda/sharded_step.h"

namespace lossd::kernels::cuda {

int64_t ShardReturns::Bytes(const Shard& shard, int64_t rows) {
  return RowPieces::Bytes(shard.segments(), rows, kMostTopK);
}

Result ShardReturns::Tell(const TileRows& tile, std::span<const SegmentPart> parts, int32_t first,
                          int32_t rows, cudaStream_t stream) const {
  const RowPieces pieces(memory_, shard_.segments(), rows, wanted_.top_k);
  const bool ranked = wanted_.target_rank != nullptr;
  const auto rows_of = [&](const SegmentPart& part) {
    return PartOfRows{first, part.logits, part.stride, part.number, shard_.first() + part.first};
  };
  if (ranked) {
    for (const SegmentPart& part : parts) {
      LOSSD_CUDA_PASS_ON(FindLabelLogits(part.tile, rows_of(part), pieces, stream));
    }
    LOSSD_CUDA_PASS_ON(GatherSegments(shard_, streams_, pieces.labels(), pieces.label_bytes(), stream));
  }
  for (const SegmentPart& part : parts) {
    LOSSD_CUDA_PASS_ON(FindRowParts(part.tile, rows_of(part), pieces, ranked, stream));
  }
  LOSSD_CUDA_PASS_ON(GatherSegments(shard_, streams_, pieces.pieces(), pieces.piece_bytes(), stream));
  return shard_.answers() ? TellRowParts(tile, first, pieces, stream) : Result();
}

}  // namespace lossd::kernels::cuda
