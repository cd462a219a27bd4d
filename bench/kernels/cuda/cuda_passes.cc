#include <algorithm>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "bench/kernels/cuda/cuda_step.h"
#include "bench/kernels/cuda/cuda_timing.h"
#include "bench/kernels/passes.h"

namespace lossd::bench {
namespace {

using kernels::SizeOf;
using kernels::WeightGradient;
using kernels::cuda::Result;

// Rows of `bytes` bytes that are `stride` bytes apart on the device, one after the other into a file.
Result WriteRows(const std::string& path, const void* from, int64_t rows, int64_t bytes, int64_t stride,
                 std::string* error) {
  constexpr int64_t kPiece = int64_t{64} << 20;
  std::ofstream file(path, std::ios::binary);
  const int64_t at_once = std::max<int64_t>(1, kPiece / bytes);
  std::vector<char> piece(static_cast<size_t>(std::min(rows, at_once) * bytes));
  for (int64_t row = 0; row < rows; row += at_once) {
    const int64_t count = std::min(at_once, rows - row);
    LOSSD_CUDA_TRY(cudaMemcpy2D(piece.data(), static_cast<size_t>(bytes),
                                static_cast<const char*>(from) + row * stride, static_cast<size_t>(stride),
                                static_cast<size_t>(bytes), static_cast<size_t>(count),
                                cudaMemcpyDeviceToHost));
    file.write(piece.data(), count * bytes);
  }
  if (!file.flush()) *error = path + " could not be written";
  return {};
}

class CudaPasses : public Passes {
 public:
  explicit CudaPasses(const KernelCase& kernel_case) : step_(kernel_case) {}

  std::string Prepare(const std::string& folder) override {
    std::string error;
    const Result result = TryPrepare(folder, &error);
    return result.ok() ? error : result.message();
  }

  std::string Time(int64_t count, WeightGradient weight_gradient,
                   std::vector<double>* milliseconds) override {
    const Result result = TryTime(count, weight_gradient, milliseconds);
    return result.ok() ? "" : result.message();
  }

 private:
  Result TryPrepare(const std::string& folder, std::string* error) {
    LOSSD_CUDA_PASS_ON(step_.Create());
    LOSSD_CUDA_PASS_ON(step_.ReadInputs(folder, error));
    if (error->empty()) LOSSD_CUDA_PASS_ON(step_.Prepare(error));
    if (!error->empty()) return {};
    tile_rows_ = step_.tile_rows();
    LOSSD_CUDA_PASS_ON(step_.Run(WeightGradient::kOverwrite));
    LOSSD_CUDA_PASS_ON(step_.TakenBytes(&peak_bytes_));
    const KernelCase& c = step_.kernel_case();
    const int64_t row = c.hidden * SizeOf(c.dtype);
    LOSSD_CUDA_PASS_ON(WriteRows(folder + "/losses.bin", step_.losses(), c.tokens, 4, 4, error));
    LOSSD_CUDA_PASS_ON(WriteRows(folder + "/dx.bin", step_.dx(), c.tokens, row, row, error));
    return WriteRows(folder + "/dw.bin", step_.dw(), c.vocab, c.hidden * 4, step_.padded_hidden() * 4, error);
  }

  // The host runs ahead during the first pass, so that launches are hidden.
  Result TryTime(int64_t count, WeightGradient weight_gradient, std::vector<double>* milliseconds) {
    LOSSD_CUDA_PASS_ON(step_.Run(weight_gradient));
    Marks marks;
    marks.Add("begin");
    for (int64_t i = 0; i < count; ++i) {
      LOSSD_CUDA_PASS_ON(step_.Run(weight_gradient));
      marks.Add("pass");
    }
    std::vector<std::pair<std::string, double>> intervals;
    LOSSD_CUDA_PASS_ON(marks.Read(&intervals));
    for (const auto& [name, time] : intervals) milliseconds->push_back(time);
    return {};
  }

  CudaStep step_;
};

}  // namespace

std::unique_ptr<Passes> MakeCudaPasses(const KernelCase& kernel_case) {
  return std::make_unique<CudaPasses>(kernel_case);
}

}  // namespace lossd::bench
