// Matrix products of cuBLAS, opened at run time: programs start, and use Hopper's own path, without it.
#ifndef LOSSD_KERNELS_CUDA_PORTABLE_CUBLAS_LT_H_
#define LOSSD_KERNELS_CUDA_PORTABLE_CUBLAS_LT_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/cuda/memory/result.h"
#include "kernels/data_type.h"

namespace lossd::kernels::cuda {

// A row-major matrix in device memory, or the transpose of one.
struct BlasOperand {
  const void* data = nullptr;
  DataType type = DataType::kFloat32;
  int64_t stride = 0;
  bool transposed = false;
};

class CublasLt {
 public:
  // Fails with cudaErrorSharedObjectInitFailed if the library is not there; `why`, if given, then says what
  // was looked for.
  static Result Open(std::unique_ptr<CublasLt>* library, std::string* why = nullptr);
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  // Device memory that products may use.
  static constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;

  // alpha and beta of a product, both on the host or both on the device.
  struct Factors {
    const float* alpha;
    const float* beta;
    bool on_device;
  };

  // c[m, n] (row-major, row stride c_stride, of c_type) = alpha a[m, k] b[k, n] + beta c. Sums in fp32;
  // products of fp32 operands in fp32, not TF32. a and b have one type.
  Result Multiply(int64_t m, int64_t n, int64_t k, const BlasOperand& a, const BlasOperand& b, void* c,
                  DataType c_type, int64_t c_stride, const Factors& factors, void* workspace,
                  cudaStream_t stream);

 private:
  struct Functions;
  CublasLt();
  std::unique_ptr<Functions> functions_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PORTABLE_CUBLAS_LT_H_
