// One named lm_head: its backend, its ledger and its gradient window. This is where a chunk is taken exactly
// once.
//
// Locking: one mutex guards ledger, window and lanes. It is never held during computation, nor while a
// listener or a callback is called. The backend and the batches are touched on the scheduler's thread alone.
#ifndef LOSSD_SERVER_ENGINE_HEAD_HEAD_H_
#define LOSSD_SERVER_ENGINE_HEAD_HEAD_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/chunk/chunk.h"
#include "server/engine/chunk/head_config.h"
#include "server/engine/common/counters.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/head/accumulation_ledger.h"
#include "server/engine/head/deterministic_session.h"
#include "server/engine/head/head_info.h"
#include "server/engine/head/head_state.h"
#include "server/engine/head/logits_call.h"
#include "server/engine/head/staged_write.h"
#include "server/engine/head/window.h"
#include "server/engine/memory/memory_budget.h"
#include "server/engine/regions/region_table.h"
#include "server/engine/schedule/batch_queue.h"
#include "server/engine/schedule/batch_scheduler.h"

namespace lossd::engine {

// What a lane's stream hears. Called from the device thread or from a thread that calls Head, without any
// lock held; calls for one lane are made one after the other, except OnEnd, which may come at any time and
// more than once.
class LaneListener {
 public:
  virtual ~LaneListener() = default;
  virtual void OnAnswer(ChunkAnswer answer) = 0;
  virtual void OnApplied(uint64_t applied) = 0;
  // The stream is over for this reason: fenced by another, head deleted, session closed.
  virtual void OnEnd(absl::Status status) = 0;
};

// A live stream's hold on a lane.
struct LaneAttachment {
  std::string session_id;
  int32_t lane = 0;
  uint64_t epoch = 0;  // goes up with every stream of the lane
  LaneMarks marks;
  uint64_t generation = 0;
  uint64_t session_number = 0;  // of the head's: what may be told of the session to anybody
  int32_t rank = 0;             // the session's
};

class Head;

// Files of a checkpoint, and keys under which the head would save the same content again.
using FileKeys = std::vector<std::pair<std::string, std::string>>;

// What a head shares with the rest of the engine; all of it outlives the head.
struct HeadEnvironment {
  BatchScheduler* scheduler = nullptr;
  Device* device = nullptr;
  Counters* counters = nullptr;
  const RegionTable* regions = nullptr;
  // Heads of the same device, by name; NOT_FOUND if there is none. Called without any lock of a head held.
  std::function<absl::StatusOr<std::shared_ptr<Head>>(const std::string&)> find_head;
  ChunkLimits limits;
  // How long chunks of a deterministic session wait for others to bring what is missing before them.
  absl::Duration place_timeout = absl::Seconds(10);
  std::string incarnation;
  // Told, perhaps by several heads, when the device can no longer be trusted.
  std::function<void(const absl::Status&)> on_device_failure;
  // When the device was done with its last batch, of whatever head; null if nobody asks. The device thread's.
  std::shared_ptr<std::optional<absl::Time>> device_done = {};
  // Not null if the head has double_buffer; the head gives it back with the rest of its memory.
  std::shared_ptr<Gradient> second_gradient = {};
};

// Whether a session's dW is to depend on its tokens alone. All sessions of a frozen head are so.
enum class Deterministic { kNo, kYes };

class Head : public BatchSource, public std::enable_shared_from_this<Head> {
 public:
  Head(HeadConfig config, HeadEnvironment environment, std::unique_ptr<HeadBackend> backend,
       std::unique_ptr<MemoryReservation> reservation);
  ~Head() override;

  const HeadConfig& config() const { return config_; }
  // What there is to tell of it (head_info.cc).
  HeadInfo Info() const;
  HeadSnapshot Snapshot() const;
  std::vector<SessionSnapshot> Sessions() const;
  const HeadCounters& counters() const { return counters_; }

  // --- Sessions and streams (head_sessions.cc) ---

