// The fused step on a CUDA device with everything it reads and writes, for benchmarks.
#ifndef LOSSD_BENCH_KERNELS_CUDA_CUDA_STEP_H_
#define LOSSD_BENCH_KERNELS_CUDA_CUDA_STEP_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bench/kernels/kernel_case.h"
#include "bench/kernels/traffic.h"
#include "kernels/cuda/linear_cross_entropy.h"
#include "kernels/cuda/memory/owners.h"
#include "kernels/cuda/portable/cublas_lt.h"
#include "kernels/shard.h"

namespace lossd::bench {

class CudaStep {
 public:
  explicit CudaStep(const KernelCase& kernel_case);

  // Chooses device and path and allocates inputs and outputs; gradients and losses hold NaN.
  kernels::cuda::Result Create();
  // Fills them: random ones, or those of three files (weight.bin [V, H] and hidden_states.bin [N, H] of the
  // case's type, labels.bin [N] int64). One of the two, before Prepare.
  kernels::cuda::Result FillInputs();
  kernels::cuda::Result ReadInputs(const std::string& folder, std::string* error);
  // Allocates what the step needs beyond inputs and outputs. *error says so if not one row fits.
  kernels::cuda::Result Prepare(std::string* error);

  kernels::cuda::Result Run(kernels::WeightGradient weight_gradient);
  kernels::cuda::Result RunForward();  // losses alone, and what is told with them
  // One step that adds to dW; `between` is called after each stage.
  kernels::cuda::Result RunStages(kernels::cuda::LinearCrossEntropy::Stage between, void* context);

  // The teacher's log-sum-exps of all rows, by a step of its own; after Prepare.
  kernels::cuda::Result TeacherLogSumExps(std::vector<float>* log_sum_exps);

  // What the device has less of than before Prepare.
  kernels::cuda::Result TakenBytes(int64_t* bytes) const;
  kernels::cuda::Result RowsRedone(int64_t* rows) const;
  // `count` elements from `first` on of an array of `type`, in fp32.
  static kernels::cuda::Result ReadWide(const void* values, kernels::DataType type, int64_t first,
                                        int64_t count, std::vector<float>* wide);

  const KernelCase& kernel_case() const { return case_; }
  // Without dX and without anything done to dW.
  kernels::cuda::LinearCrossEntropy::Batch Batch() const;
  const std::vector<int64_t>& token_labels() const { return token_labels_; }
  // Whether the softmax of `row` of rows() has this entry.
  bool Keeps(int64_t row, int64_t v) const;
  // The list of `row` of rows(), of soft targets and their probabilities.
  std::span<const int32_t> TargetsOf(int64_t row) const;
  std::span<const float> ProbabilitiesOf(int64_t row) const;
  const kernels::cuda::BatchRows& rows() const { return rows_; }
  int64_t padded_hidden() const { return padded_; }
  int64_t tile_rows() const { return tile_rows_; }
  int64_t batch_bytes() const;  // of X, dX and losses
  float gradient_scale() const { return gradient_scale_; }
  StepShape Shape() const;
  kernels::cuda::Path path() const { return path_; }
  const std::string& hardware() const { return hardware_; }
  // Null where it could not be opened and the step does not need it.
  kernels::cuda::CublasLt* library() const { return library_.get(); }

  const void* weight() const { return weight_.data(); }    // [V, padded_hidden]
  const void* hidden_states() const { return x_.data(); }  // [N, H]
  int64_t x_bytes() const { return x_.bytes(); }
  void* dx() const { return dx_.data(); }  // [N, H]
  float* dw() const { return static_cast<float*>(dw_.data()); }
  // What every row of the whole gradient has less than dw() [padded_hidden]; null if it is the same.
  const float* smoothing_gradient() const {
    return case_.teacher_hidden == 0 &&
                   kernels::cuda::SmoothingOf(case_.options) == kernels::cuda::Smoothing::kRankOne
               ? static_cast<const float*>(smoothing_gradient_.data())
               : nullptr;
  }
  const kernels::cuda::TeacherHead& teacher() const { return teacher_; }
  const float* divergences() const { return static_cast<const float*>(divergences_.data()); }
  const float* losses() const { return static_cast<const float*>(losses_.data()); }
  const float* log_sum_exps() const { return static_cast<const float*>(log_sum_exps_.data()); }
  // As RunForward has told them, in a case with entropy gradients.
  const float* entropies() const { return returns_.entropy; }

 private:
  // Those of losses alone, where they are others.
  kernels::cuda::Result PrepareForward();
  kernels::cuda::LinearCrossEntropy::Batch ForwardBatch() const;
  kernels::cuda::LinearCrossEntropy::Batch GradientBatch(kernels::WeightGradient weight_gradient) const;
  kernels::cuda::Result SpreadLogSumExps();
  void FillLists();
  kernels::cuda::Result CopyLists();
  kernels::cuda::Result CreateReturns();
  kernels::cuda::Result CreateTeacher();
  kernels::cuda::Result FillTeacher();

  const KernelCase case_;
  const kernels::ShardLayout layout_;
  const kernels::Shard shard_;  // the whole vocabulary
  const int64_t padded_;
  const kernels::cuda::LinearCrossEntropy::Shape shape_;
  kernels::cuda::Path path_ = kernels::cuda::Path::kPortable;
  std::string hardware_;
  float gradient_scale_ = 1.0f;
  std::unique_ptr<kernels::cuda::CublasLt> library_;
  std::unique_ptr<kernels::cuda::LinearCrossEntropy> step_;
  std::vector<int64_t> token_labels_;
  std::vector<int64_t> forward_labels_;
  std::vector<int64_t> kept_offsets_;  // of all tokens; empty without lists
  std::vector<int32_t> kept_tokens_;
  std::vector<float> probabilities_;  // of soft targets on these lists
  kernels::cuda::BatchRows rows_;
  kernels::cuda::BatchRows forward_rows_;
  kernels::cuda::HoldSpace hold_;
  int64_t tile_rows_ = 0;
  size_t free_before_ = 0;
  kernels::cuda::DeviceBuffer weight_, x_, dx_, dw_, losses_, log_sum_exps_, largest_, redone_, workspace_,
      batch_rows_, labels_, by_label_, scales_, vocabulary_sum_, smoothing_gradient_, returns_memory_,
      teacher_weight_, teacher_x_, teacher_largest_, divergences_, entropy_gradients_, hold_memory_,
      held_rows_, forward_batch_rows_, forward_labels_memory_, forward_by_label_, forward_scales_,
      kept_offsets_there_, kept_tokens_there_, by_token_, token_starts_, probabilities_there_, target_logits_;
  kernels::cuda::TeacherHead teacher_;  // of case_.teacher_hidden
  kernels::RowReturns returns_;
};

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_CUDA_CUDA_STEP_H_
