// How a CUDA device adds up what replicas have of a gradient: piece by piece, so that it adds one piece while
// the wires carry others.
//
//   wires      give 0 │ give 1 │ send on 0, give 2 │ send on 1, give 3 │ ...
//   computing         │ add 0  │ add 1             │ add 2             │ ...
//
// Belongs to the device's owner thread.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_CUDA_SLICE_PIPELINE_H_
#define LOSSD_SERVER_ENGINE_DEVICE_CUDA_SLICE_PIPELINE_H_

#include <array>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/collectives/communicator.h"
#include "kernels/collectives/slice_exchange.h"
#include "kernels/cuda/memory/owners.h"
#include "kernels/cuda/memory/result.h"
#include "kernels/slices.h"

namespace lossd::engine {

class SlicePipeline {
 public:
  using Sums = kernels::collectives::SliceExchange::Sums;

  // The device's memory for rows of `columns` floats on their way; at least for one row.
  static int64_t ScratchBytes(const kernels::SliceLayout& layout, int32_t replica, int64_t columns);
  // Takes that memory, for the longest rows of a head.
  kernels::cuda::Result Create(int64_t scratch_bytes);

  // SliceExchange::Sum of all pieces, behind what is on `computing`, which finds the sums behind it, and
  // scratch() free, after an error too. Returns before it is done: communicator->Wait(computing) tells.
  // UNAVAILABLE if a replica was lost.
  absl::Status Sum(const kernels::SliceLayout& layout, int64_t columns,
                   kernels::collectives::Communicator* communicator, const float* gradient, const Sums& sums,
                   cudaStream_t computing);

  // For others, on that stream, when nothing is summed.
  const kernels::cuda::DeviceBuffer& scratch() const { return scratch_; }

 private:
  // One sum under way.
  struct Work {
    kernels::collectives::SliceExchange exchange;
    int32_t pieces = 0;
    const float* gradient = nullptr;
    Sums sums;
    std::array<void*, 2> halves = {};  // of the scratch memory, for pieces in turns
    cudaStream_t computing = nullptr;
  };
  absl::Status SumPieces(Work& work);
  // Gets a piece and adds it up.
  absl::Status Take(Work& work, int32_t piece);
  // Behind its addition.
  absl::Status SendOn(Work& work, int32_t piece);

  kernels::cuda::Stream wires_;
  kernels::cuda::Event begun_;
  std::array<kernels::cuda::Event, 2> came_;   // by the half that a piece has
  std::array<kernels::cuda::Event, 2> added_;  // the same
  kernels::cuda::Event ended_;
  kernels::cuda::DeviceBuffer scratch_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_CUDA_SLICE_PIPELINE_H_
