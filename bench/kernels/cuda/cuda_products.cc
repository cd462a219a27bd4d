#include "bench/kernels/cuda/cuda_products.h"

#include "kernels/rounding.h"

namespace lossd::bench {
namespace {

using kernels::DataType;
using kernels::cuda::BlasOperand;
using kernels::cuda::CublasLt;
using kernels::cuda::DeviceBuffer;
using kernels::cuda::Result;

constexpr float kNothingAdded = 0.0f;
constexpr float kUnscaled = 1.0f;

}  // namespace

CudaProducts::CudaProducts(const CudaStep& step)
    : step_(step), stride_(kernels::RoundUp(step.kernel_case().vocab, 8)) {}

Result CudaProducts::Create() {
  const KernelCase& c = step_.kernel_case();
  if (step_.library() == nullptr) return {cudaErrorSharedObjectInitFailed, "opening libcublasLt"};
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(c.tokens * stride_ * kernels::SizeOf(c.dtype), &logits_));
  return DeviceBuffer::Create(CublasLt::kWorkspaceBytes, &library_memory_);
}

Result CudaProducts::Run(Product product) {
  const KernelCase& c = step_.kernel_case();
  CublasLt& library = *step_.library();
  const int64_t padded = step_.padded_hidden();
  const CublasLt::Factors overwrite{&kUnscaled, &kNothingAdded, false};
  const CublasLt::Factors add{&kUnscaled, &kUnscaled, false};
  const BlasOperand x{step_.hidden_states(), c.dtype, c.hidden, false};
  switch (product) {
    case Product::kLogits: {
      const BlasOperand weight{step_.weight(), c.dtype, padded, true};
      return library.Multiply(c.tokens, c.vocab, c.hidden, x, weight, logits_.data(), c.dtype, stride_,
                              overwrite, library_memory_.data(), nullptr);
    }
    case Product::kInputGradient: {
      const BlasOperand z{logits_.data(), c.dtype, stride_, false};
      const BlasOperand weight{step_.weight(), c.dtype, padded, false};
      return library.Multiply(c.tokens, c.hidden, c.vocab, z, weight, step_.dx(), c.dtype, c.hidden,
                              overwrite, library_memory_.data(), nullptr);
    }
    case Product::kWeightGradient: {
      const BlasOperand z{logits_.data(), c.dtype, stride_, true};
      return library.Multiply(c.vocab, c.hidden, c.tokens, z, x, step_.dw(), DataType::kFloat32, padded, add,
                              library_memory_.data(), nullptr);
    }
  }
  return {};
}

}  // namespace lossd::bench
