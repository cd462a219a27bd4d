// Fused linear + cross-entropy: loss, dX, dW and db of  s = c tanh(τ (X Wᵀ + b) / c),  loss_r =
// logsumexp(s_r) − s_r[y_r] (and what LossOptions add to it) without ever holding the [N, V] logits.
//
// Pure compute on raw pointers and sizes: nothing here allocates, logs, throws or keeps state. All matrices
// are row-major and dense. Pointers need the alignment of their element type only.
#ifndef LOSSD_KERNELS_LINEAR_CROSS_ENTROPY_H_
#define LOSSD_KERNELS_LINEAR_CROSS_ENTROPY_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "kernels/data_type.h"
#include "kernels/host_device.h"
#include "kernels/loss_options.h"
#include "kernels/shard.h"

namespace lossd::kernels {

enum class Status {
  kOk,
  kInvalidArgument,    // a size, pointer or type the kernel cannot work with
  kWorkspaceTooSmall,  // not even one row fits
  kUnsupported,        // this machine or build cannot do it
  kInternal,           // the math library failed
  kRankLost,           // a collective operation between ranks failed
};

const char* StatusName(Status status);

// What the step does to dW.
enum class WeightGradient {
  kNone,        // loss (and dX, if asked for) only; dw may be null
  kOverwrite,   // the first contribution of a window: dw's old content is never read
  kAccumulate,  // dw += contribution
};

inline constexpr int32_t kMostTopK = 64;

// How far the row's distribution q is from the teacher's p.
enum class Divergence {
  kForwardKl,      // KL(p ‖ q)
  kReverseKl,      // KL(q ‖ p)
  kJensenShannon,  // β KL(p ‖ m) + (1 − β) KL(q ‖ m), m = β p + (1 − β) q
};

// Soft targets. A row's loss is then label_weight × cross-entropy (with smoothing) + z-loss + weight × D,
// with D of softmax(s / temperature) of both sides; cross-entropy, z-loss and returns are of softmax(s) as
// ever.
struct Distillation {
  Divergence divergence = Divergence::kForwardKl;
  float beta = 0.5f;          // in (0, 1); of kJensenShannon
  float temperature = 1.0f;   // finite and above 0
  float weight = 1.0f;        // finite and at least 0
  float label_weight = 0.0f;  // finite and at least 0

  bool operator==(const Distillation&) const = default;
};

// The head that the soft targets are of. Constant: nothing of it gets a gradient.
struct Teacher {
  int64_t hidden = 0;                         // its own H >= 1
  DataType weight_type = DataType::kFloat32;  // its own
  const void* weight = nullptr;               // [V, hidden]
  const float* bias = nullptr;                // [V], finite; null: none
  float logit_scale = 1.0f;                   // its own τ and c
  float softcap = 0.0f;
  DataType hidden_type = DataType::kFloat32;  // rounded to its weight_type before the product
  const void* hidden_states = nullptr;        // [N, hidden]
};

// Results for each row beside its loss: arrays of device or host memory like the losses. A null array is not
// wanted and costs nothing. s, p and ℓ are those of the loss: after scale and softcap. Of ignored rows:
// 0, or −1 for what is a token or a rank; of rows that overflowed: NaN, or −1. Ties go to the lower token.
struct RowReturns {
  float* log_sum_exp = nullptr;      // [N] ℓ
  float* z_loss = nullptr;           // [N] a λ ℓ², which the loss contains
  float* log_probability = nullptr;  // [N] s_y − ℓ
  float* entropy = nullptr;          // [N] −Σ p log p, in nats
  int32_t* prediction = nullptr;     // [N] the token of the largest s
  int32_t* target_rank = nullptr;    // [N] tokens whose s is above the label's: 0 if that is the largest
  float* divergence = nullptr;       // [N] D, before every weight; with soft targets only
  int32_t top_k = 0;                 // 0 to kMostTopK and V
  int32_t* top_tokens = nullptr;     // [N, top_k], best first
  float* top_log_probabilities = nullptr;  // [N, top_k] s − ℓ

  // Whether anything is wanted that is not 0 wherever a is.
  bool unweighted() const {
    return log_sum_exp != nullptr || log_probability != nullptr || divergence != nullptr || whole_row();
  }
  // Whether anything is wanted that is more than a function of ℓ and s_y.
  bool whole_row() const { return entropy != nullptr || compares(); }
  // Whether anything is wanted that logits are compared with each other for.
  bool compares() const { return prediction != nullptr || target_rank != nullptr || top_k > 0; }
};

// A list of tokens of each row, one behind the other. The caller has checked them.
struct TokenLists {
  const int64_t* offsets = nullptr;  // [N + 1]: row r has [offsets[r], offsets[r + 1]), from 0 on
  const int32_t* tokens = nullptr;   // [offsets[N]], each in [0, V), none twice in a row

