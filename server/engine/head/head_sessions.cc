// Sessions of a head and the streams that hold their lanes.
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"
#include "server/engine/common/monotonic_clock.h"
#include "server/engine/head/head.h"

namespace lossd::engine {

absl::StatusOr<Head::SessionInfo> Head::OpenSession(const std::string& client_key, int32_t rank,
                                                    int32_t lanes, const std::string& new_session_id,
                                                    Deterministic deterministic, SessionMemory memory) {
  const MutexLock lock(mutex_);
  if (!lifecycle_.alive().ok()) return lifecycle_.alive();
  absl::StatusOr<SessionTable::Opened> opened =
      sessions_.Open(client_key, rank, lanes, new_session_id, deterministic, memory);
  if (!opened.ok()) return opened.status();
  SessionInfo info{std::move(opened->session_id), window_.generation(), std::move(opened->lanes),
                   history_.restores(), history_.restored_from()};
  info.in_window = sessions_.InWindow(info.session_id);
  return info;
}

absl::StatusOr<bool> Head::NeedsGradient(const std::string& client_key, int32_t rank) {
  const MutexLock lock(mutex_);
  if (!lifecycle_.alive().ok()) return lifecycle_.alive();
  return sessions_.NeedsGradient(client_key, rank);
}

absl::Status Head::CloseSession(const std::string& session_id, std::optional<absl::Time> idle_since) {
  SessionTable::Cut cut;
  {
    const MutexLock lock(mutex_);
    if (absl::Status closed = sessions_.Close(session_id, idle_since, &cut); !closed.ok()) return closed;
    FinishCutLocked(cut);
    DropForgottenLocked();
  }
  TellEnd(cut, MakeError(absl::StatusCode::kNotFound, RejectReason::kUnknownSession, "session_id",
                         absl::StrCat("session ", session_id, " was closed")));
  return absl::OkStatus();
}

std::vector<std::string> Head::IdleSessions(absl::Time before) const {
  const MutexLock lock(mutex_);
  return sessions_.Idle(before);
}

std::map<std::string, int32_t> Head::OpenSessions() const {
  const MutexLock lock(mutex_);
  return sessions_.OpenSessions();
}

bool Head::HasSession(const std::string& client_key) const {
  const MutexLock lock(mutex_);
  return sessions_.HasOpen(client_key);
}

int64_t Head::deterministic_sessions() const {
  const MutexLock lock(mutex_);
  return sessions_.deterministic_count();
}

absl::StatusOr<LaneAttachment> Head::AttachLane(const std::string& session_id, int32_t lane,
                                                std::shared_ptr<LaneListener> listener) {
  SessionTable::Cut cut;
  LaneAttachment attachment;
  {
    const MutexLock lock(mutex_);
    if (!lifecycle_.admits().ok()) return lifecycle_.admits();
    if (absl::Status there = sessions_.CheckLane(session_id, lane); !there.ok()) return there;
    if (weights_.version() == 0) {
      return MakeError(
          absl::StatusCode::kFailedPrecondition, RejectReason::kNoWeights, "session_id",
          absl::StrCat(
              "head ", config_.name,
              " has no weights yet: write them first (in Python with write_weights of the head, or with "
              "'lossctl head load')"));
    }
    attachment = sessions_.Attach(session_id, lane, std::move(listener), &cut);
    attachment.generation = window_.generation();
    FinishCutLocked(cut);
  }
  TellEnd(cut, MakeError(absl::StatusCode::kAborted, RejectReason::kFenced, "lane",
                         absl::StrCat("another stream took lane ", lane, " of session ", session_id)));
  return attachment;
}

bool Head::IsDeterministic(const std::string& session_id) const {
  const MutexLock lock(mutex_);
  return sessions_.IsDeterministic(session_id);
}

void Head::DetachLane(const LaneAttachment& lane) {
  SessionTable::Cut cut;  // its listener is destroyed after the lock is released
  const MutexLock lock(mutex_);
  sessions_.Detach(lane, &cut);
  FinishCutLocked(cut);
}

void Head::FinishCutLocked(const SessionTable::Cut& cut) {
  if (!cut.withdrawn.empty()) environment_.scheduler->Withdraw(this, cut.withdrawn);
  // The lock is held, and those who wait come back at once.
  for (const std::string& session_id : std::set(cut.made_room.begin(), cut.made_room.end())) {
    environment_.scheduler->Post(
        nullptr, [self = shared_from_this(), session_id] { self->ResumeSession(session_id); });
  }
}

void Head::TellEnd(const SessionTable::Cut& cut, const absl::Status& status) {
  for (const auto& listener : cut.listeners) listener->OnEnd(status);
}

void Head::ResumeSession(const std::string& session_id) {
  Resumes waiting;
  {
    const MutexLock lock(mutex_);
    waiting = sessions_.TakeWaiting(session_id);
  }
  Call(waiting);
}

void Head::ResumeStalled() {
  Resumes waiting;
  {
    const MutexLock lock(mutex_);
    waiting = sessions_.TakeStalled(MonotonicNow());
  }
  Call(waiting);
}

void Head::Call(const Resumes& resumes) {
  for (const Resume& resume : resumes) resume();
}

// Gradients of sessions that are no more go on the device thread, after the batches that add to them.
void Head::DropForgottenLocked() {
  for (std::shared_ptr<DeterministicSession>& forgotten : sessions_.TakeForgotten()) {
    environment_.scheduler->Post(this, [self = shared_from_this(), session = std::move(forgotten)]() mutable {
      Drop(session->memory);
    });
  }
}

}  // namespace lossd::engine
