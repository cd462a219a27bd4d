#include "client/src/gradient/window_call.h"

#include "client/src/connection/grpc_status.h"
#include "client/src/connection/waiting.h"
#include "client/src/gradient/open_freeze.h"

namespace lossd::internal {

bool MayBeDone(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) || WasInterrupted(status);
}

const char* CauseOfLoss(const ServerLife& life) {
  return life.history == 0 ? "the head was restored from a checkpoint"
                           : "the head was restored from a checkpoint, or a replica was lost with what its "
                             "sessions had added";
}

absl::Status WindowCall::FindServer() {
  // A server that was restarted since answers with heads, sessions or generations that are not ours.
  life_ = head_.life();
  if (life_.known()) return absl::OkStatus();
  const auto server = head_.connection().Call(&v1::StatusService::Stub::AsyncGetStatus, {});
  if (!server.ok()) return server.status();
  life_ = ServerLife::Of(*server);
  return absl::OkStatus();
}

absl::Status WindowCall::Begin(std::optional<uint64_t> generation) {
  if (!life_.known()) {
    if (absl::Status found = FindServer(); !found.ok()) return found;
  }
  if (absl::Status settled = SettleFreeze(head_); !settled.ok()) return settled;
  generation_ = generation.value_or(0);
  if (generation.has_value()) return absl::OkStatus();
  v1::GetHeadRequest get;
  get.set_name(head_.config().name);
  const auto head = head_.connection().Call(&v1::HeadService::Stub::AsyncGetHead, get);
  if (!head.ok()) return Explain(head.status());
  generation_ = head->generation();
  return absl::OkStatus();
}

absl::Status WindowCall::Explain(const absl::Status& status) const {
  if (!absl::IsNotFound(status) && !absl::IsAborted(status) && !absl::IsFailedPrecondition(status)) {
    return status;
  }
  const auto position = PositionOf(status);
  // What a checkpoint has is not to be replayed, and what came after it is. Replicas say the same of marks
  // that are of a replica before it was lost: the window goes on without them.
  const bool restored = position.has_value() && position->has_restores();
  const uint64_t generation = restored ? position->generation() : generation_;
  const auto server = head_.connection().Call(&v1::StatusService::Stub::AsyncGetStatus, {});
  if (server.ok() && ServerLife::Of(*server).IsAnotherThan(life_)) {
    return WindowLostError(head_.config().name, generation,
                           "the server was restarted before the window ended");
  }
  if (restored) {
    return WindowLostError(head_.config().name, generation, CauseOfLoss(life_));
  }
  return status;
}

}  // namespace lossd::internal
