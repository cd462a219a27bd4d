// The rows of a shard over the replicas of a head: which of them each replica steps.
#ifndef LOSSD_KERNELS_SLICES_H_
#define LOSSD_KERNELS_SLICES_H_

#include <algorithm>
#include <cstdint>

namespace lossd::kernels {

// Rows [first, first + count).
struct RowSpan {
  int64_t first = 0;
  int64_t count = 0;

  int64_t end() const { return first + count; }
  bool operator==(const RowSpan&) const = default;

  // Whether all of `rows` are here; no rows are anywhere.
  bool Has(const RowSpan& rows) const {
    return rows.count == 0 || (rows.first >= first && rows.end() <= end());
  }
  // The rows that are in both.
  RowSpan Common(const RowSpan& other) const {
    const int64_t begin = std::max(first, other.first);
    return {begin, std::max<int64_t>(0, std::min(end(), other.end()) - begin)};
  }
};

// There are as many slices as replicas. Replica i sums and steps slice i, and nobody else does.
class SliceLayout {
 public:
  // rows at least 0, replicas at least 1. Where there are fewer rows than replicas some slices are empty.
  SliceLayout(int64_t rows, int32_t replicas) : rows_(rows), replicas_(replicas) {}

  int64_t rows() const { return rows_; }
  int32_t replicas() const { return replicas_; }

  RowSpan Slice(int32_t slice) const { return Between(0, rows_, slice, replicas_); }
  // The `piece`th of `pieces` of a slice: what goes through one step of a pipeline.
  RowSpan Piece(int32_t slice, int32_t piece, int32_t pieces) const {
    const RowSpan whole = Slice(slice);
    return Between(whole.first, whole.count, piece, pieces);
  }

 private:
  // The `part`th of `parts` parts that differ by one row at most.
  static RowSpan Between(int64_t first, int64_t count, int32_t part, int32_t parts) {
    const int64_t begin = count * part / parts;
    return {first + begin, count * (part + 1) / parts - begin};
  }

  int64_t rows_;
  int32_t replicas_;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_SLICES_H_
