#include "bench/kernels/weight_gradient_case.h"

#include <algorithm>

#include "bench/kernels/chunk_products.h"
#include "bench/kernels/cuda/cuda_check.h"
#include "bench/kernels/cuda/cuda_step.h"
#include "bench/kernels/cuda/cuda_timing.h"
#include "bench/kernels/measure.h"
#include "kernels/cuda/linear_cross_entropy.h"
#include "kernels/rounding.h"

namespace lossd::bench {
namespace {

using kernels::SizeOf;
using kernels::cuda::LinearCrossEntropy;
using kernels::cuda::Path;
using kernels::cuda::Result;

constexpr double kTolerance = 1e-4;  // sums of a few thousand products in fp32
constexpr int64_t kUntimedRounds = 2;

Result FreeBytes(int64_t* bytes) {
  size_t free_now = 0;
  size_t total = 0;
  LOSSD_CUDA_TRY(cudaDeviceSynchronize());
  LOSSD_CUDA_TRY(cudaMemGetInfo(&free_now, &total));
  *bytes = static_cast<int64_t>(free_now);
  return {};
}

// Memory of a whole step over one chunk. The first work of the process, so that what kernels and libraries
// take when they are first used counts.
Result MeasureStep(const WeightGradientCase& c, WeightGradientResult* result) {
  KernelCase one;
  one.tokens = c.memory_rows;
  one.vocab = c.vocab;
  one.hidden = c.hidden;
  one.dtype = c.dtype;
  one.cuda_index = c.cuda_index;
  const LinearCrossEntropy::Shape shape{c.vocab, c.hidden, c.dtype};
  one.workspace_bytes = LinearCrossEntropy::WorkspaceBytes(shape, Path::kHopper, c.memory_rows);
  CudaStep step(one);
  LOSSD_CUDA_PASS_ON(step.Create());
  result->hardware = step.hardware();
  if (step.path() != Path::kHopper) {
    result->error = "this needs the step's own products: compute capability 9.0, bf16 or fp16";
    return {};
  }
  LOSSD_CUDA_PASS_ON(step.FillInputs());
  LOSSD_CUDA_PASS_ON(step.Prepare(&result->error));
  if (!result->error.empty()) return {};
  LOSSD_CUDA_PASS_ON(step.Run(kernels::WeightGradient::kOverwrite));
  ChunkMemory& memory = result->memory;
  LOSSD_CUDA_PASS_ON(step.TakenBytes(&memory.step_taken));
  KernelResult checked;
  LOSSD_CUDA_PASS_ON(CheckCudaStep(step, &checked));
  result->error = checked.error;
  if (step.tile_rows() != c.memory_rows) {
    result->error = "the step works on " + std::to_string(step.tile_rows()) + " rows at once, not on " +
                    std::to_string(c.memory_rows);
  }
  memory.e = c.memory_rows * kernels::RoundUp(c.vocab, 8) * SizeOf(c.dtype);
  memory.x = memory.dx = c.memory_rows * c.hidden * SizeOf(c.dtype);
  memory.weight = c.vocab * step.padded_hidden() * SizeOf(c.dtype);
  memory.gradient = c.vocab * step.padded_hidden() * 4;
  return {};
}

class Speeds {
 public:
  Speeds(const WeightGradientCase& weight_gradient_case, const Progress& progress,
         WeightGradientResult* result)
      : case_(weight_gradient_case),
        progress_(progress),
        result_(*result),
        products_(case_.batch, case_.vocab, case_.hidden, case_.dtype),
        chunks_(case_.rows.size()) {}

  Result Run() {
    LOSSD_CUDA_PASS_ON(products_.Create());
    LOSSD_CUDA_PASS_ON(MeasureProduct());
    progress_("checking against fp64");
    LOSSD_CUDA_PASS_ON(Check());
    if (!result_.error.empty()) return {};
    progress_("timing");
    for (int64_t round = -kUntimedRounds; round < case_.repetitions; ++round) {
      LOSSD_CUDA_PASS_ON(TimeRound(round));
    }
    Summarize();
    return {};
  }

 private:
  using Times = std::vector<double>;
  // By chunk size, as in case_.rows. `bare` is of the same round: the card slows down as it heats up.
  struct Chunk {
    Times ours, library, bare;
  };

