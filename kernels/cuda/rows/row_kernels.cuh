// What the kernels on rows have in common: blocks' reductions, the end of a row, and how they are launched.
#ifndef LOSSD_KERNELS_CUDA_ROWS_ROW_KERNELS_CUH_
#define LOSSD_KERNELS_CUDA_ROWS_ROW_KERNELS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/rows/dependent_launch.cuh"
#include "kernels/cuda/rows/exponential.cuh"
#include "kernels/cuda/rows/logit_transform.cuh"
#include "kernels/cuda/rows/row_kernels.h"
#include "kernels/rounding.h"
#include "kernels/row_range.h"

namespace lossd::kernels::cuda {

inline constexpr int kThreads = 256;

inline constexpr float kLargestFloat = 0x1.fffffep127f;

// A bias's value as it raises logits; infinite if it is not finite.
__device__ inline float ShiftOf(float bias) { return isfinite(bias) ? bias : __int_as_float(0x7F800000); }

__device__ inline float NaN() { return __int_as_float(0x7FFFFFFF); }

template <class T>
__device__ float Widen(T value) {
  return static_cast<float>(value);
}

__device__ inline float MaximumOfWarp(float value) {
  for (int i = 16; i > 0; i /= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFF, value, i));
  return value;
}
__device__ inline double SumOfWarp(double value) {
  for (int i = 16; i > 0; i /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, i);
  return value;
}

// Over all threads of a block of kThreads, for all of them.
__device__ inline float MaximumOfBlock(float value) {
  __shared__ float parts[kThreads / 32];
  __syncthreads();
  value = MaximumOfWarp(value);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  for (float part : parts) value = fmaxf(value, part);
  return value;
}
__device__ inline double SumOfBlock(double value) {
  __shared__ double parts[kThreads / 32];
  __syncthreads();
  value = SumOfWarp(value);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0;
  for (double part : parts) sum += part;
  return sum;
}

// Eight elements, which fill whole memory transactions. Rows of padded matrices begin at multiples of eight.
template <class T>
struct alignas(16) Eight {
  T values[8];
};

// The factor with which a row counts in dW.
__device__ inline float ShareOf(const TileRows& tile, int32_t row) {
  if (tile.overflowed[row] != 0) return 0.0f;
  return tile.shares == nullptr ? 1.0f : tile.shares[row];
}

// Whether a label is one of this rank's entries.
__device__ inline bool IsOwn(const TileRows& tile, int32_t label) { return label >= 0 && label < tile.vocab; }

// Other ranks' entries have class weights too.
__device__ inline float ClassWeight(const TileRows& tile, int64_t entry) {
  return tile.classes.weights == nullptr ? 1.0f : tile.classes.weights[entry];
}

// C s. A weight of 0 means nothing, also of -infinity.
__device__ inline double WeightedLogit(float weight, float logit) {
  return weight == 0 ? 0.0 : static_cast<double>(weight) * logit;
}
// weight · cost, and 0 for a weight of 0: a cost is infinite where the label's logit is.
__device__ inline double Weighted(double weight, double cost) { return weight == 0 ? 0.0 : weight * cost; }

// Σ C s, or -infinity where that is below fp32's range: as in plain arithmetic.
__device__ inline double SmoothingSum(double sum) { return sum < -kLargestFloat ? -INFINITY : sum; }

// The end of a row

// Sums over the vocabulary without the label's entry, and that entry.
struct RowSums {
  double others = 0;         // E
  double own = 0;            // 0 below the range
  double smoothing_sum = 0;  // Σ C s over all entries; of smoothing only
  double moment = 0;         // Σ E (s - offset) over the others; of the entropy and its gradients only
};

// Whose E those are: e^(s - offset) 2^-exponent; and the label's s and f.
struct RowUnits {
  double offset;
  int32_t exponent;
  float target_logit;
  float target_slope;
  double own;  // E as this rank has it, over E in these units
  double own_offset;
};

__device__ inline RowUnits UnitsOf(const TileRows& tile, int32_t row) {
  const float slope = tile.options.softcap != 0 ? tile.target_slopes[row] : 1.0f;
  const float offset = tile.offsets[row];
  return {offset, tile.exponents[row], tile.target_logits[row], slope, 1.0, offset};
}

struct RowOutcome {
  float loss = 0;
  float log_sum_exp = 0;
  float z_loss = 0;
  float log_probability = 0;
  float entropy = 0;  // if the sums tell it
  float scale = 0;
  float target_gradient = 0;
  float smoothing_factor = 0;
  float gradient_factor = 0;
  float entropy_factor = 0;
  float mean = 0;
  float divergence = 0;  // of soft targets on a list, and their factors
  TargetFactors targets = {};
  bool overflowed = false;
};

