#include "client/src/batch/batch_loss.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/src/batch/token_lists.h"
#include "client/src/batch/token_returns.h"
#include "client/src/common/convert.h"

namespace lossd::internal {
namespace {

absl::Status Invalid(absl::string_view field, double value, absl::string_view what_it_must_be) {
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, "; it must be ", what_it_must_be));
}

absl::Status ValidateOptions(const HeadConfig& head, const Batch& batch) {
  const LossOptions& loss = batch.loss;
  // Written so that NaN is refused.
  if (!(loss.label_smoothing >= 0 && loss.label_smoothing <= 1)) {
    return Invalid("label_smoothing", loss.label_smoothing, "in [0, 1]");
  }
  if (!std::isfinite(loss.lse_square_scale) || loss.lse_square_scale < 0) {
    return Invalid("lse_square_scale", loss.lse_square_scale, "finite and at least 0");
  }
  if (loss.logit_scale && !(std::isfinite(*loss.logit_scale) && *loss.logit_scale > 0)) {
    return Invalid("logit_scale", *loss.logit_scale, "finite and above 0");
  }
  if (loss.softcap && !(std::isfinite(*loss.softcap) && *loss.softcap >= 0)) {
    return Invalid("softcap", *loss.softcap, "finite and above 0, or 0 for none");
  }
  if (loss.class_weights == ClassWeights::kUse && !head.has_class_weights) {
    return absl::InvalidArgumentError(
        absl::StrCat("class_weights is kUse, but head '", head.name, "' was created without class weights"));
  }
  if (loss.bias == Bias::kUse && !head.bias) {
    return absl::InvalidArgumentError(
        absl::StrCat("bias is kUse, but head '", head.name, "' was created without a bias"));
  }
  return absl::OkStatus();
}

absl::Status ValidateDistillation(const Batch& batch) {
  if (!batch.distillation) return absl::OkStatus();
  const Distillation& soft = *batch.distillation;
  if (soft.teacher.empty()) {
    return absl::InvalidArgumentError("distillation.teacher is empty; it must be the name of a head");
  }
  if (soft.hidden_size < 1) {
    return Invalid("distillation.hidden_size", static_cast<double>(soft.hidden_size), "at least 1");
  }
  if (soft.hidden_states == nullptr && !batch.labels.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("distillation.hidden_states is null but labels has ", batch.labels.size(), " tokens"));
  }
  // Written so that NaN is refused.
  if (soft.divergence == Divergence::kJensenShannon && !(soft.beta > 0 && soft.beta < 1)) {
    return Invalid("distillation.beta", soft.beta, "above 0 and below 1");
  }
  if (!std::isfinite(soft.temperature) || soft.temperature <= 0) {
    return Invalid("distillation.temperature", soft.temperature, "finite and above 0");
  }
  if (!std::isfinite(soft.weight) || soft.weight < 0) {
    return Invalid("distillation.weight", soft.weight, "finite and at least 0");
  }
  if (!std::isfinite(soft.label_weight) || soft.label_weight < 0) {
    return Invalid("distillation.label_weight", soft.label_weight, "finite and at least 0");
  }
  return absl::OkStatus();
}

v1::Divergence DivergenceOnWire(Divergence divergence) {
  switch (divergence) {
    case Divergence::kForwardKl:
      return v1::DIVERGENCE_FORWARD_KL;
    case Divergence::kReverseKl:
      return v1::DIVERGENCE_REVERSE_KL;
    case Divergence::kJensenShannon:
      return v1::DIVERGENCE_JENSEN_SHANNON;
  }
  return v1::DIVERGENCE_UNSPECIFIED;
}

void SetDistillation(const Distillation& soft, v1::Distillation* proto) {
  proto->set_teacher(soft.teacher);
  proto->set_hidden_dtype(ToProto(soft.hidden_type));
  proto->set_divergence(DivergenceOnWire(soft.divergence));
  if (soft.divergence == Divergence::kJensenShannon) proto->set_beta(soft.beta);
  proto->set_temperature(soft.temperature);
  proto->set_weight(soft.weight);
  proto->set_label_weight(soft.label_weight);
}

absl::Status ValidateTokens(std::span<const float> values, size_t tokens, absl::string_view field) {
  if (values.empty()) return absl::OkStatus();
  if (values.size() != tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, " has ", values.size(), " values but labels has ", tokens));
  }
  const auto bad =
      std::find_if(values.begin(), values.end(), [](float value) { return !std::isfinite(value); });
  if (bad == values.end()) return absl::OkStatus();
  return Invalid(absl::StrCat(field, "[", bad - values.begin(), "]"), *bad, "finite");
}

absl::Status ValidateCount(const std::optional<double>& count, absl::string_view field, Reduction reduction) {
  if (!count) return absl::OkStatus();
  if (reduction != Reduction::kMean) {
    return absl::InvalidArgumentError(absl::StrCat(field, " is ", *count, ", but reduction is not kMean"));
  }
  if (std::isfinite(*count) && *count > 0) return absl::OkStatus();
  return Invalid(field, *count, "finite and above 0");
}

