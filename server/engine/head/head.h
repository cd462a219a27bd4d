// One named lm_head: where a chunk is taken exactly once.
//
// Head coordinates parts that each own one state. Those under mutex_ decide together whether a chunk, a call
// or a stream is taken: Lifecycle, SessionTable, GradientWindow, WeightStore, LogitsQueue. Those of the
// device thread compute: GradientSet, BatchRunner, TeacherLease. The mutex is never held during computation,
// nor while a listener or a callback is called.
#ifndef LOSSD_SERVER_ENGINE_HEAD_HEAD_H_
#define LOSSD_SERVER_ENGINE_HEAD_HEAD_H_

#include <atomic>
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

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/engine/chunk/chunk.h"
#include "server/engine/chunk/head_config.h"
#include "server/engine/common/counters.h"
#include "server/engine/common/mutex.h"
#include "server/engine/common/replica_place.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/device/replica_communicators.h"
#include "server/engine/head/head_environment.h"
#include "server/engine/head/parts/batch_runner.h"
#include "server/engine/head/parts/gradient_set.h"
#include "server/engine/head/parts/gradient_window.h"
#include "server/engine/head/parts/head_info.h"
#include "server/engine/head/parts/head_state.h"
#include "server/engine/head/parts/head_state_io.h"
#include "server/engine/head/parts/lane.h"
#include "server/engine/head/parts/leases.h"
#include "server/engine/head/parts/lifecycle.h"
#include "server/engine/head/parts/logits_call.h"
#include "server/engine/head/parts/logits_queue.h"
#include "server/engine/head/parts/session_table.h"
#include "server/engine/head/parts/staged_write.h"
#include "server/engine/head/parts/teacher_lease.h"
#include "server/engine/head/parts/weight_store.h"
#include "server/engine/head/parts/window_end.h"
#include "server/engine/head/replica/checkpoint_part.h"
#include "server/engine/head/replica/joint_rows.h"
#include "server/engine/head/replica/part_rows.h"
#include "server/engine/head/replica/replica_part.h"
#include "server/engine/head/step_saver.h"
#include "server/engine/memory/memory_budget.h"
#include "server/engine/regions/region_table.h"
#include "server/engine/schedule/batch_queue.h"
#include "server/engine/schedule/batch_scheduler.h"

namespace lossd::engine {

class Head : public BatchSource, public BatchOwner, public std::enable_shared_from_this<Head> {
 public:
  Head(HeadConfig config, HeadEnvironment environment, std::unique_ptr<HeadBackend> backend,
       std::unique_ptr<MemoryReservation> reservation);
  ~Head() override;

  const HeadConfig& config() const { return config_; }
  // Information about the head (head_info.cc).
  HeadInfo Info() const;
  HeadSnapshot Snapshot() const;
  std::vector<SessionSnapshot> Sessions() const;
  const HeadCounters& counters() const { return counters_; }

  // Sessions and streams (head_sessions.cc)

  struct SessionInfo {
    std::string session_id;
    uint64_t generation = 0;
    std::vector<LaneMarks> lanes;
    uint64_t restores = 0;  // of the head, so far
    // When the checkpoint of the last restore was saved, if that is known.
    std::optional<uint64_t> restored_from = {};
    bool in_window = false;  // AccumulationLedger::InWindow
  };
  // The open session of this client, or a new one under `new_session_id`. INVALID_ARGUMENT if it is open with
  // another number of lanes, or deterministic only here or there.
  absl::StatusOr<SessionInfo> OpenSession(const std::string& client_key, int32_t rank, int32_t lanes,
                                          const std::string& new_session_id,
                                          Deterministic deterministic = Deterministic::kNo,
                                          SessionMemory memory = {});
  // Whether a deterministic session of this client would be a new one, for which OpenSession wants its
  // memory. INVALID_ARGUMENT if the rank is another's.
  absl::StatusOr<bool> NeedsGradient(const std::string& client_key, int32_t rank);
  // Ends the session's streams. NOT_FOUND if it is not open. With `idle_since`, FAILED_PRECONDITION if the
  // session has a stream or was used after that.
  absl::Status CloseSession(const std::string& session_id,
                            std::optional<absl::Time> idle_since = std::nullopt);
  // Sessions without a stream and without a call since `before`.
  std::vector<std::string> IdleSessions(absl::Time before) const;

  // Attaches a stream to a lane; an older one is fenced and what it had queued is withdrawn.
  absl::StatusOr<LaneAttachment> AttachLane(const std::string& session_id, int32_t lane,
                                            std::shared_ptr<LaneListener> listener);
  // The stream is gone: what it had queued and was not started is withdrawn. Ignored if another stream took
  // the lane.
  void DetachLane(const LaneAttachment& lane);
  // False of a session that is not there.
  bool IsDeterministic(const std::string& session_id) const;

  // Lets chunks of the session be looked at again that wait.
  void ResumeSession(const std::string& session_id) ABSL_LOCKS_EXCLUDED(mutex_);
  // Lets chunks be looked at again that have waited for a place longer than they may. To be called now and
  // then.
  void ResumeStalled();

  // Chunks (head_chunks.cc; on the device: head_batches.cc), and the end of the head (head.cc)

  enum class Submission { kTaken, kWait };
  // Takes the chunk (moved from), to be answered through the lane's listener, even if its content is refused;
  // or asks the caller to wait: `resume` is called once the window has changed or has room, and the chunk,
  // untouched, must then be submitted again. An error is one of position and ends the stream:
  // FAILED_PRECONDITION for a gap, ABORTED for a wrong generation or a fenced stream. One chunk of a lane at
  // a time.
  absl::StatusOr<Submission> Submit(const LaneAttachment& lane, Chunk& chunk, std::function<void()> resume);

