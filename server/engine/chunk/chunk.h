// A chunk of tokens on its way through the engine, and its answer.
#ifndef LOSSD_SERVER_ENGINE_CHUNK_CHUNK_H_
#define LOSSD_SERVER_ENGINE_CHUNK_CHUNK_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/data_type.h"
#include "kernels/linear_cross_entropy.h"
#include "server/engine/chunk/head_config.h"
#include "server/engine/common/region_handle.h"
#include "server/engine/memory/payload.h"

namespace lossd::engine {

// Whether an answer says when its chunk passed which stage.
enum class Timing { kNone, kReport };

// By this machine's clock; each no earlier than the one above it. What they are: ChunkTiming in loss.proto.
struct ChunkTimes {
  absl::Time received;
  absl::Time accepted;
  absl::Time started;
  absl::Time input_ready;
  absl::Time compute_started;
  absl::Time computed;
  absl::Time output_ready;
  std::optional<absl::Time> earlier_done;
};

// Losses, with dX and dW, without either, or with dW alone. The last one is no chunk's: it is what remains to
// be done of one that was answered without its dW.
enum class ComputeMode { kLossAndGradients, kLossOnly, kLossAndWeightGradient, kWeightGradientOnly };
inline bool HasInputGradient(ComputeMode mode) { return mode == ComputeMode::kLossAndGradients; }
// Whether chunks of this mode are to be added to dW.
inline bool HasWeightGradient(ComputeMode mode) { return mode != ComputeMode::kLossOnly; }

// Whether the head's class weights count.
enum class ClassWeights { kIgnore, kUse };

// Whether the head's bias counts.
enum class Bias { kIgnore, kUse };

// Which of kernels::RowReturns are wanted.
struct WantedReturns {
  bool log_sum_exp = false;
  bool z_loss = false;
  bool log_probability = false;
  bool entropy = false;
  bool prediction = false;
  bool target_rank = false;
  bool divergence = false;
  int32_t top_k = 0;

  bool operator==(const WantedReturns&) const = default;
};

// Soft targets: those of another head of the engine, or of the same one.
struct ChunkDistillation {
  std::string teacher;                                          // its name
  kernels::DataType hidden_type = kernels::DataType::kFloat32;  // of Chunk::teacher_hidden
  kernels::Distillation loss = {};
};

// Options of a chunk's loss beyond plain cross-entropy; the head's values count where none are set.
// chunk_options.h resolves and checks them.
struct ChunkOptions {
  kernels::LossOptions loss = {};
  // Whether these two of `loss` are the chunk's: Set.
  bool sets_logit_scale = false;
  bool sets_softcap = false;
  std::optional<ClassWeights> class_weights = {};
  std::optional<Bias> bias = {};
  std::optional<float> z_gradient_scale = {};   // none: the chunk's gradient_scale
  std::optional<uint64_t> weight_version = {};  // that the weights must have when the chunk is started
  WantedReturns returns = {};
  std::optional<ChunkDistillation> distillation = {};

  void Set(kernels::LossValue option, float value) {
    loss.*option = value;
    if (option == &kernels::LossOptions::logit_scale) sets_logit_scale = true;
    if (option == &kernels::LossOptions::softcap) sets_softcap = true;
  }
  // Whether that option of `loss` counts, and not the head's.
  bool IsSet(kernels::LossValue option) const {
    if (option == &kernels::LossOptions::logit_scale) return sets_logit_scale;
    return option != &kernels::LossOptions::softcap || sets_softcap;
  }
};

// Most tokens that the lists of a chunk hold together: a device keeps room for them.
inline constexpr int64_t kMostListedTokens = int64_t{1} << 20;

// A list of tokens of the vocabulary for each token of a chunk: `offsets` int64 [tokens + 1], `tokens` int32.
struct ChunkLists {
  enum class Use {
    kNone,
    kKept,     // its distribution is over the list alone
    kTargets,  // soft targets: `probabilities`, fp32, one for each of `tokens`
  };
  Use use = Use::kNone;
  std::string offsets = {};
  std::string tokens = {};
  std::string probabilities = {};
  // With targets: what a token's divergence and its cross-entropy count.
  float weight = 1.0f;
  float label_weight = 0.0f;

