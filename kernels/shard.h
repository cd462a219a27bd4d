// A vocabulary over ranks: which of its entries each of them computes, and in which order what they find is
// added up.
#ifndef LOSSD_KERNELS_SHARD_H_
#define LOSSD_KERNELS_SHARD_H_

#include <array>
#include <cstdint>
#include <span>

namespace lossd::kernels {

namespace collectives {
class Communicator;
}  // namespace collectives
class ExchangeObserver;

// In how many pieces sums over the vocabulary are made. Pieces are added in one binary tree of neighbours,
// ((0 + 1) + (2 + 3)) + ..., whoever computed them.
enum class Segments {
  kOfRanks,  // one of each rank: the fastest
  kFixed,    // kFixedSegments, however many ranks there are: results then have the same bits for all numbers
};
inline constexpr int32_t kFixedSegments = 8;
inline constexpr int32_t kMostRanks = kFixedSegments;

// What one rank has of a vocabulary.
struct Shard {
  int64_t vocab = 0;  // entries of the whole vocabulary
  Segments division = Segments::kOfRanks;
  // [segments + 1], ascending, from 0 to vocab; a segment may be empty.
  std::span<const int64_t> borders = {};
  // [ranks + 1], ascending, from 0 to the number of segments: rank r has segments [r] to [r + 1].
  std::span<const int32_t> first_segments = {};
  int32_t rank = 0;
  int32_t answering_rank = 0;                         // gets losses, returns and dX
  collectives::Communicator* communicator = nullptr;  // of the ranks; null if there is one
  ExchangeObserver* observer = nullptr;               // of what goes over it; may be null

  int32_t segments() const { return static_cast<int32_t>(borders.size()) - 1; }
  int32_t ranks() const { return static_cast<int32_t>(first_segments.size()) - 1; }
  int32_t first_segment(int32_t of_rank) const { return first_segments[static_cast<size_t>(of_rank)]; }
  int64_t border(int32_t segment) const { return borders[static_cast<size_t>(segment)]; }
  int64_t entries(int32_t segment) const { return border(segment + 1) - border(segment); }
  int64_t first() const { return border(first_segment(rank)); }
  int64_t end() const { return border(first_segment(rank + 1)); }
  bool answers() const { return rank == answering_rank; }
};

// How a vocabulary lies over ranks. The border of a shard is always that of a fixed segment, so that heads
// may have batches of either kind.
class ShardLayout {
 public:
  // ranks in [1, kMostRanks], and no more than `vocab`: every rank then has an entry.
  ShardLayout(int64_t vocab, int32_t ranks);

  int64_t vocab() const { return fixed_borders_.back(); }
  int32_t ranks() const { return ranks_; }
  // Entries [first(r), first(r + 1)) are rank r's.
  int64_t first(int32_t rank) const { return rank_borders_[static_cast<size_t>(rank)]; }
  int64_t rows(int32_t rank) const { return first(rank + 1) - first(rank); }

  // What a rank has; it points into this layout.
  Shard ShardOf(int32_t rank, Segments segments, collectives::Communicator* communicator) const;

 private:
  int32_t ranks_;
  std::array<int64_t, kFixedSegments + 1> fixed_borders_;
  std::array<int32_t, kMostRanks + 1> first_fixed_segments_;
  std::array<int64_t, kMostRanks + 1> rank_borders_;
  std::array<int32_t, kMostRanks + 1> first_rank_segments_;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_SHARD_H_
