#include "server/engine/head/parts/session_table.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/chunk/chunk_options.h"
#include "server/engine/chunk/token_lists.h"
#include "server/engine/common/errors.h"
#include "server/engine/common/monotonic_clock.h"
#include "server/engine/device/batch_key.h"

namespace lossd::engine {
namespace {

using SessionState = AccumulationLedger::SessionState;

// Most sessions that are open or that the window holds something of: closed ones are remembered until it
// ends.
constexpr size_t kMostSessions = 8192;

constexpr char kWindowToken[] = "window_token";
constexpr int64_t kMostPlace = std::numeric_limits<int64_t>::max() / 2;

size_t Index(int32_t lane) { return static_cast<size_t>(lane); }

// So many more chunks with the teacher of this kind, if it has one, are in the session's tiles.
void CountTaught(const BatchKey& kind, int64_t more, DeterministicSession* session) {
  if (kind.teacher.backend == nullptr) return;
  const auto count = session->taught.try_emplace(kind.teacher.head_number, 0).first;
  count->second += more;
  if (count->second == 0) session->taught.erase(count);
}

}  // namespace

// Sessions

absl::StatusOr<SessionTable::Opened> SessionTable::Open(const std::string& client_key, int32_t rank,
                                                        int32_t lanes, const std::string& new_session_id,
                                                        Deterministic deterministic, SessionMemory& memory) {
  Opened opened{new_session_id, {}};
  AccumulationLedger::Session* session = ledger_.FindByKey(client_key, &opened.session_id);
  if (session == nullptr) {
    if (const size_t known = ledger_.sessions().size(); known >= kMostSessions) {
      return MakeError(
          absl::StatusCode::kResourceExhausted, RejectReason::kOverload, "head",
          absl::StrCat("the window of head ", settings_.head, " has ", known,
                       " sessions, open or closed; the limit is ", kMostSessions, " (flush it)"));
    }
    if (deterministic == Deterministic::kYes && !settings_.frozen && memory.gradient == nullptr) {
      // The session was open when the caller asked whether it needs memory, and was closed since.
      return MakeError(absl::StatusCode::kUnavailable, RejectReason::kConflict, "client_key",
                       absl::StrCat("the session of client_key '", client_key,
                                    "' was closed a moment ago; open it again"));
    }
    if (memory.gradient != nullptr) {
      if (absl::Status status = CheckRank(client_key, rank); !status.ok()) return status;
    }
    session = &ledger_.Add(new_session_id, client_key, rank, lanes);
    if (memory.gradient != nullptr) {
      const MemoryPlan plan = memory.reservation->plan();
      deterministic_.emplace(new_session_id,
                             std::make_shared<DeterministicSession>(DeterministicSession{
                                 std::move(memory),
                                 {},
                                 plan,
                                 new_session_id,
                                 rank,
                                 session->number,
                                 DeterministicTiles(settings_.limits, settings_.hidden_size)}));
    }
  } else if (!settings_.frozen &&
             IsDeterministic(opened.session_id) != (deterministic == Deterministic::kYes)) {
    return Invalid(RejectReason::kOption, "deterministic",
                   absl::StrCat("deterministic is ", deterministic == Deterministic::kYes ? "true" : "false",
                                "; the session of this client_key is open with the other (close it first)"));
  } else if (session->lanes.size() != Index(lanes)) {
    return Invalid(RejectReason::kOption, "lanes",
                   absl::StrCat("lanes is ", lanes, "; the session of this client_key is open with ",
                                session->lanes.size(), " (close it first)"));
  }
  session->last_active = MonotonicNow();
  for (size_t i = 0; i < session->lanes.size(); ++i) {
    opened.lanes.push_back({static_cast<int32_t>(i), session->lanes[i].accepted, session->lanes[i].applied});
  }
  return opened;
}

absl::StatusOr<bool> SessionTable::NeedsGradient(const std::string& client_key, int32_t rank) {
  std::string id;
  if (settings_.frozen || ledger_.FindByKey(client_key, &id) != nullptr) return false;
  if (absl::Status status = CheckRank(client_key, rank); !status.ok()) return status;
  return true;
}

// The order of the sum must not depend on who came first.
absl::Status SessionTable::CheckRank(const std::string& client_key, int32_t rank) const {
  for (const auto& [id, session] : ledger_.sessions()) {
    if (session.state != SessionState::kOpen || session.rank != rank || !IsDeterministic(id)) continue;
    return Invalid(
        RejectReason::kOption, "rank",
        absl::StrCat("rank is ", rank, " for client_key '", client_key, "' and for '", session.client_key,
                     "'; deterministic sessions of a head must have different ones"));
  }
  return absl::OkStatus();
}

absl::Status SessionTable::Close(const std::string& session_id, std::optional<absl::Time> idle_since,
                                 Cut* cut) {
  const AccumulationLedger::Session* session = ledger_.Find(session_id);
  if (session == nullptr || session->state != SessionState::kOpen) {
    return MakeError(absl::StatusCode::kNotFound, RejectReason::kUnknownSession, "session_id",
                     absl::StrCat("session ", session_id, " is not open"));
  }
  if (idle_since.has_value() && !IsIdle(session_id, *session, *idle_since)) {
    return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kConflict, "session_id",
                     absl::StrCat("session ", session_id, " is in use"));
  }
  for (auto it = streams_.lower_bound({session_id, 0});
       it != streams_.end() && it->first.first == session_id;) {
    CutOff(it->first, it->second, cut);
    it = streams_.erase(it);
  }
  ledger_.Close(session_id);
  return absl::OkStatus();
}

