// For any processor: vectors of four, which the compiler maps to what the target has (SSE2, NEON, ...).
#include "kernels/cpu/simd_kernels_inl.h"
#include "kernels/cpu/simd_kernels_tables.h"

namespace lossd::kernels::cpu {

constinit const SimdKernels kPortableKernels = SimdImplementation<4, 6>::Table("portable");

}  // namespace lossd::kernels::cpu
