#include "client/src/gradient/open_freeze.h"

#include "client/src/connection/grpc_status.h"
#include "client/src/gradient/window_call.h"

namespace lossd::internal {

v1::BeginFlushRequest RequestOf(const HeadContext& head, const OpenFreeze& freeze) {
  v1::BeginFlushRequest request;
  request.set_head(head.config().name);
  request.set_generation(freeze.generation);
  if (freeze.gradient_scale != 1) request.set_gradient_scale(freeze.gradient_scale);
  AddMarks(freeze.marks, &request);
  return request;
}

absl::Status SettleFreeze(HeadContext& head) {
  const auto open = head.unanswered().freeze();
  if (!open.has_value()) return absl::OkStatus();
  constexpr char kWhy[] = "a flush had no answer, and the window may be frozen by it";
  // The same call joins it, and tells the id.
  const auto frozen =
      head.connection().Call(&v1::GradientService::Stub::AsyncBeginFlush, RequestOf(head, *open), kWorkCall);
  if (!frozen.ok()) {
    if (MayBeDone(frozen.status())) return Annotate(frozen.status(), kWhy);
    head.unanswered().SetFreeze(std::nullopt);  // it was refused, or is over
    return absl::OkStatus();
  }
  v1::AbortFlushRequest request;
  request.set_head(head.config().name);
  request.set_flush_id(frozen->flush_id());
  const auto aborted = head.connection().Call(&v1::GradientService::Stub::AsyncAbortFlush, request);
  if (!aborted.ok() && MayBeDone(aborted.status())) return Annotate(aborted.status(), kWhy);
  head.unanswered().SetFreeze(std::nullopt);
  head.NoteReopened();
  return absl::OkStatus();
}

}  // namespace lossd::internal