std::vector<std::string> SessionTable::Idle(absl::Time before) const {
  std::vector<std::string> idle;
  for (const auto& [id, session] : ledger_.sessions()) {
    if (session.state == SessionState::kOpen && IsIdle(id, session, before)) idle.push_back(id);
  }
  return idle;
}

bool SessionTable::IsIdle(const std::string& session_id, const AccumulationLedger::Session& session,
                          absl::Time before) const {
  if (session.last_active >= before) return false;
  for (auto it = streams_.lower_bound({session_id, 0}); it != streams_.end() && it->first.first == session_id;
       ++it) {
    if (it->second.listener != nullptr) return false;
  }
  return true;
}

std::map<std::string, int32_t> SessionTable::OpenSessions() const {
  std::map<std::string, int32_t> open;
  for (const auto& [id, session] : ledger_.sessions()) {
    if (session.state == SessionState::kOpen) open.emplace(id, static_cast<int32_t>(session.lanes.size()));
  }
  return open;
}

bool SessionTable::HasOpen(const std::string& client_key) const {
  const auto& sessions = ledger_.sessions();
  return std::any_of(sessions.begin(), sessions.end(), [&](const auto& entry) {
    return entry.second.state == SessionState::kOpen && entry.second.client_key == client_key;
  });
}

std::vector<SessionSnapshot> SessionTable::Snapshots(absl::Time now) const {
  std::vector<SessionSnapshot> sessions;
  for (const auto& [id, session] : ledger_.sessions()) {
    if (session.state != SessionState::kOpen) continue;
    SessionSnapshot& snapshot = sessions.emplace_back();
    snapshot.number = session.number;
    snapshot.rank = session.rank;
    snapshot.lanes = static_cast<int64_t>(session.lanes.size());
    snapshot.idle = std::max(absl::ZeroDuration(), now - session.last_active);
    for (const Lane& lane : session.lanes) {
      snapshot.accepted += lane.accepted - lane.base;
      snapshot.applied += std::max(lane.applied, lane.base) - lane.base;
    }
    for (auto it = streams_.lower_bound({id, 0}); it != streams_.end() && it->first.first == id; ++it) {
      if (it->second.listener != nullptr) ++snapshot.streams;
    }
  }
  return sessions;
}

// Streams

absl::Status SessionTable::CheckLane(const std::string& session_id, int32_t lane) {
  const AccumulationLedger::Session* session = ledger_.Find(session_id);
  if (session == nullptr || session->state != SessionState::kOpen) {
    return MakeError(absl::StatusCode::kNotFound, RejectReason::kUnknownSession, "session_id",
                     absl::StrCat("session ", session_id, " is not open; call OpenSession"));
  }
  if (lane >= 0 && Index(lane) < session->lanes.size()) return absl::OkStatus();
  return Invalid(RejectReason::kOption, "lane",
                 absl::StrCat("lane is ", lane, "; the session has ", session->lanes.size()));
}

