// A segment of the vocabulary: a head of its own as far as products go, whose entries begin at 0.
#ifndef LOSSD_KERNELS_CPU_SEGMENTS_SEGMENT_H_
#define LOSSD_KERNELS_CPU_SEGMENTS_SEGMENT_H_

#include <cstdint>
#include <optional>

#include "kernels/cpu/arithmetic.h"
#include "kernels/cpu/library_products.h"
#include "kernels/cpu/products.h"
#include "kernels/cpu/segments/segment_step.h"
#include "kernels/cpu/segments/vocabulary.h"
#include "kernels/cpu/simd_products.h"
#include "kernels/cpu/soft_targets.h"
#include "kernels/cpu/tile_memory.h"
#include "kernels/linear_cross_entropy.h"

namespace lossd::kernels::cpu {

// It refers to itself and is not copied.
class Segment {
 public:
  Segment() = default;
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Becomes entries [first, first + entries) of the whole vocabulary, the parameters' own entries being those
  // from `shard_first` on.
  void Set(const LinearCrossEntropyParams& params, int64_t first, int64_t entries, int64_t shard_first);
  // The products of a tile, which outlives them.
  void BindProducts(Arithmetic arithmetic, const Workspace& tile);
  // With them the step; `soft` is used if there is a teacher.
  void BindStep(Arithmetic arithmetic, const Workspace& tile, const SoftTile& soft);

  int64_t first() const { return first_; }
  const LinearCrossEntropyParams& params() const { return params_; }
  const Workspace& tile() const { return *tile_; }
  Products& products() { return *products_; }
  const SoftTargets& soft() const { return *soft_; }
  SegmentStep& step() { return *step_; }
  const SegmentStep& step() const { return *step_; }

 private:
  int64_t first_ = 0;
  LinearCrossEntropyParams params_;
  Teacher teacher_;
  WeightMatrix weight_;
  const Workspace* tile_ = nullptr;
  std::optional<SimdProducts> simd_;
  std::optional<LibraryProducts> library_;
  Products* products_ = nullptr;  // one of the two
  std::optional<SoftTargets> soft_;
  std::optional<SegmentStep> step_;
};

// Those of this rank.
class LocalSegments {
 public:
  LocalSegments(const LinearCrossEntropyParams& params, const Vocabulary& vocabulary);

  std::span<Segment> all() { return std::span(segments_).first(count_); }
  // How many entries each has.
  std::span<const int64_t> entries() const { return std::span(entries_).first(count_); }

 private:
  PerSegment<Segment> segments_;
  PerSegment<int64_t> entries_{};
  size_t count_ = 0;
};

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_SEGMENTS_SEGMENT_H_