  struct SessionInfo {
    std::string session_id;
    uint64_t generation = 0;
    std::vector<LaneMarks> lanes;
    uint64_t restores = 0;  // of the head, so far
  };
  // The open session of this client, or a new one under `new_session_id`. INVALID_ARGUMENT if it is open with
  // another number of lanes, or deterministic only here or there.
  absl::StatusOr<SessionInfo> OpenSession(const std::string& client_key, int32_t rank, int32_t lanes,
                                          const std::string& new_session_id,
                                          Deterministic deterministic = Deterministic::kNo,
                                          SessionMemory memory = {});
  // Whether a deterministic session of this client would be a new one, for which OpenSession wants its
  // memory. INVALID_ARGUMENT if the rank is another's (head_deterministic.cc).
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

  // Lets chunks be looked at again that have waited for a place longer than they may. To be called now and
  // then.
  void ResumeStalled();

  // --- Chunks (on the device: head_batches.cc), and the end of the head (head.cc) ---

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
  // After MarkDeleted: ends every stream and gives the memory back, whoever still holds the head (a client
  // that never reads may do so for long), but not before batches of others that it teaches are done.
  // `released` is called then, on the device thread.
  void Shutdown(std::function<void()> released);

  // --- Flush (head_flush.cc) ---

  // `gradient_scale` multiplies what is read and what the summary is of. FAILED_PRECONDITION if the head is
  // frozen.
  void BeginFlush(uint64_t generation, std::vector<SessionMarks> marks, float gradient_scale,
                  FlushCallback done);
  // Copies rows of the frozen window into `out` (rows * H * SizeOf(type) bytes and fp32 [rows], which must
  // live until `done`).
  void ReadGradient(const std::string& flush_id, int64_t first_row, int64_t rows, kernels::DataType type,
                    RowsOut out, std::function<void(absl::Status)> done);
  // Whether this flush can be read now; ABORTED if it is over.
  absl::Status CheckFlush(const std::string& flush_id) const;
  // The new generation.
  absl::StatusOr<uint64_t> CommitFlush(const std::string& flush_id);
  // The generation, unchanged. What a second gradient has taken since is added to the window.
  absl::StatusOr<uint64_t> AbortFlush(const std::string& flush_id);

  // --- The optimizer (head_step.cc) ---

  // Statistics of the gradient times a factor, and of how many tokens it is. With `marks`, as of BeginFlush:
  // once they are applied, and of exactly that. Without: of what is there when its turn comes; tiles of
  // deterministic sessions that are not complete are left alone, and are not in it.
  struct WindowStats {
    GradientStats gradient;
    uint64_t window_tokens = 0;
  };
  void ReadStats(uint64_t generation, std::vector<SessionMarks> marks, double gradient_scale,
                 std::function<void(absl::StatusOr<WindowStats>)> done);
  // Waits until `marks` are applied, updates the weights, publishes them as a new version and ends the
  // window. The last step's arguments again answer the same, also while it is under way; others for its
  // generation are FAILED_PRECONDITION, and any other generation than the window's is ABORTED.
  void ApplyStep(uint64_t generation, std::vector<SessionMarks> marks, const StepRequest& request,
                 StepCallback done);

  // --- Weights (head_weights.cc) ---

  enum class Replace { kYes, kNo };
  absl::StatusOr<std::string> BeginWrite(const std::string& write_key, Replace replace,
                                         const std::string& new_write_id);
  absl::StatusOr<std::shared_ptr<StagedWrite>> FindWrite(const std::string& write_id) const;
  // Gives up a write that is not being published; its buffer goes. Nothing if there is no such write.
  void DropWrite(const std::string& write_id);
  // FAILED_PRECONDITION while rows are missing, NOT_FOUND of no such write, ABORTED if a restore undid it.
  using CommitCallback = std::function<void(absl::StatusOr<uint64_t>)>;
  void CommitWrite(const std::string& write_id, CommitCallback done);
  // Copies rows into `out`, which must live until `done`, and reports the version they are of.
  void ReadWeights(int64_t first_row, int64_t rows, kernels::DataType type, RowsOut out,
                   std::function<void(absl::StatusOr<uint64_t>)> done);
  uint64_t weight_version() const;

