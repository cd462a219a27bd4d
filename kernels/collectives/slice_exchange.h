// What replicas of a head do together when they take a step: gradients are added up by slice, and weights go
// from who has stepped them to the others.
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

  // Sums of the gradients of all replicas, [rows of the slice, columns] fp32 each: of this replica's slice,
  // and of the one that it mirrors, whose owner has made it (null where there are no mirrors). Neither may
  // overlap a gradient.
  struct Sums {
    float* own = nullptr;
    float* mirrored = nullptr;
  };

  // Adds up `gradient`, [layout.rows(), columns] fp32 at each replica, which stays as it is. Added in the
  // order of the replicas, so the bits depend on them alone. `scratch`: ScratchBytes() for as many pieces,
  // aligned to 16 bytes.
  Result Sum(const float* gradient, int32_t piece, int32_t pieces, const Sums& sums, void* scratch,
             void* stream);
  // What it consists of, for who has the device add one piece while the wires carry another: every replica
  // gives the others their parts of the piece, which come into `scratch`; adds up what has come; and sends
  // the sum on to its mirror. Each is ordered in its own stream alone, and Give and SendOn are those that
  // meet the others, in one order everywhere.
  Result Give(const float* gradient, int32_t piece, int32_t pieces, void* scratch, void* stream);
  Result Add(const float* gradient, int32_t piece, int32_t pieces, const Sums& sums, const void* scratch,
             void* stream);
  Result SendOn(int32_t piece, int32_t pieces, const Sums& sums, void* stream);
  static int64_t ScratchBytes(const SliceLayout& layout, int32_t replica, int64_t columns, int32_t pieces);

  // Every row of `weights`, [layout.rows(), columns] of `entry_bytes` each, becomes what its slice's owner
  // has there. Nobody is sent what it has stepped itself.
  Result Gather(void* weights, int64_t entry_bytes, int32_t piece, int32_t pieces, void* stream);

 private:
  int32_t self() const { return replicas_.rank(); }
  // Entries of a slice before its `piece`th piece.
  int64_t PlaceInSlice(int32_t slice, int32_t piece, int32_t pieces) const;

  const SliceLayout layout_;
  const int64_t columns_;
  Communicator& replicas_;
};

}  // namespace lossd::kernels::collectives

#endif  // LOSSD_KERNELS_COLLECTIVES_SLICE_EXCHANGE_H_