  int64_t bytes() const {
    return static_cast<int64_t>(offsets.size() + tokens.size() + probabilities.size());
  }
};

struct ChunkLimits {
  int64_t max_chunk_bytes = int64_t{16} << 20;  // of hidden states, with those of a teacher
  int64_t max_chunk_tokens = 65536;
};

// A tensor in a region, by name.
struct TensorRef {
  RegionHandle handle;
  int64_t offset = 0;
};

// Tokens of a batch that is computed in two phases: what the first finds of them may be kept for the second.
struct Hold {
  uint64_t number = 0;  // that the client has given the batch; 0: none
  int64_t first = 0;    // of the batch's tokens that are not ignored, the place of the chunk's first

  bool operator==(const Hold&) const = default;
};

// Owns its payload. `labels` are int64, `hidden_states` [tokens, H] elements of hidden_type, `teacher_hidden`
// likewise of a distillation's teacher and otherwise empty, and what there is for each token besides, fp32
// [tokens] or empty: all little-endian.
struct Chunk {
  uint64_t sequence = 0;
  uint64_t generation = 0;
  int64_t first_token = 0;
  int64_t tokens = 0;
  kernels::DataType hidden_type = kernels::DataType::kFloat32;
  kernels::DataType dx_type = kernels::DataType::kFloat32;
  ComputeMode mode = ComputeMode::kLossAndGradients;
  int64_t ignore_index = -100;
  float gradient_scale = 1.0f;
  ChunkOptions options;
  Hold hold;
  // By that hold: the hidden states of losses alone are to be held, those of gradients that bring none are.
  bool holds_hidden = false;
  bool hidden_held = false;  // and they are
  std::string labels;
  std::string token_weights;
  std::string lse_gradients;
  std::string entropy_gradients;
  ChunkLists lists;
  Payload hidden_states;
  Payload teacher_hidden;
  // Until ResolveRegions has put the places themselves into hidden_states, teacher_hidden and dx.
  std::optional<TensorRef> hidden_region;
  std::optional<TensorRef> teacher_hidden_region;
  std::optional<TensorRef> dx_region;
  OutputRange dx;  // of a region, or at the rank that holds the hidden states; not set: into the answer
  std::optional<int64_t> window_token;  // of a deterministic session: the place of the first token
  absl::Status decode_status;  // not ok if a field could not be represented here (an unknown dtype, say)
  absl::Time received;
  Timing timing = Timing::kNone;

  int64_t payload_bytes() const { return token_bytes() + hidden_states.size() + teacher_hidden.size(); }
  bool has_soft_targets() const {
    return options.distillation.has_value() || lists.use == ChunkLists::Use::kTargets;
  }
  // Whether dX is to go into a region or stay at another rank.
  bool dx_elsewhere() const { return dx_region.has_value() || dx.is_set(); }
  // The rank that has the hidden states: 0, the leader, unless PlaceAtRank says otherwise.
  int32_t holder() const { return hidden_states.at_rank().rank; }
  // Memory that the payload takes: more, where parts of larger blocks keep these.
  int64_t kept_bytes() const {
    return token_bytes() + hidden_states.kept_bytes() + teacher_hidden.kept_bytes();
  }
  // For a rejected chunk, which may be kept for as long as a batch takes after its bytes were credited back.
  void DropPayload() {
    labels = token_weights = lse_gradients = entropy_gradients = {};
    lists = {.use = lists.use};
    hidden_states = teacher_hidden = {};
    dx = {};
  }
  int64_t token_bytes() const {
    return static_cast<int64_t>(labels.size() + token_weights.size() + lse_gradients.size() +
                                entropy_gradients.size()) +
           lists.bytes();
  }
};

// What a rank other than the leader holds of a chunk that came to it. The rest of the chunk is at the leader.
struct HeldTensors {
  int32_t rank = 1;
  uint64_t number = 0;  // that the rank has given all of them, from 1
  int64_t hidden_bytes = 0;
  int64_t teacher_bytes = 0;
  // Values of rows that are not ignored, as CountNonFinite says.
  int64_t non_finite = 0;
  int64_t teacher_non_finite = 0;
};
// Has the chunk's hidden states, those of a teacher and dX be at that rank. `owner` as Payload::At's.
void PlaceAtRank(const HeldTensors& held, const std::shared_ptr<const void>& owner, Chunk* chunk);

// What was wanted of each token, as kernels::RowReturns describes it; the rest is empty.
struct TokenReturns {
  std::string log_sum_exp;
  std::string z_losses;
  std::string log_probabilities;
  std::string entropies;
  std::string predictions;
  std::string target_ranks;
  std::string divergences;
  std::string top_tokens;
  std::string top_log_probabilities;

