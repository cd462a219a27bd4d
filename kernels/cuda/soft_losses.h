// The losses of a tile of rows with soft targets, and the entries of its logits' gradient. Whole logits of
// both heads, in fp32, are held of some of the tile's rows at a time.
#ifndef LOSSD_KERNELS_CUDA_SOFT_LOSSES_H_
#define LOSSD_KERNELS_CUDA_SOFT_LOSSES_H_

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/linear_cross_entropy.h"
#include "kernels/cuda/losses/soft_targets.h"
#include "kernels/cuda/memory/heads.h"
#include "kernels/cuda/memory/result.h"
#include "kernels/cuda/rows/tile_buffers.h"
#include "kernels/cuda/segment_part.h"
#include "kernels/cuda/step_observer.h"
#include "kernels/shard.h"

namespace lossd::kernels::cuda {

class ShardReturns;
class ShardStreams;

class SoftLosses {
 public:
  using Batch = LinearCrossEntropy::Batch;

  // Rows whose logits are held at once, of tiles that have more.
  static constexpr int64_t kLogitRows = 512;
  // As many rows as fit, in whole pieces of those if there are more.
  static constexpr int64_t InPieces(int64_t rows) {
    return rows > kLogitRows ? rows / kLogitRows * kLogitRows : rows;
  }

  // What it takes of a workspace, beside what every step has.
  struct Buffers {
    float* logits = nullptr;  // [logit rows, stride]
    float* teacher_logits = nullptr;
    char* teacher_x = nullptr;
    char* library = nullptr;  // cuBLAS's own; null where both paths are Hopper's
    RowArrays teacher_rows;
    char* pieces = nullptr;  // what segments find; null where there is one

    // `entries`: of each segment that there is to be room for. `shard`: null where there is one segment.
    void Take(std::span<const int64_t> entries, Path path, const TeacherShape& teacher, const Shard* shard,
              int64_t tile_rows, Divider* divider);
  };

  // How segments tell each other what they find. All outlive the losses.
  struct Exchange {
    const Shard* shard = nullptr;     // null: there is one segment
    ShardStreams* streams = nullptr;  // null: there is one rank
    const ShardReturns* returns = nullptr;
  };

  // `buffers` are those of `most_rows` rows; `library` is the learning head's.
  SoftLosses(Path path, int64_t most_rows, const Buffers& buffers, CublasLt* library,
             const Exchange& exchange)
      : path_(path),
        logit_rows_(LogitRowsOf(most_rows)),
        b_(buffers),
        library_(library),
        exchange_(exchange) {}

  // PrepareRows of both heads. The tile's labels are numbered from the rank's first entry.
  Result Prepare(const Batch& batch, const TileRows& tile, cudaStream_t stream) const;
  // Then everything of the tile, and the parts' entries where a gradient is wanted: one part of each of this
  // rank's segments, whose arrays have what PrepareRows has made, and whose labels are numbered from its
  // first entry. All ranks call it for the same rows.
  Result Run(const Batch& batch, const TileRows& tile, std::vector<SegmentPart> parts, cudaStream_t stream,
             const StepObserver& observer) const;

  // Has libraries load what their products of both heads' logits take, by running them over what the buffers
  // hold. `x`: the tile's; `shape`: the learning head's, which is one segment.
  Result LoadProducts(const HeadShape& shape, const void* x, const void* weight, const TeacherHead& teacher,
                      cudaStream_t stream) const;

 private:
  static constexpr int64_t LogitRowsOf(int64_t tile_rows) {
    return tile_rows < kLogitRows ? tile_rows : kLogitRows;
  }
  TileRows DescribeTeacher(const TeacherHead& teacher, const TileRows& tile) const;
  Result PrepareHead(const TileRows& tile, Path path, DataType hidden_type, const void* hidden_states,
                     cudaStream_t stream) const;
  float* TeacherLogitsOf(const SegmentPart& part) const {
    return b_.teacher_logits + (part.logits - b_.logits);
  }
  Result MultiplyHead(const TileRows& tile, Path path, CublasLt* library, int32_t first, int32_t rows,
                      float* logits, cudaStream_t stream) const;
  Result MultiplyTeacher(const TeacherHead& teacher, const SegmentPart& part, int32_t first, int32_t rows,
                         cudaStream_t stream) const;
  Result TellWholeRows(const TileRows& tile, std::span<const SegmentPart> parts, int32_t first, int32_t rows,
                       cudaStream_t stream) const;
  SoftTargets TargetsOf(const Batch& batch, const SegmentPart& part) const;
  Result FinishSegments(const Batch& batch, std::span<const SegmentPart> parts, int32_t first, int32_t rows,
                        cudaStream_t stream) const;

  const Path path_;
  const int64_t logit_rows_;
  const Buffers b_;
  CublasLt* const library_;
  const Exchange exchange_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_SOFT_LOSSES_H_