  // --- Logits (head_logits.cc) ---

  // Computes logits with the weights there are when their turn comes; `done` is called on the device thread,
  // or at once. RESOURCE_EXHAUSTED while too many calls wait.
  void Logits(LogitsRequest request, LogitsCallback done);

  // --- Checkpoints (head_checkpoint.cc) ---

  // Only a server that goes away saves a window that a flush holds.
  enum class SaveAs { kTagged, kDrained };
  // Writes every file but the manifest, of one moment between two batches; `done` gets what that has to say.
  void Save(SaveAs as, StateSink* sink, std::function<void(absl::StatusOr<HeadCheckpoint>)> done);
  // kDrained: nothing happened since it was saved, so sessions go on. kTagged: what happened since is undone;
  // streams end, and weights get a version that none had before.
  enum class RestoreAs { kTagged, kDrained };
  // The head becomes what it was, if an error does not say that nothing has changed. `numbers`: of a tagged
  // one, CheckpointStore::NextRestore. `source`: of this configuration. `memory`: of deterministic
  // sessions beyond those there are.
  void Restore(RestoreAs as, const RestoreNumbers& numbers, std::shared_ptr<const StateSource> source,
               std::vector<SessionMemory> memory, std::function<void(absl::StatusOr<FileKeys>)> done);
  // Goes up whenever more than a drain lies between the head and what it was.
  uint64_t restores() const;
  // Ids and numbers of lanes.
  std::map<std::string, int32_t> OpenSessions() const;
  int64_t deterministic_sessions() const;

 private:
  friend class HeadCheckpointer;
  using Lane = AccumulationLedger::Lane;

  enum class ItemKind {
    kAccumulate,
    kInputGradient,   // of a frozen head: losses and dX
    kPlaced,          // losses and dX, of a deterministic session: its rows go into tiles
    kWeightGradient,  // dW of a piece of a tile, whose chunk was answered
    kLossOnly,
    kRepeat,
    kRejected,
  };
  enum class ItemState { kQueued, kStarted, kWithdrawn };
  struct ChunkItem : QueuedChunk {
    ItemKind kind = ItemKind::kAccumulate;
    ItemState state = ItemState::kQueued;  // guarded by mutex_
    bool numbered = true;                  // holds a sequence of its own: not a repeat
    bool remembered = false;               // if it is rejected, the ledger knows it (Reject)
    std::string session_id;
    int32_t lane = 0;
    std::shared_ptr<LaneListener> listener;
    Chunk chunk;
    absl::Status rejection;
    std::shared_ptr<Head> teacher;  // of a distillation; does not change once it is queued
    absl::Time accepted;
    int64_t valid_tokens = 0;  // once answered
    // For chunks that are kPlaced, with what they count in its tiles, and for pieces of these.
    std::shared_ptr<DeterministicSession> deterministic;
    int64_t kept_bytes = 0;
    DeterministicTiles::Piece piece;
  };
  // What a lane has beside its marks.
  struct LaneRuntime {
    uint64_t epoch = 0;
    std::shared_ptr<LaneListener> listener;
    std::deque<std::shared_ptr<ChunkItem>> queued;  // not started, in order
    std::function<void()> resume;                   // of a chunk that waits for the window to change
  };
  using LaneKey = std::pair<std::string, int32_t>;
  // A chunk that was started.
  struct StartedChunk {
    std::shared_ptr<ChunkItem> item;
    ChunkAnswer answer;
    absl::Time answered;
  };
  // Chunks that the device has together, and rejected ones between and behind them that wait for their turn.
  struct Batch {
    // Stay where they are when others join: the device writes into them.
    std::deque<StartedChunk> chunks;
    size_t answered = 0;  // so many of them, from the first one
    absl::Time started;
    std::optional<DeviceTimes> device_times;
    double loss_sum = 0;  // of new chunks that train and are answered, and their valid tokens
    int64_t valid_tokens = 0;
    std::vector<std::function<void()>> on_ended;
    std::shared_ptr<Head> teacher;  // of all of them; may not be released before the device is done
  };

