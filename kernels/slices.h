// The rows of a shard over the replicas of a head: which of them each replica steps.
#ifndef LOSSD_KERNELS_SLICES_H_
#define LOSSD_KERNELS_SLICES_H_

#include <algorithm>
#include <array>
#include <cstdint>

namespace lossd::kernels {

// Rows [first, first + count).
struct RowSpan {
  int64_t first = 0;
  int64_t count = 0;

  int64_t end() const { return first + count; }
  bool operator==(const RowSpan&) const = default;
};

// There are as many slices as replicas. Slice i is summed by replica i, its owner, and stepped by it and by
// the next one, which mirrors it: no state is lost with one replica. One replica alone mirrors nothing.
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

  bool HasMirrors() const { return replicas_ > 1; }
  int32_t MirrorOf(int32_t slice) const { return (slice + 1) % replicas_; }
  // The slice that this replica mirrors. Only where there are mirrors.
  int32_t MirroredBy(int32_t replica) const { return (replica + replicas_ - 1) % replicas_; }
  bool Steps(int32_t replica, int32_t slice) const { return replica == slice || replica == MirrorOf(slice); }

 private:
  // The `part`th of `parts` parts that differ by one row at most.
  static RowSpan Between(int64_t first, int64_t count, int32_t part, int32_t parts) {
    const int64_t begin = count * part / parts;
    return {first + begin, count * (part + 1) / parts - begin};
  }

  int64_t rows_;
  int32_t replicas_;
};

// The rows that a replica steps, and where each of them is in its memory, which has no others: its own slice
// comes first, the one that it mirrors next. One replica alone has every row in its place.
class SteppedRows {
 public:
  struct Part {
    RowSpan rows;
    int64_t place = 0;  // of the first one
  };

  SteppedRows(const SliceLayout& layout, int32_t replica)
      : own_(layout.Slice(replica)),
        mirrored_(layout.HasMirrors() ? layout.Slice(layout.MirroredBy(replica)) : RowSpan()) {}

  const RowSpan& own() const { return own_; }
  const RowSpan& mirrored() const { return mirrored_; }  // none where there are no mirrors
  int64_t count() const { return own_.count + mirrored_.count; }

  // What is stepped here of `rows`, in each slice.
  std::array<Part, 2> PartsOf(const RowSpan& rows) const {
    return {PartOf(rows, own_, 0), PartOf(rows, mirrored_, own_.count)};
  }
  // The row is one that is stepped here.
  int64_t PlaceOf(int64_t row) const {
    const bool in_own = row >= own_.first && row < own_.end();
    return in_own ? row - own_.first : own_.count + row - mirrored_.first;
  }
  bool HasAll(const RowSpan& rows) const {
    const std::array<Part, 2> parts = PartsOf(rows);
    return parts[0].rows.count + parts[1].rows.count == rows.count;
  }

 private:
  static Part PartOf(const RowSpan& rows, const RowSpan& slice, int64_t place) {
    const int64_t first = std::max(rows.first, slice.first);
    const int64_t end = std::min(rows.end(), slice.end());
    if (end <= first) return {{rows.first, 0}, 0};
    return {{first, end - first}, place + first - slice.first};
  }

  RowSpan own_;
  RowSpan mirrored_;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_SLICES_H_