LaneAttachment SessionTable::Attach(const std::string& session_id, int32_t lane,
                                    std::shared_ptr<LaneListener> listener, Cut* cut) {
  AccumulationLedger::Session& session = *ledger_.Find(session_id);
  const Key key{session_id, lane};
  Stream& stream = streams_[key];
  CutOff(key, stream, cut);
  stream.epoch = ++last_epoch_;
  stream.listener = std::move(listener);
  stream.holder.reset();
  session.last_active = MonotonicNow();
  const Lane& marks = session.lanes[Index(lane)];
  LaneAttachment attachment;
  attachment.session_id = session_id;
  attachment.lane = lane;
  attachment.epoch = stream.epoch;
  attachment.marks = {lane, marks.accepted, marks.applied};
  attachment.session_number = session.number;
  attachment.rank = session.rank;
  return attachment;
}

void SessionTable::Detach(const LaneAttachment& attachment, Cut* cut) {
  const Key key{attachment.session_id, attachment.lane};
  const auto it = streams_.find(key);
  if (it == streams_.end() || it->second.epoch != attachment.epoch) return;
  CutOff(key, it->second, cut);
  it->second.epoch = ++last_epoch_;  // a chunk that this stream is just submitting comes too late
  if (AccumulationLedger::Session* session = ledger_.Find(attachment.session_id)) {
    session->last_active = MonotonicNow();
  }
}

void SessionTable::DetachAll(Cut* cut) {
  for (auto& [key, stream] : streams_) CutOff(key, stream, cut);
  streams_.clear();  // a later stream of the same lane has another epoch
}

void SessionTable::CutOff(const Key& key, Stream& stream, Cut* cut) {
  for (const std::shared_ptr<ChunkItem>& item : stream.queued) {
    cut->withdrawn.push_back(item);
    GiveUpPlace(*item, cut);
    item->state = ChunkItem::State::kWithdrawn;
    item->chunk.DropPayload();  // now, not when the device's thread hears of it
    item->listener = nullptr;
    ++counters_.chunks_withdrawn;
    --counters_.queued_chunks;
    --head_counters_.queued_chunks;
  }
  stream.queued.clear();
  if (stream.resume) ++counters_.chunks_withdrawn;  // the chunk that waits was read too
  stream.resume = nullptr;
  if (AccumulationLedger::Session* session = ledger_.Find(key.first)) {
    AccumulationLedger::Withdraw(session->lanes[Index(key.second)]);
  }
  if (stream.listener != nullptr) cut->listeners.push_back(std::exchange(stream.listener, nullptr));
}

// Chunks

absl::StatusOr<const SessionTable::Lane*> SessionTable::Held(const LaneAttachment& attachment) {
  const auto stream = streams_.find({attachment.session_id, attachment.lane});
  const AccumulationLedger::Session* session = ledger_.Find(attachment.session_id);
  if (stream == streams_.end() || session == nullptr || stream->second.epoch != attachment.epoch) {
    return MakeError(absl::StatusCode::kAborted, RejectReason::kFenced, "lane",
                     absl::StrCat("this stream no longer holds lane ", attachment.lane));
  }
  return &session->lanes[Index(attachment.lane)];
}

std::vector<LaneReplay> SessionTable::Replay(const std::string& session_id) const {
  std::vector<LaneReplay> replay;
  const auto session = ledger_.sessions().find(session_id);
  if (session == ledger_.sessions().end()) return replay;
  const std::vector<Lane>& lanes = session->second.lanes;
  for (size_t i = 0; i < lanes.size(); ++i) {
    replay.push_back({static_cast<int32_t>(i), lanes[i].accepted + 1});
  }
  return replay;
}

void SessionTable::Enqueue(const std::shared_ptr<ChunkItem>& item) {
  AccumulationLedger::Session& session = *ledger_.Find(item->session_id);
  session.last_active = MonotonicNow();
  item->session = session.number;
  if (item->numbered()) AccumulationLedger::Accept(session.lanes[Index(item->lane)]);
  Stream& stream = streams_.at({item->session_id, item->lane});
  item->listener = stream.listener;
  item->accepted = absl::Now();
  stream.queued.push_back(item);
  ++counters_.queued_chunks;
  ++head_counters_.queued_chunks;
}

absl::Status SessionTable::CheckHolder(const std::string& session_id, int32_t lane, int32_t holder) {
  Stream& stream = streams_.at({session_id, lane});
  if (!stream.holder.has_value()) stream.holder = holder;
  if (*stream.holder == holder) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("rank ", holder, " holds a chunk of lane ", lane,
                                          ", whose earlier chunks are at rank ", *stream.holder));
}

