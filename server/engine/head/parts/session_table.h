// The sessions of a head: which chunks of which lane it has taken (the ledger), the streams that hold the
// lanes with what they have queued, and the tiles of deterministic sessions.
//
// Thread-compatible: guarded by Head::mutex_. What must not happen under that lock (calling a listener,
// resuming a stream, freeing a gradient) is returned to the caller.
#ifndef LOSSD_SERVER_ENGINE_HEAD_PARTS_SESSION_TABLE_H_
#define LOSSD_SERVER_ENGINE_HEAD_PARTS_SESSION_TABLE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/chunk/chunk.h"
#include "server/engine/chunk/head_config.h"
#include "server/engine/chunk/session_marks.h"
#include "server/engine/common/counters.h"
#include "server/engine/head/parts/accumulation_ledger.h"
#include "server/engine/head/parts/chunk_item.h"
#include "server/engine/head/parts/deterministic_session.h"
#include "server/engine/head/parts/deterministic_tiles.h"
#include "server/engine/head/parts/head_info.h"
#include "server/engine/head/parts/head_state.h"
#include "server/engine/head/parts/lane.h"

namespace lossd::engine {

// Whether a session's dW is to depend on its tokens alone. All sessions of a frozen head are so.
enum class Deterministic { kNo, kYes };

// Called without any lock: a stream whose chunk waits submits it again.
using Resume = std::function<void()>;

class SessionTable {
 public:
  using Lane = AccumulationLedger::Lane;
  using DeterministicSessions = std::map<std::string, std::shared_ptr<DeterministicSession>>;

  struct Settings {
    std::string head;  // its name, for messages
    bool frozen = false;
    int64_t hidden_size = 0;
    ChunkLimits limits;
    // How long chunks of a deterministic session wait for others to bring what is missing before them.
    absl::Duration place_timeout;
    bool fixed_segments = false;  // whether the device has them
  };
  // The counters outlive it.
  SessionTable(Settings settings, Counters* counters, HeadCounters* head_counters)
      : settings_(std::move(settings)), counters_(*counters), head_counters_(*head_counters) {}

  // What the caller must still do after streams were cut off.
  struct Cut {
    std::vector<std::shared_ptr<QueuedChunk>> withdrawn;   // to be taken out of the device's queue
    std::vector<std::shared_ptr<LaneListener>> listeners;  // to be told why, without the lock
    std::vector<std::string> made_room;                    // sessions whose waiting chunks may have room now
  };

  // Sessions

  struct Opened {
    std::string session_id;
    std::vector<LaneMarks> lanes;
  };
  // See Head::OpenSession. `memory` is moved from only if the session is new.
  absl::StatusOr<Opened> Open(const std::string& client_key, int32_t rank, int32_t lanes,
                              const std::string& new_session_id, Deterministic deterministic,
                              SessionMemory& memory);
  // See Head::NeedsGradient.
  absl::StatusOr<bool> NeedsGradient(const std::string& client_key, int32_t rank);
  // See Head::CloseSession.
  absl::Status Close(const std::string& session_id, std::optional<absl::Time> idle_since, Cut* cut);
  std::vector<std::string> Idle(absl::Time before) const;
  std::map<std::string, int32_t> OpenSessions() const;  // their lanes, by id
  bool HasOpen(const std::string& client_key) const;
  int64_t open() const { return ledger_.open_sessions(); }
  std::vector<SessionSnapshot> Snapshots(absl::Time now) const;

  // Streams

  // NOT_FOUND if the session is not open, INVALID_ARGUMENT if it has no such lane.
  absl::Status CheckLane(const std::string& session_id, int32_t lane);
  // The lane was checked. An older stream is cut off, and its listener returned in `cut`.
  LaneAttachment Attach(const std::string& session_id, int32_t lane, std::shared_ptr<LaneListener> listener,
                        Cut* cut);
  // Nothing happens if another stream took the lane.
  void Detach(const LaneAttachment& attachment, Cut* cut);
  void DetachAll(Cut* cut);

  // Chunks

