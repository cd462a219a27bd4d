// Sessions of a head and the streams that hold their lanes.
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"
#include "server/engine/common/monotonic_clock.h"
#include "server/engine/head/head.h"

namespace lossd::engine {

using SessionState = AccumulationLedger::SessionState;

namespace {

// Most sessions that are open or that the window holds something of: closed ones are remembered until it
// ends.
constexpr size_t kMostSessions = 8192;

}  // namespace

absl::StatusOr<Head::SessionInfo> Head::OpenSession(const std::string& client_key, int32_t rank,
                                                    int32_t lanes, const std::string& new_session_id,
                                                    Deterministic deterministic, SessionMemory memory) {
  const std::lock_guard lock(mutex_);
  if (!ended_.ok()) return ended_;
  SessionInfo info{new_session_id, window_.generation, {}, restores_};
  AccumulationLedger::Session* session = ledger_.FindByKey(client_key, &info.session_id);
  if (session == nullptr) {
    if (const size_t known = ledger_.sessions().size(); known >= kMostSessions) {
      return MakeError(
          absl::StatusCode::kResourceExhausted, RejectReason::kOverload, "head",
          absl::StrCat("the window of head ", config_.name, " has ", known,
                       " sessions, open or closed; the limit is ", kMostSessions, " (flush it)"));
    }
    if (deterministic == Deterministic::kYes && !frozen() && memory.gradient == nullptr) {
      // It was there when memory was looked at, and was closed since.
      return MakeError(absl::StatusCode::kUnavailable, RejectReason::kConflict, "client_key",
                       absl::StrCat("the session of client_key '", client_key,
                                    "' was closed a moment ago; open it again"));
    }
    if (memory.gradient != nullptr) {
      if (absl::Status status = CheckRankLocked(client_key, rank); !status.ok()) return status;
    }
    session = &ledger_.Add(new_session_id, client_key, rank, lanes);
    if (memory.gradient != nullptr) {
      const MemoryPlan plan = memory.reservation->plan();
      deterministic_.emplace(new_session_id,
                             std::make_shared<DeterministicSession>(DeterministicSession{
                                 std::move(memory), plan, new_session_id, rank, session->number,
                                 DeterministicTiles(environment_.limits, config_.hidden_size)}));
    }
  } else if (!frozen() &&
             deterministic_.contains(info.session_id) != (deterministic == Deterministic::kYes)) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, RejectReason::kOption, "deterministic",
        absl::StrCat("deterministic is ", deterministic == Deterministic::kYes ? "true" : "false",
                     "; the session of this client_key is open with the other (close it first)"));
  } else if (session->lanes.size() != static_cast<size_t>(lanes)) {
    return MakeError(absl::StatusCode::kInvalidArgument, RejectReason::kOption, "lanes",
                     absl::StrCat("lanes is ", lanes, "; the session of this client_key is open with ",
                                  session->lanes.size(), " (close it first)"));
  }
  session->last_active = MonotonicNow();
  for (size_t i = 0; i < session->lanes.size(); ++i) {
    info.lanes.push_back({static_cast<int32_t>(i), session->lanes[i].accepted, session->lanes[i].applied});
  }
  return info;
}

absl::Status Head::CloseSession(const std::string& session_id, std::optional<absl::Time> idle_since) {
  std::vector<std::shared_ptr<LaneListener>> listeners;
  {
    const std::lock_guard lock(mutex_);
    const AccumulationLedger::Session* session = ledger_.Find(session_id);
    if (session == nullptr || session->state != SessionState::kOpen) {
      return MakeError(absl::StatusCode::kNotFound, RejectReason::kUnknownSession, "session_id",
                       absl::StrCat("session ", session_id, " is not open"));
    }
    if (idle_since.has_value() && !IsIdleLocked(session_id, *session, *idle_since)) {
      return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kConflict, "session_id",
                       absl::StrCat("session ", session_id, " is in use"));
    }
    for (size_t i = 0; i < session->lanes.size(); ++i) {
      const LaneKey key{session_id, static_cast<int32_t>(i)};
      WithdrawLocked(key);
      listeners.push_back(DropListenerLocked(key));
      lanes_.erase(key);
    }
    ledger_.Close(session_id);
    DropGradientsLocked();
  }
  for (const auto& listener : listeners) {
    if (listener == nullptr) continue;
    listener->OnEnd(MakeError(absl::StatusCode::kNotFound, RejectReason::kUnknownSession, "session_id",
                              absl::StrCat("session ", session_id, " was closed")));
  }
  return absl::OkStatus();
}

std::vector<std::string> Head::IdleSessions(absl::Time before) const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> idle;
  for (const auto& [id, session] : ledger_.sessions()) {
    if (session.state == SessionState::kOpen && IsIdleLocked(id, session, before)) idle.push_back(id);
  }
  return idle;
}