void SessionTable::Start(ChunkItem& item) {
  item.state = ChunkItem::State::kStarted;
  --counters_.queued_chunks;
  --head_counters_.queued_chunks;
  streams_.at({item.session_id, item.lane}).queued.pop_front();
}

void SessionTable::NoteStarted(const ChunkItem& item) {
  if (!item.numbered()) return;
  Lane& lane = MutableLane(item.session_id, item.lane);
  AccumulationLedger::Start(lane);
  if (item.in_window()) lane.added = lane.started;
  if (item.rejected() && item.remembered) AccumulationLedger::Reject(lane);
}

absl::Status SessionTable::EarlierRejection(const std::string& session_id, int32_t lane,
                                            const Chunk& chunk) const {
  if (!AccumulationLedger::WasRejected(LaneOf(session_id, lane), chunk.sequence)) return absl::OkStatus();
  const char* field = kWindowToken;
  const char* why = "there was no place for it";
  if (chunk.options.distillation.has_value()) {
    field = kTeacherField;
    why = "it could not be computed with the teacher that there was";
  } else if (chunk.lists.use != ChunkLists::Use::kNone) {
    field = FieldOf(chunk.lists);
    why = "there was no place for it, or the server could not compute its lists";
  }
  return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kConflict, field,
                   absl::StrCat("sequence ", chunk.sequence, " was rejected before, when ", why,
                                ", and is in no window; send its tokens as another chunk"));
}

const SessionTable::Lane& SessionTable::LaneOf(const std::string& session_id, int32_t lane) const {
  return ledger_.sessions().find(session_id)->second.lanes[Index(lane)];
}

SessionTable::Lane& SessionTable::MutableLane(const std::string& session_id, int32_t lane) {
  return ledger_.Find(session_id)->lanes[Index(lane)];
}

std::optional<SessionTable::Applied> SessionTable::Apply(const ChunkItem& item) {
  // A started sequence keeps its session in the ledger until it is applied, though the session may be closed.
  Lane& lane = MutableLane(item.session_id, item.lane);
  const uint64_t before = lane.applied;
  AccumulationLedger::Apply(lane);
  const uint64_t applied = lane.applied;
  if (settings_.frozen) ledger_.ForgetApplied(item.session_id);
  ledger_.ForgetIfOver(item.session_id);
  const auto stream = streams_.find({item.session_id, item.lane});
  if (stream == streams_.end() || applied == before) return std::nullopt;
  return Applied{applied, stream->second.listener};
}

void SessionTable::Wait(const LaneAttachment& attachment, Resume resume) {
  streams_.at({attachment.session_id, attachment.lane}).resume = std::move(resume);
}

bool SessionTable::StopWaiting(const LaneAttachment& attachment) {
  if (!Held(attachment).ok()) return false;
  return std::exchange(streams_.at({attachment.session_id, attachment.lane}).resume, nullptr) != nullptr;
}

std::vector<Resume> SessionTable::TakeWaiting() {
  std::vector<Resume> waiting;
  for (auto& [key, stream] : streams_) {
    if (stream.resume) waiting.push_back(std::exchange(stream.resume, nullptr));
  }
  return waiting;
}

std::vector<Resume> SessionTable::TakeWaiting(const std::string& session_id) {
  std::vector<Resume> waiting;
  for (auto it = streams_.lower_bound({session_id, 0}); it != streams_.end() && it->first.first == session_id;
       ++it) {
    if (it->second.resume) waiting.push_back(std::exchange(it->second.resume, nullptr));
  }
  return waiting;
}

std::vector<Resume> SessionTable::TakeStalled(absl::Time now) {
  std::vector<Resume> waiting;
  for (const auto& [id, session] : deterministic_) {
    if (session->waiting_since > now - settings_.place_timeout) continue;
    for (Resume& resume : TakeWaiting(id)) waiting.push_back(std::move(resume));
  }
  return waiting;
}

// The window

bool SessionTable::OnlyLookedSince(const std::vector<SessionMarks>& begun,
                                   const std::vector<SessionMarks>& now) const {
  std::map<std::pair<absl::string_view, int32_t>, uint64_t> left;
  for (const SessionMarks& session : begun) {
    for (const LaneMarks& lane : session.lanes) left[{session.session_id, lane.lane}] = lane.accepted;
  }
  for (const SessionMarks& session : now) {
    for (const LaneMarks& mark : session.lanes) {
      const auto then = left.find({session.session_id, mark.lane});
      const bool moved = then == left.end() || then->second != mark.accepted;
      if (then != left.end()) left.erase(then);
      if (moved && !OnlyLookedTo(session.session_id, mark)) return false;
    }
  }
  return left.empty();
}

