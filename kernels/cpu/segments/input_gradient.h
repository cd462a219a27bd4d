// dX of a tile: what segments have of it is added up in their tree, over ranks too, and written where it is
// answered.
#ifndef LOSSD_KERNELS_CPU_SEGMENTS_INPUT_GRADIENT_H_
#define LOSSD_KERNELS_CPU_SEGMENTS_INPUT_GRADIENT_H_

#include <cstdint>
#include <span>

#include "kernels/cpu/products.h"
#include "kernels/cpu/segments/segment.h"
#include "kernels/cpu/segments/shard_exchange.h"
#include "kernels/cpu/segments/vocabulary.h"
#include "kernels/cpu/tile_memory.h"
#include "kernels/linear_cross_entropy.h"
#include "kernels/segment_tree.h"

namespace lossd::kernels::cpu {

class InputGradient {
 public:
  // All references outlive it. The rows' factors are known.
  InputGradient(const LinearCrossEntropyParams& params, const Vocabulary& vocabulary,
                std::span<Segment> segments, const ShardExchange& exchange, const TileMemory& memory);

  // Multiplies, adds and writes.
  Status Compute();

 private:
  // Where a row's part of each segment lies; null where it is not here or has gone into another.
  using Parts = PerSegment<float*>;

  // The segments whose parts a rank has left when it has made the sums that it can make by itself.
  SegmentBits UnsummedOf(int32_t rank) const;
  bool IsWithinOneRank(const SegmentSum& sum) const;
  Parts OwnParts(int64_t r) const;
  void Add(const SegmentSum& sum, const Parts& parts) const;
  void SumOwn(int64_t r, float* scratch) const;
  Status Exchange(Range rows) const;
  void PackUnsummed(Range rows) const;
  Parts AllParts(int64_t r, Range rows) const;
  void Write(int64_t r, float* dx) const;
  template <class Function>
  void ForEachRow(Range rows, const Function& function) const;

  const LinearCrossEntropyParams& params_;
  const Vocabulary& vocabulary_;
  const std::span<Segment> segments_;
  const ShardExchange& exchange_;
  const TileMemory& memory_;
  const Workspace& tile_;  // of the first segment
};

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_SEGMENTS_INPUT_GRADIENT_H_