  // Takes no more streams and chunks (they get `status`); what was accepted goes on.
  void BeginDrain(const absl::Status& status);
  // From now on the head takes nothing and answers `status`. FAILED_PRECONDITION, and nothing changes, if the
  // window holds gradients that are not to be discarded.
  enum class DiscardGradient { kYes, kNo };
  absl::Status MarkDeleted(const absl::Status& status, DiscardGradient discard);
  // Whether that would be refused now.
  absl::Status CheckDiscard(DiscardGradient discard) const;
  // The same, and if it would not be, it is not later either: new chunks wait until MarkDeleted, which
  // refuses them, or CancelDeletion, after which they go on. UNAVAILABLE while a window ends, or weights are
  // published; from then on neither begins.
  absl::Status BeginDeletion(DiscardGradient discard);
  void CancelDeletion();
  // After MarkDeleted: ends every stream and gives the memory back, whoever still holds the head (a client
  // that never reads may do so for long), but not before batches of others that it teaches are done.
  // `released` is called then, on the device thread.
  void Shutdown(std::function<void()> released);

  // Ending the window: steps (head_window.cc) and flushes (head_flush.cc)

  // `gradient_scale` multiplies what is read and what the summary is of. FAILED_PRECONDITION if the head is
  // frozen.
  void BeginFlush(uint64_t generation, std::vector<SessionMarks> marks, float gradient_scale,
                  FlushCallback done);
  // Copies rows of the sealed window into `out` (rows * H * SizeOf(type) bytes and fp32 [rows], which must
  // live until `done`).
  void ReadGradient(const std::string& flush_id, int64_t first_row, int64_t rows, kernels::DataType type,
                    RowsOut out, std::function<void(absl::Status)> done);
  // Whether this flush can be read now; ABORTED if it is over.
  absl::Status CheckFlush(const std::string& flush_id) const;
  // Tells the new generation: at once, but of a head over replicas.
  void CommitFlush(const std::string& flush_id, const FateCallback& done);
  // Likewise the generation, unchanged. What a second gradient has taken since is added to the window.
  void AbortFlush(const std::string& flush_id, const FateCallback& done);

  // With `marks`, as of BeginFlush: once they are applied, and of exactly that. Without: of what is there
  // when its turn comes; tiles of deterministic sessions that are not complete are left alone, and are not in
  // it (head_stats.cc).
  using WindowStats = engine::WindowStats;
  void ReadStats(uint64_t generation, std::vector<SessionMarks> marks, double gradient_scale,
                 const StatsCallback& done);
  // Waits until `marks` are applied, updates the weights, publishes them as a new version and ends the
  // window; of a window without a token it only ends it. The last step's arguments again answer the same,
  // also while it is under way and with marks that losses alone have moved since; others for its generation
  // are FAILED_PRECONDITION, and any other generation than the window's is ABORTED.
  void ApplyStep(uint64_t generation, std::vector<SessionMarks> marks, const StepRequest& request,
                 StepCallback done);

  // One replica's part in the end of a window, each call when all replicas have done the one before
  // (head_replica.cc). `done` is called by the device thread, or at once.

  // Describes the window once its sessions match what `end` says of them, and are done. Until ReopenPart
  // or PublishPart the window then takes nothing. At the coordinator the window waits for this already. Of
  // the last step, which is asked for again: its tokens alone, if it was the same to the sessions here, and
  // nothing is sealed.
  void SealPart(const WindowEnd& end, const std::function<void(absl::StatusOr<SealedWindow>)>& done);
  // Adds up the gradients of all replicas. UNAVAILABLE if one was lost.
  void SumPart(JointSum sum, std::shared_ptr<const ReplicaCommunicators> replicas,
               std::function<void(absl::StatusOr<GradientStats>)> done);
  // Steps by the sum, or blends, and gathers the weights. Readers of the weights wait until PublishPart.
  // UNAVAILABLE if one was lost.
  void StepPart(const JointStep& step, std::shared_ptr<const ReplicaCommunicators> replicas,
                std::function<void(absl::Status)> done);
  // What StepPart has made is the new version, and the next window begins. Answers who waits here.
  void PublishPart(const JointStep& step);
  // The window is open again, with everything that it held. Tells `why` to who waits here. Nothing if
  // `ending` is set, and what ends the window is another one.
  void ReopenPart(const absl::Status& why, std::optional<uint64_t> ending = std::nullopt);
  // At the coordinator, of what could not be begun: the window is open again, or a flush holds it as before.
  void GiveUpEnding(const absl::Status& why, const WindowEnd& end);
  EndingPhase phase() const;
  // Whether this is what ends the window (WindowEnd::ending), and somebody still waits for this fate of a
  // flush.
  bool IsEnding(const WindowEnd& end) const;
  // At the coordinator, when all have the sums of a flush: what it is to be answered with
  // (head_joint_flush.cc).
  FlushInfo DescribeFlush(uint64_t window_tokens, const GradientStats& stats) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The flush holds the window, and who waits for it here is answered.
  absl::Status HoldPart(const FlushInfo& flush);
  // The flush ends, and who waits for that here is answered. ABORTED if it does not hold the window.
  absl::Status EndFlushPart(const std::string& flush_id, FlushFate fate);
  // At the coordinator, when the others' windows are open again: answers who looks (head_stats.cc).
  void EndLook(const WindowStats& stats, uint64_t ending);
  // The window stays as it is. The same.
  void TellWaiting(const absl::Status& why, std::optional<uint64_t> ending = std::nullopt);