void SessionTable::PassOver(const std::vector<SessionMarks>& marks) {
  for (const SessionMarks& session : marks) {
    AccumulationLedger::Session* const found = ledger_.Find(session.session_id);
    if (found == nullptr) continue;  // its marks are those of the step, and it is over
    for (const LaneMarks& mark : session.lanes) {
      Lane& lane = found->lanes.at(Index(mark.lane));
      lane.base = std::max(lane.base, std::min(mark.accepted, lane.accepted));
    }
  }
}

bool SessionTable::OnlyLookedTo(const std::string& session_id, const LaneMarks& mark) const {
  const auto session = ledger_.sessions().find(session_id);
  if (session == ledger_.sessions().end()) return false;
  const std::vector<Lane>& lanes = session->second.lanes;
  if (mark.lane < 0 || Index(mark.lane) >= lanes.size()) return false;
  const Lane& lane = lanes[Index(mark.lane)];
  if (mark.accepted < lane.base || mark.accepted > lane.accepted || !lane.only_looked()) return false;
  const auto stream = streams_.find({session_id, mark.lane});
  return stream == streams_.end() || std::none_of(stream->second.queued.begin(), stream->second.queued.end(),
                                                  [](const auto& item) { return item->in_window(); });
}

void SessionTable::BeginWindow() {
  ledger_.BeginWindow();
  for (const auto& [id, session] : deterministic_) {
    if (ledger_.Find(id) != nullptr) session->tiles.BeginWindow();
  }
}

// Deterministic sessions

DeterministicTiles* SessionTable::TilesOf(const std::string& session_id) const {
  const auto it = deterministic_.find(session_id);
  return it == deterministic_.end() ? nullptr : &it->second->tiles;
}

Gradient* SessionTable::GradientOf(const std::string& session_id) const {
  const auto it = deterministic_.find(session_id);
  return it == deterministic_.end() ? nullptr : it->second->memory.gradient.get();
}

std::vector<const DeterministicSession*> SessionTable::InOrder() const {
  std::vector<const DeterministicSession*> all;
  for (const auto& [id, session] : deterministic_) {
    if (!session->tiles.empty()) all.push_back(session.get());
  }
  std::sort(all.begin(), all.end(), [](const auto* a, const auto* b) {
    return std::tie(a->rank, a->number) < std::tie(b->rank, b->number);
  });
  return all;
}

std::vector<Gradient*> SessionTable::GradientsInOrder() const {
  std::vector<Gradient*> gradients;
  for (const DeterministicSession* session : InOrder()) gradients.push_back(session->memory.gradient.get());
  return gradients;
}

std::vector<int32_t> SessionTable::RanksInOrder() const {
  std::vector<int32_t> ranks;
  for (const DeterministicSession* session : InOrder()) ranks.push_back(session->rank);
  return ranks;
}

MemoryPlan SessionTable::Memory() const {
  MemoryPlan memory;
  for (const auto& [id, session] : deterministic_) {
    memory.insert(memory.end(), session->plan.begin(), session->plan.end());
  }
  return memory;
}

absl::Status SessionTable::CheckPlace(const std::string& session_id, const Chunk& chunk) const {
  if (!chunk.window_token.has_value()) {
    return Invalid(
        RejectReason::kOption, kWindowToken,
        "window_token is not set; chunks of a deterministic session must say their place in the window");
  }
  const int64_t place = *chunk.window_token;
  if (place < 0 || place > kMostPlace) {
    return Invalid(RejectReason::kOption, kWindowToken,
                   absl::StrCat("window_token is ", place, "; it must be in [0, ", kMostPlace, "]"));
  }
  for (const auto& [field, rows] : {std::pair("hidden_states_region", &chunk.hidden_states),
                                    std::pair("teacher_hidden_states_region", &chunk.teacher_hidden)}) {
    if (rows->place() != MemoryPlace::kDevice) continue;
    return Invalid(RejectReason::kOption, field,
                   absl::StrCat(field,
                                " is of the device's memory; chunks of a deterministic session must be in "
                                "the host's"));
  }
  switch (TilesOf(session_id)->RoomFor(chunk)) {
    case DeterministicTiles::Room::kFree:
      return absl::OkStatus();
    case DeterministicTiles::Room::kTaken:
      return Invalid(RejectReason::kOption, kWindowToken,
                     absl::StrCat("window_token is ", place, "; tokens of this window have places in [",
                                  place, ", ", place + chunk.tokens, ") already"));
    default:
      return MakeError(
          absl::StatusCode::kResourceExhausted, RejectReason::kOutOfMemory, kWindowToken,
          absl::StrCat("window_token is ", place,
                       "; there is no memory for tokens so far ahead of the first that is missing, and "
                       "no other lane of the session can bring that"));
  }
}