  enum class Admission { kTake, kRepeat, kWait };
  absl::Status CheckContent(Chunk& chunk, std::shared_ptr<Head>* teacher) const;
  absl::StatusOr<Admission> AdmitLocked(const LaneAttachment& attachment, const Chunk& chunk);
  absl::Status RefusalLocked(Admission admission, const Chunk& chunk, const absl::Status& rejection,
                             bool remembered, const LaneAttachment& attachment) const;
  absl::Status GenerationErrorLocked(const LaneAttachment& attachment, uint64_t named) const;
  absl::Status PositionErrorLocked(absl::StatusCode code, RejectReason reason, absl::string_view field,
                                   absl::string_view message, const std::string& session_id) const;
  bool IsIdleLocked(const std::string& session_id, const AccumulationLedger::Session& session,
                    absl::Time before) const;
  absl::Status CheckDiscardLocked(DiscardGradient discard) const;
  void WithdrawLocked(const LaneKey& key);
  // Deterministic sessions: head_deterministic.cc.
  absl::Status CheckRankLocked(const std::string& client_key, int32_t rank) const;
  // Null: the session is none.
  DeterministicTiles* TilesOfLocked(const std::string& session_id);
  static absl::Status CheckPlaceLocked(const DeterministicTiles& tiles, const Chunk& chunk);
  // Any thread's: what tiles are to keep of a chunk must not change when its client has the answer.
  static void KeepOperands(Chunk& chunk);
  bool MustWaitForRoomLocked(const LaneAttachment& attachment, const Chunk& chunk);
  void GiveUpPlaceLocked(ChunkItem& item);
  void DropGradientsLocked();
  std::vector<std::shared_ptr<DeterministicSession>> DeterministicInOrder() const;
  static std::vector<std::shared_ptr<ChunkItem>> ItemsOf(const std::shared_ptr<DeterministicSession>& session,
                                                         std::vector<DeterministicTiles::Piece> pieces);
  std::shared_ptr<LaneListener> DropListenerLocked(const LaneKey& key);
  void EnqueueLocked(std::shared_ptr<ChunkItem> item);

  // On the device thread. Batches: head_batches.cc.
  int64_t RowsPerBatch(const RowKind& kind) const override {
    // Pieces of tiles keep to themselves.
    const bool of_window = kind.gradient == nullptr || kind.gradient == second_gradient_.get();
    return of_window ? backend_->RowsPerBatch(kind) : 1;
  }
  std::vector<std::shared_ptr<QueuedChunk>> TakeUnfinished() override;
  static RowKind TileKind(RowKind of_chunk, Gradient* gradient);
  void FillTiles(StartedChunk& chunk);
  void FinishPiece(ChunkItem& item);
  // These add up a window's gradient, `of` (null for the head's own), and those of the sessions.
  absl::Status ReadGradientSum(const Gradient* of, int64_t first_row, int64_t rows, float* out);
  absl::Status ReadBiasGradientSum(const Gradient* of, int64_t first_row, int64_t rows, float* out);
  absl::Status SumOverGradients(
      const Gradient* of, int64_t count, float* out,
      absl::FunctionRef<absl::Status(const Gradient* gradient, float* values)> read);
  int64_t CostPerRow() const override { return config_.vocab_size * config_.hidden_size; }
  void StartBatch(std::vector<std::shared_ptr<QueuedChunk>> chunks, std::function<void()> on_ended) override;
  static bool IsFollowUp(const ChunkItem& item) { return item.kind == ItemKind::kWeightGradient; }
  std::deque<StartedChunk> Start(const std::vector<std::shared_ptr<QueuedChunk>>& chunks);
  absl::StatusOr<uint64_t> PrepareTeacherOf(const std::vector<std::shared_ptr<QueuedChunk>>& chunks);
  void StartInLedgerLocked(const ChunkItem& item);
  bool frozen() const { return config_.weight_gradients == WeightGradients::kFrozen; }
  static void Reject(absl::Status rejection, ChunkItem& item);
  void Compute(const std::shared_ptr<Batch>& batch);
  ChunkRows Describe(StartedChunk& chunk) const;
  ChunkTimes TimesOf(const Batch& batch, const ChunkItem& item) const;
  void AnswerNext(Batch& batch);
  void AnswerRejected(Batch& batch);
  void EndBatch(Batch& batch, const absl::StatusOr<BatchReport>& report);
  void EndByFailure(const absl::Status& status);
  void Count(const Batch& batch, const StartedChunk& chunk);
  void CountLosses(Batch& batch, const ChunkItem& item, const ChunkAnswer& answer);
  // What somebody was told of a gradient.
  void CountGradient(double norm, int64_t non_finite);
  void Finish(const ChunkItem& item);
  void Freeze();
  void Publish(const std::shared_ptr<StagedWrite>& staged);
  absl::Status NoWriteLocked(const std::string& write_id) const;
  void NoteUndoneLocked(const std::string& write_id);
  // Runs `task` on the device thread once everything that was accepted before is in the gradients; what tiles
  // hold is only taken out for it if `marks`, where there are any, match then.
  void PostLastLocked(std::optional<std::vector<SessionMarks>> marks, std::function<void()> task);
  // Whether the window may be ended now, by a call of this generation.
  absl::Status CheckGenerationLocked(uint64_t generation) const;
  absl::Status CheckOpenLocked() const;
  // What chunks of this generation are added to: null for the head's own gradient.
  Gradient* GradientOfLocked(uint64_t generation) const;
  Gradient* OtherGradientLocked() const {
    return window_gradient_ == nullptr ? second_gradient_.get() : nullptr;
  }
  bool InNextWindowLocked(uint64_t generation) const {
    return window_.state == WindowState::kFrozen && generation == window_.generation + 1;
  }
  std::vector<std::function<void()>> BeginWindowLocked();

