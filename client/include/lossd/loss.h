// What a batch's loss may be beyond plain cross-entropy, what can be had of each of its tokens besides the
// loss, and how a loss is reduced to one number. Part of lossd/client.h. Formulas: docs/numerics.md; which
// option does what: docs/losses.md.
#ifndef LOSSD_LOSS_H_
#define LOSSD_LOSS_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace lossd {

enum class DataType { kFloat32, kBFloat16, kFloat16 };
inline constexpr DataType kDataTypes[] = {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16};
int64_t SizeOf(DataType type);    // bytes of one element
const char* Name(DataType type);  // "float32", ...

enum class ClassWeights {
  kOfHead,  // they count if the head has any
  kIgnore,
  kUse,  // INVALID_ARGUMENT if the head has none
};

enum class Bias {
  kOfHead,  // it counts if the head has one
  kIgnore,
  kUse,  // INVALID_ARGUMENT if the head has none
};

struct LossOptions {
  float label_smoothing = 0.0F;   // ε, in [0, 1]
  float lse_square_scale = 0.0F;  // λ of the z-loss λ·lse²; finite, at least 0
  // In place of the head's: τ, finite and above 0; c, finite and above 0, or 0 for none.
  std::optional<float> logit_scale = {};
  std::optional<float> softcap = {};
  ClassWeights class_weights = ClassWeights::kOfHead;
  Bias bias = Bias::kOfHead;
};

// How far a token's distribution q is from the teacher's p.
enum class Divergence {
  kForwardKl,      // KL(p ‖ q)
  kReverseKl,      // KL(q ‖ p)
  kJensenShannon,  // β KL(p ‖ m) + (1 − β) KL(q ‖ m), m = β p + (1 − β) q
};

// Soft targets: those of another head of the same server, fed with hidden states of its own. A token's loss
// is label_weight times the cross-entropy, plus the z-loss, plus weight times the divergence D. Nothing of
// the teacher is trained.
struct Distillation {
  std::string teacher;      // name of a head of the same vocab_size; its own scale, softcap and bias count
  int64_t hidden_size = 0;  // the teacher's
  DataType hidden_type = DataType::kFloat32;
  const void* hidden_states =
      nullptr;  // [N, hidden_size] of hidden_type; may lie in a Region, like the batch's
  Divergence divergence = Divergence::kForwardKl;
  float beta = 0.5F;          // of kJensenShannon; above 0 and below 1
  float temperature = 1.0F;   // divides both heads' logits in D, not in the cross-entropy; finite, above 0
  float weight = 1.0F;        // finite, at least 0
  float label_weight = 0.0F;  // finite, at least 0; 0: no cross-entropy
};

// Room for what is wanted of each of a batch's N tokens; what is empty is not computed. All of it is of the
// logits that the loss is of, after scale and softcap. Of ignored tokens 0, or −1 for what is a token or a
// rank; of tokens whose logits overflow NaN, or −1. Of equal logits the lower token comes first.
struct TokenReturns {
  std::span<float> log_sum_exp = {};        // [N]
  std::span<float> z_losses = {};           // [N], which the losses contain
  std::span<float> log_probabilities = {};  // [N], of the label
  std::span<float> entropies = {};          // [N], in nats
  std::span<int32_t> predictions = {};      // [N], the token of the largest logit
  std::span<int32_t> target_ranks = {};     // [N], how many tokens are above the label: 0 if it is predicted
  std::span<float> divergences = {};        // [N], before every weight; with Batch::distillation only
  int32_t top_k = 0;                        // at most 64 and V
  std::span<int32_t> top_tokens = {};       // [N, top_k], best first
  std::span<float> top_log_probabilities = {};  // [N, top_k]
};

// How BatchResult::loss, and with it the gradients, come from the losses of the tokens.
enum class Reduction {
  // Their sum. dX and dW are of gradient_scale times it.
  kSum,
  // The cross-entropy, and what there is of a divergence, over `normalizer` and the z-loss over
  // `z_normalizer`: the sum of the batch's losses over the global batch's count is the mean of the global
  // batch, where a mean of means would not be. dX and dW
  // are of gradient_scale times it.
  kMean,
  // As kSum, for a mean whose count is known only after the last batch of a step: Head::Flush with
  // FlushOptions::gradient_scale = 1 / count makes dW that of the mean, ScaleInPlace dX. Refused
  // (INVALID_ARGUMENT) for class weights together with a z-loss: these are two means with a count of their
  // own each, and their gradients cannot be told apart any more.
  kLateMean,
};

// How many labels are not ignore_index: the count of a mean without class weights.
int64_t CountValid(std::span<const int64_t> labels, int64_t ignore_index = -100);

// The sum of the labels' weights, which is the count of a mean with class weights. Labels must be in
// [0, class_weights.size()) or ignore_index.
double ClassWeightSum(std::span<const int64_t> labels, std::span<const float> class_weights,
                      int64_t ignore_index = -100);

// Multiplies `count` elements of `type`, dX for one, by `scale`, in fp32, and rounds to `type` again.
void ScaleInPlace(DataType type, void* values, int64_t count, double scale);

// Labels for the prediction of the token `shift` places further on: result[i] = labels[i + shift] where both
// are in the same sequence of `sequence_length` tokens, otherwise ignore_index. INVALID_ARGUMENT if `shift`
// is negative or `labels` is no whole number of sequences.
absl::StatusOr<std::vector<int64_t>> ShiftedLabels(std::span<const int64_t> labels, int64_t shift,
                                                   int64_t sequence_length, int64_t ignore_index = -100);

}  // namespace lossd

#endif  // LOSSD_LOSS_H_