  int64_t bytes() const;
};

enum class Disposition { kAccumulated, kRepeated, kRejected };

struct ChunkAnswer {
  uint64_t sequence = 0;
  Disposition disposition = Disposition::kAccumulated;
  absl::Status error;  // not ok if and only if rejected
  int64_t first_token = 0;
  int64_t tokens = 0;
  int64_t valid_tokens = 0;
  int64_t non_finite_losses = 0;  // of these
  int64_t skipped_tokens = 0;     // of these: all their factors are 0, and nothing was computed
  double loss_sum = 0;
  double z_loss_sum = 0;        // which loss_sum contains
  int64_t correct_tokens = 0;   // if predictions are wanted
  double class_weight_sum = 0;  // if class weights count
  double divergence_sum = 0;    // before its weight, times the tokens' weights
  uint64_t weight_version = 0;
  uint64_t teacher_weight_version = 0;  // of a distillation
  bool hidden_held = false;
  kernels::DataType dx_type = kernels::DataType::kFloat32;
  std::string losses;  // fp32 [tokens]
  TokenReturns returns;
  ResultBytes dx;  // [tokens, H], empty where the mode has none and where it went into a region
  std::optional<ChunkTimes> times;
  absl::Time ready;  // when all this was there
};

// Whether its hidden states are to be taken from what the session holds, and were not yet.
bool TakesHeld(const Chunk& chunk);

// INVALID_ARGUMENT if `labels` are not as many as the tokens.
absl::Status ValidateLabelBytes(const Chunk& chunk);

// Checks what needs no look at the tensors: the number of tokens and of hidden-state bytes. `teacher`, here
// and below: the teacher of the chunk's distillation, null without one.
absl::Status ValidateTokens(const Chunk& chunk, const HeadConfig& head, const ChunkLimits& limits,
                            const HeadConfig* teacher = nullptr);

// How many values of these hidden states [tokens, any width], in rows whose label is not ignore_index, are
// not finite. 0 where the sizes do not fit each other, which is found elsewhere.
int64_t CountNonFinite(const Payload& hidden_states, kernels::DataType type, int64_t tokens,
                       const std::string& labels, int64_t ignore_index);

// Checks everything about a chunk's content: sizes, labels, options, finiteness of the hidden states of rows
// that are not ignored (unless they are in the device's memory: then the device checks them; or at another
// rank, which has). INVALID_ARGUMENT naming the field, what it is and what it must be.
absl::Status ValidateContent(const Chunk& chunk, const HeadConfig& head, const ChunkLimits& limits,
                             const HeadConfig* teacher = nullptr);

// Checks a chunk that was taken once and is read back from a checkpoint: everything that becomes an index or
// a factor.
absl::Status ValidateKept(const Chunk& chunk, const HeadConfig& head);

// Bytes the answer to this chunk will hold.
int64_t AnswerBytes(const Chunk& chunk, int64_t hidden_size);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_CHUNK_CHUNK_H_
