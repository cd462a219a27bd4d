// How CUDA calls fail: with a code and the place, and without exceptions.
#ifndef LOSSD_KERNELS_CUDA_MEMORY_RESULT_H_
#define LOSSD_KERNELS_CUDA_MEMORY_RESULT_H_

#include <cuda_runtime_api.h>

#include <string>

namespace lossd::kernels::cuda {

// Most errors of a device are sticky: once a kernel has failed, every later call does, and only a new process
// can use the device again.
class [[nodiscard]] Result {
 public:
  Result() = default;
  // `what` must live as long as the program: a literal.
  Result(cudaError_t code, const char* what) : code_(code), what_(what) {}

  bool ok() const { return code_ == cudaSuccess; }
  cudaError_t code() const { return code_; }
  // For people: what was tried, CUDA's name of the error and its description.
  std::string message() const {
    return ok()
               ? "ok"
               : std::string(what_) + ": " + cudaGetErrorName(code_) + " (" + cudaGetErrorString(code_) + ")";
  }

 private:
  cudaError_t code_ = cudaSuccess;
  const char* what_ = "";
};

}  // namespace lossd::kernels::cuda

// Returns from the calling function, whose type is Result, if `expression` fails.
#define LOSSD_CUDA_TRY(expression)                                                \
  do {                                                                            \
    if (const cudaError_t lossd_code = (expression); lossd_code != cudaSuccess) { \
      return ::lossd::kernels::cuda::Result(lossd_code, #expression);             \
    }                                                                             \
  } while (false)
#define LOSSD_CUDA_PASS_ON(expression)                                                        \
  do {                                                                                        \
    if (const ::lossd::kernels::cuda::Result lossd_result = (expression); !lossd_result.ok()) \
      return lossd_result;                                                                    \
  } while (false)

#endif  // LOSSD_KERNELS_CUDA_MEMORY_RESULT_H_
