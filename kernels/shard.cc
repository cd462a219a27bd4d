#include "kernels/shard.h"

#include <algorithm>

#include "kernels/rounding.h"

namespace lossd::kernels {
namespace {

// Borders of large vocabularies are multiples of this: tiles of the products on GPUs begin there anyway.
constexpr int64_t kBorderAlignment = 256;
constexpr int64_t kLeastAlignedVocab = 16 * kBorderAlignment;

int64_t FixedBorder(int64_t vocab, int32_t segment) {
  const int64_t border = CeilDivide(vocab * segment, kFixedSegments);
  return vocab < kLeastAlignedVocab ? border : std::min(vocab, RoundUp(border, kBorderAlignment));
}

}  // namespace

ShardLayout::ShardLayout(int64_t vocab, int32_t ranks) : ranks_(ranks) {
  for (int32_t i = 0; i <= kFixedSegments; ++i) {
    fixed_borders_[static_cast<size_t>(i)] = FixedBorder(vocab, i);
  }
  for (int32_t r = 0; r <= kMostRanks; ++r) {
    const auto at = static_cast<size_t>(r);
    first_fixed_segments_[at] = std::min(r, ranks) * kFixedSegments / ranks;
    rank_borders_[at] = fixed_borders_[static_cast<size_t>(first_fixed_segments_[at])];
    first_rank_segments_[at] = r;
  }
}

Shard ShardLayout::ShardOf(int32_t rank, Segments segments, collectives::Communicator* communicator) const {
  Shard shard{.vocab = vocab(), .division = segments, .rank = rank, .communicator = communicator};
  const auto borders = static_cast<size_t>(ranks_) + 1;
  if (segments == Segments::kFixed) {
    shard.borders = fixed_borders_;
    shard.first_segments = std::span(first_fixed_segments_).first(borders);
  } else {
    shard.borders = std::span(rank_borders_).first(borders);
    shard.first_segments = std::span(first_rank_segments_).first(borders);
  }
  return shard;
}

}  // namespace lossd::kernels