absl::Status ValidateReduction(const HeadConfig& head, const Batch& batch) {
  if (absl::Status status = ValidateCount(batch.normalizer, "normalizer", batch.reduction); !status.ok()) {
    return status;
  }
  if (absl::Status status = ValidateCount(batch.z_normalizer, "z_normalizer", batch.reduction);
      !status.ok()) {
    return status;
  }
  if (batch.z_gradient_scale && !std::isfinite(*batch.z_gradient_scale)) {
    return Invalid("z_gradient_scale", *batch.z_gradient_scale, "finite");
  }
  if (batch.z_gradient_scale && batch.reduction == Reduction::kMean) {
    return absl::InvalidArgumentError(absl::StrCat("z_gradient_scale is ", *batch.z_gradient_scale,
                                                   ", but reduction is kMean: z_normalizer says it there"));
  }
  const bool two_counts = ClassWeightsCount(head, batch) && batch.loss.lse_square_scale > 0;
  if (batch.reduction == Reduction::kLateMean && two_counts) {
    return absl::InvalidArgumentError(
        "reduction is kLateMean, but with class weights and a z-loss there are two means with a count each "
        "(the "
        "sum of the labels' weights and the number of valid tokens), and one scale cannot make both: use "
        "kMean, "
        "or kSum with gradient_scale and z_gradient_scale");
  }
  if (batch.z_normalizer && !batch.normalizer) {
    return absl::InvalidArgumentError(
        "z_normalizer is set and normalizer is not: both are counts of the same tokens, of this batch or of "
        "the "
        "global one");
  }
  if (batch.reduction != Reduction::kMean || !ClassWeightsCount(head, batch)) return absl::OkStatus();
  if (!batch.normalizer) {
    return absl::InvalidArgumentError(absl::StrCat(
        "normalizer is not set, but the class weights of head '", head.name,
        "' count: a mean is over the sum of the labels' weights (ClassWeightSum), which must be given"));
  }
  // Either both are of the batch alone or both of the whole.
  if (two_counts && !batch.z_normalizer) {
    return absl::InvalidArgumentError(
        "normalizer is set and z_normalizer is not, but with class weights the z-loss has another count: the "
        "number of valid tokens (CountValid)");
  }
  return absl::OkStatus();
}

struct Counts {
  double all = 0;
  double z_loss = 0;
};

// What a mean divides by.
Counts CountsOf(const Batch& batch) {
  const double all = batch.normalizer ? *batch.normalizer
                                      : static_cast<double>(CountValid(batch.labels, batch.ignore_index));
  return {all, batch.z_normalizer.value_or(all)};
}

}  // namespace

bool ClassWeightsCount(const HeadConfig& head, const Batch& batch) {
  switch (batch.loss.class_weights) {
    case ClassWeights::kOfHead:
      return head.has_class_weights;
    case ClassWeights::kIgnore:
      return false;
    case ClassWeights::kUse:
      return true;
  }
  return false;
}

absl::Status ValidateLoss(const HeadConfig& head, const Batch& batch) {
  if (absl::Status status = ValidateOptions(head, batch); !status.ok()) return status;
  if (absl::Status status = ValidateDistillation(batch); !status.ok()) return status;
  const size_t tokens = batch.labels.size();
  absl::Status status = ValidateTokens(batch.token_weights, tokens, "token_weights");
  status.Update(ValidateTokens(batch.lse_gradients, tokens, "lse_gradients"));
  status.Update(ValidateTokens(batch.entropy_gradients, tokens, "entropy_gradients"));
  status.Update(ValidateTokenLists(batch));
  if (!status.ok()) return status;
  return ValidateReduction(head, batch);
}

GradientScales ScalesOf(const Batch& batch) {
  if (batch.reduction != Reduction::kMean) return {batch.gradient_scale, batch.z_gradient_scale};
  const Counts counts = CountsOf(batch);
  if (counts.all == 0) return {batch.gradient_scale, {}};  // no token to be multiplied
  GradientScales scales{.all = static_cast<float>(batch.gradient_scale / counts.all)};
  if (counts.z_loss != counts.all) scales.z_loss = static_cast<float>(batch.gradient_scale / counts.z_loss);
  return scales;
}

void SetLossOptions(const Batch& batch, const GradientScales& scales, const TokenReturns& returns,
                    v1::Chunk* chunk) {
  v1::LossOptions options;
  options.set_label_smoothing(batch.loss.label_smoothing);
  options.set_lse_square_scale(batch.loss.lse_square_scale);
  if (batch.loss.logit_scale) options.set_logit_scale(*batch.loss.logit_scale);
  if (batch.loss.softcap) options.set_softcap(*batch.loss.softcap);
  if (batch.loss.class_weights != ClassWeights::kOfHead) {
    options.set_class_weights(batch.loss.class_weights == ClassWeights::kUse);
  }
  if (batch.loss.bias != Bias::kOfHead) options.set_bias(batch.loss.bias == Bias::kUse);
  if (scales.z_loss) options.set_z_gradient_scale(*scales.z_loss);
  if (batch.weight_version) options.set_weight_version(*batch.weight_version);
  if (batch.distillation) SetDistillation(*batch.distillation, options.mutable_distillation());
  if (AnyWanted(returns)) *options.mutable_returns() = WantedOnWire(returns);
  if (options.ByteSizeLong() > 0) *chunk->mutable_options() = std::move(options);
}

double ReducedLoss(const Batch& batch, const BatchResult& result) {
  if (batch.reduction != Reduction::kMean) return result.loss_sum;
  if (result.valid_tokens == 0) {
    const bool over_nothing = batch.torch_compat && !batch.normalizer;
    return over_nothing ? std::numeric_limits<double>::quiet_NaN() : 0;
  }
  const Counts counts = CountsOf(batch);
  return (result.loss_sum - result.z_loss_sum) / counts.all + result.z_loss_sum / counts.z_loss;
}

BatchResult ResultOfNothing(const Batch& batch) {
  BatchResult result{.valid_tokens = CountValid(batch.labels, batch.ignore_index)};
  result.loss = ReducedLoss(batch, result);
  return result;
}

}  // namespace lossd::internal
