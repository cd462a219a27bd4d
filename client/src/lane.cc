#include "client/src/lane.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/chunk_codec.h"
#include "client/src/chunk_times.h"
#include "client/src/grpc_status.h"

namespace lossd::internal {
namespace {

constexpr int32_t kLane = 0;
constexpr std::chrono::milliseconds kCloseTimeout(2000);

v1::LaneMarks MarksOf(const v1::OpenSessionResponse& response) {
  for (const auto& marks : response.lanes()) {
    if (marks.lane() == kLane) return marks;
  }
  return {};
}

}  // namespace

Lane::Lane(std::shared_ptr<HeadContext> head, SessionOptions options)
    : head_(std::move(head)), options_(std::move(options)), backoff_(head_->options().reconnect_timeout) {}

absl::Status Lane::Open() {
  Recovery recovery = Recovery::kResumed;
  if (absl::Status status = Reopen(&recovery); !status.ok()) return status;
  // A head without weights takes no stream yet, and has accepted nothing: Compute tries again.
  if (absl::Status status = EnsureAttached(); !status.ok() && !absl::IsFailedPrecondition(status)) {
    return status;
  }
  next_sequence_ = accepted_ + 1;
  // Whatever an earlier process of the same client_key had accepted may be in the window that is open now.
  contributed_generation_ = generation_;
  contributions_ = static_cast<int64_t>(accepted_ > 0);
  reconnects_ = 0;
  return absl::OkStatus();
}

absl::Status Lane::EnsureAttached() {
  if (stream_) return absl::OkStatus();
  absl::Status status = Attach();
  if (status.ok()) return status;
  if (!absl::IsFailedPrecondition(status)) return Recover(std::move(status)).status();
  stream_.reset();
  return status;
}

absl::StatusOr<Lane::Recovery> Lane::Recover(absl::Status cause) {
  Recovery recovery = Recovery::kResumed;
  for (;;) {
    if (absl::Status status = CheckRecoverable(cause); !status.ok()) return status;
    if (!backoff_.Wait(RetryDelayOf(cause).value_or(std::chrono::milliseconds(0)))) {
      return absl::UnavailableError(
          absl::StrCat("session ", session_id_, ": gave up reconnecting after ",
                       head_->options().reconnect_timeout.count(),
                       " ms; last error: ", cause.ok() ? "the server ended the stream" : cause.message()));
    }
    if (absl::Status status = Reopen(&recovery); !status.ok()) return status;
    cause = Attach();
    if (cause.ok()) {
      if (recovery == Recovery::kNewSession) next_sequence_ = accepted_ + 1;
      ++reconnects_;
      return recovery;
    }
  }
}

// Chunks are numbered, so sending again is always safe; the question is only whether it can help.
absl::Status Lane::CheckRecoverable(const absl::Status& cause) {
  switch (cause.code()) {
    case absl::StatusCode::kOk:           // the server ended the call while answers were missing
    case absl::StatusCode::kUnavailable:  // the network, or a server that goes away
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kUnknown:   // what gRPC makes of some broken connections
    case absl::StatusCode::kNotFound:  // the session's lease ended, or the server is another one
      return absl::OkStatus();
    case absl::StatusCode::kAborted:
      return FollowPosition(cause);
    default:
      return IsTransient(cause) ? absl::OkStatus() : cause;
  }
}

absl::Status Lane::FollowPosition(const absl::Status& cause) {
  const auto position = PositionOf(cause);
  if (!position) {
    return Annotate(
        cause, absl::StrCat("session ", session_id_, " was taken over by another stream with client_key '",
                            options_.client_key, "'"));
  }
  if (position->incarnation() != incarnation_) return absl::OkStatus();  // Reopen finds out what that means
  // Refused although the generation is the server's own: the window is frozen, and the next one waits for its
  // commit. Should the flush be aborted instead, the server refuses that one and names the present one again.
  generation_ = position->generation() == generation() ? position->generation() + 1 : position->generation();
  return absl::OkStatus();
}

absl::Status Lane::Reopen(Recovery* recovery) {
  stream_.reset();  // the server must see the old stream end before a new one begins
  v1::OpenSessionRequest request;
  request.set_head(head_->config().name);
  request.set_client_key(options_.client_key);
  request.set_rank(options_.rank);
  request.set_lanes(1);
  auto response = head_->connection().OpenSession(request);
  if (!response.ok()) return ExplainMissing(response.status());
  if (response->vocab_size() != head_->config().vocab_size ||
      response->hidden_size() != head_->config().hidden_size) {
    return absl::FailedPreconditionError(absl::StrCat(
        "head '", head_->config().name, "' is now ", response->vocab_size(), "x", response->hidden_size(),
        "; this handle was made when it was ", head_->config().vocab_size, "x", head_->config().hidden_size));
  }
  limits_ = response->limits();
  if (response->session_id() == session_id_ && response->incarnation() == incarnation_) {
    return absl::OkStatus();
  }
  if (absl::Status status = CheckReplaceable(*response); !status.ok()) return status;
  if (!session_id_.empty()) *recovery = Recovery::kNewSession;
  Adopt(*response);
  return absl::OkStatus();
}

absl::Status Lane::CheckReplaceable(const v1::OpenSessionResponse& response) {
  if (session_id_.empty() || !Contributed()) return absl::OkStatus();
  if (response.incarnation() != incarnation_) {
    return WindowLostError(head_->config().name, contributed_generation_, "the server was restarted");
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "session ", session_id_, " has expired at the server (its lease is ", limits_.lease_seconds(),
      " s); what it added to generation ", contributed_generation_, " up to sequence ", answered_,
      " is still in the window: open a new session, and name the marks of both (HeadInfo::sessions) when "
      "flushing"));
}