  Result MeasureProduct() {
    int64_t before = 0;
    int64_t after = 0;
    LOSSD_CUDA_PASS_ON(FreeBytes(&before));
    LOSSD_CUDA_PASS_ON(products_.AddOurs(0, std::min(case_.batch, case_.memory_rows)));
    LOSSD_CUDA_PASS_ON(FreeBytes(&after));
    result_.memory.product_taken = before - after;
    return {};
  }

  Result Check() {
    for (const int64_t rows : case_.rows) {
      LOSSD_CUDA_PASS_ON(products_.ClearGradient());
      LOSSD_CUDA_PASS_ON(products_.AddAllOurs(rows));
      LOSSD_CUDA_PASS_ON(CheckGradient());
    }
    LOSSD_CUDA_PASS_ON(products_.Bare());
    LOSSD_CUDA_PASS_ON(CheckGradient());
    if (!(result_.dw_error < kTolerance)) {
      result_.error = "wrong: the relative error of dW is " + std::to_string(result_.dw_error);
    }
    return {};
  }

  Result CheckGradient() {
    double error = 0;
    LOSSD_CUDA_PASS_ON(products_.GradientError(&error));
    if (!(error <= result_.dw_error)) result_.dw_error = error;
    return {};
  }

  // The bare product runs beside every chunk size, before it in one round and after it in the next.
  Result TimeRound(int64_t round) {
    for (size_t i = 0; i < chunks_.size(); ++i) {
      const int64_t rows = case_.rows[i];
      double ours = 0;
      double library = 0;
      double bare = 0;
      const auto time_bare = [&] { return TimeOnDevice([this] { return products_.Bare(); }, &bare); };
      if (round % 2 == 0) LOSSD_CUDA_PASS_ON(time_bare());
      LOSSD_CUDA_PASS_ON(TimeOnDevice([&] { return products_.AddAllOurs(rows); }, &ours));
      if (round % 2 != 0) LOSSD_CUDA_PASS_ON(time_bare());
      LOSSD_CUDA_PASS_ON(TimeOnDevice([&] { return products_.AddAllLibrary(rows); }, &library));
      if (round < 0) continue;
      chunks_[i].ours.push_back(ours);
      chunks_[i].library.push_back(library);
      chunks_[i].bare.push_back(bare);
    }
    return {};
  }

  static double Speed(const Times& bare, const Times& times) {
    Times speeds;
    for (size_t i = 0; i < bare.size(); ++i) speeds.push_back(bare[i] / times[i]);
    return Median(speeds);
  }

  void Summarize() {
    const auto n = static_cast<double>(case_.batch);
    const auto v = static_cast<double>(case_.vocab);
    const auto h = static_cast<double>(case_.hidden);
    const double operations = 2 * n * v * h;
    const double operands = (n * v + n * h) * static_cast<double>(SizeOf(case_.dtype));
    const double gradient = v * h * 4;
    Times all_bare;
    for (size_t i = 0; i < chunks_.size(); ++i) {
      const Chunk& chunk = chunks_[i];
      const auto times = static_cast<double>(kernels::CeilDivide(case_.batch, case_.rows[i]));
      const Work work{operations, operands + times * 2 * gradient};
      result_.chunks.push_back({case_.rows[i],
                                {"ours", Median(chunk.ours), work},
                                {"cuBLAS", Median(chunk.library), work},
                                Speed(chunk.bare, chunk.ours),
                                Speed(chunk.bare, chunk.library)});
      all_bare.insert(all_bare.end(), chunk.bare.begin(), chunk.bare.end());
    }
    result_.bare = {"bare", Median(all_bare), {operations, operands + gradient}};
  }

  const WeightGradientCase& case_;
  const Progress& progress_;
  WeightGradientResult& result_;
  ChunkProducts products_;
  std::vector<Chunk> chunks_;
};

}  // namespace

WeightGradientResult RunWeightGradientCase(const WeightGradientCase& weight_gradient_case,
                                           const Progress& progress) {
  WeightGradientResult result;
  progress("measuring the memory of a step");
  Result run = MeasureStep(weight_gradient_case, &result);
  if (run.ok() && result.error.empty()) run = Speeds(weight_gradient_case, progress, &result).Run();
  if (!run.ok()) result.error = run.message();
  return result;
}

}  // namespace lossd::bench
