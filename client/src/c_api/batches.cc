#include "client/src/c_api/batches.h"

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "client/src/c_api/arguments.h"
#include "client/src/c_api/structs.h"

namespace lossd::c_api {
namespace {

absl::StatusOr<std::optional<Distillation>> DistillationOf(const lossd_distillation* given) {
  if (given == nullptr) return std::nullopt;
  const auto read = Read(given, "batch.distillation");
  if (!read.ok()) return read.status();
  if (read->teacher == nullptr) return NullArgument("batch.distillation.teacher");
  const auto type = DataTypeOf(read->hidden_dtype, "batch.distillation.hidden_dtype");
  if (!type.ok()) return type.status();
  static constexpr std::array kDivergences = {Divergence::kForwardKl, Divergence::kReverseKl,
                                              Divergence::kJensenShannon};
  const auto divergence = EnumOf(kDivergences, read->divergence, "batch.distillation.divergence");
  if (!divergence.ok()) return divergence.status();
  return Distillation{.teacher = read->teacher,
                      .hidden_size = read->hidden_size,
                      .hidden_type = *type,
                      .hidden_states = read->hidden_states,
                      .divergence = *divergence,
                      .beta = read->beta,
                      .temperature = read->temperature,
                      .weight = read->weight,
                      .label_weight = read->label_weight};
}

absl::StatusOr<LossOptions> LossOf(const lossd_batch& given) {
  static constexpr std::array kClassWeights = {ClassWeights::kOfHead, ClassWeights::kIgnore,
                                               ClassWeights::kUse};
  static constexpr std::array kBiases = {Bias::kOfHead, Bias::kIgnore, Bias::kUse};
  const auto class_weights = EnumOf(kClassWeights, given.class_weights, "batch.class_weights");
  if (!class_weights.ok()) return class_weights.status();
  const auto bias = EnumOf(kBiases, given.bias, "batch.bias");
  if (!bias.ok()) return bias.status();
  return LossOptions{.label_smoothing = given.label_smoothing,
                     .lse_square_scale = given.lse_square_scale,
                     .logit_scale = OptionalOf(given.logit_scale),
                     .softcap = OptionalOf(given.softcap),
                     .class_weights = *class_weights,
                     .bias = *bias};
}

absl::Status CheckTensors(const lossd_batch& given, const std::optional<Distillation>& distillation) {
  if (given.tokens < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("batch.tokens is ", given.tokens, "; it must be at least 0"));
  }
  if (given.tokens == 0) return absl::OkStatus();
  if (given.labels == nullptr) return NullArgument("batch.labels");
  if (given.hidden_states == nullptr) return NullArgument("batch.hidden_states");
  if (distillation.has_value() && distillation->hidden_states == nullptr) {
    return NullArgument("batch.distillation.hidden_states");
  }
  return absl::OkStatus();
}

absl::StatusOr<TokenLists> ListsOf(const lossd_batch& given) {
  if (given.kept_token_count < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("batch.kept_token_count is ", given.kept_token_count, "; it must be at least 0"));
  }
  if (given.kept_token_count > 0 && given.kept_tokens == nullptr) return NullArgument("batch.kept_tokens");
  if (given.kept_token_count > 0 && given.kept_offsets == nullptr) return NullArgument("batch.kept_offsets");
  return TokenLists{.offsets = SpanOf(given.kept_offsets, given.tokens + 1),
                    .tokens = SpanOf(given.kept_tokens, given.kept_token_count)};
}

absl::StatusOr<TargetLists> TargetListsOf(const lossd_batch& batch) {
  if (batch.target_lists == nullptr) return TargetLists{};
  const auto given = Read(batch.target_lists, "batch.target_lists");
  if (!given.ok()) return given.status();
  if (given->token_count < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("batch.target_lists.token_count is ", given->token_count, "; it must be at least 0"));
  }
  if (given->offsets == nullptr && batch.tokens > 0) return NullArgument("batch.target_lists.offsets");
  if (given->token_count > 0 && given->tokens == nullptr) return NullArgument("batch.target_lists.tokens");
  if (given->token_count > 0 && given->probabilities == nullptr) {
    return NullArgument("batch.target_lists.probabilities");
  }
  return TargetLists{.lists = {.offsets = SpanOf(given->offsets, batch.tokens + 1),
                               .tokens = SpanOf(given->tokens, given->token_count)},
                     .probabilities = SpanOf(given->probabilities, given->token_count),
                     .weight = given->weight,
                     .label_weight = given->label_weight};
}

}  // namespace

