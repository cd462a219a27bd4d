// One case of `lossd-bench kernels`: what is asked for, and what came out. Device-independent.
#ifndef LOSSD_BENCH_KERNELS_KERNEL_CASE_H_
#define LOSSD_BENCH_KERNELS_KERNEL_CASE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bench/kernels/traffic.h"
#include "kernels/data_type.h"
#include "kernels/linear_cross_entropy.h"
#include "kernels/shard.h"

namespace lossd::bench {

struct KernelCase {
  int64_t tokens = 0;
  int64_t vocab = 0;
  int64_t hidden = 0;
  kernels::DataType dtype = kernels::DataType::kBFloat16;  // of weights, hidden states and dX
  int64_t workspace_bytes = 0;
  int64_t repetitions = 0;
  double lse_spread = 0;  // log-sum-exps of rows vary by up to this much; 0: by little
  int cuda_index = -1;    // of the device; negative: the CPU
  bool portable = false;  // on a GPU, the path that every GPU takes
  // kFixed: on a GPU only, and not on that path or with a teacher.
  kernels::Segments segments = kernels::Segments::kOfRanks;
  double ignored = 0;  // share of the rows that are ignored; on a GPU only
  kernels::LossOptions options;
  // H of a teacher of the same dtype, whose soft targets are then added to the labels, at temperature 1; 0:
  // none. On a GPU only.
  int64_t teacher_hidden = 0;
  kernels::Divergence divergence = kernels::Divergence::kForwardKl;
  bool returns = false;  // whether everything is asked for that can be told of a row; on a GPU only
  // ω of every row, as an objective that has an entropy in it is computed in two phases: losses alone then
  // tell entropies, and the step tells none and takes their gradients. 0: neither. On a GPU only, without a
  // teacher, and not with `returns`.
  double entropy_gradient = 0;
  // For two phases: share of the rows that have no gradient, so that the step is of the others and losses
  // alone of all; and whether the step takes what losses alone have held (HoldSpace). On Hopper only, without
  // a teacher.
  double zeros = 0;
  bool held = false;
  // Each row's softmax is over a list of so many random tokens, its label among them; 0: over all. On a GPU
  // only, without a teacher, label smoothing or `returns`.
  int64_t kept = 0;
  int64_t longest = 0;  // of one row, with `kept`; 0: no longer than the others
  // Soft targets on a list of so many random tokens of each row, which add up to 0.8, beside the labels. The
  // same restrictions, and not with `kept`.
  int64_t targets = 0;
};

// A part of the work with its median time.
struct Measurement {
  std::string name;
  double milliseconds = 0;
  Work work;  // bytes 0: not known
};

struct RelativeErrors {
  double loss = 0;
  double dx = 0;
  double dw = 0;
};

struct KernelResult {
  std::string error;  // empty, or why there is no timing
  RelativeErrors relative_error;
  double tolerance = 0;  // of dx and dw
  Measurement step;      // the fused step
  Measurement limit;     // the fastest bare products, in sequence
  // Median of the rounds' ratios: what disturbs one round, or a part of the run, does not count.
  double ratio = 0;
  std::string limit_kind;  // which products those were
  std::vector<double> all_milliseconds;
  std::vector<double> all_limit_milliseconds;
  std::vector<Measurement> products;  // the limit's, each as it ran in the sequence
  std::vector<Measurement> stages;    // of the step, on a GPU
  // On a GPU: losses alone, and the bare logits product as their limit.
  Measurement forward;
  Measurement forward_limit;
  double forward_ratio = 0;
  double of_one_product = 0;  // the step over the bare logits product, round by round
  double two_phases = 0;      // losses alone and then the step, likewise
  // Memory the step took above inputs and outputs, as the system counts it; and what X, dX and the losses of
  // the batch take. Their sum is all there is above weights and gradient.
  int64_t peak_bytes = 0;
  int64_t batch_bytes = 0;
  int64_t tile_rows = 0;
  int64_t rows_redone = 0;
  int64_t checked_rows = 0;
  int64_t checked_vocabulary_rows = 0;
  std::string hardware;
};

// Called with a short text as a case goes on.
using Progress = std::function<void(const std::string&)>;

// Checks the fused step on the CPU against fp64, then times it against bare oneDNN products, in turns.
KernelResult RunCpuCase(const KernelCase& kernel_case, const Progress& progress);

// The same on a CUDA device against cuBLAS. Losses and dX of sampled rows and sampled rows of dW are checked.
KernelResult RunCudaCase(const KernelCase& kernel_case, const Progress& progress);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_KERNEL_CASE_H_
