// The step of linear_cross_entropy.h for batches with soft targets. A tile of rows holds what the products
// for dX and dW take; the whole logits of both heads, in fp32, are held of some of its rows at a time.
#ifndef LOSSD_KERNELS_CUDA_DISTILLATION_H_
#define LOSSD_KERNELS_CUDA_DISTILLATION_H_

#include <cstdint>

#include "kernels/cuda/linear_cross_entropy.h"
#include "kernels/cuda/memory/heads.h"
#include "kernels/cuda/memory/result.h"
#include "kernels/cuda/rows/tile_buffers.h"

namespace lossd::kernels::cuda {

class DistillationStep {
 public:
  using Batch = LinearCrossEntropy::Batch;
  // Hears of stages, as the caller of LinearCrossEntropy::Run does.
  struct Observer {
    LinearCrossEntropy::Stage between = nullptr;
    void* context = nullptr;

    void Report(const char* stage) const {
      if (between != nullptr) between(context, stage);
    }
  };

  // Rows whose logits are held at once, of tiles that have more.
  static constexpr int64_t kLogitRows = 512;

  // Rows of a tile within so many bytes, a multiple of kLogitRows if there are more than those; 0 if not one
  // fits. And the bytes that so many rows need.
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
  // A tile of the learning head and that of the teacher.
  struct Tiles {
    TileRows own;
    TileRows teacher;
  };

  static int64_t Divide(const HeadShape& shape, Path path, const TeacherShape& teacher, int64_t tile_rows,
                        void* base, Buffers* buffers);
  Tiles Describe(const Batch& batch, int64_t first, int64_t rows, const Buffers& buffers) const;
  Result Prepare(const Batch& batch, const Tiles& tiles, cudaStream_t stream) const;
  Result Losses(const Batch& batch, const Tiles& tiles, const Buffers& buffers, cudaStream_t stream,
                const Observer& observer) const;
  Result MultiplyLogits(const TileRows& tile, Path path, CublasLt* library, int64_t first, int64_t rows,
                        float* logits, const Buffers& buffers, cudaStream_t stream) const;
  Result InputGradient(const Batch& batch, const TileRows& tile, const Buffers& buffers,
                       cudaStream_t stream) const;
  Result AddWeightGradient(const Batch& batch, const TileRows& tile, const Buffers& buffers, bool overwrite,
                           cudaStream_t stream) const;
  Result AddPortableWeightGradient(const TileRows& tile, const Buffers& buffers, bool overwrite, float* dw,
                                   cudaStream_t stream) const;
  HeadShape ShapeOfTeacher() const { return {shape_.vocab, teacher_.hidden, teacher_.weight_type}; }

  const HeadShape shape_;
  const Path path_;
  const TeacherShape teacher_;
  const int64_t most_rows_;
  const int64_t logit_rows_;
  void* const workspace_;
  CublasLt* const library_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DISTILLATION_H_
