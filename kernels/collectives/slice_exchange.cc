#include "kernels/collectives/slice_exchange.h"

#include <vector>

#include "kernels/rounding.h"

namespace lossd::kernels::collectives {

Result SliceExchange::Sum(const float* gradient, int32_t piece, int32_t pieces, float* sum, void* scratch,
                          void* stream) {
  LOSSD_COLLECTIVE_TRY(Give(gradient, piece, pieces, scratch, stream));
  return Add(gradient, piece, pieces, sum, scratch, stream);
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

Result SliceExchange::Add(const float* gradient, int32_t piece, int32_t pieces, float* sum,
                          const void* scratch, void* stream) {
  const auto [rows, before] = OwnPiece(piece, pieces);
  return replicas_.AddScattered(gradient + rows.first * columns_, rows.count * columns_, scratch,
                                sum + before * columns_, stream);
}

SliceExchange::PieceRows SliceExchange::OwnPiece(int32_t piece, int32_t pieces) const {
  const RowSpan rows = layout_.Piece(self(), piece, pieces);
  return {.rows = rows, .before = rows.first - layout_.Slice(self()).first};
}

Result SliceExchange::Send(const float* gradient, int32_t from, int32_t piece, int32_t pieces, void* scratch,
                           void* stream) {
  const auto bytes_of = [&](int32_t slice) {
    return layout_.Piece(slice, piece, pieces).count * columns_ * static_cast<int64_t>(sizeof(float));
  };
  std::vector<Communicator::Transfer> transfers(static_cast<size_t>(layout_.replicas()));
  if (self() != from) {
    Communicator::Transfer& comes = transfers[static_cast<size_t>(from)];
    comes.receive = scratch;
    comes.receive_bytes = bytes_of(self());
    return replicas_.Exchange(transfers, stream);
  }
  for (int32_t other = 0; other < layout_.replicas(); ++other) {
    if (other == from) continue;
    Communicator::Transfer& goes = transfers[static_cast<size_t>(other)];
    goes.send = gradient + layout_.Piece(other, piece, pieces).first * columns_;
    goes.send_bytes = bytes_of(other);
  }
  return replicas_.Exchange(transfers, stream);
}

int64_t SliceExchange::ScratchBytes(const SliceLayout& layout, int32_t replica, int64_t columns,
                                    int32_t pieces) {
  const int64_t rows = CeilDivide(layout.Slice(replica).count, pieces);
  return rows * columns * static_cast<int64_t>(sizeof(float)) * (layout.replicas() - 1);
}

Result SliceExchange::Gather(void* rows, int64_t entry_bytes, int32_t piece, int32_t pieces, void* stream) {
  const int64_t row_bytes = columns_ * entry_bytes;
  const auto at = [rows, row_bytes](const RowSpan& span) {
    return static_cast<char*>(rows) + span.first * row_bytes;
  };
  const RowSpan own = layout_.Piece(self(), piece, pieces);
  std::vector<Communicator::Transfer> transfers(static_cast<size_t>(layout_.replicas()));
  for (int32_t other = 0; other < layout_.replicas(); ++other) {
    if (other == self()) continue;
    const RowSpan theirs = layout_.Piece(other, piece, pieces);
    transfers[static_cast<size_t>(other)] = {.send = at(own),
                                             .send_bytes = own.count * row_bytes,
                                             .receive = at(theirs),
                                             .receive_bytes = theirs.count * row_bytes};
  }
  return replicas_.Exchange(transfers, stream);
}

}  // namespace lossd::kernels::collectives
