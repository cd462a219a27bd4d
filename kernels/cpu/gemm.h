// oneDNN's matrix product, the one place that names the library. Built against 2.6 and 3.x.
#ifndef LOSSD_KERNELS_CPU_GEMM_H_
#define LOSSD_KERNELS_CPU_GEMM_H_

#include <cstdint>

#include "kernels/cpu/simd_kernels.h"
#include "kernels/data_type.h"

namespace lossd::kernels::cpu {

// Element (i, j) lies at data[i * row_stride + j * column_stride]; one of the strides is 1.
struct Operand {
  const void* data = nullptr;
  int64_t row_stride = 1;
  int64_t column_stride = 1;
};

// c[m, n] (fp32, row stride c_stride) = or += a[m, k] b[k, n], both of `type`, summed in fp32. Runs on the
// calling thread's share of the cores: on one thread inside a parallel loop, on all outside. Allocates inside
// the library. False if the library cannot do it on this processor.
bool Multiply(DataType type, int64_t m, int64_t n, int64_t k, const Operand& a, const Operand& b, float* c,
              int64_t c_stride, Store store);

// Whether this processor has a bf16 matrix unit (AMX) that the library uses. The bf16 dot products of AVX-512
// without it are slower than fp32 products, by measurement.
bool HasFastBFloat16();

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_GEMM_H_
