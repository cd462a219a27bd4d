#include "server/engine/head/parts/optimizer_step.h"

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "server/engine/chunk/session_marks.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {
namespace {

absl::Status Check(bool right, absl::string_view field, double value, absl::string_view must) {
  if (right) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInvalidArgument, RejectReason::kOption, field,
                   absl::StrCat(field, " is ", value, "; it must be ", must));
}

bool AtLeast0(double value) { return value >= 0 && value <= OptimizerConfig::kMost; }

// An option of another optimizer than the head's is refused: otherwise the mistake would go unseen.
absl::Status CheckKind(bool right, absl::string_view field, absl::string_view optimizers) {
  if (right) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInvalidArgument, RejectReason::kOption, field,
                   absl::StrCat(field, " is set; it is an argument of ", optimizers,
                                ", which this head's optimizer is not"));
}

absl::Status CheckOverrides(const OptimizerConfig& optimizer, const StepRequest& request) {
  const bool sgd = optimizer.kind == OptimizerKind::kSgd;
  absl::Status status;
  if (request.weight_decay.has_value()) {
    status.Update(
        Check(AtLeast0(*request.weight_decay), "weight_decay", *request.weight_decay, "in [0, 1e18]"));
  }
  if (request.momentum.has_value()) {
    status.Update(CheckKind(sgd, "momentum", "SGD"));
    status.Update(Check(AtLeast0(*request.momentum), "momentum", *request.momentum, "in [0, 1e18]"));
    status.Update(Check(optimizer.momentum > 0 || *request.momentum == 0, "momentum", *request.momentum,
                        "0, since the head was created with momentum 0 and has no buffer for it"));
  }
  if (request.beta1.has_value()) {
    status.Update(CheckKind(!sgd, "beta1", "Adam and AdamW"));
    status.Update(
        Check(AtLeast0(*request.beta1) && *request.beta1 < 1, "beta1", *request.beta1, "in [0, 1)"));
  }
  if (request.beta2.has_value()) {
    status.Update(CheckKind(!sgd, "beta2", "Adam and AdamW"));
    status.Update(
        Check(AtLeast0(*request.beta2) && *request.beta2 < 1, "beta2", *request.beta2, "in [0, 1)"));
  }
  return status;
}

std::string ToText(const std::optional<double>& value) {
  return value.has_value() ? absl::StrCat(*value) : "unset";
}

}  // namespace

bool IsScale(double value) { return std::abs(value) <= std::numeric_limits<float>::max(); }

absl::Status CheckStep(const HeadConfig& head, const StepRequest& request) {
  if (head.optimizer.kind == OptimizerKind::kNone) {
    return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kConflict, "head",
                     absl::StrCat("head ", head.name, " was created without an optimizer",
                                  head.weight_gradients == WeightGradients::kFrozen ? " (it is frozen)" : "",
                                  "; flush its gradient instead, or create it with one"));
  }
  absl::Status status =
      Check(AtLeast0(request.learning_rate), "learning_rate", request.learning_rate, "in [0, 1e18]");
  status.Update(
      Check(IsScale(request.gradient_scale), "gradient_scale", request.gradient_scale, "finite in fp32"));
  status.Update(CheckOverrides(head.optimizer, request));
  return status;
}

StepArguments Resolve(const OptimizerConfig& optimizer, const StepRequest& request, int64_t step) {
  StepArguments arguments{.learning_rate = request.learning_rate,
                          .gradient_scale = request.gradient_scale,
                          .optimizer = optimizer,
                          .step = step};
  arguments.optimizer.weight_decay = request.weight_decay.value_or(optimizer.weight_decay);
  arguments.optimizer.momentum = request.momentum.value_or(optimizer.momentum);
  arguments.optimizer.beta1 = request.beta1.value_or(optimizer.beta1);
  arguments.optimizer.beta2 = request.beta2.value_or(optimizer.beta2);
  return arguments;
}

absl::Status CheckSameStep(const StepRecord& first, const std::vector<SessionMarks>& marks,
                           const StepRequest& request, absl::string_view was) {
  const auto differ = [&](absl::string_view field, const std::string& then, const std::string& now) {
    return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kFlushArguments, field,
                     absl::StrCat("a step of generation ", first.generation, " ", was, " with ", field, " ",
                                  then, "; this call names ", now));
  };
  const StepRequest& old = first.request;
  if (!Same(marks, first.marks)) {
    return differ("marks", engine::ToText(first.marks), engine::ToText(marks));
  }
  if (old == request) return absl::OkStatus();
  const auto number = [](double value) { return absl::StrCat(value); };
  if (old.learning_rate != request.learning_rate) {
    return differ("learning_rate", number(old.learning_rate), number(request.learning_rate));
  }
  if (old.gradient_scale != request.gradient_scale) {
    return differ("gradient_scale", number(old.gradient_scale), number(request.gradient_scale));
  }
  if (old.non_finite != request.non_finite) {
    const auto text = [](NonFinite value) { return value == NonFinite::kSkip ? "true" : "false"; };
    return differ("skip_non_finite", text(old.non_finite), text(request.non_finite));
  }
  if (old.weight_decay != request.weight_decay) {
    return differ("weight_decay", ToText(old.weight_decay), ToText(request.weight_decay));
  }
  if (old.momentum != request.momentum) {
    return differ("momentum", ToText(old.momentum), ToText(request.momentum));
  }
  if (old.beta1 != request.beta1) return differ("beta1", ToText(old.beta1), ToText(request.beta1));
  return differ("beta2", ToText(old.beta2), ToText(request.beta2));
}

}  // namespace lossd::engine