  bool given() const { return offsets != nullptr; }
  int64_t size(int64_t row) const { return offsets[row + 1] - offsets[row]; }
};

// Soft targets of each row on a list of tokens: q of its tokens, and what they leave of 1 for all others
// together.
struct TargetLists {
  TokenLists lists = {};                 // in ascending order of tokens
  const float* probabilities = nullptr;  // q [offsets[N]], finite and at least 0; above 1 by rounding at most

  bool given() const { return lists.given(); }
};

// What is left of 1 where probabilities add up to `mass`. Less than this is what rounding has left.
LOSSD_HOST_DEVICE inline double RestOfTargets(double mass) { return 1 - mass > 0x1p-18 ? 1 - mass : 0; }

// The least probability of all tokens outside a list that is told from 0. It is found as what the list's
// leave of 1, which has an error of some 2^-23 of the logits.
LOSSD_HOST_DEVICE inline double LeastRest(double log_sum_exp) {
  const double size = log_sum_exp < 0 ? -log_sum_exp : log_sum_exp;
  return size > 8 ? 0x1p-19 * size : 0x1p-16;
}

// One batch of rows. Notation of docs/numerics.md: N tokens, V vocab, H hidden.
struct LinearCrossEntropyParams {
  // Null: this is the whole head. Otherwise the step is one of as many as there are ranks, each called with
  // the same rows and options: `vocab`, `weight`, `bias`, `dw`, `db` and the teacher's weight and bias are
  // those of this rank's entries (`vocab` = shard->end() - shard->first()); labels and class weights are
  // those of the whole vocabulary. Losses, returns and dX are written by the rank that answers; elsewhere
  // their pointers only say what is wanted, and are never followed. dW and db are each rank's own.
  const Shard* shard = nullptr;

  int64_t tokens = 0;  // N >= 1
  int64_t vocab = 0;   // V >= 1
  int64_t hidden = 0;  // H >= 1

  DataType weight_type = DataType::kFloat32;  // fp32, bf16 or fp16
  const void* weight = nullptr;               // W [V, H]
  const float* bias = nullptr;                // b [V], finite; null: none. Logits are τ (x Wᵀ + b)

  DataType hidden_type =
      DataType::kFloat32;  // fp32, bf16 or fp16; rounded to the weight's type before the products
  const void* hidden_states = nullptr;  // X [N, H]; finite

  const int64_t* labels =
      nullptr;  // [N], each in [0, V) or equal to ignore_index; the caller has checked them
  // Such rows cost no arithmetic: loss 0, dX 0, nothing in dW. So it is with rows whose weight and upstream
  // gradients are 0, if no returns are wanted that may be something else (RowReturns::unweighted).
  int64_t ignore_index = -100;

  LossOptions options;
  const Teacher* teacher = nullptr;  // null: none, and `distillation` means nothing but for target_lists
  Distillation distillation;
  const float* class_weights = nullptr;  // w [V], finite and at least 0, with a finite sum; null: none
  const float* token_weights = nullptr;  // a [N], finite: of the row's loss and its gradients; null: 1
  // u [N], finite: the upstream gradient of ℓ, which a does not multiply; null: 0.
  const float* lse_gradients = nullptr;
  // ω [N], finite: the same of the entropy. Where they are given, with a dX or a dW, gradients are formed
  // entry by entry, whatever their values.
  const float* entropy_gradients = nullptr;

  // Given: a row's softmax is over its list alone, and so is everything that is made of it. The list of a row
  // that is computed has its label. kUnsupported together with label smoothing, soft targets, top_k or
  // several ranks.
  TokenLists kept_tokens;
  // Given: a row's divergence is that of q, with all tokens outside its list as one whose probability is what
  // is left of 1, from the row's own distribution; `distillation` has its weight and the cross-entropy's, and
  // is of kForwardKl with temperature 1. kUnsupported together with label smoothing, a teacher, kept tokens
  // or several segments.
  TargetLists target_lists;

  float gradient_scale = 1.0f;  // g: multiplies dX and dW (u's and ω's parts as well), not the losses
  // g_z: what multiplies the z-loss's part of them instead, whose normaliser may be another one; none: g.
  std::optional<float> z_gradient_scale;

  float* losses = nullptr;  // [N] fp32, required: all terms, times a
  RowReturns returns;

  DataType dx_type = DataType::kFloat32;  // fp32, bf16 or fp16
  void* dx = nullptr;                     // dX [N, H], optional