  // ABORTED if the stream no longer holds its lane.
  absl::StatusOr<const Lane*> Held(const LaneAttachment& attachment);
  // Where a client that lost its place goes on.
  std::vector<LaneReplay> Replay(const std::string& session_id) const;
  // A new chunk is accepted, or a repeat: it goes to the end of its lane's queue.
  void Enqueue(const std::shared_ptr<ChunkItem>& item);
  // A stream's chunks are started and answered in order because one rank holds all of them. INTERNAL if
  // another one holds this chunk: whoever relays it has made a mistake.
  absl::Status CheckHolder(const std::string& session_id, int32_t lane, int32_t holder);
  // It leaves the front of the queue for the device.
  void Start(ChunkItem& item);
  // A started chunk that is numbered goes on, rejected or not: there is no way back.
  void NoteStarted(const ChunkItem& item);
  // Not ok for a repeat whose first was rejected: it could be computed now, but is in no window.
  absl::Status EarlierRejection(const std::string& session_id, int32_t lane, const Chunk& chunk) const;
  const Lane& LaneOf(const std::string& session_id, int32_t lane) const;
  // A started chunk is applied. Set if the lane's mark moved: to be told to the stream that holds it now.
  struct Applied {
    uint64_t applied = 0;
    std::shared_ptr<LaneListener> listener;
  };
  std::optional<Applied> Apply(const ChunkItem& item);

  // The chunk at the front of this stream waits.
  void Wait(const LaneAttachment& attachment, Resume resume);
  // False if the stream waits no more: it was resumed, or has lost its lane.
  bool StopWaiting(const LaneAttachment& attachment);
  // Takes out those who wait, of all sessions or one.
  std::vector<Resume> TakeWaiting();
  std::vector<Resume> TakeWaiting(const std::string& session_id);
  // Those of sessions that wait for a place for longer than they may.
  std::vector<Resume> TakeStalled(absl::Time now);

  // The window

  // See AccumulationLedger.
  absl::Status Match(std::span<const SessionMarks> named) const { return ledger_.Match(named); }
  std::vector<SessionMarks> WindowMarks() const { return ledger_.WindowMarks(); }
  bool InWindow(absl::string_view session_id) const { return ledger_.InWindow(session_id); }
  bool WindowEmpty() const { return ledger_.WindowEmpty(); }
  bool OnlyLooked() const { return ledger_.OnlyLooked(); }
  uint64_t last_number() const { return ledger_.last_number(); }  // that a session was given
  // Whether these two name the same, but for lanes that have added nothing to the window that began with
  // `begun`: their chunks are of losses alone, or were rejected. Both Canonical.
  bool OnlyLookedSince(const std::vector<SessionMarks>& begun, const std::vector<SessionMarks>& now) const;
  // What is up to these marks, for which that was so, is no part of the window.
  void PassOver(const std::vector<SessionMarks>& marks);
  void Seal() { ledger_.Seal(); }
  void Reopen() { ledger_.Reopen(); }
  void BeginWindow();

  // Deterministic sessions

  bool IsDeterministic(const std::string& session_id) const { return deterministic_.contains(session_id); }
  int64_t deterministic_count() const { return static_cast<int64_t>(deterministic_.size()); }
  // Gradients of sessions with tokens in the window, by rank: the order of their sum. A sealed window keeps
  // the list as it is.
  std::vector<Gradient*> GradientsInOrder() const;
  std::vector<int32_t> RanksInOrder() const;  // of the same sessions
  // The memory of their gradients and tiles.
  MemoryPlan Memory() const;
  // Not ok if a chunk of such a session has no place in the window.
  absl::Status CheckPlace(const std::string& session_id, const Chunk& chunk) const;
  // Whether the chunk has to wait until others have brought what is missing before it.
  bool MustWaitForRoom(const LaneAttachment& attachment, const Chunk& chunk);
  // What a chunk with a teacher or lists needs in tiles beyond what the session has, and that it has it now.
  int64_t MissingFor(const std::string& session_id, const Chunk& chunk) const;
  void WidenFor(const std::string& session_id, const Chunk& chunk, std::unique_ptr<MemoryReservation> memory);
  // Whether something of the session is under way that makes room in its tiles.
  bool MakesRoom(const std::string& session_id) const { return TilesOf(session_id)->MakesRoom(); }
  // The chunk has its place. Its item says so from now on.
  void ClaimPlace(const Chunk& chunk, ChunkItem* item);
  // The chunk whose item this is, complete by now, may have a teacher.
  void NoteTeacher(const ChunkItem& item);
  // It does not come after all. Ok for any item.
  void GiveUpPlace(ChunkItem& item, Cut* cut);
  // It was answered: its rows go into tiles. The pieces that this completes are to follow it to the device,
  // and lanes that wait for room look again. They leave the table in the same moment as the room is made: a
  // lane that still waits has seen that there is none, which MustWaitForRoom relies on.
  struct Filled {
    std::vector<std::shared_ptr<ChunkItem>> pieces;
    std::vector<Resume> resumes;
  };
  Filled FillPlace(ChunkItem& item);
  // A piece is in dW: likewise.
  std::vector<Resume> FinishPiece(ChunkItem& item);
  // Takes the rows of tiles that are not complete, before the window ends or new weights come.
  std::vector<std::shared_ptr<ChunkItem>> TakeUnfinished();
  // The same for tiles that hold rows with soft targets, of whatever head.
  std::vector<std::shared_ptr<ChunkItem>> TakeTaught();
  // Whether chunks in tiles, or on their way there or from there to dW, have this teacher.
  bool LearnsInTiles(uint64_t teacher) const;
  // What there is to be computed with this teacher: pieces that wait for the device, and tiles with such
  // rows, which are closed. All other pieces that wait of the same sessions are among them, as theirs is the
  // order in which they go to dW.
  std::vector<std::shared_ptr<ChunkItem>> TakeTaughtBy(uint64_t teacher);
  // A piece no longer waits for the device.
  void NotePieceStarted(const ChunkItem& item);
  // INTERNAL if rows of a tile, or a piece of one, are not in dW yet: a window that ended now would lack
  // them, and they might come into the next one.
  absl::Status CheckAllAdded() const;
  // Sessions that the ledger forgot, whose gradients are to be freed on the device thread.
  std::vector<std::shared_ptr<DeterministicSession>> TakeForgotten();
  // How many have memory: all of them, until TakeMemory.
  int64_t memories() const;
  // All of them, at the end of the head.
  DeterministicSessions TakeDeterministic() { return std::exchange(deterministic_, {}); }
  // Their gradients and reservations, for a restore to use.
  void TakeMemory(std::vector<SessionMemory>* memory);
  // Where the device can, sums for chunks of such a session are made over fixed segments, whatever the head
  // says. Leaves those of other sessions as they are, and soft targets on lists, which know no segments.
  void FixSegments(const std::string& session_id, BatchKey* kind) const;
  // The product that rows of such a chunk are part of.
  BatchKey TileKind(BatchKey of_chunk, Gradient* gradient) const;