bool SessionTable::MustWaitForRoom(const LaneAttachment& attachment, const Chunk& chunk) {
  const DeterministicTiles* tiles = TilesOf(attachment.session_id);
  if (tiles == nullptr || !HasWeightGradient(chunk.mode)) return false;
  const int64_t place = chunk.window_token.value_or(-1);
  if (place < 0 || place > kMostPlace || chunk.tokens < 1 ||
      chunk.tokens > settings_.limits.max_chunk_tokens) {
    return false;  // it will be rejected
  }
  const DeterministicTiles::Room room = tiles->RoomFor(chunk);
  if (room == DeterministicTiles::Room::kLater) return true;
  if (room != DeterministicTiles::Room::kNone) return false;
  DeterministicSession& session = *deterministic_.at(attachment.session_id);
  const absl::Time now = MonotonicNow();
  session.waiting_since = std::min(session.waiting_since, now);
  if (now - session.waiting_since >= settings_.place_timeout) return false;
  const size_t lanes = ledger_.Find(attachment.session_id)->lanes.size();
  for (size_t lane = 0; lane < lanes; ++lane) {
    if (lane == Index(attachment.lane)) continue;
    const auto other = streams_.find({attachment.session_id, static_cast<int32_t>(lane)});
    if (other == streams_.end() || !other->second.resume) return true;
  }
  return false;
}

int64_t SessionTable::MissingFor(const std::string& session_id, const Chunk& chunk) const {
  return TilesOf(session_id)->MissingFor(chunk);
}

void SessionTable::WidenFor(const std::string& session_id, const Chunk& chunk,
                            std::unique_ptr<MemoryReservation> memory) {
  DeterministicSession& session = *deterministic_.at(session_id);
  session.tiles.WidenFor(chunk);
  session.Keep(std::move(memory));
}

void SessionTable::ClaimPlace(const Chunk& chunk, ChunkItem* item) {
  item->weight_gradient = ChunkItem::WeightGradient::kIntoTiles;
  item->deterministic = deterministic_.at(item->session_id);
  item->kept = DeterministicTiles::BytesOf(chunk);
  item->deterministic->tiles.Claim(chunk);
  item->deterministic->waiting_since = absl::InfiniteFuture();
}

void SessionTable::NoteTeacher(const ChunkItem& item) {
  if (item.teacher == nullptr || item.weight_gradient != ChunkItem::WeightGradient::kIntoTiles) return;
  CountTaught(item.batch_key, 1, item.deterministic.get());
}

void SessionTable::GiveUpPlace(ChunkItem& item, Cut* cut) {
  if (item.deterministic == nullptr || item.weight_gradient != ChunkItem::WeightGradient::kIntoTiles) return;
  item.deterministic->tiles.GiveUp(*item.chunk.window_token, item.chunk.tokens, item.kept);
  CountTaught(item.batch_key, -1, item.deterministic.get());
  item.deterministic = nullptr;
  item.weight_gradient = ChunkItem::WeightGradient::kNone;
  cut->made_room.push_back(item.session_id);
}

void SessionTable::FixSegments(const std::string& session_id, BatchKey* kind) const {
  if (IsDeterministic(session_id)) FixSegments(kind);
}

void SessionTable::FixSegments(BatchKey* kind) const {
  if (!settings_.fixed_segments || kind->lists.use == ChunkLists::Use::kTargets) return;
  kind->segments = kernels::Segments::kFixed;
}

BatchKey SessionTable::TileKind(BatchKey of_chunk, Gradient* gradient) const {
  of_chunk.mode = ComputeMode::kWeightGradientOnly;
  of_chunk.dx_type = {};
  of_chunk.returns = {};
  of_chunk.holds = false;
  of_chunk.gradient = gradient;
  // How long lists are on average is a matter of where chunks are cut.
  of_chunk.lists.size_class = 0;
  FixSegments(&of_chunk);
  return of_chunk;
}