  // The optimizer: head_step.cc. The answer, unless it is to come: then `done` was taken.
  std::optional<absl::StatusOr<StepResult>> BeginStepLocked(uint64_t generation,
                                                            std::vector<SessionMarks> marks,
                                                            const StepRequest& request, StepCallback& done);
  void Step();
  absl::StatusOr<StepResult> TakeStep(const StepRequest& request, Gradient* gradient, int64_t steps);
  std::vector<std::function<void()>> EndStepLocked(absl::StatusOr<StepResult>& answer);
  absl::Status CheckStatsLocked(uint64_t generation, const std::vector<SessionMarks>& marks) const;
  absl::StatusOr<WindowStats> StatsNow(uint64_t generation, const std::vector<SessionMarks>& marks,
                                       double gradient_scale);
  absl::StatusOr<GradientStats> SummarizeWindow(const Gradient* of, double gradient_scale);

  void PostLogitsLocked();
  void AnswerLogits();
  absl::Status ComputeLogits(LogitsCall& call);
  absl::Status CheckLogitsLocked(const LogitsRequest& request) const;

  // Distillation (head_teaching.cc). Of a chunk's teacher, whose weights there must be:
  absl::StatusOr<std::shared_ptr<Head>> FindTeacher(const ChunkDistillation& distillation) const;
  absl::Status TeacherRefusalLocked(Admission admission, const Chunk& chunk, const absl::Status& rejection,
                                    const LaneAttachment& attachment) const;
  absl::Status CheckRoomForRejectionLocked(const Chunk& chunk, const absl::Status& rejection,
                                           const LaneAttachment& attachment) const;
  static absl::Status EarlierRejection(const Lane& lane, const Chunk& chunk);
  const Lane& LaneLocked(const LaneAttachment& attachment) const;
  // As a teacher: the weights' version; NOT_FOUND if it was deleted, FAILED_PRECONDITION without weights.
  absl::StatusOr<uint64_t> TeacherVersion() const;
  // Between these the backend stays, though the head may be deleted. On the device thread.
  void BeginTeaching() { ++teaching_; }
  void EndTeaching();

