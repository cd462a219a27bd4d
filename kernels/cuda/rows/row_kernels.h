// What happens to rows between the matrix products: everything here works on [n] or [n, H], never on [n, V].
// Formulas and names as in docs/numerics.md.
//
// All pointers are device memory. Functions enqueue on `stream` and return at once; an error is the launch's.
#ifndef LOSSD_KERNELS_CUDA_ROWS_ROW_KERNELS_H_
#define LOSSD_KERNELS_CUDA_ROWS_ROW_KERNELS_H_

#include <cstdint>

#include "kernels/cuda/memory/result.h"
#include "kernels/data_type.h"
#include "kernels/linear_cross_entropy.h"
#include "kernels/target_shares.h"

namespace lossd::kernels::cuda {

// How label smoothing reaches the gradients. Soft targets and gradients of the entropy, whose entries are not
// multiples of E either, are kElementwise with or without it.
enum class Smoothing {
  kNone,
  kRankOne,      // through Σ C_v W_v and Σ γ_r x_r
  kElementwise,  // with softcap: each entry of the logits' gradient has its own part
};
// What follows from the options alone.
constexpr Smoothing SmoothingOf(const LossOptions& options) {
  if (options.label_smoothing == 0) return Smoothing::kNone;
  return options.softcap == 0 ? Smoothing::kRankOne : Smoothing::kElementwise;
}

// The head's class weights, and what is made of them. Without any, C is 1.
struct ClassWeightTerms {
  const float* weights = nullptr;  // w [V], from the first of a rank's entries; null: none
  double sum = 0;                  // Σ C
  float largest = 1.0f;            // C
  // For Smoothing::kRankOne only:
  const float* vocabulary_sum = nullptr;  // Σ C_v W_v [padded_hidden]
  const double* bias_sum = nullptr;       // Σ C_v b_v, one value; with a bias only
};

// What a rank knows of a row once its own logits are summed, and what the others need of it.
struct ShardStatistics {
  double others = 0;         // Σ E of the rank's entries without the label's; negative: overflowed
  double smoothing_sum = 0;  // Σ C s of the rank's entries; of smoothing only
  double moment = 0;         // Σ E (s - offset) as `others` is; of gradients of the entropy only
  float offset = 0;          // E = e^(z - offset) 2^-exponent
  int32_t exponent = 0;      // even
  float target_logit = 0;    // s of the label; -infinity where the label is another rank's
  float target_slope = 0;    // f of the label
  int32_t has_label = 0;     // 1: the label is one of the rank's entries
};

// What entries of a row's list of soft targets are made of: (listed - spread (s - mean)) p - target q, over
// the same power of two as the row's other entries. All 0 of a row that overflowed.
struct TargetFactors {
  double log_sum_exp = 0;
  double mean = 0;  // Σ p s
  float listed = 0;
  float target = 0;
  float spread = 0;
};

// The valid rows of one tile. Arrays have one element a row.
struct TileRows {
  int32_t rows = 0;
  int64_t vocab = 0;        // of this rank
  int64_t whole_vocab = 0;  // of all ranks
  int64_t hidden = 0;
  int64_t padded_hidden = 0;            // stride of weight, x and scaled_x; a multiple of 8
  DataType type = DataType::kBFloat16;  // of weight, x and scaled_x

  // Given.
  const void* weight = nullptr;  // W [V, padded_hidden]
  const float* bias = nullptr;   // b [V], 16-byte aligned; null: none
  const float* weight_largest =
      nullptr;  // one value: the largest magnitude in W, not finite if one of W is not
  const float* bias_largest = nullptr;  // one value, of LargestShift(b)
  const int32_t* batch_rows = nullptr;  // where a row is in the batch's own arrays
  // Numbered from the first of this rank's entries: those outside [0, vocab) are other ranks'.
  const int32_t* labels = nullptr;
  const float* gradient_scales = nullptr;    // g
  const float* z_gradient_scales = nullptr;  // g_z; null: g
  const float* token_weights = nullptr;      // a; null: 1
  const float* lse_gradients = nullptr;      // u; null: 0
  const float* entropy_gradients = nullptr;  // ω; null: 0
  const float* shares = nullptr;             // 1: counts in dW, 0: does not; null: all count
  const int32_t* by_label = nullptr;         // the tile's rows ordered by label, rows of one label in order
  bool gradient_wanted = false;  // dX or dW: then rows whose gradient would overflow count as overflowed
  LossOptions options;
  Smoothing smoothing = Smoothing::kNone;  // SmoothingOf(options), or kElementwise for another reason
  // The entropies that are wanted are made of kElementwise's sums. Otherwise FinishRows leaves them alone.
  bool sums_tell_entropy = false;
  // kElementwise for the sake of the entropy alone: moments are summed beside E, and entries are made of E as
  // it was rounded, without logits (held_rows.h).
  bool spread = false;
  // With soft targets on lists: the weights of the divergence and of the cross-entropy.
  float target_weight = 0;
  float label_weight = 1;
  ClassWeightTerms classes;
  int32_t exponent_bias = 0;        // even; added to every k, for tests
  bool dependent_launches = false;  // compute capability 9.0: see dependent_launch.cuh
  // What Hopper's products leave to kernels of other streams.
  int32_t spared_multiprocessors = 0;