  WeightGradient weight_gradient = WeightGradient::kNone;
  float* dw = nullptr;  // dW [V, H] fp32, always
  // db [V] fp32, overwritten or added to as dw is. With a bias and a dW it is required; without a bias it may
  // be given, and what is added is nothing.
  float* db = nullptr;

  void* workspace = nullptr;  // at least WorkspaceBytes(1, ...), with the teacher if any; 64-byte aligned
  int64_t workspace_bytes = 0;

  // Called once, when every loss and every row of dX is final and before the last dW product starts, so that
  // answers leave while dW is still being added. Optional. Not called when the step fails.
  void (*on_input_gradients)(void* context) = nullptr;
  void* on_input_gradients_context = nullptr;
};

// What a step did, beyond its outputs.
struct LinearCrossEntropyStats {
  int64_t valid_tokens = 0;  // rows that were computed
  int64_t rows_redone =
      0;  // rows whose exponent offset was out of range and that were computed again exactly
};

// How large a workspace is where nobody asks for another size. The GPU's holds 4096 rows of 131072 entries in
// 16 bits.
inline constexpr int64_t kDefaultCpuWorkspaceBytes = int64_t{512} << 20;
inline constexpr int64_t kDefaultCudaWorkspaceBytes = int64_t{5} << 28;

// Bytes a workspace needs so that `rows` rows are worked on at once, whatever is asked of them. Monotonic in
// rows.
int64_t WorkspaceBytes(int64_t rows, int64_t vocab, int64_t hidden, DataType weight_type);

// Most rows a workspace of `bytes` lets the CPU step work on at once, whatever is asked of them; 0 if not
// even one fits.
int64_t RowsWithin(int64_t bytes, int64_t vocab, int64_t hidden, DataType weight_type);

// The same for batches with soft targets of such a teacher, which need more. A workspace that has no room for
// one row of them is kWorkspaceTooSmall.
struct TeacherSize {
  int64_t hidden = 0;
  DataType weight_type = DataType::kFloat32;
};
int64_t WorkspaceBytes(int64_t rows, int64_t vocab, int64_t hidden, DataType weight_type,
                       const TeacherSize& teacher);
int64_t RowsWithin(int64_t bytes, int64_t vocab, int64_t hidden, DataType weight_type,
                   const TeacherSize& teacher);

// The same for a step of a shard. The bytes are those of any rank, and workspaces of all ranks should be of
// one size: where they are not, the smallest decides how many rows all of them work on at once. With fixed
// segments they do not depend on the number of ranks, so that the rows of a tile do not either; a rank of
// many then uses less. `teacher` null: batches without soft targets. `bytes` below WorkspaceBytes(1, ...): 0
// rows.
int64_t WorkspaceBytes(int64_t rows, const Shard& shard, int64_t hidden, DataType weight_type,
                       const TeacherSize* teacher);
int64_t RowsWithin(int64_t bytes, const Shard& shard, int64_t hidden, DataType weight_type,
                   const TeacherSize* teacher);

// The step on the CPU, on all cores (OpenMP). Any N: rows are worked on in tiles that fit the workspace. Loss
// and dX of a row do not depend on the rows beside it. Given the same calls in the same order, dW is bitwise
// the same. Not reentrant for one workspace; different workspaces may be used at once.
//
// With a shard every rank makes the call, and the communicator's when its turn comes; a batch of ignored rows
// alone makes none. A rank that is lost, or whose own step fails, gives kRankLost at the others:
// communicator->failure() says why.
Status CpuLinearCrossEntropy(const LinearCrossEntropyParams& params, LinearCrossEntropyStats* stats);

// The oracle: the same formulas in fp64, one row after the other, for tests. Slow. losses/log_sum_exp/dx/dw
// are written as doubles to the arrays given here (any may be null), and those of params are ignored; dw is
// accumulated into. Inputs are taken as they are (rounding hidden states to the weight's type is part of the
// arithmetic that is judged).
struct ReferenceOutputs {
  double* losses = nullptr;           // [N]
  double* log_sum_exp = nullptr;      // [N]
  double* z_loss = nullptr;           // [N]
  double* log_probability = nullptr;  // [N]
  double* entropy = nullptr;          // [N]
  double* logits = nullptr;           // [N, V] s: what tokens and ranks are judged by
  double* dx = nullptr;               // [N, H]
  double* dw = nullptr;               // [V, H], accumulated
  double* db = nullptr;               // [V], accumulated
  double* divergence = nullptr;       // [N] D
};
Status ReferenceLinearCrossEntropy(const LinearCrossEntropyParams& params, const ReferenceOutputs& outputs);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_LINEAR_CROSS_ENTROPY_H_
