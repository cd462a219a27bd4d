// The segments in which a step sees the vocabulary.
#ifndef LOSSD_KERNELS_CPU_SEGMENTS_VOCABULARY_H_
#define LOSSD_KERNELS_CPU_SEGMENTS_VOCABULARY_H_

#include <array>
#include <cstdint>

#include "kernels/shard.h"

namespace lossd::kernels::cpu {

// Those of a shard or, where there is none, a single one. It refers to itself and is not copied.
class Vocabulary {
 public:
  Vocabulary(const Shard* shard, int64_t vocab)
      : whole_{0, vocab},
        shard_(shard != nullptr ? *shard
                                : Shard{.vocab = vocab, .borders = whole_, .first_segments = kOneRank}) {}
  Vocabulary(const Vocabulary&) = delete;
  Vocabulary& operator=(const Vocabulary&) = delete;

  const Shard& shard() const { return shard_; }
  int64_t entries() const { return shard_.vocab; }
  bool is_alone() const { return shard_.ranks() == 1; }
  bool answers() const { return shard_.answers(); }

  // Segments are numbered over all ranks. This rank computes [first_segment(), end_segment()).
  int32_t segments() const { return shard_.segments(); }
  int32_t first_segment() const { return FirstSegment(shard_.rank); }
  int32_t end_segment() const { return FirstSegment(shard_.rank + 1); }
  int32_t FirstSegment(int32_t rank) const { return shard_.first_segments[static_cast<size_t>(rank)]; }
  int64_t FirstEntry(int32_t segment) const { return shard_.borders[static_cast<size_t>(segment)]; }
  int64_t Entries(int32_t segment) const { return FirstEntry(segment + 1) - FirstEntry(segment); }

  // The segment that has the entry, and the rank that has the segment.
  int32_t SegmentOf(int64_t entry) const {
    int32_t segment = 0;
    while (entry >= FirstEntry(segment + 1)) ++segment;
    return segment;
  }
  int32_t RankOf(int64_t entry) const {
    const int32_t segment = SegmentOf(entry);
    int32_t rank = 0;
    while (segment >= FirstSegment(rank + 1)) ++rank;
    return rank;
  }

 private:
  static constexpr std::array<int32_t, 2> kOneRank = {0, 1};

  const std::array<int64_t, 2> whole_;
  const Shard shard_;
};

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_SEGMENTS_VOCABULARY_H_