  // When all replicas have met, and nothing that they exchange is under way.
  MetPart MeetPart() const;
  // They are alike: an end of the window, a write or a restore that has changed nothing comes to nothing.
  // Tells `why` to who waits here.
  void GoOnPart(const absl::Status& why);
  // They are not: nothing counts any more, and no window ends until a restore (BeginRestorePart) or the head
  // is dropped.
  void AbandonPart(const absl::Status& why);

  // Rows that this replica holds, for another one, or from it (head_rows.cc): of a tensor of its state, or of
  // the sum. At most RowsOfPiece at once; `done` is called by the device thread. NOT_FOUND of no such tensor,
  // INVALID_ARGUMENT of rows that the head has not, INTERNAL of some that are not held here, or without a
  // sum. What is written counts as HeadBackend says, of WriteState.
  void ReadPartRows(const PartRows& rows, std::function<void(absl::StatusOr<std::string>)> done);
  void WritePartRows(const PartRows& rows, std::string bytes, std::function<void(absl::Status)> done);

  // Weights (head_weights.cc)

  using Replace = engine::Replace;
  absl::StatusOr<std::string> BeginWrite(const std::string& write_key, Replace replace,
                                         const std::string& new_write_id);
  absl::StatusOr<std::shared_ptr<StagedWrite>> FindWrite(const std::string& write_id) const;
  // Gives up a write that is not being published; its buffer goes. Nothing if there is no such write.
  void DropWrite(const std::string& write_id);
  // FAILED_PRECONDITION while rows are missing, NOT_FOUND of no such write, ABORTED if a restore undid it.
  using CommitCallback = engine::CommitCallback;
  void CommitWrite(const std::string& write_id, CommitCallback done);
  // A write of a head over replicas is published by all of them or none. It is prepared first: it then waits
  // to be published, and no window ends meanwhile. At the coordinator CommitWrite does that. Errors as
  // CommitWrite's, and UNAVAILABLE while a window is being ended.
  absl::Status PrepareWrite(const std::string& write_id);
  // Publishes what is prepared; of nothing, `done` gets the version that there is.
  void PublishPrepared(CommitCallback done);
  // What is prepared is not published: its rows stay. Tells `why` to who waits here.
  void DropPrepared(const absl::Status& why);
  // Tells `why` to who waits for a write that stays prepared.
  void TellCommitting(const absl::Status& why);
  // Calls `done` when nothing is being published that PublishPrepared was called for.
  void AwaitPublished(std::function<void()> done);
  // Copies rows into `out`, which must live until `done`, and reports the version they are of.
  void ReadWeights(int64_t first_row, int64_t rows, kernels::DataType type, RowsOut out,
                   std::function<void(absl::StatusOr<uint64_t>)> done);
  uint64_t weight_version() const;

  // Copies of heads, all of one device (head_copies.cc)

  // Whether it can be copied now: FAILED_PRECONDITION without weights, or if `weight_version` is not 0 and
  // not theirs; UNAVAILABLE while the head is changed or put back over replicas.
  absl::Status CheckCopied(uint64_t weight_version) const;
  // For a head that nobody else knows yet, of a configuration that CopyConfig has made: it becomes what
  // `source` is between two of its batches, weights, their version and, where it has an optimizer, moments
  // and steps. Its window is empty. `done` gets the version, which is that of a write of this id from now on;
  // errors as of CheckCopied, and RESOURCE_EXHAUSTED if there is no memory.
  void CopyFrom(std::shared_ptr<Head> source, uint64_t weight_version, std::string copy_id,
                CommitCallback done);
  // The version that the last write has made, if it has this id.
  std::optional<uint64_t> VersionOfWrite(const std::string& write_id) const;
  // The weights become decay * weights + (1 - decay) * the source's (kernels/blend.h), as a new version,
  // which `done` gets. That is a write of this id: the same call again answers the same, until another write
  // comes. INVALID_ARGUMENT if the heads do not fit each other, FAILED_PRECONDITION without weights, if the
  // versions are others than those that are named, while a write is under way, or if the window has gradients
  // of the present weights. Over replicas the window is held until all replicas have blended.
  void Blend(std::shared_ptr<Head> source, const BlendRequest& request, const CommitCallback& done);

  absl::StatusOr<uint64_t> SourceVersion(const BlendRequest& request) const;  // over replicas

  // Chunks of other heads that this one is to teach cannot be taken now, since its weights are being changed
  // at all replicas, or put back: resumes this student, perhaps before this returns, when they can be tried
  // again. False: they can.
  bool AwaitLessons(const Student& student);

  // Logits (head_logits.cc)

  // Computes logits with the weights there are when their turn comes; `done` is called on the device thread,
  // or at once. RESOURCE_EXHAUSTED while too many calls wait.
  void Logits(LogitsRequest request, LogitsCallback done);

  // Checkpoints (head_checkpoint.cc)

