// The three products of a head through the library. They always have one of a few sizes, so that everything
// the library takes for them can be loaded beforehand, and that it chooses the same algorithm for a row
// whatever rows are beside it.
//
// All pointers are device memory; functions enqueue on `stream` and return at once. Strides are in elements.
#ifndef LOSSD_KERNELS_CUDA_PORTABLE_PRODUCTS_H_
#define LOSSD_KERNELS_CUDA_PORTABLE_PRODUCTS_H_

#include <cstdint>

#include "kernels/cuda/memory/heads.h"
#include "kernels/cuda/memory/result.h"
#include "kernels/cuda/portable/cublas_lt.h"
#include "kernels/linear_cross_entropy.h"

namespace lossd::kernels::cuda {

class PortableProducts {
 public:
  // `workspace` of CublasLt::kWorkspaceBytes; both outlive the object.
  PortableProducts(const HeadShape& shape, CublasLt* library, void* workspace)
      : shape_(shape), padded_(PaddedHidden(shape.hidden)), library_(library), workspace_(workspace) {}

  // logits [rows, stride] in fp32 = x Wᵀ; x [rows, padded hidden].
  Result Logits(int64_t rows, const void* x, const void* weight, void* logits, int64_t stride,
                cudaStream_t stream) const;

  // product [rows, padded hidden] in fp32 = E W; e [rows, stride] of the head's type.
  Result InputGradient(int64_t rows, const void* e, int64_t stride, const void* weight, float* product,
                       cudaStream_t stream) const;

  // The number of rows, at most `most`, that WeightGradient is to be given for a tile of `rows`. The caller
  // sets those beyond the tile to zero, in e and in scaled_x.
  static int64_t ReductionRows(int64_t rows, int64_t most);
  // dW = or += Eᵀ scaled_x. `factors`: TileRows', used for fp16.
  Result WeightGradient(int64_t rows, const void* e, int64_t stride, const void* scaled_x,
                        kernels::WeightGradient gradient, const float* factors, float* dw,
                        cudaStream_t stream) const;

 private:
  const HeadShape shape_;
  const int64_t padded_;
  CublasLt* const library_;
  void* const workspace_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PORTABLE_PRODUCTS_H_
