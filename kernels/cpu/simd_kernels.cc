#include "kernels/cpu/simd_kernels.h"

#include "kernels/cpu/simd_kernels_tables.h"

namespace lossd::kernels::cpu {

#if defined(__x86_64__)

namespace {

bool HasAvx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool HasAvx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && HasAvx2();
}

}  // namespace

const SimdKernels* const* RunnableSimdKernels() {
  static constexpr const SimdKernels* kAll[] = {&kAvx512Kernels, &kAvx2Kernels, &kPortableKernels, nullptr};
  if (HasAvx512()) return kAll;
  return HasAvx2() ? kAll + 1 : kAll + 2;
}

#else

const SimdKernels* const* RunnableSimdKernels() {
  static constexpr const SimdKernels* kAll[] = {&kPortableKernels, nullptr};
  return kAll;
}

#endif

const SimdKernels& BestSimdKernels() { return *RunnableSimdKernels()[0]; }

}  // namespace lossd::kernels::cpu
