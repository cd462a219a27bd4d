// Compiled for AVX-512 F, BW, DQ and VL.
#include "kernels/cpu/simd_kernels_inl.h"
#include "kernels/cpu/simd_kernels_tables.h"

namespace lossd::kernels::cpu {

constinit const SimdKernels kAvx512Kernels = SimdImplementation<16, 12>::Table("avx512");

}  // namespace lossd::kernels::cpu