__device__ inline RowOutcome OverflowedRow() {
  return {.loss = NaN(),
          .log_sum_exp = NaN(),
          .z_loss = NaN(),
          .log_probability = NaN(),
          .entropy = NaN(),
          .scale = NaN(),
          .target_gradient = NaN(),
          .divergence = NaN(),
          .overflowed = true};
}

// The z-loss of a row, before its weight.
__device__ inline double ZLossOf(const LossOptions& options, double log_sum_exp) {
  return options.lse_square_scale == 0 ? 0.0 : options.lse_square_scale * log_sum_exp * log_sum_exp;
}

// α, β, γ and δ of docs/numerics.md, and α - β, which is not their difference: that would be noise where the
// two are nearly equal.
struct GradientTerms {
  double alpha;
  double beta;
  double gamma;
  double delta;
  double rest;
};

// `label_weight` is the cross-entropy's: 1 without soft targets.
__device__ inline GradientTerms GradientTermsOf(const TileRows& tile, int32_t row, double token_weight,
                                                double label_weight, double class_weight,
                                                double log_sum_exp) {
  const LossOptions& options = tile.options;
  const double g = tile.gradient_scales[row];
  const double labelled = token_weight * g * label_weight;
  GradientTerms terms{};
  terms.beta = labelled * (1.0 - options.label_smoothing) * class_weight;
  if (options.label_smoothing != 0) {
    terms.gamma = labelled * options.label_smoothing / static_cast<double>(tile.whole_vocab);
    terms.rest = terms.gamma * tile.classes.sum;
  }
  if (options.lse_square_scale != 0) {
    const double z_scale = tile.z_gradient_scales == nullptr ? g : tile.z_gradient_scales[row];
    terms.rest += token_weight * 2.0 * options.lse_square_scale * log_sum_exp * z_scale;
  }
  if (tile.lse_gradients != nullptr) terms.rest += g * tile.lse_gradients[row];
  terms.alpha = terms.beta + terms.rest;
  if (tile.entropy_gradients != nullptr) terms.delta = g * tile.entropy_gradients[row];
  return terms;
}

// The label's part of the gradient but for smoothing's and softcap's: α p_y - β without a difference of
// nearly equal numbers, and the entropy's δ p_y (μ - s_y), where s_y is `own_logit` from the sums' offset.
__device__ inline double TargetOf(const GradientTerms& terms, const RowSums& sums, double own_logit) {
  const double sum = sums.others + sums.own;
  double target = -terms.beta * (sums.others / sum);
  if (terms.rest != 0) target += terms.rest * (sums.own / sum);
  if (terms.delta != 0 && sums.own > 0) {
    target += terms.delta * (sums.own / sum) * ((sums.moment - sums.others * own_logit) / sum);
  }
  return target;
}

// The most that the entropy's part of all entries can add up to: Σ p |s - μ| is at most twice the entropy.
__device__ inline double EntropyReach(const TileRows& tile, const GradientTerms& terms) {
  return terms.delta == 0 ? 0.0 : 2.0 * fabs(terms.delta) * log(static_cast<double>(tile.whole_vocab));
}

// Soft targets on a list: what p is multiplied by in the list and outside it, q's factor, D and the label's
// part of the gradient. Zeros without any.
struct TargetTerms {
  double listed = 0;
  double others = 0;
  double factor = 0;
  double divergence = 0;
  double label = 0;
};
__device__ inline TargetTerms TargetTermsOf(const TileRows& tile, int32_t row, double token_weight,
                                            double own_probability, double log_sum_exp) {
  TargetTerms terms;
  if (tile.target_sums == nullptr) return terms;
  const TargetSums& sums = tile.target_sums[row];
  const TargetShares shares = SharesOf(sums, log_sum_exp);
  terms.factor = token_weight * tile.gradient_scales[row] * tile.target_weight;
  terms.listed = terms.factor * shares.listed;
  terms.others = terms.factor * shares.others;
  terms.divergence = shares.divergence;
  terms.label = sums.has_own ? terms.listed * own_probability - terms.factor * sums.own
                             : terms.others * own_probability;
  return terms;
}

// A bound of the entries of a row with a list: p of the others times their factor is at most the rest of q.
__device__ inline double TargetReach(const GradientTerms& terms, const TargetTerms& targets) {
  return fabs(terms.alpha) + 2.01 * fabs(targets.factor) + 4 * fabs(terms.delta);
}

