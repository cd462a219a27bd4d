#include "kernels/collectives/slice_exchange.h"

#include <vector>

#include "kernels/rounding.h"

namespace lossd::kernels::collectives {
namespace {

using Transfer = Communicator::Transfer;

int64_t BytesOf(int64_t floats) { return floats * static_cast<int64_t>(sizeof(float)); }

}  // namespace

Result SliceExchange::Sum(const float* gradient, int32_t piece, int32_t pieces, const Sums& sums,
                          void* scratch, void* stream) {
  LOSSD_COLLECTIVE_TRY(Give(gradient, piece, pieces, scratch, stream));
  LOSSD_COLLECTIVE_TRY(Add(gradient, piece, pieces, sums, scratch, stream));
  return SendOn(piece, pieces, sums, stream);
}

Result SliceExchange::Give(const float* gradient, int32_t piece, int32_t pieces, void* scratch,
                           void* stream) {
  std::vector<const float*> parts;
  std::vector<int64_t> counts;
  for (int32_t slice = 0; slice < layout_.replicas(); ++slice) {
    const RowSpan rows = layout_.Piece(slice, piece, pieces);
    parts.push_back(gradient + rows.first * columns_);
    counts.push_back(rows.count * columns_);
  }
  return replicas_.ScatterV(parts, counts, scratch, stream);
}

Result SliceExchange::Add(const float* gradient, int32_t piece, int32_t pieces, const Sums& sums,
                          const void* scratch, void* stream) {
  const RowSpan rows = layout_.Piece(self(), piece, pieces);
  return replicas_.AddScattered(gradient + rows.first * columns_, rows.count * columns_, scratch,
                                sums.own + PlaceInSlice(self(), piece, pieces), stream);
}

Result SliceExchange::SendOn(int32_t piece, int32_t pieces, const Sums& sums, void* stream) {
  if (!layout_.HasMirrors()) return {};
  const int32_t mirrored = layout_.MirroredBy(self());
  const auto bytes = [&](int32_t slice) {
    return BytesOf(layout_.Piece(slice, piece, pieces).count * columns_);
  };
  std::vector<Transfer> onward(static_cast<size_t>(layout_.replicas()));
  Transfer& to_mirror = onward[static_cast<size_t>(layout_.MirrorOf(self()))];
  to_mirror.send = sums.own + PlaceInSlice(self(), piece, pieces);
  to_mirror.send_bytes = bytes(self());
  Transfer& from_owner = onward[static_cast<size_t>(mirrored)];  // the same of two replicas
  from_owner.receive = sums.mirrored + PlaceInSlice(mirrored, piece, pieces);
  from_owner.receive_bytes = bytes(mirrored);
  return replicas_.Exchange(onward, stream);
}

int64_t SliceExchange::PlaceInSlice(int32_t slice, int32_t piece, int32_t pieces) const {
  return (layout_.Piece(slice, piece, pieces).first - layout_.Slice(slice).first) * columns_;
}

int64_t SliceExchange::ScratchBytes(const SliceLayout& layout, int32_t replica, int64_t columns,
                                    int32_t pieces) {
  const int64_t rows = CeilDivide(layout.Slice(replica).count, pieces);
  return BytesOf(rows * columns) * (layout.replicas() - 1);
}

Result SliceExchange::Gather(void* weights, int64_t entry_bytes, int32_t piece, int32_t pieces,
                             void* stream) {
  const int64_t row_bytes = columns_ * entry_bytes;
  const auto at = [weights, row_bytes](const RowSpan& rows) {
    return static_cast<char*>(weights) + rows.first * row_bytes;
  };
  const RowSpan own = layout_.Piece(self(), piece, pieces);
  std::vector<Transfer> transfers(static_cast<size_t>(layout_.replicas()));
  for (int32_t other = 0; other < layout_.replicas(); ++other) {
    Transfer& with = transfers[static_cast<size_t>(other)];
    if (!layout_.Steps(other, self())) {
      with.send = at(own);
      with.send_bytes = own.count * row_bytes;
    }
    if (!layout_.Steps(self(), other)) {
      const RowSpan theirs = layout_.Piece(other, piece, pieces);
      with.receive = at(theirs);
      with.receive_bytes = theirs.count * row_bytes;
    }
  }
  return replicas_.Exchange(transfers, stream);
}

}  // namespace lossd::kernels::collectives