  // Only a server that goes away saves a window that a flush holds.
  enum class SaveAs { kTagged, kDrained };
  // Writes every file but the manifest, of one moment between two batches; `done` gets what that has to say.
  // `named`: marks that the window is to have, as ApplyStep takes them; FAILED_PRECONDITION or ABORTED if it
  // has others. None: whatever it has.
  using SavedCallback = std::function<void(absl::StatusOr<HeadCheckpoint>)>;
  void Save(SaveAs as, std::vector<SessionMarks> named, StateSink* sink, SavedCallback done);
  // kDrained: nothing happened since the save, so sessions go on. kTagged: everything since the save is
  // undone; streams end, and the weights get a version that no weights had before.
  enum class RestoreAs { kTagged, kDrained };
  // Puts the head back to the checkpoint. The error says so if nothing has changed. `numbers`: for kTagged,
  // those of CheckpointStore::NextRestore. `source` has this head's configuration. `memory`: for
  // deterministic sessions beyond those that the head has now.
  void Restore(RestoreAs as, const RestoreNumbers& numbers, std::shared_ptr<const StateSource> source,
               std::vector<SessionMemory> memory, std::function<void(absl::StatusOr<FileKeys>)> done);
  // Null if no step has the head saved.
  StepSaver* step_saver() const { return environment_.step_saver.get(); }
  // The optimizer's steps in the newest checkpoint that there is of this head's past; 0 without one.
  int64_t checkpoint_steps() const { return checkpoint_steps_; }
  void NoteCheckpoint(int64_t optimizer_steps) { checkpoint_steps_ = optimizer_steps; }
  // How often the head was put back to a checkpoint; going on after a drain does not count.
  uint64_t restores() const;
  // Ids and numbers of lanes.
  std::map<std::string, int32_t> OpenSessions() const;
  bool HasSession(const std::string& client_key) const;  // open
  int64_t deterministic_sessions() const;

  // Parking (head_parking.cc)

  // Room in the host's memory for files of these sizes.
  using ParkingPlace = std::function<absl::StatusOr<StateSink*>(const FileSizes& files)>;
  // Writes everything that a drain would save to where `place` says, and ends the head, which answers
  // `parked` from then on; a head that is put back to it (kDrained) goes on as if nothing had happened. An
  // error means that it goes on by itself, unless that of `place`'s sink or of the device, after which the
  // server ends: FAILED_PRECONDITION while it is in use (open sessions, a write
  // under way, a window that a flush holds or that has gradients of deterministic sessions), UNAVAILABLE
  // while a call ends its window, or what `place` says.
  void Park(ParkingPlace place, const absl::Status& parked, SavedCallback done);

  // One replica's part in a checkpoint of all of them: SaveTogether (head_save_part.cc) and RestoreTogether
  // (head_restore_part.cc) of engine/replicas. `done` is called by the device thread, or at once.

  // At the coordinator: calls that end the window wait from here to EndSave, and no weights are published.
  struct BegunSave {
    WindowPlace place;
    StateKeys keys;  // of its own files
  };
  // FAILED_PRECONDITION if a flush holds the window, UNAVAILABLE if a call is about to end it.
  absl::StatusOr<BegunSave> BeginSave();
  void EndSave();
  // What this replica is between two of its batches, of which no other starts until SumCapturedPart or
  // ReleaseCaptured. Its `gradients` say whether it has one. FAILED_PRECONDITION if it is at another place.
  // `named` are those of all replicas, as Save's.
  void CapturePart(const WindowPlace& place, std::vector<SessionMarks> named, SavedCallback done);
  // Adds up the gradients of that moment: SumSlices.
  void SumCapturedPart(std::shared_ptr<const ReplicaCommunicators> replicas,
                       std::function<void(absl::Status)> done);
  void ReleaseCaptured();

  // From now on chunks wait, and no window ends, until InstallRestoredPart or CancelRestorePart. `done` gets
  // OK when the device has done all accepted chunks, and starts no more of this head. UNAVAILABLE if a call
  // ends the window.
  void BeginRestorePart(std::function<void(absl::StatusOr<RestoringPart>)> done);
  // Why this head cannot be put back to that, all of which is the coordinator's to read.
  absl::Status CheckRestorable(const HeadCheckpoint& state) const;
  // Everything is written (WritePartRows). `source`: where this replica's gradient is read from.
  void FinishRestorePart(const RestoredPart& part, std::shared_ptr<const StateSource> source,
                         std::shared_ptr<const ReplicaCommunicators> replicas,
                         std::function<void(absl::Status)> done);
  // Makes the restored state current, once all replicas have finished. Answers the keys of its tensors.
  // Does nothing, and answers none, if this replica has not finished or the head is that already.
  FileKeys InstallRestoredPart();
  // Nothing was overwritten; nothing happens if something was.
  void CancelRestorePart();
  // The replicas have parted: what was asked for until now comes to nothing.
  void LeaveEpoch();
  // HeadBackend's rows of each slice, by slice. None once the head has ended.
  std::vector<std::vector<kernels::RowSpan>> SliceRows() const;

 private:
  using Lane = AccumulationLedger::Lane;
  enum class Admission { kTake, kRepeat, kWait };
  using Resumes = std::vector<Resume>;

  // Keys under which the head would save these tensors now.
  FileKeys KeysOf(const std::vector<StateTensor>& tensors) const;

  bool frozen() const { return config_.weight_gradients == WeightGradients::kFrozen; }

  // What BatchSource and BatchOwner want, on the device thread (head_batches.cc).
  int64_t RowsPerBatch(const BatchKey& kind) const override;
  int64_t CostPerRow() const override { return config_.vocab_size * config_.hidden_size; }
  void StartBatch(std::vector<std::shared_ptr<QueuedChunk>> chunks, std::function<void()> on_ended) override;
  std::vector<std::shared_ptr<QueuedChunk>> TakeUnfinished() override;
  // Those that this head teaches, and what is in their tiles or waits to be added.
  std::vector<std::shared_ptr<BatchSource>> Borrowers() override;
  std::vector<std::shared_ptr<QueuedChunk>> TakeBorrowed(const BatchSource& teacher) override;
  void OnBatchEnded() override { ++gradient_changes_; }
  void OnChunkAnswered(const ChunkItem& item) override;
  void OnChunkDone(ChunkItem& item) override;
  // Nobody may read dW or add to it any more.
  void OnDeviceFailure(const absl::Status& status) override;
  std::deque<StartedChunk> Start(const std::vector<std::shared_ptr<QueuedChunk>>& chunks);
  // Not ok if it cannot be computed now. Rejects it, unless it is a repeat.
  absl::Status FindObstacleLocked(ChunkItem& item, const absl::Status& teacher, SessionTable::Cut* cut)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FillTiles(ChunkItem& item);