  // Checkpoints

  // Queued chunks are left out: their clients send them again. INTERNAL if chunks are under way.
  absl::Status Capture(HeadCheckpoint* state) const;
  // The sessions become those of `state`; streams are cut off. `deterministic`: their tiles and gradients.
  void Install(const HeadCheckpoint& state, DeterministicSessions deterministic, Cut* cut);
  // The tiles of a deterministic session of a checkpoint, with memory for it, and `more` for what
  // DeterministicTiles::MissingFor says, if that is something.
  std::shared_ptr<DeterministicSession> Restore(const SessionCheckpoint& entry, SessionMemory memory,
                                                std::unique_ptr<MemoryReservation> more,
                                                const HeadConfig& config) const;
  // FAILED_PRECONDITION if the tiles of `state` have another size here. `needed`: its deterministic sessions.
  absl::Status CheckTiles(const HeadCheckpoint& state, int64_t* needed) const;
  Gradient* GradientOf(const std::string& session_id) const;  // of a deterministic one; else null

 private:
  // The state of a lane beside its marks.
  struct Stream {
    uint64_t epoch = 0;
    std::shared_ptr<LaneListener> listener;
    std::deque<std::shared_ptr<ChunkItem>> queued;  // not started, in order
    std::optional<int32_t> holder;                  // of its chunks; none has come yet
    Resume resume;                                  // of a chunk that waits
  };
  using Key = std::pair<std::string, int32_t>;

  absl::Status CheckRank(const std::string& client_key, int32_t rank) const;
  std::vector<const DeterministicSession*> InOrder() const;
  void FixSegments(BatchKey* kind) const;
  bool IsIdle(const std::string& session_id, const AccumulationLedger::Session& session,
              absl::Time before) const;
  // Withdraws what the stream has queued, and drops its listener.
  void CutOff(const Key& key, Stream& stream, Cut* cut);
  bool OnlyLookedTo(const std::string& session_id, const LaneMarks& mark) const;
  DeterministicTiles* TilesOf(const std::string& session_id) const;
  Lane& MutableLane(const std::string& session_id, int32_t lane);
  std::vector<std::shared_ptr<ChunkItem>> ItemsOf(const std::shared_ptr<DeterministicSession>& session,
                                                  std::vector<DeterministicTiles::Piece> pieces);
  absl::Status CaptureSession(SessionCheckpoint* entry) const;

  const Settings settings_;
  Counters& counters_;
  HeadCounters& head_counters_;
  AccumulationLedger ledger_;
  std::map<Key, Stream> streams_;  // those of a session are neighbours
  DeterministicSessions deterministic_;
  std::deque<std::shared_ptr<ChunkItem>> waiting_pieces_;  // for the device, in order
  uint64_t last_epoch_ = 0;                                // of any lane
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_PARTS_SESSION_TABLE_H_
