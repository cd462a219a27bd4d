// The tables that the per-instruction-set files define; only simd_kernels.cc picks among them.
#ifndef LOSSD_KERNELS_CPU_SIMD_KERNELS_TABLES_H_
#define LOSSD_KERNELS_CPU_SIMD_KERNELS_TABLES_H_

#include "kernels/cpu/simd_kernels.h"

namespace lossd::kernels::cpu {

// Constants, initialised before any code runs.
extern const SimdKernels kPortableKernels;
extern const SimdKernels kAvx2Kernels;    // x86-64 only
extern const SimdKernels kAvx512Kernels;  // x86-64 only

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_SIMD_KERNELS_TABLES_H_