bool Head::IsIdleLocked(const std::string& session_id, const AccumulationLedger::Session& session,
                        absl::Time before) const {
  if (session.last_active >= before) return false;
  for (size_t i = 0; i < session.lanes.size(); ++i) {
    const auto it = lanes_.find({session_id, static_cast<int32_t>(i)});
    if (it != lanes_.end() && it->second.listener != nullptr) return false;
  }
  return true;
}

// --- Streams
// ----------------------------------------------------------------------------------------------------

absl::StatusOr<LaneAttachment> Head::AttachLane(const std::string& session_id, int32_t lane,
                                                std::shared_ptr<LaneListener> listener) {
  std::shared_ptr<LaneListener> fenced;
  LaneAttachment attachment;
  attachment.session_id = session_id;
  attachment.lane = lane;
  {
    const std::lock_guard lock(mutex_);
    if (!ended_.ok()) return ended_;
    if (!draining_.ok()) return draining_;
    AccumulationLedger::Session* session = ledger_.Find(session_id);
    if (session == nullptr || session->state != SessionState::kOpen) {
      return MakeError(absl::StatusCode::kNotFound, RejectReason::kUnknownSession, "session_id",
                       absl::StrCat("session ", session_id, " is not open; call OpenSession"));
    }
    if (lane < 0 || static_cast<size_t>(lane) >= session->lanes.size()) {
      return MakeError(absl::StatusCode::kInvalidArgument, RejectReason::kOption, "lane",
                       absl::StrCat("lane is ", lane, "; the session has ", session->lanes.size()));
    }
    if (weight_version_ == 0) {
      return MakeError(
          absl::StatusCode::kFailedPrecondition, RejectReason::kNoWeights, "session_id",
          absl::StrCat("head ", config_.name,
                       " has no weights yet: BeginWrite, WriteWeights and CommitWrite come first"));
    }
    const LaneKey key{session_id, lane};
    WithdrawLocked(key);
    fenced = DropListenerLocked(key);
    LaneRuntime& runtime = lanes_[key];
    runtime.epoch = ++last_epoch_;
    runtime.listener = std::move(listener);
    session->last_active = MonotonicNow();
    const Lane& marks = session->lanes[static_cast<size_t>(lane)];
    attachment.epoch = runtime.epoch;
    attachment.marks = {lane, marks.accepted, marks.applied};
    attachment.generation = window_.generation;
    attachment.session_number = session->number;
    attachment.rank = session->rank;
  }
  if (fenced != nullptr) {
    fenced->OnEnd(MakeError(absl::StatusCode::kAborted, RejectReason::kFenced, "lane",
                            absl::StrCat("another stream took lane ", lane, " of session ", session_id)));
  }
  return attachment;
}

void Head::DetachLane(const LaneAttachment& lane) {
  std::shared_ptr<LaneListener> dropped;  // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  const LaneKey key{lane.session_id, lane.lane};
  const auto it = lanes_.find(key);
  if (it == lanes_.end() || it->second.epoch != lane.epoch) return;
  WithdrawLocked(key);
  dropped = DropListenerLocked(key);
  it->second.epoch = ++last_epoch_;  // a chunk that this stream is just submitting comes too late
  if (AccumulationLedger::Session* session = ledger_.Find(lane.session_id)) {
    session->last_active = MonotonicNow();
  }
}

void Head::WithdrawLocked(const LaneKey& key) {
  const auto it = lanes_.find(key);
  if (it == lanes_.end()) return;
  std::vector<std::shared_ptr<QueuedChunk>> withdrawn;
  for (const std::shared_ptr<ChunkItem>& item : it->second.queued) {
    withdrawn.push_back(item);
    GiveUpPlaceLocked(*item);
    item->state = ItemState::kWithdrawn;
    item->chunk.DropPayload();  // now, not when the device's thread hears of it
    item->listener = nullptr;
    ++environment_.counters->chunks_withdrawn;
    --environment_.counters->queued_chunks;
    --counters_.queued_chunks;
  }
  it->second.queued.clear();
  if (!withdrawn.empty()) environment_.scheduler->Withdraw(this, std::move(withdrawn));
  if (it->second.resume) ++environment_.counters->chunks_withdrawn;  // the chunk that waits was read too
  it->second.resume = nullptr;
  if (AccumulationLedger::Session* session = ledger_.Find(key.first)) {
    AccumulationLedger::Withdraw(session->lanes[static_cast<size_t>(key.second)]);
  }
}

std::shared_ptr<LaneListener> Head::DropListenerLocked(const LaneKey& key) {
  const auto it = lanes_.find(key);
  return it == lanes_.end() ? nullptr : std::exchange(it->second.listener, nullptr);
}

}  // namespace lossd::engine