// The entries ((α - δ (s - μ)) e^s / S - γ C) f of the logits' gradient are stored over a power of two that
// keeps them in every type's range; v has it instead. A row that they are all 0 of has no say in what is
// common to rows. `mean`: μ from this rank's offset.
__device__ inline void FormElementwise(const TileRows& tile, const GradientTerms& terms,
                                       const TargetTerms& targets, double sum, double mean, RowOutcome* out) {
  double reach =
      fmax(fabs(terms.alpha / sum), fabs(terms.gamma) * static_cast<double>(tile.classes.largest)) +
      fabs(terms.delta / sum);
  // Entries of a list are not multiples of E, which the others' sum may be far above: their own size counts,
  // brought to where 16 bits have most room below.
  if (tile.target_sums != nullptr) reach = TargetReach(terms, targets) * 0x1p-13;
  const int exponent = reach > 0 && isfinite(reach) ? ilogb(reach) + 1 : 0;
  const double tau = reach > 0 ? static_cast<double>(tile.options.logit_scale) : 0.0;
  out->scale = static_cast<float>(ldexp(tau, exponent));
  out->gradient_factor = static_cast<float>(ldexp((terms.alpha + targets.others) / sum, -exponent));
  out->smoothing_factor = static_cast<float>(ldexp(terms.gamma, -exponent));
  out->entropy_factor = static_cast<float>(ldexp(terms.delta / sum, -exponent));
  out->mean = static_cast<float>(mean);
  out->targets.listed = static_cast<float>(ldexp(terms.alpha + targets.listed, -exponent));
  out->targets.target = static_cast<float>(ldexp(targets.factor, -exponent));
  out->targets.spread = static_cast<float>(ldexp(terms.delta, -exponent));
}

// All of the vocabulary's sums, in any units; v and the factors are for this rank's E.
__device__ inline RowOutcome FinishRow(const TileRows& tile, int32_t row, const RowSums& sums,
                                       const RowUnits& units) {
  constexpr double kLn2 = 0.693147180559945309417;
  const LossOptions& options = tile.options;
  const double own = sums.own;
  const double others = sums.others;
  const double sum = others + own;
  const double log_sum_exp = log(sum) + units.exponent * kLn2 + units.offset;
  double surprise = log_sum_exp - units.target_logit;  // where the label's own E is below the range
  if (own > 0) surprise = own > others ? log1p(others / own) : log(sum / own);

  const double class_weight = ClassWeight(tile, tile.labels[row]);
  const double token_weight = tile.token_weights == nullptr ? 1.0 : tile.token_weights[row];
  double loss = Weighted((1.0 - options.label_smoothing) * class_weight, surprise);
  if (options.label_smoothing != 0) {
    loss += options.label_smoothing / static_cast<double>(tile.whole_vocab) *
            (log_sum_exp * tile.classes.sum - SmoothingSum(sums.smoothing_sum));
  }
  const TargetTerms targets = TargetTermsOf(tile, row, token_weight, own / sum, log_sum_exp);
  if (tile.target_sums != nullptr) {
    loss = Weighted(tile.label_weight, loss) + Weighted(tile.target_weight, targets.divergence);
  }
  const double z_loss = ZLossOf(options, log_sum_exp);

  const GradientTerms terms =
      GradientTermsOf(tile, row, token_weight, tile.label_weight, class_weight, log_sum_exp);
  const double own_logit = static_cast<double>(units.target_logit) - units.offset;
  double target = TargetOf(terms, sums, own_logit) + targets.label;
  if (tile.smoothing == Smoothing::kElementwise) target -= terms.gamma * class_weight;
  if (options.softcap != 0) target *= units.target_slope;
  const double own_sum = sum * units.own;
  const double tau = options.logit_scale;
  RowOutcome out{.loss = static_cast<float>(Weighted(token_weight, loss + z_loss)),
                 .log_sum_exp = static_cast<float>(log_sum_exp),
                 .z_loss = static_cast<float>(token_weight * z_loss),
                 .log_probability = static_cast<float>(-surprise),
                 .scale = static_cast<float>(tau * terms.alpha / own_sum),
                 .target_gradient = static_cast<float>(tau * target),
                 .smoothing_factor = static_cast<float>(tau * terms.gamma),
                 .divergence = static_cast<float>(targets.divergence),
                 .overflowed = tile.overflowed[row] != 0};
  if (tile.smoothing == Smoothing::kElementwise) {
    const double mean = (sums.moment + (own > 0 ? own * own_logit : 0.0)) / sum;  // from the sums' offset
    // The offset is not added first: the rest would lose its digits to it.
    if (tile.sums_tell_entropy) {
      out.entropy = static_cast<float>(fmax(log(sum) + units.exponent * kLn2 - mean, 0.0));
    }
    FormElementwise(tile, terms, targets, own_sum,
                    terms.delta == 0 ? 0 : mean + units.offset - units.own_offset, &out);
    out.targets.log_sum_exp = log_sum_exp;
    out.targets.mean = mean + units.offset;
  }
  // A bias is as if each row of X ended in a 1.
  const double largest = tile.bias == nullptr ? tile.largest[row] : fmaxf(tile.largest[row], 1.0f);
  const double contribution = tau * fmax(fmax(fmax(fabs(terms.alpha), fabs(terms.beta)),
                                              fabs(terms.gamma) * fmax(tile.classes.sum, 1.0)),
                                         fmax(EntropyReach(tile, terms), 4 * fabs(targets.factor)));
  // Factors that are infinite meet zeros in a row of zeros too.
  const bool in_range = isfinite(out.target_gradient) && isfinite(out.smoothing_factor) &&
                        contribution * largest < kLargestContribution &&
                        fabs(static_cast<double>(out.scale)) * largest < kLargestScaledRow;
  out.overflowed = out.overflowed || (tile.gradient_wanted && !in_range);
  // Σ C_v W_v may leave fp32 where no logit does. Entry by entry, logits of -infinity are in the sum.
  const bool sums_logits = tile.smoothing == Smoothing::kElementwise && sums.smoothing_sum < 0;
  out.overflowed = out.overflowed || isnan(sums.smoothing_sum) || (isinf(sums.smoothing_sum) && !sums_logits);
  return out.overflowed ? OverflowedRow() : out;
}