  // Streams (head_sessions.cc): the rest of what the table began, with the lock and without it.
  void FinishCutLocked(const SessionTable::Cut& cut) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void TellEnd(const SessionTable::Cut& cut, const absl::Status& status);
  void DropForgottenLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void Call(const Resumes& resumes);

  // Chunks (head_chunks.cc).
  // A place for the chunk in the tiles of this session, with memory for a teacher's rows and for lists:
  // RESOURCE_EXHAUSTED with a table without it.
  absl::Status MakeRoomLocked(const std::string& session_id, const Chunk& chunk)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Who teaches a chunk, and what keeps it from being parked until the chunk is done. Nobody: nulls.
  struct Taught {
    std::shared_ptr<Head> teacher;
    std::shared_ptr<const void> lesson;
  };
  // Not OK, and the chunk is not taken, if its hidden states should be held and are not.
  absl::Status TakeHidden(const LaneAttachment& lane, Chunk& chunk, bool deterministic) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  std::optional<HeldHiddenStates::Piece> CopyHidden(const LaneAttachment& lane, const Chunk& chunk) const;
  absl::Status CheckContent(Chunk& chunk, Taught* taught) const;
  // Whether the chunk waits for its teacher: `resume` is called, or was.
  bool AwaitTeacher(const LaneAttachment& lane, const std::string& teacher,
                    const std::function<void()>& resume) ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether the device can do what a chunk with lists asks for.
  absl::Status CheckListsHere(const Chunk& chunk) const;
  absl::StatusOr<Admission> AdmitLocked(const LaneAttachment& attachment, const Chunk& chunk)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status RefusalLocked(Admission admission, const Chunk& chunk, const absl::Status& rejection,
                             bool remembered, const LaneAttachment& attachment) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::shared_ptr<ChunkItem> MakeItemLocked(const LaneAttachment& lane, Admission admission, Chunk& chunk,
                                            absl::Status rejection, Taught& taught)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status GenerationErrorLocked(const LaneAttachment& attachment, uint64_t named) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status PositionErrorLocked(absl::StatusCode code, RejectReason reason, absl::string_view field,
                                   absl::string_view message, const std::string& session_id) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Distillation (head_teaching.cc). The teacher of a chunk, whose weights there must be:
  absl::StatusOr<Taught> FindTeacher(const ChunkDistillation& distillation) const ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<uint64_t> PrepareTeacherOf(const std::vector<std::shared_ptr<QueuedChunk>>& chunks)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status TeacherRefusalLocked(Admission admission, const Chunk& chunk, const absl::Status& rejection,
                                    const LaneAttachment& attachment) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckRoomForRejectionLocked(const Chunk& chunk, const absl::Status& rejection,
                                           const LaneAttachment& attachment) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // As a teacher: it is in use (lessons_) for as long as what this returns is kept. Errors as of
  // TeacherVersion; UNAVAILABLE while its weights are changed at all replicas, or put back.
  absl::StatusOr<std::shared_ptr<const void>> BeginLesson() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status CheckTeachesLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A blend over replicas takes weights from this head for as long. Errors as of CheckCopied.
  absl::StatusOr<std::shared_ptr<const void>> Lend(uint64_t weight_version) ABSL_LOCKS_EXCLUDED(mutex_);
  // As a teacher: the weights' version; NOT_FOUND if it was deleted, FAILED_PRECONDITION without weights.
  absl::StatusOr<uint64_t> TeacherVersion() const ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<uint64_t> TeacherVersionLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // The end of the head (head.cc).
  absl::Status CheckDiscardLocked(DiscardGradient discard) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndStreams(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  void Release() ABSL_LOCKS_EXCLUDED(mutex_);

  // The window (head_window.cc). A flush and a step begin alike: the answer, unless it is to come; then
  // `done` was taken. `together`: what the replicas are to be told now.
  std::optional<absl::StatusOr<FlushInfo>> BeginFlushLocked(uint64_t generation,
                                                            const std::vector<SessionMarks>& marks,
                                                            float gradient_scale, FlushCallback& done,
                                                            std::optional<WindowEnd>* together)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<FlushCallback> SealLocked(absl::StatusOr<FlushInfo>* answer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CountFlush(const FlushInfo& flush);
  void EndFlush(const std::string& flush_id, FlushFate fate, const FateCallback& done)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Likewise; of a head of its own it may be ended now if there is no answer.
  std::optional<absl::StatusOr<uint64_t>> AskForFateLocked(const std::string& flush_id, FlushFate fate,
                                                           const FateCallback& done,
                                                           std::optional<WindowEnd>* together)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The generation; `waiting` is for FinishFlush, without the lock.
  uint64_t EndFlushLocked(FlushFate fate, absl::Time decided, Resumes* waiting)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FinishFlush(FlushFate fate, absl::Time decided, const Resumes& waiting) ABSL_LOCKS_EXCLUDED(mutex_);
  // again(head, done) is called when nothing ends the window any more, nor looks at it.
  template <class Callback, class Again>
  void WaitBehindLocked(const Callback& done, const Again& again) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    window_.WaitBehind({.again = [self = shared_from_this(), again, done] { again(*self, done); },
                        .tell = [done](const absl::Status& why) { done(why); }});
  }
  std::optional<absl::StatusOr<StepResult>> BeginStepLocked(uint64_t generation,
                                                            const std::vector<SessionMarks>& marks,
                                                            const StepRequest& request, StepCallback& done,
                                                            std::optional<WindowEnd>* together)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What the step that is asked for was answered with when it was taken, as far as the sessions of this
  // server can tell; none if it was not the last one.
  std::optional<absl::StatusOr<StepResult>> RepeatedStepLocked(uint64_t generation,
                                                               const std::vector<SessionMarks>& marks,
                                                               const StepRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // ABORTED with the server's position for marks of a past that this head does not go on from, or of beyond
  // where it does: the window may have come to the same numbers with other chunks. Those of sessions that
  // `known`, marks of an earlier call, has of the same past, or of one that was not told, are right as well.
  absl::Status CheckPastLocked(uint64_t generation, const std::vector<SessionMarks>& marks,
                               const std::vector<SessionMarks>& known = {}) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Those of this server's sessions: `marks` themselves, or if there are replicas what is put into `own`.
  const std::vector<SessionMarks>* OwnMarks(const std::vector<SessionMarks>* marks,
                                            std::vector<SessionMarks>* own) const;
  // Whether a call of this generation that names these marks may end the window, or one that ends it may
  // begin now.
  absl::Status CheckPlaceLocked(uint64_t generation, const std::vector<SessionMarks>& marks) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The same of a call with marks of all replicas.
  absl::Status CheckEndPlaceLocked(uint64_t generation, const std::vector<SessionMarks>& marks) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckSealableLocked(const std::vector<SessionMarks>& marks) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Called when everything that was accepted before the call is in the gradients. Ok if that still matches
  // the marks of the call.
  absl::Status CheckSealedLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Seal();
  void Step();
  // What of a head over replicas is the coordinator's, and is another server's here.
  absl::Status CheckEndsWindows() const;
  absl::Status CheckAlive() const ABSL_LOCKS_EXCLUDED(mutex_);
  // UNAVAILABLE while a write waits for all replicas to publish it.
  absl::Status CheckNothingPreparedLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Weights that all replicas are stepping are not replaced by one.
  absl::Status CheckMayPublishLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckSameWeightsLocked(const WindowEnd& end) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // On the device thread: PartRows as bytes, of a row and of those that were checked.
  absl::StatusOr<int64_t> PartRowBytes(const std::string& tensor) const;
  absl::StatusOr<int64_t> CheckPartRows(const PartRows& rows) const;
  absl::Status ReadHeldRows(const PartRows& rows, char* to);
  absl::Status WriteHeldRows(const PartRows& rows, const char* from);
  WindowEnd EndingLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status BeginPartLocked(const WindowEnd& end) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Answers a step that was `taken`, to this replica's sessions, if it was to those of all from `replica` on.
  void AskWhetherTaken(const WindowEnd& taken, const StepResult& answer, int32_t replica, StepCallback done);
  // SealPart's answer to that; none if `end` is to begin.
  std::optional<absl::StatusOr<SealedWindow>> TakenPartLocked(const WindowEnd& end)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // On the device thread; `epoch` is JointCheckpoint's and `ending` GradientWindow's, of when it was asked
  // for. What changes the weights waits for chunks that are computed with them.
  void SealUntaught(uint64_t epoch, uint64_t ending, const WindowEnd& end,
                    const std::function<void(absl::StatusOr<SealedWindow>)>& done)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<SealedWindow> SealedPart(uint64_t epoch, uint64_t ending, const WindowEnd& end)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<GradientStats> SumNow(uint64_t ending, const JointSum& sum,
                                       const ReplicaCommunicators& replicas) ABSL_LOCKS_EXCLUDED(mutex_);
  // The windows, and then the gradients of deterministic sessions.
  absl::Status AddUp(const WindowGradient& gradient, const std::vector<int32_t>& sessions,
                     const ReplicaCommunicators& replicas);
  absl::Status StepNow(uint64_t ending, const JointStep& step, const ReplicaCommunicators& replicas)
      ABSL_LOCKS_EXCLUDED(mutex_);
  uint64_t EndingNumber() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Runs `task` on the device thread, after those that were given before, of whatever head: what replicas
  // exchange must have one order everywhere.
  void PostExchange(std::function<void()> task);
  // Not ok if it is not this ending, or has not come to this.
  absl::Status CheckPhaseLocked(uint64_t ending, EndingPhase phase) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<StepResult> TakeStep(const StepRequest& request, const WindowGradient& gradient,
                                      int64_t steps);
  void CountStepLocked(StepResult* result) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The next window has begun, or this one is open again; returns who waited for that.
  Resumes BeginWindowLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Chunks and calls that wait for what becomes of the window, and the students of this head.
  Resumes TakeWaitingLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckStatsLocked(uint64_t generation, const std::vector<SessionMarks>& marks) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PostStatsLocked(uint64_t generation, std::vector<SessionMarks> marks, double gradient_scale,
                       const StatsCallback& done) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What the replicas are to be told now, if anything.
  std::optional<WindowEnd> BeginLookLocked(uint64_t generation, const std::vector<SessionMarks>& marks,
                                           double gradient_scale, StatsCallback done)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<WindowStats> StatsNow(uint64_t generation, const std::vector<SessionMarks>& marks,
                                       double gradient_scale);
  // The gradient of a flush and its scale, if it can be read now; ABORTED if it is over.
  absl::StatusOr<std::pair<WindowGradient, float>> GradientOf(const std::string& flush_id) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status ReadRows(const std::string& flush_id, int64_t first_row, int64_t rows, kernels::DataType type,
                        RowsOut out);
  // Over replicas (head_joint_flush.cc).
  void ReadPartOf(int32_t replica, const PartRows& rows,
                  std::function<void(absl::StatusOr<std::string>)> done);
  void ReadJointGradient(const std::string& flush_id, const kernels::RowSpan& rows, kernels::DataType type,
                         RowsOut out, std::function<void(absl::Status)> done);
  WindowGradient WindowGradientLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Puts the norm and the count that a caller got of a gradient into the counters.
  void CountGradient(double norm, int64_t non_finite);

  // A task that something has to be finished for.
  struct LastTask {
    // The tiles that are closed as they are.
    enum class Closes { kAll, kSoftTargets, kNone };
    Closes closes = Closes::kAll;
    // Whether it may change the weights: then those tiles of other heads, too, that wait with soft targets
    // of this one.
    bool changes_weights = false;
    // If set: none of all this unless they match.
    std::optional<std::vector<SessionMarks>> marks = {};
  };
  // Runs `task` on the device thread once everything that was accepted before is in the gradients, or in
  // tiles that `last` leaves alone.
  void PostLastLocked(LastTask last, std::function<void()> task) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The last task that is next, if it is going to do anything.
  const LastTask* DueLastTaskLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void BeginLastTask() ABSL_LOCKS_EXCLUDED(mutex_);
  // Posts the work on the gradients that follows from a change of the window.
  void PostWindowWorkLocked(std::function<void()> task) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndWindowWork() ABSL_LOCKS_EXCLUDED(mutex_);

  // Weights (head_weights.cc) and logits (head_logits.cc).
  absl::StatusOr<std::string> AdmitWriteLocked(const std::string& write_key, Replace replace) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Publish(const std::shared_ptr<StagedWrite>& staged) ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns who waits for it (AwaitPublished).
  std::vector<std::function<void()>> EndPublishingLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PostPublishLocked(std::shared_ptr<StagedWrite> staged) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<uint64_t> ReadWeightRows(int64_t first_row, int64_t rows, kernels::DataType type,
                                          RowsOut out);

  // A head over replicas reads rows in another type than the weights' from the master (head_rows.cc): at the
  // coordinator, which knows when all replicas change their weights.
  absl::StatusOr<WeightsPlace> WeightsPlaceLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReadJointWeights(const WantedRows& wanted, std::function<void(absl::StatusOr<uint64_t>)> done)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void EndJointRead(const WantedRows& wanted, const WeightsPlace& before,
                    const std::function<void(absl::StatusOr<uint64_t>)>& done) ABSL_LOCKS_EXCLUDED(mutex_);

  // Copies of heads (head_copies.cc), on the device thread.
  absl::StatusOr<uint64_t> CopyNow(const Head& source, uint64_t weight_version, const std::string& copy_id)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status CheckFits(const Head& source) const;
  // The answer of a call that was made before; otherwise whether it can be done.
  absl::StatusOr<std::optional<uint64_t>> BeginBlendLocked(const BlendRequest& request) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<uint64_t> BlendNow(const Head& source, const BlendRequest& request)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status CheckCopiedLocked(uint64_t weight_version) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckBlendableLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void BlendTogether(const std::shared_ptr<Head>& source, const BlendRequest& request, CommitCallback done)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The answer, or none if it comes later; then `together` is what the replicas are to be told, if anything.
  std::optional<absl::StatusOr<uint64_t>> BeginBlendTogetherLocked(BlendEnd blend, CommitCallback& done,
                                                                   std::optional<WindowEnd>* together)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckNotLentLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::shared_ptr<Head>> FindSource(const BlendRequest& request) const;
  absl::Status BlendPart(const BlendRequest& request, const ReplicaCommunicators& replicas);
  bool IsBlending() const ABSL_LOCKS_EXCLUDED(mutex_);
  void PublishBlend() ABSL_LOCKS_EXCLUDED(mutex_);
  void PostLogitsLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AnswerLogits() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status BeginLogitsLocked(LogitsCall& call) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status ComputeLogits(LogitsCall& call);

  // Parking (head_parking.cc).
  void ParkNow(const ParkingPlace& place, const absl::Status& parked, const SavedCallback& done);
  absl::Status CheckUnusedLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<CapturedHead> CaptureUnusedLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Checkpoints (head_checkpoint.cc).
  // A save that a step has made due.
  struct StepSave {
    StepSaver::Due due = StepSaver::Due::kNo;
    absl::StatusOr<CapturedHead> captured = CapturedHead{};  // not over replicas
  };
  // Behind a step, when the next window has begun.
  StepSave CaptureStepLocked(const StepResult& step) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void BeginStepSave(StepSave save) ABSL_LOCKS_EXCLUDED(mutex_);
  std::optional<int64_t> StepsSinceCheckpointLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SaveNow(SaveAs as, std::vector<SessionMarks> named, StateSink* sink, SavedCallback done);
  absl::StatusOr<CapturedHead> CaptureLocked(SaveAs as, const std::vector<SessionMarks>& named) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckCapturedLocked(const std::vector<SessionMarks>& named, const HeadCheckpoint& state) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Nothing of it was in the window since.
  bool IsAsLastStepLeftItLocked(const SessionMarks& session) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<GradientFile> GradientFilesLocked(const HeadCheckpoint& state) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  StateKeys KeysLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Runs `task` once all work of PostWindowWorkLocked is done: the gradients then match the window.
  void PostSettled(std::function<void()> task);
  bool Settled() const ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<FileKeys> RestoreNow(RestoreAs as, const RestoreNumbers& numbers, const StateSource& source,
                                      std::vector<SessionMemory> memory);
  // For each deterministic session of a checkpoint, in order, what it needs beyond SessionMemory, or null.
  using MoreMemory = std::vector<std::unique_ptr<MemoryReservation>>;
  absl::Status BeginRestore(const HeadCheckpoint& state, std::vector<SessionMemory>* memory, MoreMemory* more)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether this head could compute what is in tiles, and has room for it.
  absl::Status CheckKeptLists(const DeterministicTiles::Content& tiles) const;
  absl::StatusOr<MoreMemory> ReserveForTiles(const HeadCheckpoint& state) const;
  absl::Status CheckRestorableLocked(const HeadCheckpoint& state, int64_t more_memory) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckSameStateLocked(const HeadCheckpoint& state,
                                    const std::vector<StateTensor>& tensors) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<SessionTable::DeterministicSessions> RestoreSessions(HeadStateReader& reader,
                                                                      const HeadCheckpoint& state,
                                                                      std::vector<SessionMemory> memory,
                                                                      MoreMemory more);
  absl::Status RestoreWindow(RestoreAs as, HeadStateReader& reader);
  void Install(RestoreAs as, const RestoreNumbers& numbers, HeadCheckpoint state,
               SessionTable::DeterministicSessions sessions) ABSL_LOCKS_EXCLUDED(mutex_);
  void EndInPieces(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);

  // Their parts over replicas (head_save_part.cc, head_restore_part.cc).
  WindowPlace PlaceLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The error of calls from AbandonPart on.
  absl::Status GoesBackLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckEpochLocked(uint64_t epoch) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // HeadEnvironment::end_together, now or at EndSave.
  void EndTogether(WindowEnd end) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<HeadCheckpoint> CapturePartNow(uint64_t epoch, const WindowPlace& place,
                                                const std::vector<SessionMarks>& named)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status SumCapturedNow(const ReplicaCommunicators& replicas) ABSL_LOCKS_EXCLUDED(mutex_);
  void BeginRestorePartNow(uint64_t epoch, const std::function<void(absl::StatusOr<RestoringPart>)>& done)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status BeginRestorePartLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckBegunLocked(uint64_t epoch) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status RestoreBrokeOff() const;
  // Only a restore that comes to its end mends what is done from here on.
  absl::Status BeginOverwriting() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<std::vector<SessionMemory>> MemoryForRestored(const HeadCheckpoint& state)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status FinishRestoreNow(const RestoredPart& part, const StateSource& source,
                                const ReplicaCommunicators& replicas, std::vector<SessionMemory> memory)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status RestoreSessionsOfPart(HeadStateReader& reader, const HeadCheckpoint& part,
                                     std::vector<SessionMemory> memory) ABSL_LOCKS_EXCLUDED(mutex_);

  const HeadConfig config_;
  const HeadEnvironment environment_;
  const uint64_t number_;  // among all heads that there ever were
  HeadCounters counters_;

  mutable Mutex mutex_;
  // Null once released. Declared before what it covers, which goes first.
  std::unique_ptr<MemoryReservation> reservation_ ABSL_GUARDED_BY(mutex_);

  // The device thread's. The backend is null once released: everything posted before that finds it there, and
  // everything after is turned away by lifecycle_.
  std::unique_ptr<HeadBackend> backend_;
  HeadBackend* const backend_address_;                       // for comparisons
  const std::vector<std::vector<kernels::RowSpan>> slices_;  // the rows of each (HeadBackend::SliceRows)
  GradientSet gradients_;
  BatchRunner batches_;
  TeacherLease teaching_;
  std::atomic<uint64_t> gradient_changes_ = 0;  // counted: two equal numbers are equal gradients
  std::atomic<int64_t> checkpoint_steps_ = 0;

  Lifecycle lifecycle_ ABSL_GUARDED_BY(mutex_);
  // Chunks, of any head, that this one teaches and that are not done. More only with the lock, while it is
  // alive; fewer at any time.
  const std::shared_ptr<Leases> lessons_ = std::make_shared<Leases>();
  const std::shared_ptr<Leases> lent_ = std::make_shared<Leases>();  // blends over replicas (Lend); likewise
  std::map<std::string, Student> students_ ABSL_GUARDED_BY(mutex_);  // AwaitLessons; by their sessions
  HeadHistory history_ ABSL_GUARDED_BY(mutex_);
  SessionTable sessions_ ABSL_GUARDED_BY(mutex_);
  GradientWindow window_ ABSL_GUARDED_BY(mutex_);
  JointCheckpoint joint_ ABSL_GUARDED_BY(mutex_);
  SessionTable::DeterministicSessions restored_sessions_ ABSL_GUARDED_BY(mutex_);  // of FinishRestorePart
  WeightStore weights_ ABSL_GUARDED_BY(mutex_);
  bool publishing_prepared_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::function<void()>> published_waiters_ ABSL_GUARDED_BY(mutex_);
  LogitsQueue logits_ ABSL_GUARDED_BY(mutex_);
  int64_t window_work_ ABSL_GUARDED_BY(mutex_) = 0;  // tasks of PostWindowWorkLocked that have not run
  // The tasks that PostLastLocked posted, in order.
  std::deque<LastTask> last_tasks_ ABSL_GUARDED_BY(mutex_);

  Mutex begin_write_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);  // one staging buffer is made at a time
  const int64_t logits_rows_;                             // of a job
  // What the backend can do, which may be gone while a chunk is looked at.
  const bool holds_;
  const int64_t longest_list_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_HEAD_H_