SessionTable::Filled SessionTable::FillPlace(ChunkItem& item) {
  const BatchKey kind = TileKind(item.batch_key, item.deterministic->memory.gradient.get());
  DeterministicTiles& tiles = item.deterministic->tiles;
  tiles.Fill(std::move(item.chunk), kind, item.kept, item.teacher);
  return {ItemsOf(item.deterministic, tiles.TakeComplete()), TakeWaiting(item.session_id)};
}

std::vector<Resume> SessionTable::FinishPiece(ChunkItem& item) {
  CountTaught(item.batch_key, -item.deterministic->tiles.Done(item.piece), item.deterministic.get());
  return TakeWaiting(item.session_id);
}

std::vector<std::shared_ptr<ChunkItem>> SessionTable::TakeUnfinished() {
  std::vector<std::shared_ptr<ChunkItem>> items;
  for (const auto& [id, session] : deterministic_) {
    for (std::shared_ptr<ChunkItem>& item : ItemsOf(session, session->tiles.TakeAll())) {
      items.push_back(std::move(item));
    }
  }
  return items;
}

std::vector<std::shared_ptr<ChunkItem>> SessionTable::TakeTaught() {
  std::vector<std::shared_ptr<ChunkItem>> items;
  for (const auto& [id, session] : deterministic_) {
    for (std::shared_ptr<ChunkItem>& item : ItemsOf(session, session->tiles.TakeTaught(std::nullopt))) {
      items.push_back(std::move(item));
    }
  }
  return items;
}

bool SessionTable::LearnsInTiles(uint64_t teacher) const {
  return std::any_of(deterministic_.begin(), deterministic_.end(),
                     [teacher](const auto& entry) { return entry.second->taught.contains(teacher); });
}

std::vector<std::shared_ptr<ChunkItem>> SessionTable::TakeTaughtBy(uint64_t teacher) {
  // As pieces that wait they come behind those that did so before.
  for (const auto& [id, session] : deterministic_) (void)ItemsOf(session, session->tiles.TakeTaught(teacher));
  std::set<const DeterministicSession*> taught;
  for (const std::shared_ptr<ChunkItem>& item : waiting_pieces_) {
    if (item->batch_key.teacher.head_number == teacher) taught.insert(item->deterministic.get());
  }
  std::vector<std::shared_ptr<ChunkItem>> items;
  std::copy_if(waiting_pieces_.begin(), waiting_pieces_.end(), std::back_inserter(items),
               [&taught](const auto& item) { return taught.contains(item->deterministic.get()); });
  return items;
}

void SessionTable::NotePieceStarted(const ChunkItem& item) {
  const auto it = std::find_if(waiting_pieces_.begin(), waiting_pieces_.end(),
                               [&item](const auto& waiting) { return waiting.get() == &item; });
  if (it != waiting_pieces_.end()) waiting_pieces_.erase(it);
}

absl::Status SessionTable::CheckAllAdded() const {
  for (const auto& [id, session] : deterministic_) {
    if (session->tiles.AllAdded()) continue;
    return absl::InternalError(absl::StrCat("rows of session ", id, " are in the window of head ",
                                            settings_.head, " and did not come into its gradient"));
  }
  return absl::OkStatus();
}

std::vector<std::shared_ptr<ChunkItem>> SessionTable::ItemsOf(
    const std::shared_ptr<DeterministicSession>& session, std::vector<DeterministicTiles::Piece> pieces) {
  std::vector<std::shared_ptr<ChunkItem>> items;
  for (DeterministicTiles::Piece& piece : pieces) {
    auto item = std::make_shared<ChunkItem>();
    item->batch_key = piece.kind;
    item->rows = piece.chunk.tokens;
    item->session = session->number;
    item->session_id = session->id;
    item->weight_gradient = ChunkItem::WeightGradient::kWithBatch;
    item->state = ChunkItem::State::kStarted;
    item->deterministic = session;
    item->accepted = absl::Now();
    item->chunk = std::move(piece.chunk);
    item->teacher = piece.teacher.lock();
    item->piece = std::move(piece);
    waiting_pieces_.push_back(item);
    items.push_back(std::move(item));
  }
  return items;
}

