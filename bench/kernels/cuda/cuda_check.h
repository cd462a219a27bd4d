// Judges what a step on a CUDA device left behind, against fp64 computed from its inputs.
#ifndef LOSSD_BENCH_KERNELS_CUDA_CUDA_CHECK_H_
#define LOSSD_BENCH_KERNELS_CUDA_CUDA_CHECK_H_

#include "bench/kernels/cuda/cuda_step.h"
#include "bench/kernels/kernel_case.h"
#include "kernels/cuda/memory/result.h"

namespace lossd::bench {

// After one Run that overwrote dW. Fills in relative errors, tolerance, what was checked, and `error` if the
// result is wrong.
kernels::cuda::Result CheckCudaStep(CudaStep& step, KernelResult* result);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_CUDA_CUDA_CHECK_H_
