// Head::GradientStats and Head::ApplyStep: the window that a server's own optimizer consumes.
#include <utility>

#include "client/src/common/convert.h"
#include "client/src/common/head_impl.h"
#include "client/src/gradient/open_commit.h"
#include "client/src/gradient/window_call.h"
#include "lossd/client.h"

namespace lossd {

absl::StatusOr<lossd::GradientStats> Head::GradientStats(std::span<const SessionMarks> marks,
                                                         double gradient_scale) const {
  internal::HeadContext& head = *impl_->context;
  internal::WindowCall window(head);
  if (absl::Status begun = window.Begin(); !begun.ok()) return begun;
  v1::GradientStatsRequest request;
  request.set_head(config().name);
  request.set_generation(window.generation());
  request.set_gradient_scale(gradient_scale);
  internal::AddMarks(marks, &request);
  const auto stats =
      head.connection().Call(&v1::GradientService::Stub::AsyncGradientStats, request, internal::kWorkCall);
  if (!stats.ok()) return window.Explain(stats.status());
  return internal::FromProto(*stats);
}

absl::StatusOr<StepResult> Head::ApplyStep(const StepOptions& options,
                                           std::span<const SessionMarks> marks) const {
  internal::HeadContext& head = *impl_->context;
  // The caller may not know that a flush with an unanswered commit has ended: then a step of the next window
  // is only meant if it names the generation.
  const auto settled = internal::SettleCommit(head);
  if (!settled.ok()) return settled.status();
  if (settled->has_value() && !options.generation) return internal::SettledError(**settled);
  internal::WindowCall window(head);
  if (absl::Status found = window.FindServer(); !found.ok()) return found;
  // Unless a generation is named, a call after a step without an answer is about that step.
  const std::optional<uint64_t> named =
      options.generation ? options.generation : head.unanswered().StepAt(window.life());
  if (absl::Status begun = window.Begin(named); !begun.ok()) return begun;
  v1::ApplyStepRequest request = internal::ToProto(options);
  request.set_head(config().name);
  request.set_generation(window.generation());
  internal::AddMarks(marks, &request);
  const auto step =
      head.connection().Call(&v1::GradientService::Stub::AsyncApplyStep, request, internal::kWorkCall);
  head.unanswered().SetStep(internal::MayBeDone(step.status())
                                ? std::optional(internal::OpenStep{window.generation(), window.life()})
                                : std::nullopt);
  if (!step.ok()) return window.Explain(step.status());
  head.NoteCommit(step->generation());
  return internal::FromProto(*step);
}

}  // namespace lossd