std::vector<std::shared_ptr<DeterministicSession>> SessionTable::TakeForgotten() {
  std::vector<std::shared_ptr<DeterministicSession>> forgotten;
  for (auto it = deterministic_.begin(); it != deterministic_.end();) {
    if (ledger_.Find(it->first) != nullptr) {
      ++it;
      continue;
    }
    forgotten.push_back(std::move(it->second));
    it = deterministic_.erase(it);
  }
  return forgotten;
}

void SessionTable::TakeMemory(std::vector<SessionMemory>* memory) {
  for (const auto& [id, session] : deterministic_) memory->push_back(std::move(session->memory));
}

int64_t SessionTable::memories() const {
  return std::count_if(deterministic_.begin(), deterministic_.end(),
                       [](const auto& entry) { return entry.second->memory.gradient != nullptr; });
}

// Checkpoints

absl::Status SessionTable::Capture(HeadCheckpoint* state) const {
  state->last_session_number = ledger_.last_number();
  for (const auto& [id, session] : ledger_.sessions()) {
    state->sessions.push_back({id, session, std::nullopt});
    if (absl::Status status = CaptureSession(&state->sessions.back()); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status SessionTable::CaptureSession(SessionCheckpoint* entry) const {
  std::vector<Lane>& lanes = entry->session.lanes;
  std::map<int64_t, int64_t> claimed;
  for (size_t i = 0; i < lanes.size(); ++i) {
    AccumulationLedger::Withdraw(lanes[i]);
    if (lanes[i].applied != lanes[i].started) {
      return absl::InternalError(
          absl::StrCat("session ", entry->id, " has chunks under way between two batches"));
    }
    const auto stream = streams_.find({entry->id, static_cast<int32_t>(i)});
    if (stream == streams_.end()) continue;
    for (const auto& item : stream->second.queued) {
      if (item->weight_gradient == ChunkItem::WeightGradient::kIntoTiles) {
        claimed.emplace(*item->chunk.window_token, item->chunk.tokens);
      }
    }
  }
  const DeterministicTiles* const tiles = TilesOf(entry->id);
  if (tiles == nullptr) return absl::OkStatus();
  entry->tiles = tiles->content(claimed);
  const std::vector<Chunk>& kept = entry->tiles->kept;
  if (std::none_of(kept.begin(), kept.end(), [](const Chunk& chunk) { return chunk.options.distillation; })) {
    return absl::OkStatus();
  }
  return absl::InternalError(
      absl::StrCat("tiles of session ", entry->id, " hold soft targets, whose teacher is another head"));
}

absl::Status SessionTable::CheckTiles(const HeadCheckpoint& state, int64_t* needed) const {
  const DeterministicTiles tiles(settings_.limits, settings_.hidden_size);
  *needed = 0;
  for (const SessionCheckpoint& session : state.sessions) {
    if (!session.tiles.has_value()) continue;
    ++*needed;
    if (absl::Status right = tiles.CheckContent(*session.tiles); !right.ok()) return right;
  }
  return absl::OkStatus();
}

std::shared_ptr<DeterministicSession> SessionTable::Restore(const SessionCheckpoint& entry,
                                                            SessionMemory memory,
                                                            std::unique_ptr<MemoryReservation> more,
                                                            const HeadConfig& config) const {
  Gradient* const gradient = memory.gradient.get();
  const MemoryPlan plan = memory.reservation->plan();
  auto session = std::make_shared<DeterministicSession>(
      DeterministicSession{std::move(memory),
                           {},
                           plan,
                           entry.id,
                           entry.session.rank,
                           entry.session.number,
                           DeterministicTiles(settings_.limits, settings_.hidden_size)});
  if (more != nullptr) session->Keep(std::move(more));
  session->tiles.Restore(*entry.tiles, [this, &config, gradient](const Chunk& chunk) {
    return TileKind(KindOf(chunk, config), gradient);
  });
  return session;
}

void SessionTable::Install(const HeadCheckpoint& state, DeterministicSessions deterministic, Cut* cut) {
  DetachAll(cut);
  std::map<std::string, AccumulationLedger::Session, std::less<>> sessions;
  for (const SessionCheckpoint& entry : state.sessions) {
    sessions.emplace(entry.id, entry.session).first->second.last_active = MonotonicNow();
  }
  ledger_.Replace(std::move(sessions), state.last_session_number,
                  state.window.state == WindowState::kSealed ? AccumulationLedger::WindowPhase::kSealed
                                                             : AccumulationLedger::WindowPhase::kOpen);
  deterministic_ = std::move(deterministic);
}

}  // namespace lossd::engine