  // Made.
  void* x = nullptr;                   // [rows, padded_hidden]
  void* scaled_x = nullptr;            // [rows, padded_hidden]
  float* target_logits = nullptr;      // s
  float* target_slopes = nullptr;      // f; of softcap only
  double* smoothing_logits = nullptr;  // Σ C_v x W_v; of smoothing without softcap only
  float* largest = nullptr;            // magnitude in x
  int32_t* overflowed = nullptr;       // 0 or 1
  float* offsets = nullptr;            // E = e^(z - offset) 2^-exponent
  int32_t* exponents = nullptr;
  float* scales = nullptr;            // v; NaN if overflowed
  float* target_gradients = nullptr;  // c; NaN if overflowed
  // For smoothing only, and 0 if overflowed. kRankOne: τ γ. kElementwise: the entries of the logits' gradient
  // are ((gradient_factor - entropy_factor (s - offset - mean)) E - smoothing_factor C) f, and v has no α /
  // S.
  float* smoothing_factors = nullptr;
  float* gradient_factors = nullptr;
  float* entropy_factors = nullptr;
  float* means = nullptr;
  // Soft targets on lists; null: there are none.
  TargetSums* target_sums = nullptr;
  TargetFactors* target_factors = nullptr;
  int32_t* redo_rows = nullptr;
  int32_t* redo_count = nullptr;  // one value
  float* factors = nullptr;       // of fp16: what scaled_x is multiplied by, the reciprocal, 0 and 1

  // Null: this rank has the whole vocabulary. Otherwise FinishRows only writes these.
  ShardStatistics* statistics = nullptr;

  // The batch's own.
  float* losses = nullptr;  // null where another rank answers, and then no returns are wanted
  RowReturns returns;
  int32_t* rows_redone = nullptr;  // or null; one value, added to
};

// Which rows a function works on: all, or those of redo_rows (as many as redo_count says, on the device).
enum class Which { kAll, kRedo };

// Gathers and rounds hidden states [*, hidden] of `hidden_type` into x, and computes target logits,
// magnitudes and overflows: a row is one if it is not finite in the weight's type or if a logit could leave
// fp32, but for a bias that takes it below: such a logit is -infinity. Its x is zero. Empties redo_rows.
Result PrepareRows(const TileRows& tile, DataType hidden_type, const void* hidden_states,
                   cudaStream_t stream);

// From the largest logits [tiles, stride] of a sample of the vocabulary: exponents that put a row's sum near
// 2^-40 or above. From those of the whole vocabulary (kRedo, or exact): the row's true maximum as its offset.
enum class Maximum { kOfSample, kOfAll };
Result ChooseExponents(const TileRows& tile, Which which, Maximum maximum, const float* maxima, int32_t tiles,
                       int64_t stride, cudaStream_t stream);

// Sums over pieces of the vocabulary without the label's entry, [tiles, stride] each.
struct SumPieces {
  const float* exponentials = nullptr;  // E
  const float* logits = nullptr;        // C s; of smoothing with softcap only
  const float* moments = nullptr;       // E (s - offset); null but for Smoothing::kElementwise
  int32_t tiles = 0;
  int64_t stride = 0;
};
// Losses and what is a function of the log-sum-exp, v, c and the factors; or the statistics. Rows out of
// range go to redo_rows (kAll); what is out of range still (kRedo) has overflowed, and redo_count is added to
// rows_redone.
Result FinishRows(const TileRows& tile, Which which, const SumPieces& sums, cudaStream_t stream);

// scaled_x[i] = x[redo_rows[i]].
Result GatherRedoRows(const TileRows& tile, cudaStream_t stream);

// scaled_x = v x, rounded to the weight's type; zero for rows that overflowed or do not count. For fp16 with
// a power of two, the same for all rows, that fits its range.
Result ScaleRows(const TileRows& tile, cudaStream_t stream);

// dW[y] += c x, rows of one label summed in fp32 in their order.
Result AddTargets(const TileRows& tile, float* gradient, cudaStream_t stream);

// The largest magnitude of `count` values of `type` into *largest; infinite if one is not finite.
Result LargestMagnitude(DataType type, const void* values, int64_t count, float* largest,
                        cudaStream_t stream);

// Loads every kernel that the functions above may launch for heads of this type: left to itself, the driver
// does that at the first launch, when there may be no memory left for it.
Result LoadRowKernels(DataType weight_type);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_ROWS_ROW_KERNELS_H_
