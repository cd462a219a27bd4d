#include "client/src/session/lane_set.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/connection/grpc_status.h"
#include "client/src/connection/waiting.h"

namespace lossd::internal {
namespace {

constexpr std::chrono::milliseconds kCloseTimeout(2000);  // of all lanes together

}  // namespace

LaneSet::LaneSet(std::shared_ptr<HeadContext> head, SessionOptions options)
    : link_(std::move(head), std::move(options)) {}

absl::Status LaneSet::Open() {
  const auto response = link_.Open();
  if (!response.ok()) return response.status();
  for (int32_t i = 0; i < link_.lanes(); ++i) {
    lanes_.push_back(std::make_unique<Lane>(&link_, &interruption_, i));
  }
  Adopt(*response);
  const size_t used = response->is_new() ? 1 : lanes_.size();
  absl::Status status = AttachFirst(used);
  // A head without weights takes no stream yet, and has accepted nothing: Compute tries again.
  if (!status.ok() && !absl::IsFailedPrecondition(status)) {
    Backoff backoff(link_.head().options().reconnect_timeout);
    const auto recovery = Reattach(std::move(status), used, &backoff);
    if (!recovery.ok()) return recovery.status();
  }
  Begin();
  reconnects_ = 0;
  return absl::OkStatus();
}

absl::Status LaneSet::EnsureReady() {
  Lane& first = *lanes_[0];
  absl::Status cause;
  if (first.stream() == nullptr) {
    cause = first.Attach();
    if (cause.ok() || absl::IsFailedPrecondition(cause)) return cause;
  } else if (first.stream()->Ended()) {
    // Before further lanes are attached: if another process has taken this one, they are no longer ours
    // either.
    cause = first.stream()->EndStatus();
  } else {
    return absl::OkStatus();
  }
  Backoff backoff(link_.head().options().reconnect_timeout);
  return Reattach(std::move(cause), 1, &backoff).status();
}

absl::Status LaneSet::ComeHere() {
  link_.WantHere();
  link_.places().KeepHome();
  if (link_.places().elsewhere()) {
    if (absl::Status moved = Move(); !moved.ok()) return moved;
  }
  for (const auto& lane : lanes_) lane->LeaveOtherPlace();
  return absl::OkStatus();
}

absl::Status LaneSet::Move() {
  constexpr char kWhere[] = "its chunks name a region, which another replica cannot read";
  if (link_.contributed()) {
    return absl::FailedPreconditionError(
        absl::StrCat("session ", link_.session_id(), " is at ", link_.places().home(),
                     " and has something in the window; ", kWhere,
                     ": create the region before the session is opened, or end the window first"));
  }
  Abandon();
  v1::CloseSessionRequest request;
  request.set_session_id(link_.session_id());
  const auto closed =
      link_.head().connection().Call(&v1::LossService::Stub::AsyncCloseSession, request, kDeletion);
  if (!closed.ok()) return closed.status();
  const auto response = link_.Reopen(absl::OkStatus());
  if (!response.ok()) return response.status();
  Adopt(*response);
  Begin();
  if (!link_.places().elsewhere()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("the session is opened at ", link_.places().home(),
                                                    " although it was asked for at ",
                                                    link_.head().connection().target(), "; ", kWhere));
}

absl::StatusOr<LaneSet::Recovery> LaneSet::Reattach(absl::Status cause, size_t used, Backoff* backoff) {
  Recovery recovery = Recovery::kResumed;
  for (;;) {
    if (absl::Status status = link_.CheckRecoverable(cause); !status.ok()) return status;
    const auto position = PositionOf(cause);
    if (position && !position->hidden_states_gone()) link_.FollowPosition(*position);
    const auto delay = backoff->NextDelay(RetryDelayOf(cause).value_or(std::chrono::milliseconds(0)));
    if (!delay) return link_.GaveUp(cause);
    if (absl::Status slept = SleepFor(link_.head().options(), *delay); !slept.ok()) return slept;
    for (size_t i = 0; i < used; ++i) lanes_[i]->DropStream();
    const auto response = link_.Reopen(cause);
    if (!response.ok()) return response.status();
    if (!link_.IsSame(*response)) {
      if (absl::Status status = link_.CheckReplaceable(*response); !status.ok()) return status;
      Adopt(*response);
      recovery = Recovery::kNewSession;
    }
    cause = AttachFirst(used);
    if (!cause.ok()) continue;
    if (recovery == Recovery::kNewSession) Begin();
    ++reconnects_;
    return recovery;
  }
}

absl::Status LaneSet::AttachFirst(size_t used) {
  for (size_t i = 0; i < used; ++i) {
    if (absl::Status status = lanes_[i]->Attach(); !status.ok()) return status;
  }
  return absl::OkStatus();
}

void LaneSet::Adopt(const v1::OpenSessionResponse& response) {
  for (const auto& lane : lanes_) lane->Adopt(response);
  link_.Adopt(response);
}

void LaneSet::Begin() {
  for (const auto& lane : lanes_) {
    const uint64_t opened_at = lane->accepted_when_opened();
    lane->Begin();
    if (lane->accepted() > opened_at && !link_.head().config().frozen) {
      link_.NoteTakenBefore(link_.generation());
    }
  }
}

void LaneSet::Interrupt(size_t used) {
  interruption_.Raise();
  for (size_t i = 0; i < used; ++i) lanes_[i]->CancelStream();
}

void LaneSet::Abandon() {
  for (const auto& lane : lanes_) lane->DropStream();
}

void LaneSet::Close() {
  auto deadline = std::chrono::steady_clock::now() + kCloseTimeout;
  for (const auto& lane : lanes_) {
    if (!Asked(link_.head().options()).ok()) deadline = std::chrono::steady_clock::now();
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    lane->Close(std::max(left, std::chrono::milliseconds(0)));
  }
}

int64_t LaneSet::reconnects() const {
  int64_t reconnects = reconnects_;
  for (const auto& lane : lanes_) reconnects += lane->reconnects();
  return reconnects;
}

}  // namespace lossd::internal
