#include "server/engine/chunk/chunk_options.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/loss_options.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {
namespace {

constexpr char kClassWeightsField[] = "options.class_weights";
constexpr char kBias[] = "options.bias";
constexpr char kZGradientScale[] = "options.z_gradient_scale";
constexpr char kWeightVersion[] = "options.weight_version";
constexpr char kTopK[] = "options.returns.top_k";
constexpr char kDivergences[] = "options.returns.divergences";
constexpr char kBeta[] = "options.distillation.beta";
constexpr char kTemperature[] = "options.distillation.temperature";
constexpr char kWeight[] = "options.distillation.weight";
constexpr char kLabelWeight[] = "options.distillation.label_weight";
constexpr char kTokenWeights[] = "token_inputs.weights";
constexpr char kLseGradients[] = "token_inputs.lse_gradients";
constexpr char kEntropyGradients[] = "token_inputs.entropy_gradients";

constexpr int64_t kValueBytes = 4;  // of a float, of a token, of a rank

absl::Status InvalidOption(absl::string_view field, float value, absl::string_view what_it_must_be) {
  return Invalid(RejectReason::kOption, field,
                 absl::StrCat(field, " is ", value, "; it must be ", what_it_must_be));
}

const float* Floats(const std::string& bytes) {
  return bytes.empty() ? nullptr : reinterpret_cast<const float*>(bytes.data());
}

absl::Status ValidateTokenArray(const std::string& array, int64_t tokens, absl::string_view field) {
  if (array.empty()) return absl::OkStatus();
  if (static_cast<int64_t>(array.size()) != tokens * kValueBytes) {
    return Invalid(RejectReason::kLength, field,
                   absl::StrCat(field, " holds ", array.size(), " bytes; ", tokens, " fp32 values are ",
                                tokens * kValueBytes));
  }
  const auto* values = reinterpret_cast<const float*>(array.data());
  const auto* end = values + tokens;
  const auto* bad = std::find_if(values, end, [](float value) { return !std::isfinite(value); });
  if (bad == end) return absl::OkStatus();
  return Invalid(RejectReason::kNonFinite, field,
                 absl::StrCat(field, "[", bad - values, "] is ", *bad, "; it must be finite"));
}

absl::Status ValidateNumbers(const ChunkOptions& options) {
  for (const kernels::LossOption& option : kernels::kLossOptions) {
    const float value = options.loss.*option.value;
    if (options.IsSet(option.value) && !kernels::IsIn(option.range, value)) {
      return InvalidOption(absl::StrCat("options.", option.name), value, kernels::Name(option.range));
    }
  }
  if (options.z_gradient_scale.has_value() && !std::isfinite(*options.z_gradient_scale)) {
    return InvalidOption(kZGradientScale, *options.z_gradient_scale, "finite");
  }
  return absl::OkStatus();
}

absl::Status ValidateDistillation(const kernels::Distillation& loss) {
  // Written so that NaN is refused.
  if (loss.divergence == kernels::Divergence::kJensenShannon && !(loss.beta > 0 && loss.beta < 1)) {
    return InvalidOption(kBeta, loss.beta, "above 0 and below 1");
  }
  if (!std::isfinite(loss.temperature) || loss.temperature <= 0) {
    return InvalidOption(kTemperature, loss.temperature, "finite and above 0");
  }
  for (const auto& [field, weight] : {std::pair(kWeight, loss.weight), {kLabelWeight, loss.label_weight}}) {
    if (!std::isfinite(weight) || weight < 0) return InvalidOption(field, weight, "finite and at least 0");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateLogitScale(float logit_scale, absl::string_view field) {
  constexpr auto kRange = kernels::LossRange::kAboveZero;
  if (kernels::IsIn(kRange, logit_scale)) return absl::OkStatus();
  return InvalidOption(field, logit_scale, kernels::Name(kRange));
}

absl::Status ValidateSoftcap(float softcap, absl::string_view field) {
  constexpr auto kRange = kernels::LossRange::kAboveZeroOrNone;
  if (kernels::IsIn(kRange, softcap)) return absl::OkStatus();
  return InvalidOption(field, softcap, kernels::Name(kRange));
}

absl::Status ValidateOptions(const Chunk& chunk, const HeadConfig& head) {
  const ChunkOptions& options = chunk.options;
  if (absl::Status status = ValidateNumbers(options); !status.ok()) return status;
  if (options.class_weights == ClassWeights::kUse && head.class_weights == nullptr) {
    return Invalid(RejectReason::kOption, kClassWeightsField,
                   absl::StrCat(kClassWeightsField, " is true, but head ", head.name,
                                " was created without class weights"));
  }
  if (options.bias == Bias::kUse && !head.bias) {
    return Invalid(RejectReason::kOption, kBias,
                   absl::StrCat(kBias, " is true, but head ", head.name, " was created without a bias"));
  }
  if (options.distillation.has_value()) {
    if (absl::Status status = ValidateDistillation(options.distillation->loss); !status.ok()) return status;
  } else if (options.returns.divergence && !chunk.has_soft_targets()) {
    return Invalid(RejectReason::kOption, kDivergences,
                   absl::StrCat(kDivergences,
                                " is true, but neither options.distillation nor "
                                "token_inputs.target_lists is set"));
  }
  const int64_t most = std::min<int64_t>(kernels::kMostTopK, head.vocab_size);
  if (options.returns.top_k < 0 || options.returns.top_k > most) {
    return Invalid(RejectReason::kOption, kTopK,
                   absl::StrCat(kTopK, " is ", options.returns.top_k, "; it must be in [0, ", most, "]"));
  }
  absl::Status status = ValidateTokenArray(chunk.token_weights, chunk.tokens, kTokenWeights);
  if (status.ok()) status = ValidateTokenArray(chunk.lse_gradients, chunk.tokens, kLseGradients);
  if (status.ok()) status = ValidateTokenArray(chunk.entropy_gradients, chunk.tokens, kEntropyGradients);
  return status;
}

absl::Status ValidateTeacher(const HeadConfig& teacher, const HeadConfig& head) {
  if (teacher.vocab_size == head.vocab_size) return absl::OkStatus();
  return Invalid(
      RejectReason::kShape, kTeacherField,
      absl::StrCat(kTeacherField, " is ", teacher.name, ", of vocab_size ", teacher.vocab_size, "; head ",
                   head.name, " has ", head.vocab_size, ": ",
                   teacher.vocab_size > head.vocab_size
                       ? absl::StrCat("if its last rows are padding, write the first ", head.vocab_size,
                                      " rows of its weights and bias to a head of that vocab_size, and "
                                      "name that head")
                       : "a teacher needs the vocabulary of the head that it teaches"));
}

absl::Status NoRoomForTeacher(const HeadConfig& head, int64_t row_bytes, int64_t workspace_bytes) {
  return Invalid(RejectReason::kShape, kTeacherField,
                 absl::StrCat(kTeacherField, ": with soft targets, one row of vocab_size ", head.vocab_size,
                              " needs a workspace of ", row_bytes, " bytes, the server has ", workspace_bytes,
                              "; raise --workspace_bytes"));
}

WantedReturns ReturnsOf(const Chunk& chunk) {
  WantedReturns returns = chunk.options.returns;
  returns.z_loss = returns.z_loss || chunk.options.loss.lse_square_scale > 0;
  returns.divergence = returns.divergence || chunk.has_soft_targets();
  return returns;
}

int64_t ReturnBytes(const WantedReturns& returns) {
  const int64_t values = static_cast<int64_t>(returns.log_sum_exp) + static_cast<int64_t>(returns.z_loss) +
                         static_cast<int64_t>(returns.log_probability) +
                         static_cast<int64_t>(returns.entropy) + static_cast<int64_t>(returns.prediction) +
                         static_cast<int64_t>(returns.target_rank) +
                         static_cast<int64_t>(returns.divergence) +
                         2 * std::clamp<int64_t>(returns.top_k, 0, kernels::kMostTopK);
  return values * kValueBytes;
}

bool WantsUnweighted(const WantedReturns& wanted) {
  WantedReturns others = wanted;
  others.z_loss = false;
  return others != WantedReturns();
}

kernels::RowReturns Allocate(const WantedReturns& wanted, int64_t tokens, TokenReturns* returns) {
  kernels::RowReturns rows;
  const auto make = [](int64_t values, std::string* bytes, auto** out) {
    bytes->resize(static_cast<size_t>(values * kValueBytes));
    *out = reinterpret_cast<std::remove_pointer_t<decltype(out)>>(bytes->data());
  };
  if (wanted.log_sum_exp) make(tokens, &returns->log_sum_exp, &rows.log_sum_exp);
  if (wanted.z_loss) make(tokens, &returns->z_losses, &rows.z_loss);
  if (wanted.log_probability) make(tokens, &returns->log_probabilities, &rows.log_probability);
  if (wanted.entropy) make(tokens, &returns->entropies, &rows.entropy);
  if (wanted.prediction) make(tokens, &returns->predictions, &rows.prediction);
  if (wanted.target_rank) make(tokens, &returns->target_ranks, &rows.target_rank);
  if (wanted.divergence) make(tokens, &returns->divergences, &rows.divergence);
  rows.top_k = wanted.top_k;
  if (wanted.top_k > 0) {
    make(tokens * wanted.top_k, &returns->top_tokens, &rows.top_tokens);
    make(tokens * wanted.top_k, &returns->top_log_probabilities, &rows.top_log_probabilities);
  }
  return rows;
}

bool IsAnswer(int64_t tokens, const WantedReturns& wanted, const std::string& losses,
              const TokenReturns& returns) {
  const auto has = [tokens](const std::string& bytes, int64_t values) {
    return bytes.size() == static_cast<size_t>(tokens * values * kValueBytes);
  };
  return has(losses, 1) && has(returns.log_sum_exp, wanted.log_sum_exp ? 1 : 0) &&
         has(returns.z_losses, wanted.z_loss ? 1 : 0) &&
         has(returns.log_probabilities, wanted.log_probability ? 1 : 0) &&
         has(returns.entropies, wanted.entropy ? 1 : 0) &&
         has(returns.predictions, wanted.prediction ? 1 : 0) &&
         has(returns.target_ranks, wanted.target_rank ? 1 : 0) &&
         has(returns.divergences, wanted.divergence ? 1 : 0) && has(returns.top_tokens, wanted.top_k) &&
         has(returns.top_log_probabilities, wanted.top_k);
}

void PutInto(const kernels::RowReturns& rows, const TokenReturns& returns) {
  const auto put = [](void* to, const std::string& from) {
    if (to != nullptr) std::memcpy(to, from.data(), from.size());
  };
  put(rows.log_sum_exp, returns.log_sum_exp);
  put(rows.z_loss, returns.z_losses);
  put(rows.log_probability, returns.log_probabilities);
  put(rows.entropy, returns.entropies);
  put(rows.prediction, returns.predictions);
  put(rows.target_rank, returns.target_ranks);
  put(rows.divergence, returns.divergences);
  put(rows.top_tokens, returns.top_tokens);
  put(rows.top_log_probabilities, returns.top_log_probabilities);
}

namespace {

// Whether nothing is computed of a valid token (kernels::LinearCrossEntropyParams::token_weights).
bool IsSkipped(const Chunk& chunk, int64_t row) {
  const auto is_zero = [row](const std::string& values) {
    return values.empty() || Floats(values)[row] == 0;
  };
  if (chunk.token_weights.empty() || !is_zero(chunk.token_weights)) return false;
  // Losses alone have no gradients.
  const bool losses_alone = !HasWeightGradient(chunk.mode);
  return losses_alone || (is_zero(chunk.lse_gradients) && is_zero(chunk.entropy_gradients));
}

}  // namespace

void SumTokens(const Chunk& chunk, const float* class_weights, ChunkAnswer* answer) {
  const bool skips = !WantsUnweighted(ReturnsOf(chunk));
  const auto* labels = reinterpret_cast<const int64_t*>(chunk.labels.data());
  const auto* losses = reinterpret_cast<const float*>(answer->losses.data());
  const float* const z_losses = Floats(answer->returns.z_losses);
  const float* const divergences = Floats(answer->returns.divergences);
  const float* const token_weights = Floats(chunk.token_weights);
  const std::string& prediction_bytes = answer->returns.predictions;
  const auto* predictions =
      prediction_bytes.empty() ? nullptr : reinterpret_cast<const int32_t*>(prediction_bytes.data());
  for (int64_t row = 0; row < chunk.tokens; ++row) {
    if (labels[row] == chunk.ignore_index) continue;
    ++answer->valid_tokens;
    answer->loss_sum += losses[row];
    if (!std::isfinite(losses[row])) ++answer->non_finite_losses;
    if (skips && IsSkipped(chunk, row)) ++answer->skipped_tokens;
    if (z_losses != nullptr) answer->z_loss_sum += z_losses[row];
    if (predictions != nullptr && predictions[row] == labels[row]) ++answer->correct_tokens;
    if (divergences != nullptr) {
      const double weight = token_weights == nullptr ? 1 : token_weights[row];
      answer->divergence_sum += weight * divergences[row];
    }
    if (class_weights != nullptr) answer->class_weight_sum += class_weights[labels[row]];
  }
}

double SumOfFiniteLosses(const Chunk& chunk, const ChunkAnswer& answer) {
  const auto* labels = reinterpret_cast<const int64_t*>(chunk.labels.data());
  const auto* losses = reinterpret_cast<const float*>(answer.losses.data());
  double sum = 0;
  for (int64_t row = 0; row < chunk.tokens; ++row) {
    if (labels[row] != chunk.ignore_index && std::isfinite(losses[row])) sum += losses[row];
  }
  return sum;
}

absl::Status CheckWeightVersion(const Chunk& chunk, uint64_t weight_version) {
  const std::optional<uint64_t>& demanded = chunk.options.weight_version;
  if (!demanded.has_value() || *demanded == weight_version) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kFailedPrecondition, RejectReason::kWeightVersion, kWeightVersion,
      absl::StrCat(kWeightVersion, " is ", *demanded, "; the weights are of version ", weight_version));
}

}  // namespace lossd::engine
