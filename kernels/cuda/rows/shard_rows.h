// What happens to rows whose vocabulary is computed in segments, by one rank or several: labels become those
// of a segment's entries, what all segments know of a row is put together, and so are their parts of dX.
//
// All pointers are device memory. Functions enqueue on `stream` and return at once; an error is the launch's.
// Nothing here is launched while the kernel before it runs: streams that wait for each other lie in between.
#ifndef LOSSD_KERNELS_CUDA_ROWS_SHARD_ROWS_H_
#define LOSSD_KERNELS_CUDA_ROWS_SHARD_ROWS_H_

#include <cstdint>

#include "kernels/cuda/memory/result.h"
#include "kernels/cuda/rows/row_kernels.h"
#include "kernels/data_type.h"
#include "kernels/segment_tree.h"
#include "kernels/shard.h"

namespace lossd::kernels::cuda {

// Labels of the whole vocabulary as TileRows and the product for dX want them, [rows] each.
struct PlacedLabels {
  int32_t* labels = nullptr;       // from the first entry of this rank, or of one of its segments
  int32_t* weight_rows = nullptr;  // the same, or 0 where the label is another's, whose c is then 0
  int32_t* places = nullptr;       // 0, 1, 2, ...
};
Result PlaceLabels(const int32_t* labels, int32_t rows, int64_t first_entry, int64_t vocab,
                   const PlacedLabels& out, cudaStream_t stream);

// This rank's segments without those that have no entries. Arrays of a segment begin `stride` elements of
// four bytes behind those of the one before.
struct OwnSegments {
  int32_t count = 0;
  int64_t borders[kFixedSegments + 1] = {};  // [count + 1], from this rank's first entry
  int32_t stride = 0;
};
// Makes of what PlaceLabels and PrepareRows have written for all of this rank's entries, which lies where
// that of the first segment will, what they would have written for each segment.
Result SplitRows(const TileRows& tile, const OwnSegments& segments, const PlacedLabels& labels,
                 cudaStream_t stream);

// Whose statistics MergeRows puts together, and for whom.
struct MergedSegments {
  int32_t segments = 0;          // of all ranks
  SegmentBits with_entries = 0;  // the others have none
  SegmentBits own = 0;           // this rank's, of those with entries
  int32_t stride = 0;            // between the arrays of these, as above; positive
  SegmentBits sums = 0;          // the additions of kSegmentTree over all segments
};
// From the statistics of all segments [segments, rows]: v and the smoothing's factors for the E of each of
// this rank's, c of the rows whose label is one of its entries and 0 of the others, and where the tile has
// losses also these and the returns. `tile` is of the first of them. A row that has overflowed in any segment
// has in all of them. Every rank that has the same statistics comes to the same numbers: sums are added in
// the order of segment_tree.h.
Result MergeRows(const TileRows& tile, const ShardStatistics* statistics, const MergedSegments& segments,
                 cudaStream_t stream);

// What segments have of dX of the tile's rows.
struct InputGradientParts {
  int32_t segments = 0;
  const float* of[kFixedSegments] = {};  // [rows, hidden] each; null: it is in that of a segment before it
  SegmentBits sums = 0;                  // the additions of kSegmentTree to be made
};
// Makes additions, and puts the parts of `unsummed`, those segments that are left, one behind the other into
// out, which may be where the first part is.
Result AddParts(const TileRows& tile, const InputGradientParts& parts, SegmentBits unsummed, float* out,
                cudaStream_t stream);
// Makes the last additions, and puts the sum into out [*, hidden] of out_type at batch_rows.
Result AddInputGradients(const TileRows& tile, const InputGradientParts& parts, DataType out_type, void* out,
                         cudaStream_t stream);

Result LoadShardKernels();

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_ROWS_SHARD_ROWS_H_
