// The fields of RowReturns that need all logits of a row (row_returns.h), where each of these comes from a
// part of the vocabulary: what a part finds, and what is told when all parts' finds have come together.
//
// All pointers are device memory. Functions enqueue on `stream` and return at once; an error is the launch's.
#ifndef LOSSD_KERNELS_CUDA_ROWS_PART_RETURNS_H_
#define LOSSD_KERNELS_CUDA_ROWS_PART_RETURNS_H_

#include <cstdint>

#include "kernels/cuda/memory/result.h"
#include "kernels/cuda/rows/row_kernels.h"
#include "kernels/cuda/rows/row_parts.h"

namespace lossd::kernels::cuda {

// Where the parts' finds of some rows lie, in two arrays that are exchanged one after the other: first the
// labels' logits, then a piece of each part, its RowPart [rows] and after them its keys [rows, top_k].
class RowPieces {
 public:
  static constexpr int64_t Bytes(int32_t parts, int64_t rows, int32_t top_k) {
    return parts * (PieceBytes(rows, top_k) + LabelBytes(rows));
  }
  // `memory` is so many bytes, 8-byte aligned.
  RowPieces(void* memory, int32_t parts, int32_t rows, int32_t top_k)
      : pieces_(static_cast<char*>(memory)), parts_(parts), rows_(rows), top_k_(top_k) {}

  LOSSD_HOST_DEVICE static constexpr int64_t PieceBytes(int64_t rows, int32_t top_k) {
    return rows * (static_cast<int64_t>(sizeof(RowPart)) + top_k * static_cast<int64_t>(sizeof(Key)));
  }
  static constexpr int64_t LabelBytes(int64_t rows) { return rows * static_cast<int64_t>(sizeof(float)); }
  int64_t piece_bytes() const { return PieceBytes(rows_, top_k_); }
  int64_t label_bytes() const { return LabelBytes(rows_); }

  LOSSD_HOST_DEVICE int32_t parts() const { return parts_; }
  LOSSD_HOST_DEVICE int32_t rows() const { return rows_; }
  LOSSD_HOST_DEVICE int32_t top_k() const { return top_k_; }
  // What is exchanged of all parts.
  LOSSD_HOST_DEVICE char* pieces() const { return pieces_; }
  // s of the label [parts, rows]: -infinity in parts that do not have it.
  LOSSD_HOST_DEVICE float* labels() const { return reinterpret_cast<float*>(RowsOf(parts_)); }
  // [rows] of a part.
  LOSSD_HOST_DEVICE RowPart* RowsOf(int32_t part) const {
    return reinterpret_cast<RowPart*>(pieces_ + part * PieceBytes(rows_, top_k_));
  }
  // The part's [rows, top_k], best first; 0 where it has fewer entries.
  LOSSD_HOST_DEVICE Key* KeysOf(int32_t part) const { return reinterpret_cast<Key*>(RowsOf(part) + rows_); }
  // From a part's keys to the next one's.
  LOSSD_HOST_DEVICE int64_t KeyStride() const {
    return PieceBytes(rows_, top_k_) / static_cast<int64_t>(sizeof(Key));
  }

 private:
  char* pieces_;
  int32_t parts_;
  int32_t rows_;
  int32_t top_k_;
};
static_assert(sizeof(RowPart) % sizeof(Key) == 0);

// Some rows of a tile in one part of the vocabulary, whose entries alone the tile describes.
struct PartOfRows {
  int32_t first = 0;            // of the tile's rows
  const float* sums = nullptr;  // of the logits product [rows, stride], before bias, scale and softcap
  int64_t stride = 0;
  int32_t part = 0;
  int64_t first_entry = 0;  // of the part, in the whole vocabulary
};

// The part's row of labels().
Result FindLabelLogits(const TileRows& tile, const PartOfRows& rows, const RowPieces& pieces,
                       cudaStream_t stream);
// The part's piece. `ranked`: all parts' labels() are there, and logits above them are counted.
Result FindRowParts(const TileRows& tile, const PartOfRows& rows, const RowPieces& pieces, bool ranked,
                    cudaStream_t stream);
// The tile's returns of rows `first` to `first` + rows(), from all parts' pieces.
Result TellRowParts(const TileRows& tile, int32_t first, const RowPieces& pieces, cudaStream_t stream);

Result LoadPartReturnKernels();

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_ROWS_PART_RETURNS_H_
