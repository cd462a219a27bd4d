#include "client/src/session/lane.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/batch/chunk_codec.h"
#include "client/src/connection/grpc_status.h"
#include "client/src/connection/trace.h"
#include "client/src/connection/waiting.h"

namespace lossd::internal {

Lane::Lane(SessionLink* link, Interruption* interruption, int32_t number)
    : link_(link),
      interruption_(interruption),
      number_(number),
      backoff_(link->head().options().reconnect_timeout) {}

void Lane::Adopt(const v1::OpenSessionResponse& response) {
  DropStream();
  accepted_ = applied_ = answered_ = 0;
  for (const auto& marks : response.lanes()) {
    if (marks.lane() != number_) continue;
    accepted_ = marks.accepted();
    applied_ = marks.applied();
  }
  accepted_when_opened_ = accepted_;
  begun_ = false;
}

void Lane::Begin() {
  begun_ = true;
  sent_ = answered_ = accepted_;
  next_sequence_ = accepted_ + 1;
}

absl::Status Lane::Attach() {
  const std::string place = link_->places().Of(number_);
  const std::string home = link_->places().home();
  if (place == home) return AttachAt(place);
  absl::Status there = AttachAt(place);
  if (there.ok()) {
    displaced_ = absl::OkStatus();
    link_->places().Reached(place);
  }
  // ABORTED without a position: another client has taken the lane, and keeps it. An error of another server
  // at this address has a position, with that server's incarnation.
  const bool is_taken = absl::IsAborted(there) && !PositionOf(there);
  if (there.ok() || is_taken || WasInterrupted(there) || interruption_->raised()) return there;
  // What is wrong with the session, the server itself says again.
  absl::Status at_home = AttachAt(home);
  if (at_home.ok()) {
    link_->places().Avoid(place);
    displaced_ = std::move(there);
  }
  return at_home;
}

absl::Status Lane::AttachAt(const std::string& place) {
  DropStream();  // the server must see the old stream end before a new one begins
  const TraceScope scope(&link_->trace());
  absl::StatusOr<std::unique_ptr<ComputeStream>> stream = NewStream(place);
  if (!stream.ok()) return stream.status();
  {
    const std::lock_guard lock(stream_mutex_);
    stream_ = *std::move(stream);
    if (interruption_->raised()) stream_->Cancel();
  }
  place_ = place;
  absl::Status status = AwaitReady();
  if (!status.ok()) DropStream();
  return status;
}

absl::StatusOr<std::unique_ptr<ComputeStream>> Lane::NewStream(const std::string& place) {
  Connection& connection = link_->head().connection();
  if (place.empty()) return connection.Compute(link_->limits());
  return connection.ComputeAt(place, link_->limits());
}

void Lane::LeaveOtherPlace() {
  if (place() != link_->places().home()) DropStream();
}

absl::Status Lane::AwaitReady() {
  v1::ComputeStart start;
  start.set_session_id(link_->session_id());
  start.set_incarnation(link_->incarnation());
  start.set_lane(number_);
  start.set_report_timing(link_->options().timing == Timing::kReport);
  if (absl::Status supported = link_->head().connection().CheckSupported(start); !supported.ok()) {
    return supported;
  }
  stream_->Write(EncodeStart(start));  // if the call is over, reading says why
  grpc::ByteBuffer message;
  switch (stream_->Read(&message, link_->head().options().call_timeout)) {
    case ComputeStream::ReadResult::kTimeout:
      return absl::UnavailableError("the server did not become ready for the session's stream");
    case ComputeStream::ReadResult::kEnded: {
      const absl::Status status = stream_->EndStatus();
      return status.ok() ? absl::UnavailableError("the server ended the session's stream at once") : status;
    }
    case ComputeStream::ReadResult::kMessage:
      break;
  }
  const auto decoded = DecodedResponse::Decode(&message);
  if (!decoded.ok()) return decoded.status();
  if (!decoded->header().has_ready()) {
    return absl::InternalError("the first answer of the server's stream is not `ready`");
  }
  if (const int64_t server_time = decoded->header().ready().server_time(); server_time != 0) {
    link_->NoteServerTime(server_time, stream_->WriteTime(), stream_->ReadTime());
  }
  return TakeReady(decoded->header().ready());
}

absl::Status Lane::TakeReady(const v1::ComputeReady& ready) {
  const uint64_t accepted = ready.marks().accepted();
  if (accepted < answered_ && link_->restored()) return link_->LostByRestore(ready.generation());
  if (accepted < answered_) {
    return absl::InternalError(absl::StrCat("session ", link_->session_id(), " lane ", number_,
                                            ": the server has accepted sequences up to ", accepted,
                                            " but had answered ", answered_, " before"));
  }
  if (begun_ && accepted > sent_) {
    return link_->TakenByAnother(number_, accepted);
  }
  accepted_ = accepted;
  applied_ = std::max(applied_, ready.marks().applied());
  link_->NoteStands();
  link_->NoteGeneration(ready.generation());
  return absl::OkStatus();
}

absl::StatusOr<Lane::Recovery> Lane::Recover(absl::Status cause) {
  for (;;) {
    // Final errors come first, interrupted or not: a lane that was taken over must not be taken back.
    if (absl::Status status = link_->CheckRecoverable(cause); !status.ok()) return status;
    if (absl::IsAborted(cause) || interruption_->raised()) return Recovery::kUnsettled;
    const auto delay = backoff_.NextDelay(RetryDelayOf(cause).value_or(std::chrono::milliseconds(0)));
    if (!delay) return link_->GaveUp(cause);
    for (auto left = *delay; left > std::chrono::milliseconds(0); left -= kWaitSlice) {
      if (!interruption_->SleepFor(std::min(left, kWaitSlice))) return Recovery::kUnsettled;
      if (absl::Status asked = Asked(link_->head().options()); !asked.ok()) return asked;
    }
    DropStream();
    const auto response = link_->Reopen(cause);
    if (absl::IsUnavailable(response.status()) && interruption_->raised()) return Recovery::kUnsettled;
    if (!response.ok()) return response.status();
    if (!link_->IsSame(*response)) {
      if (absl::Status status = link_->CheckReplaceable(*response); !status.ok()) return status;
      return Recovery::kUnsettled;
    }
    cause = Attach();
    if (cause.ok()) {
      ++reconnects_;
      return Recovery::kResumed;
    }
  }
}

void Lane::NoteSent(uint64_t sequence) { sent_ = std::max(sent_, sequence); }

void Lane::NoteAnswered(uint64_t sequence) {
  answered_ = std::max(answered_, sequence);
  accepted_ = std::max(accepted_, sequence);
}

void Lane::NoteApplied(uint64_t sequence) { applied_ = std::max(applied_, sequence); }

void Lane::DropStream() {
  std::unique_ptr<ComputeStream> dropped;  // its end is waited for without the lock
  const std::lock_guard lock(stream_mutex_);
  dropped.swap(stream_);
}

void Lane::CancelStream() {
  const std::lock_guard lock(stream_mutex_);
  if (stream_) stream_->Cancel();
}

void Lane::Close(std::chrono::milliseconds timeout) {
  if (stream_) stream_->Close(timeout);
  DropStream();
}

}  // namespace lossd::internal
