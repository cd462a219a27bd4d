// How a CUDA device works on one piece of a slice while the wires carry another. Belongs to the device's
// owner thread.
//
//   sum     wires      give 0 │ give 1 │ give 2 │ ...
//           computing         │ add 0  │ add 1  │ ...
//   step    computing  step 0 │ step 1   │ step 2   │ ...
//           wires             │ gather 0 │ gather 1 │ ...
#ifndef LOSSD_SERVER_ENGINE_DEVICE_CUDA_SLICE_PIPELINE_H_
#define LOSSD_SERVER_ENGINE_DEVICE_CUDA_SLICE_PIPELINE_H_

#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "kernels/collectives/communicator.h"
#include "kernels/collectives/slice_exchange.h"
#include "kernels/cuda/memory/owners.h"
#include "kernels/cuda/memory/result.h"
#include "kernels/slices.h"

namespace lossd::engine {

class SlicePipeline {
 public:
  // The device's memory for rows of `columns` floats on their way; at least for one row.
  static int64_t ScratchBytes(const kernels::SliceLayout& layout, int32_t replica, int64_t columns);
  // In how many pieces weights of `columns` entries of `entry_bytes` are stepped and gathered: the same
  // number at every replica.
  static int32_t GatheredPieces(const kernels::SliceLayout& layout, int64_t columns, int64_t entry_bytes);
  // Takes the scratch memory, for the longest rows of a head, and what orders so many pieces.
  kernels::cuda::Result Create(int64_t scratch_bytes, int32_t gathered_pieces);

  // SliceExchange::Sum of all pieces, behind what is on `computing`, which finds the sum behind it, and
  // scratch() free, after an error too. Returns before it is done: communicator->Wait(computing) tells.
  // UNAVAILABLE if a replica was lost.
  absl::Status Sum(const kernels::SliceLayout& layout, int64_t columns,
                   kernels::collectives::Communicator* communicator, const float* gradient, float* sum,
                   cudaStream_t computing);

  // SliceExchange::Send of all pieces of one replica's gradient, each added to the sum; the same.
  absl::Status AddOne(const kernels::SliceLayout& layout, int64_t columns,
                      kernels::collectives::Communicator* communicator, int32_t from, const float* gradient,
                      float* sum, cudaStream_t computing);

  // The step of this piece is what is on `computing`.
  kernels::cuda::Result NoteStepped(int32_t piece, cudaStream_t computing);
  // Work that is put on wires() from now on comes behind the step of this piece.
  kernels::cuda::Result AwaitStepped(int32_t piece);
  // Work that is put on `computing` from now on comes behind what is on wires().
  kernels::cuda::Result Join(cudaStream_t computing);
  cudaStream_t wires() const { return wires_.get(); }

  // For others, on the computing stream, when nothing is summed.
  const kernels::cuda::DeviceBuffer& scratch() const { return scratch_; }

 private:
  // One sum under way.
  struct Work {
    kernels::collectives::SliceExchange exchange;
    int32_t pieces = 0;
    const float* gradient = nullptr;
    float* sum = nullptr;
    std::array<void*, 2> halves = {};  // of the scratch memory, for pieces in turns
    cudaStream_t computing = nullptr;
  };
  absl::Status SumPieces(Work& work);
  // Gets a piece and adds it up.
  absl::Status Take(Work& work, int32_t piece);

  kernels::cuda::Stream wires_;
  kernels::cuda::Event begun_;
  std::array<kernels::cuda::Event, 2> came_;   // by the half that a piece has
  std::array<kernels::cuda::Event, 2> added_;  // the same
  std::vector<kernels::cuda::Event> stepped_;  // by piece
  kernels::cuda::Event ended_;
  kernels::cuda::DeviceBuffer scratch_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_CUDA_SLICE_PIPELINE_H_