void Lane::Adopt(const v1::OpenSessionResponse& response) {
  session_id_ = response.session_id();
  incarnation_ = response.incarnation();
  generation_ = response.generation();
  accepted_ = MarksOf(response).accepted();
  applied_ = MarksOf(response).applied();
  answered_ = 0;
  contributions_ = 0;
  head_->NoteIncarnation(incarnation_);
}

// A restarted server has no heads, so it answers OpenSession with NOT_FOUND: say what that means.
absl::Status Lane::ExplainMissing(const absl::Status& status) {
  if (!absl::IsNotFound(status) || session_id_.empty()) return status;
  const auto server = head_->connection().GetStatus({});
  if (!server.ok() || server->incarnation() == incarnation_) return status;
  if (Contributed()) {
    return WindowLostError(head_->config().name, contributed_generation_,
                           "the server was restarted without this head");
  }
  return Annotate(status, "the server was restarted");
}

absl::Status Lane::Attach() {
  stream_ = head_->connection().Compute(limits_);
  v1::ComputeStart start;
  start.set_session_id(session_id_);
  start.set_incarnation(incarnation_);
  start.set_lane(kLane);
  start.set_report_timing(options_.timing == Timing::kReport);
  stream_->Write(EncodeStart(start));  // if the call is over, reading says why
  grpc::ByteBuffer message;
  switch (stream_->Read(&message, head_->options().call_timeout)) {
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
    clock_offset_ = ClockOffset();  // it may be another server
    clock_offset_.NoteToServer(Microseconds(stream_->WriteTime()), server_time);
    clock_offset_.NoteFromServer(server_time, Microseconds(stream_->ReadTime()));
  }
  return TakeReady(decoded->header().ready());
}

absl::Status Lane::TakeReady(const v1::ComputeReady& ready) {
  if (ready.marks().accepted() < answered_) {
    return absl::InternalError(
        absl::StrCat("session ", session_id_, ": the server has accepted sequences up to ",
                     ready.marks().accepted(), " but had answered ", answered_, " before"));
  }
  accepted_ = ready.marks().accepted();
  applied_ = std::max(applied_, ready.marks().applied());
  // Never back: while a window is frozen, `ready` may still name it although a chunk was told to go to the
  // next one.
  generation_ = std::max(generation_, ready.generation());
  return absl::OkStatus();
}

uint64_t Lane::generation() {
  generation_ = std::max(generation_, head_->CommittedGeneration(incarnation_));
  return generation_;
}

bool Lane::Contributed() { return contributions_ > 0 && contributed_generation_ >= generation(); }

void Lane::NoteContribution(uint64_t generation) {
  if (generation != contributed_generation_) {
    contributed_generation_ = generation;
    contributions_ = 0;
  }
  ++contributions_;
}

void Lane::NoteWithdrawal(uint64_t generation) {
  if (generation == contributed_generation_) --contributions_;
}

void Lane::NoteAnswered(uint64_t sequence) {
  answered_ = std::max(answered_, sequence);
  accepted_ = std::max(accepted_, sequence);
}

void Lane::NoteApplied(uint64_t sequence) { applied_ = std::max(applied_, sequence); }

void Lane::Close() {
  if (stream_) stream_->Close(kCloseTimeout);
  stream_.reset();
}

}  // namespace lossd::internal