  // The gradient of a flush, if it can be read now; ABORTED if it is over.
  struct ScaledGradient {
    const Gradient* of = nullptr;  // the window's
    float scale = 1.0f;
  };
  absl::StatusOr<ScaledGradient> GradientOf(const std::string& flush_id) const;
  std::optional<absl::Time> FlushSinceLocked() const;  // of BeginFlush; none: no flush is under way
  absl::Status ReadScaledRows(const ScaledGradient& gradient, int64_t first_row, int64_t rows, float* out);
  absl::Status ReadScaledBias(const ScaledGradient& gradient, int64_t first_row, int64_t rows, float* out);
  // Calls `add` with every row, in order, some at a time.
  absl::Status ForEachPiece(const ScaledGradient& gradient,
                            absl::FunctionRef<void(std::span<const float> rows)> add);
  // Fills in the summaries of `flush`.
  absl::Status Summarize(const ScaledGradient& gradient, FlushInfo* flush);
  absl::Status SummarizeHere(const ScaledGradient& gradient, GradientSummary* summary);
  absl::Status SummarizeOnDevice(const ScaledGradient& gradient, GradientSummary* summary);
  void EndStreams();

  // Checkpoints: head_checkpoint.cc.
  void PostWindowWorkLocked(std::function<void()> task);
  // Runs `task` once the device's gradients are those that the window says.
  void PostSettled(std::function<void()> task);
  void Retire(std::function<void()> released);
  void Release();

  // The callbacks of chunks that wait for the window to change, to be called without the lock.
  std::vector<std::function<void()>> TakeWaitersLocked();
  // Those of one session, which wait for room.
  std::vector<std::function<void()>> TakeWaitersLocked(const std::string& session_id);

  const HeadConfig config_;
  std::shared_ptr<Gradient> second_gradient_;  // null without double_buffer; dropped with the lock held
  const HeadEnvironment environment_;
  HeadCounters counters_;
  // Both null once released. Everything posted to the device before that finds them there; everything after
  // is turned away by ended_.
  std::unique_ptr<MemoryReservation> reservation_;  // guarded by mutex_
  std::unique_ptr<HeadBackend> backend_;            // the device thread's
  HeadBackend* const backend_address_;              // for comparisons
  const uint64_t number_;                           // among all heads that there ever were
  std::deque<std::shared_ptr<Batch>> batches_;      // under way, in order; the device thread's
  uint64_t gradient_changes_ = 0;                   // counted; the device thread's
  int64_t teaching_ = 0;                            // batches; the device thread's
  std::function<void()> on_unused_;                 // of a head that is to be released; the device thread's

  mutable std::mutex mutex_;
  AccumulationLedger ledger_;
  std::map<LaneKey, LaneRuntime> lanes_;
  std::map<std::string, std::shared_ptr<DeterministicSession>> deterministic_;  // by session
  Window window_;
  uint64_t last_epoch_ = 0;  // of any lane
  int64_t window_work_ = 0;  // tasks of PostWindowWorkLocked that have not run
  uint64_t restores_ = 0;
  Gradient* window_gradient_ = nullptr;  // where the window accumulates: null for the head's own
  // What has to match for each of the tasks that PostLastLocked posted, in order.
  std::deque<std::optional<std::vector<SessionMarks>>> last_tasks_;
  absl::Status draining_;   // not ok after BeginDrain
  absl::Status restoring_;  // not ok while a checkpoint takes the place of everything: no window ends then
  absl::Status ended_;      // not ok after MarkDeleted, or when the device failed

  std::mutex begin_write_mutex_;  // one staging buffer is made at a time; taken before mutex_
  uint64_t weight_version_ = 0;
  int64_t optimizer_steps_ = 0;
  std::shared_ptr<StagedWrite> staged_;
  bool publishing_ = false;
  std::vector<CommitCallback> publish_waiters_;
  std::string last_committed_write_;  // for repeated commits
  uint64_t last_committed_version_ = 0;
  std::deque<std::string> undone_writes_;  // by restores, the last ones: their writers are told so

  const int64_t logits_rows_;  // of a job
  LogitsRoom logits_room_;
  std::deque<LogitsCall> logits_calls_;  // the first one is posted
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_HEAD_H_
