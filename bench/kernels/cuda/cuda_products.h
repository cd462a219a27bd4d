// The limit on a CUDA device: cuBLAS's three products of the whole batch.
#ifndef LOSSD_BENCH_KERNELS_CUDA_CUDA_PRODUCTS_H_
#define LOSSD_BENCH_KERNELS_CUDA_CUDA_PRODUCTS_H_

#include "bench/kernels/cuda/cuda_step.h"
#include "bench/kernels/traffic.h"
#include "kernels/cuda/memory/owners.h"
#include "kernels/cuda/memory/result.h"

namespace lossd::bench {

// Works on a step's own inputs and outputs, all rows; what it leaves in dX and dW is of no use.
class CudaProducts {
 public:
  explicit CudaProducts(const CudaStep& step);
  kernels::cuda::Result Create();  // allocates the logits
  kernels::cuda::Result Run(Product product);

 private:
  const CudaStep& step_;
  const int64_t stride_;
  kernels::cuda::DeviceBuffer logits_;
  kernels::cuda::DeviceBuffer library_memory_;
};

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_CUDA_CUDA_PRODUCTS_H_
