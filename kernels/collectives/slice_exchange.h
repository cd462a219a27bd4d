// What replicas of a head do together when they take a step: each gets the sum of the gradients for its
// slice, and all get the weights that each of them has stepped.
#ifndef LOSSD_KERNELS_COLLECTIVES_SLICE_EXCHANGE_H_
#define LOSSD_KERNELS_COLLECTIVES_SLICE_EXCHANGE_H_

#include <cstdint>

#include "kernels/collectives/communicator.h"
#include "kernels/collectives/result.h"
#include "kernels/slices.h"

namespace lossd::kernels::collectives {

// Rank r of the communicator is replica r. What holds for the communicator holds here: threads, memory,
// streams and failures. Every replica makes the same calls with the same pieces.
//
// A step goes through pieces of every slice at the same time: each call does the `piece`th of `pieces` of
// each, so that the device can work on one piece while the wires carry another, and scratch memory is that of
// a piece.
class SliceExchange {
 public:
  // Rows of `columns` entries. The communicator, which has layout.replicas() ranks, outlives this.
  SliceExchange(const SliceLayout& layout, int64_t columns, Communicator* replicas)
      : layout_(layout), columns_(columns), replicas_(*replicas) {}

  // Adds up the `gradient` of all replicas, [layout.rows(), columns] fp32 at each, which stays as it is, into
  // `sum`, [rows of this replica's slice, columns] fp32, which must not overlap it. Gradients are added in
  // the order of the replicas: the bits depend on them alone. `scratch`: ScratchBytes() for as many pieces,
  // aligned to 16 bytes.
  Result Sum(const float* gradient, int32_t piece, int32_t pieces, float* sum, void* scratch, void* stream);
  // The two halves of Sum, for a device that adds one piece while the wires carry another. Give sends the
  // others their parts of the piece, and gets this replica's parts into `scratch`; Add adds them up. Each is
  // ordered in its own stream. Only Give meets the other replicas.
  Result Give(const float* gradient, int32_t piece, int32_t pieces, void* scratch, void* stream);
  Result Add(const float* gradient, int32_t piece, int32_t pieces, float* sum, const void* scratch,
             void* stream);
  static int64_t ScratchBytes(const SliceLayout& layout, int32_t replica, int64_t columns, int32_t pieces);
  // Sends the others their parts of the piece of one replica's `gradient`, which is read there alone; the
  // part of this replica comes into `scratch`, but of its own gradient. Sum's `scratch` has room for it.
  Result Send(const float* gradient, int32_t from, int32_t piece, int32_t pieces, void* scratch,
              void* stream);
  // Where this replica's part of the piece begins, in rows: of the head, and of its slice.
  struct PieceRows {
    RowSpan rows;
    int64_t before = 0;
  };
  PieceRows OwnPiece(int32_t piece, int32_t pieces) const;

  // Every row of `rows`, [layout.rows(), columns] of `entry_bytes` each, becomes that of the replica which
  // has it in its slice.
  Result Gather(void* rows, int64_t entry_bytes, int32_t piece, int32_t pieces, void* stream);

 private:
  int32_t self() const { return replicas_.rank(); }

  const SliceLayout layout_;
  const int64_t columns_;
  Communicator& replicas_;
};

}  // namespace lossd::kernels::collectives

#endif  // LOSSD_KERNELS_COLLECTIVES_SLICE_EXCHANGE_H_
