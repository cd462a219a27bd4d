#include "kernels/cuda/portable/products.h"

#include <algorithm>
#include <bit>

namespace lossd::kernels::cuda {
namespace {

constexpr float kZero = 0.0f;
constexpr float kOne = 1.0f;

}  // namespace

Result PortableProducts::Logits(int64_t rows, const void* x, const void* weight, void* logits, int64_t stride,
                                cudaStream_t stream) const {
  const BlasOperand rows_of_x{x, shape_.weight_type, padded_, false};
  const BlasOperand weight_transposed{weight, shape_.weight_type, padded_, true};
  return library_->Multiply(rows, shape_.vocab, padded_, rows_of_x, weight_transposed, logits,
                            DataType::kFloat32, stride, {&kOne, &kZero, false}, workspace_, stream);
}

Result PortableProducts::InputGradient(int64_t rows, const void* e, int64_t stride, const void* weight,
                                       float* product, cudaStream_t stream) const {
  const BlasOperand rows_of_e{e, shape_.weight_type, stride, false};
  const BlasOperand w{weight, shape_.weight_type, padded_, false};
  return library_->Multiply(rows, padded_, shape_.vocab, rows_of_e, w, product, DataType::kFloat32, padded_,
                            {&kOne, &kZero, false}, workspace_, stream);
}

int64_t PortableProducts::ReductionRows(int64_t rows, int64_t most) {
  constexpr uint64_t kFewest = 64;
  return std::min(static_cast<int64_t>(std::max(kFewest, std::bit_ceil(static_cast<uint64_t>(rows)))), most);
}

Result PortableProducts::WeightGradient(int64_t rows, const void* e, int64_t stride, const void* scaled_x,
                                        kernels::WeightGradient gradient, const float* factors, float* dw,
                                        cudaStream_t stream) const {
  const bool overwrite = gradient == kernels::WeightGradient::kOverwrite;
  const DataType type = shape_.weight_type;
  const BlasOperand e_transposed{e, type, stride, true};
  const BlasOperand x{scaled_x, type, padded_, false};
  CublasLt::Factors alpha_and_beta{&kOne, overwrite ? &kZero : &kOne, false};
  if (type == DataType::kFloat16) alpha_and_beta = {factors + 1, factors + (overwrite ? 2 : 3), true};
  return library_->Multiply(shape_.vocab, padded_, rows, e_transposed, x, dw, DataType::kFloat32, padded_,
                            alpha_and_beta, workspace_, stream);
}

}  // namespace lossd::kernels::cuda
