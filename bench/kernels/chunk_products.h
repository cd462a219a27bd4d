// dW = Eᵀ X of a whole batch, overwritten at once or added chunk by chunk, by the step's own product and by
// cuBLAS's.
#ifndef LOSSD_BENCH_KERNELS_CHUNK_PRODUCTS_H_
#define LOSSD_BENCH_KERNELS_CHUNK_PRODUCTS_H_

#include <cstdint>
#include <memory>

#include "kernels/cuda/memory/owners.h"
#include "kernels/cuda/memory/result.h"
#include "kernels/cuda/portable/cublas_lt.h"
#include "kernels/data_type.h"

namespace lossd::bench {

class ChunkProducts {
 public:
  // E [batch, vocab] and X [batch, hidden] of `type`, normal numbers.
  ChunkProducts(int64_t batch, int64_t vocab, int64_t hidden, kernels::DataType type);
  kernels::cuda::Result Create();

  // dW += of rows [first, first + count); needs compute capability 9.0.
  kernels::cuda::Result AddOurs(int64_t first, int64_t count) const;
  // The whole batch in chunks of `rows`, one after the other.
  kernels::cuda::Result AddAllOurs(int64_t rows) const;
  kernels::cuda::Result AddAllLibrary(int64_t rows) const;
  // cuBLAS, the whole batch in one product that overwrites dW.
  kernels::cuda::Result Bare() const;

  kernels::cuda::Result ClearGradient() const;
  // Relative error of sampled rows of dW against the whole batch's in fp64.
  kernels::cuda::Result GradientError(double* error) const;

 private:
  enum class Into { kOverwrite, kAdd };
  kernels::cuda::Result Library(int64_t first, int64_t count, Into into) const;
  const char* Rows(const kernels::cuda::DeviceBuffer& buffer, int64_t first, int64_t stride) const;

  const int64_t batch_;
  const int64_t vocab_;
  const int64_t hidden_;
  const kernels::DataType type_;
  const int64_t padded_;  // stride of X and dW
  const int64_t stride_;  // of E
  std::unique_ptr<kernels::cuda::CublasLt> library_;
  kernels::cuda::DeviceBuffer library_memory_, e_, x_, dw_, factors_;
};

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_CHUNK_PRODUCTS_H_
