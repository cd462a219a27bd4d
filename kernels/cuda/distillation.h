// The step of linear_cross_entropy.h for batches with soft targets, on one device. A tile of rows holds what
// the products for dX and dW take (soft_losses.h makes it).
#ifndef LOSSD_KERNELS_CUDA_DISTILLATION_H_
#define LOSSD_KERNELS_CUDA_DISTILLATION_H_

#include <cstdint>

#include "kernels/cuda/linear_cross_entropy.h"
#include "kernels/cuda/memory/heads.h"
#include "kernels/cuda/memory/result.h"
#include "kernels/cuda/rows/tile_buffers.h"
#include "kernels/cuda/step_observer.h"

namespace lossd::kernels::cuda {

class DistillationStep {
 public:
  using Batch = LinearCrossEntropy::Batch;
  using Observer = StepObserver;

  // Rows of a tile within so many bytes, a multiple of SoftLosses::kLogitRows if there are more than those; 0
  // if not one fits. And the bytes that so many rows need.
  static int64_t RowsWithin(const HeadShape& shape, Path path, const TeacherShape& teacher,
                            int64_t workspace_bytes);
  static int64_t WorkspaceBytes(const HeadShape& shape, Path path, const TeacherShape& teacher,
                                int64_t tile_rows);

  // `most_rows` is RowsWithin's, at least 1; `workspace` is of that size. `library` is the learning head's.
  DistillationStep(const HeadShape& shape, Path path, const TeacherShape& teacher, int64_t most_rows,
                   void* workspace, CublasLt* library);

  // As LinearCrossEntropy::Run, in tiles of `tile_rows` rows, at most `most_rows`.
  Result Run(const Batch& batch, int64_t tile_rows, cudaStream_t stream, cudaEvent_t input_gradients,
             const Observer& observer) const;

  // LinearCrossEntropy::LoadTeacherProducts.
  Result LoadProducts(const void* weight, float* dw, const TeacherHead& teacher, cudaStream_t stream) const;

 private:
  struct Buffers;  // the workspace, divided
  static int64_t Divide(const HeadShape& shape, Path path, const TeacherShape& teacher, int64_t tile_rows,
                        void* base, Buffers* buffers);
  TileRows Describe(const Batch& batch, int64_t first, int64_t rows, const Buffers& buffers) const;
  Result InputGradient(const Batch& batch, const TileRows& tile, const Buffers& buffers,
                       cudaStream_t stream) const;
  Result AddWeightGradient(const Batch& batch, const TileRows& tile, const Buffers& buffers, bool overwrite,
                           cudaStream_t stream) const;
  Result AddPortableWeightGradient(const TileRows& tile, const Buffers& buffers, bool overwrite, float* dw,
                                   cudaStream_t stream) const;

  const HeadShape shape_;
  const Path path_;
  const TeacherShape teacher_;
  const int64_t most_rows_;
  void* const workspace_;
  CublasLt* const library_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DISTILLATION_H_
