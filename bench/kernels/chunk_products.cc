#include "bench/kernels/chunk_products.h"

#include <algorithm>
#include <vector>

#include "bench/kernels/cuda/cuda_random.h"
#include "bench/kernels/cuda/cuda_step.h"
#include "bench/kernels/measure.h"
#include "kernels/cuda/linear_cross_entropy.h"
#include "kernels/cuda/sm90/products.h"
#include "kernels/rounding.h"

namespace lossd::bench {
namespace {

using kernels::DataType;
using kernels::SizeOf;
using kernels::cuda::BlasOperand;
using kernels::cuda::CublasLt;
using kernels::cuda::DeviceBuffer;
using kernels::cuda::Result;
using kernels::cuda::TileRows;
namespace sm90 = kernels::cuda::sm90;

constexpr int64_t kCheckedEntries = 6;
constexpr float kZero = 0.0f;
constexpr float kOne = 1.0f;

}  // namespace

ChunkProducts::ChunkProducts(int64_t batch, int64_t vocab, int64_t hidden, DataType type)
    : batch_(batch),
      vocab_(vocab),
      hidden_(hidden),
      type_(type),
      padded_(kernels::cuda::PaddedHidden(hidden)),
      stride_(kernels::RoundUp(vocab, 8)) {}

Result ChunkProducts::Create() {
  const int64_t element = SizeOf(type_);
  LOSSD_CUDA_PASS_ON(CublasLt::Open(&library_));
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(CublasLt::kWorkspaceBytes, &library_memory_));
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(batch_ * stride_ * element, &e_));
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(batch_ * padded_ * element, &x_));
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(vocab_ * padded_ * 4, &dw_));
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(4 * sizeof(float), &factors_));
  // fp16's factors; bf16 has none.
  const float factors[] = {1.0f, 1.0f, 0.0f, 1.0f};
  LOSSD_CUDA_TRY(cudaMemcpy(factors_.data(), factors, sizeof factors, cudaMemcpyHostToDevice));
  LOSSD_CUDA_PASS_ON(FillNormal(type_, e_.data(), batch_ * stride_, 1.0f, 1));
  LOSSD_CUDA_PASS_ON(FillNormal(type_, x_.data(), batch_ * padded_, 1.0f, 2));
  return {};
}

const char* ChunkProducts::Rows(const DeviceBuffer& buffer, int64_t first, int64_t stride) const {
  return static_cast<const char*>(buffer.data()) + first * stride * SizeOf(type_);
}

Result ChunkProducts::AddOurs(int64_t first, int64_t count) const {
  TileRows tile;
  tile.rows = static_cast<int32_t>(count);
  tile.vocab = vocab_;
  tile.hidden = hidden_;
  tile.padded_hidden = padded_;
  tile.type = type_;
  tile.scaled_x = const_cast<char*>(Rows(x_, first, padded_));
  tile.factors = static_cast<float*>(factors_.data());
  return sm90::MultiplyWeightGradient(tile, Rows(e_, first, stride_), stride_, sm90::Store::kAdd,
                                      static_cast<float*>(dw_.data()), nullptr);
}

Result ChunkProducts::Library(int64_t first, int64_t count, Into into) const {
  const BlasOperand e{Rows(e_, first, stride_), type_, stride_, true};
  const BlasOperand x{Rows(x_, first, padded_), type_, padded_, false};
  const CublasLt::Factors factors{&kOne, into == Into::kAdd ? &kOne : &kZero, false};
  return library_->Multiply(vocab_, padded_, count, e, x, dw_.data(), DataType::kFloat32, padded_, factors,
                            library_memory_.data(), nullptr);
}

Result ChunkProducts::Bare() const { return Library(0, batch_, Into::kOverwrite); }

Result ChunkProducts::AddAllOurs(int64_t rows) const {
  for (int64_t first = 0; first < batch_; first += rows) {
    LOSSD_CUDA_PASS_ON(AddOurs(first, std::min(rows, batch_ - first)));
  }
  return {};
}

Result ChunkProducts::AddAllLibrary(int64_t rows) const {
  for (int64_t first = 0; first < batch_; first += rows) {
    LOSSD_CUDA_PASS_ON(Library(first, std::min(rows, batch_ - first), Into::kAdd));
  }
  return {};
}

Result ChunkProducts::ClearGradient() const {
  LOSSD_CUDA_TRY(cudaMemset(dw_.data(), 0, static_cast<size_t>(dw_.bytes())));
  return {};
}

Result ChunkProducts::GradientError(double* relative) const {
  std::vector<float> x;
  LOSSD_CUDA_PASS_ON(CudaStep::ReadWide(x_.data(), type_, 0, batch_ * padded_, &x));
  ErrorNorm error;
  const auto size = static_cast<size_t>(SizeOf(type_));
  for (int64_t i = 0; i < kCheckedEntries; ++i) {
    const int64_t v = i * (vocab_ - 1) / (kCheckedEntries - 1);
    std::vector<char> narrow(static_cast<size_t>(batch_) * size);
    LOSSD_CUDA_TRY(cudaMemcpy2D(narrow.data(), size, Rows(e_, 0, stride_) + v * static_cast<int64_t>(size),
                                static_cast<size_t>(stride_) * size, size, static_cast<size_t>(batch_),
                                cudaMemcpyDeviceToHost));
    std::vector<float> e(static_cast<size_t>(batch_));
    kernels::Convert(type_, narrow.data(), DataType::kFloat32, e.data(), batch_);
    std::vector<float> dw;
    LOSSD_CUDA_PASS_ON(CudaStep::ReadWide(dw_.data(), DataType::kFloat32, v * padded_, hidden_, &dw));
    std::vector<double> expected(dw.size(), 0.0);
    for (size_t r = 0; r < e.size(); ++r) {
      const float* row = &x[r * static_cast<size_t>(padded_)];
      for (size_t h = 0; h < expected.size(); ++h) expected[h] += static_cast<double>(e[r]) * row[h];
    }
    for (size_t h = 0; h < expected.size(); ++h) error.Add(dw[h], expected[h]);
  }
  *relative = error.Relative();
  return {};
}

}  // namespace lossd::bench