absl::StatusOr<Batch> BatchOf(const lossd_batch* given) {
  const auto read = Read(given, "batch");
  if (!read.ok()) return read.status();
  const auto distillation = DistillationOf(read->distillation);
  if (!distillation.ok()) return distillation.status();
  if (absl::Status status = CheckTensors(*read, *distillation); !status.ok()) return status;
  const auto type = DataTypeOf(read->hidden_dtype, "batch.hidden_dtype");
  if (!type.ok()) return type.status();
  static constexpr std::array kModes = {ComputeMode::kLossAndGradients, ComputeMode::kLossOnly};
  const auto mode = EnumOf(kModes, read->mode, "batch.mode");
  if (!mode.ok()) return mode.status();
  static constexpr std::array kReductions = {Reduction::kSum, Reduction::kMean, Reduction::kLateMean};
  const auto reduction = EnumOf(kReductions, read->reduction, "batch.reduction");
  if (!reduction.ok()) return reduction.status();
  const auto lists = ListsOf(*read);
  if (!lists.ok()) return lists.status();
  const auto target_lists = TargetListsOf(*read);
  if (!target_lists.ok()) return target_lists.status();
  const auto loss = LossOf(*read);
  if (!loss.ok()) return loss.status();
  Batch batch{.labels = SpanOf(read->labels, read->tokens),
              .hidden_type = *type,
              .hidden_states = read->hidden_states,
              .mode = *mode,
              .ignore_index = read->ignore_index,
              .gradient_scale = read->gradient_scale,
              .first_token = read->first_token,
              .loss = *loss,
              .distillation = *distillation,
              .token_weights = SpanOf(read->token_weights, read->tokens),
              .lse_gradients = SpanOf(read->lse_gradients, read->tokens),
              .entropy_gradients = SpanOf(read->entropy_gradients, read->tokens),
              .kept_tokens = *lists,
              .target_lists = *target_lists,
              .z_gradient_scale = OptionalOf(read->z_gradient_scale),
              .reduction = *reduction,
              .normalizer = OptionalOf(read->normalizer),
              .z_normalizer = OptionalOf(read->z_normalizer),
              .torch_compat = read->torch_compat != 0};
  batch.hold = read->hold;
  if (read->weight_version != 0) batch.weight_version = read->weight_version;
  if (read->window_token != -1) batch.window_token = read->window_token;
  return batch;
}

absl::StatusOr<BatchOutputs> OutputsOf(const lossd_outputs* given, int64_t tokens) {
  BatchOutputs outputs;
  if (given == nullptr) return outputs;
  const auto read = Read(given, "outputs");
  if (!read.ok()) return read.status();
  const auto dx_type = DataTypeOf(read->dx_dtype, "outputs.dx_dtype");
  if (!dx_type.ok()) return dx_type.status();
  const bool has_top = read->top_tokens != nullptr && read->top_log_probabilities != nullptr;
  if (read->top_k != 0 && !has_top) {
    return absl::InvalidArgumentError(
        absl::StrCat("outputs.top_k is ", read->top_k,
                     ", but outputs.top_tokens or outputs.top_log_probabilities is NULL; it needs both"));
  }
  if (read->top_k == 0 && (read->top_tokens != nullptr || read->top_log_probabilities != nullptr)) {
    return absl::InvalidArgumentError(
        "outputs.top_k is 0, but outputs.top_tokens or outputs.top_log_probabilities is not NULL");
  }
  const auto top = ElementsOf("batch.tokens", tokens, "outputs.top_k", std::max(read->top_k, 0));
  if (!top.ok()) return top.status();
  outputs.losses = SpanOf(read->losses, tokens);
  outputs.dx_type = *dx_type;
  outputs.dx = read->dx;
  outputs.returns = {.log_sum_exp = SpanOf(read->log_sum_exp, tokens),
                     .z_losses = SpanOf(read->z_losses, tokens),
                     .log_probabilities = SpanOf(read->log_probabilities, tokens),
                     .entropies = SpanOf(read->entropies, tokens),
                     .predictions = SpanOf(read->predictions, tokens),
                     .target_ranks = SpanOf(read->target_ranks, tokens),
                     .divergences = SpanOf(read->divergences, tokens),
                     .top_k = read->top_k,
                     .top_tokens = SpanOf(read->top_tokens, *top),
                     .top_log_probabilities = SpanOf(read->top_log_probabilities, *top)};
  return outputs;
}

lossd_result ToC(const BatchResult& result) {
  lossd_result converted{.struct_size = 0,
                         .loss = result.loss,
                         .loss_sum = result.loss_sum,
                         .z_loss_sum = result.z_loss_sum,
                         .class_weight_sum = result.class_weight_sum,
                         .divergence_sum = result.divergence_sum,
                         .valid_tokens = result.valid_tokens,
                         .correct_tokens = result.correct_tokens,
                         .weight_version = result.weight_version,
                         .teacher_weight_version = result.teacher_weight_version,
                         .chunks = result.chunks,
                         .repeated_chunks = result.repeated_chunks,
                         .lanes = 0,
                         .first_sequences = {}};
  const auto lanes = std::min<size_t>(result.first_sequences.size(), LOSSD_MOST_LANES);
  converted.lanes = static_cast<int64_t>(lanes);
  std::copy_n(result.first_sequences.begin(), lanes, converted.first_sequences);
  return converted;
}

}  // namespace lossd::c_api