__device__ inline RowOutcome FinishRow(const TileRows& tile, int32_t row, const RowSums& sums) {
  return FinishRow(tile, row, sums, UnitsOf(tile, row));
}

// The label's own E; 0 below the range.
__device__ inline double OwnExponential(const ScaledExponential& exponential, float target_logit) {
  return exponential.IsBelow(target_logit) ? 0.0 : exponential(target_logit);
}

// The losses of a row and what is told with them.
__device__ inline void WriteReturns(const TileRows& tile, int32_t row, const RowOutcome& out) {
  const int32_t place = tile.batch_rows[row];
  if (tile.losses != nullptr) tile.losses[place] = out.loss;
  if (tile.returns.log_sum_exp != nullptr) tile.returns.log_sum_exp[place] = out.log_sum_exp;
  if (tile.returns.z_loss != nullptr) tile.returns.z_loss[place] = out.z_loss;
  if (tile.returns.log_probability != nullptr) tile.returns.log_probability[place] = out.log_probability;
  if (tile.sums_tell_entropy) tile.returns.entropy[place] = out.entropy;
  if (tile.target_sums != nullptr && tile.returns.divergence != nullptr) {
    tile.returns.divergence[place] = out.divergence;
  }
}

// What the products for gradients need of a row.
__device__ inline void WriteFactors(const TileRows& tile, int32_t row, const RowOutcome& out) {
  tile.scales[row] = out.scale;
  tile.target_gradients[row] = out.target_gradient;
  tile.overflowed[row] = out.overflowed ? 1 : 0;
  if (tile.smoothing == Smoothing::kNone) return;
  tile.smoothing_factors[row] = out.smoothing_factor;
  tile.gradient_factors[row] = out.gradient_factor;
  tile.entropy_factors[row] = out.entropy_factor;
  tile.means[row] = out.mean;
  if (tile.target_factors != nullptr) tile.target_factors[row] = out.targets;
}

__device__ inline void WriteRow(const TileRows& tile, int32_t row, const RowOutcome& out) {
  WriteReturns(tile, row, out);
  WriteFactors(tile, row, out);
}

// Dispatch

// Calls `function` with a value of the type that `type` stands for.
template <class Function>
void WithType(DataType type, Function function) {
  switch (type) {
    case DataType::kFloat32:
      return function(float());
    case DataType::kBFloat16:
      return function(__nv_bfloat16());
    case DataType::kFloat16:
      return function(__half());
  }
}

inline unsigned Blocks(int64_t count, int64_t per_block) {
  return static_cast<unsigned>(CeilDivide(count, per_block));
}

struct Grid {
  unsigned blocks = 0;
  unsigned threads = kThreads;
};

// `kernel` begins with AwaitPreviousKernel.
template <class... Parameters, class... Arguments>
Result LaunchRows(const char* what, Grid grid, const TileRows& tile, cudaStream_t stream,
                  void (*kernel)(TileRows, Parameters...), Arguments... arguments) {
  cudaLaunchAttribute attribute = DependentLaunch();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.blocks);
  config.blockDim = dim3(grid.threads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = tile.dependent_launches ? 1 : 0;
  return {cudaLaunchKernelEx(&config, kernel, tile, Parameters(arguments)...), what};
}

// Loads kernels: left to itself, the driver does that at the first launch, when there may be no memory left.
class KernelLoader {
 public:
  template <class Kernel>
  void Add(Kernel* kernel) {
    cudaFuncAttributes attributes{};
    if (result_.ok()) result_ = {cudaFuncGetAttributes(&attributes, kernel), "loading a kernel of rows"};
  }
  const Result& result() const { return result_; }

 private:
  Result result_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_ROWS_ROW_KERNELS_CUH_
