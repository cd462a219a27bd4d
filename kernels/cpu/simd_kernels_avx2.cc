// Compiled for AVX2 and FMA.
#include "kernels/cpu/simd_kernels_inl.h"
#include "kernels/cpu/simd_kernels_tables.h"

namespace lossd::kernels::cpu {

constinit const SimdKernels kAvx2Kernels = SimdImplementation<8, 6>::Table("avx2");

}  // namespace lossd::kernels::cpu
