// Random numbers made where they are used: gigabytes of them would take the host minutes.
#ifndef LOSSD_BENCH_KERNELS_CUDA_CUDA_RANDOM_H_
#define LOSSD_BENCH_KERNELS_CUDA_CUDA_RANDOM_H_

#include <cstdint>

#include "kernels/cuda/memory/result.h"
#include "kernels/data_type.h"

namespace lossd::bench {

// Normal numbers of this deviation into device memory; the same for the same seed.
kernels::cuda::Result FillNormal(kernels::DataType type, void* values, int64_t count, float deviation,
                                 uint64_t seed);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_CUDA_CUDA_RANDOM_H_
