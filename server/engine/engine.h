// The engine: heads by name, sessions by id, one device, one memory budget. Everything the services need,
// without a word about gRPC.
//
// Thread-safe.
#ifndef LOSSD_SERVER_ENGINE_ENGINE_H_
#define LOSSD_SERVER_ENGINE_ENGINE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/engine/checkpoint/checkpoint.h"
#include "server/engine/chunk/chunk.h"
#include "server/engine/chunk/held_hidden_states.h"
#include "server/engine/common/counters.h"
#include "server/engine/common/mutex.h"
#include "server/engine/common/retry_slots.h"
#include "server/engine/common/worker_pool.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/device/staging.h"
#include "server/engine/head/head.h"
#include "server/engine/head/parts/head_copy.h"
#include "server/engine/head/parts/head_state.h"
#include "server/engine/memory/memory_budget.h"
#include "server/engine/regions/region_table.h"
#include "server/engine/replicas/agreement.h"
#include "server/engine/replicas/joint_checkpoint.h"
#include "server/engine/replicas/replica_watch.h"
#include "server/engine/schedule/batch_scheduler.h"
#include "server/engine/schedule/row_streams.h"
#include "server/engine/schedule/session_credit.h"

namespace lossd::engine {

class CheckpointReader;
class CheckpointStore;
class CheckpointWriter;
class ParkedHead;
struct DrainRecord;

// A save that EngineOptions::checkpoint_steps made due.
struct StepSaveReport {
  // kPassedOver is told once for each save that is under way.
  enum class Outcome { kSaved, kFailed, kPassedOver, kDropped };
  std::string head;
  std::string tag;  // of kPassedOver that of the save which is under way
  Outcome outcome = Outcome::kSaved;
  absl::Status why = {};                  // of kFailed, and of kDropped: nobody wants it any more
  int64_t passed_over = 0;                // while this one was under way
  std::vector<std::string> deleted = {};  // tags, for EngineOptions::checkpoint_keep
  absl::Status not_deleted = {};          // SavedCheckpoint's
};
std::string StepTag(int64_t optimizer_steps);  // "auto-1000"
inline constexpr int64_t kStepSavesKept = 3;

struct EngineOptions {
  int64_t memory_limit_bytes = int64_t{8} << 30;  // what heads and the workspace may reserve
  std::string memory_bound;      // the control group that sets it, for messages; may be empty
  int64_t head_quota_bytes = 0;  // of that, one head with its sessions; 0: all of it
  int64_t parking_bytes = 0;     // of the host, for heads that are parked; 0: none can be
  ChunkLimits chunk_limits;
  int64_t lane_credit_bytes = int64_t{32} << 20;  // payload in and out that one lane may have under way
  int64_t session_credit_bytes = 0;               // that all lanes of a session may; 0: four lanes' worth
  // All sessions' credits and streams of rows together; the latter have an eighth on top, so that full
  // sessions never keep a window from being read.
  int64_t staging_bytes = int64_t{2} << 30;
  int64_t head_staging_bytes = 0;  // of that, and likewise, what one head's may have; 0: all of it
  int32_t max_lanes = 16;          // of one session
  int64_t max_heads = 64;
  int64_t max_sessions = 1024;
  int64_t max_streams = 4096;  // of chunks and of rows
  absl::Duration session_lease = absl::Minutes(10);
  absl::Duration place_timeout = absl::Seconds(10);  // HeadEnvironment's
  RegionLimits regions;
  // How long an idle device waits for more chunks before it starts a small batch.
  absl::Duration batching_window = absl::ZeroDuration();
  DeviceLoop device_loop = DeviceLoop::kOwnThread;  // otherwise StepDevice runs it
  // Where checkpoints are kept; null: nowhere.
  std::shared_ptr<CheckpointStore> checkpoints = {};
  // After a save with a tag PREFIX-NUMBER: so many of the head's tags with this prefix, those saved last, are
  // kept (CheckpointStore::BeyondNewest), and the others deleted. 0: all are kept.
  int64_t checkpoint_keep = 0;
  // A head is saved by itself when the number of its optimizer's steps is a multiple of this, under the tag
  // StepTag(steps), beside what is computed next. A save that is due while the one before is under way is
  // passed over. Of these kStepSavesKept are kept, if checkpoint_keep does not say otherwise. 0: never.
  int64_t checkpoint_steps = 0;
  // Told of these saves, from two threads; it does not block.
  std::function<void(const StepSaveReport&)> on_step_save = [](const StepSaveReport&) {};
  // That of the server which this one goes on from; empty: a new one.
  std::string incarnation = {};
  // Which replica of its heads it has, and at the coordinator what ends their windows (HeadEnvironment).
  ReplicaPlace place = {};
  std::function<void(std::shared_ptr<Head>, WindowEnd)> end_together = {};
  std::function<void(std::shared_ptr<Head>, std::shared_ptr<StagedWrite>)> publish_together = {};
  // At the coordinator: a head that is here is to be at all other replicas, or is to be deleted at all.
  // They wait. UNAVAILABLE if not all replicas are there; asked again, they do what is missing.
  std::function<absl::Status(const HeadConfig&)> create_together = {};
  // Makes a copy at all replicas; `copy_here` makes that of this one. No window ends and no write is
  // published meanwhile, so that the source has one version everywhere.
  std::function<absl::Status(const HeadCopy&, absl::FunctionRef<absl::Status()> copy_here)> copy_together =
      {};
  // Whether another one had it; `delete_here` is called once it can be deleted at all of them.
  std::function<absl::StatusOr<bool>(const std::string& name, Head::DiscardGradient,
                                     absl::FunctionRef<absl::Status()> delete_here)>
      delete_together = {};
  std::function<absl::StatusOr<std::shared_ptr<ReplicaPart>>(const Head&, int32_t replica)> find_part = {};
  // At the coordinator: all replicas of a head. UNAVAILABLE, saying who is missing, if not all are there.
  std::function<absl::StatusOr<JointReplicas>(const Head&)> find_replicas = {};
  // Told once, from the device thread, when the device can no longer be trusted: the process should end.
  std::function<void(const absl::Status&)> on_device_failure = [](const absl::Status&) {};
};

// What OpenSessionRequest asks for.
struct SessionRequest {
  std::string client_key = {};
  int32_t rank = 0;
  int32_t lanes = 1;
  Deterministic deterministic = Deterministic::kNo;
  int64_t held_hidden_bytes = 0;
};

// A session as its streams see it.
struct FoundSession {
  std::shared_ptr<Head> head;
  std::shared_ptr<SessionCredit> credit;
  std::shared_ptr<HeldHiddenStates> held;
};

struct OpenedSession {
  std::shared_ptr<Head> head;
  Head::SessionInfo info;
  bool is_new = false;  // made by this call
  int64_t held_hidden_bytes = 0;
};

struct CopiedHead {
  std::shared_ptr<Head> head;
  uint64_t weight_version = 0;  // that it began with, which was the source's
};

// What a head went through, and has in its window.
struct CheckpointPast {
  std::string incarnation = {};  // of the server; empty: any
  std::optional<uint64_t> restores = {};
  uint64_t history = 0;                  // of the set; 0: any
  std::vector<SessionMarks> marks = {};  // Head::Save
};

struct SavedCheckpoint {
  CheckpointInfo info;
  int64_t bytes_written = 0;
  std::vector<std::string> deleted = {};  // tags, for EngineOptions::checkpoint_keep
  absl::Status not_deleted = {};          // why more of them could not be; the save is good all the same
};

// Bytes of --checkpoint_dir and of the file system that it is on; zeros without one.
struct CheckpointDisk {
  int64_t used = 0;  // by everything in the folder, as of the last call about checkpoints
  int64_t free = 0;
  int64_t total = 0;
};

struct DrainedHeads {
  std::vector<SavedCheckpoint> saved;
  std::map<std::string, absl::Status> failed;  // by head: why it could not be saved
};

// What is said of a head that is parked, or on its way back.
absl::Status ComingBack(absl::string_view name);

class Engine {
 public:
  // RESOURCE_EXHAUSTED if the device's own memory does not fit the limit.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(EngineOptions options,
                                                        std::unique_ptr<Device> device);
  // Finishes what was accepted.
  ~Engine();

  const EngineOptions& options() const { return options_; }
  const std::string& incarnation() const { return incarnation_; }
  Counters& counters() { return counters_; }
  const Counters& counters() const { return counters_; }
  const Device& device() const { return *device_; }
  Device& device() { return *device_; }
  const MemoryBudget& budget() const { return *budget_; }
  ReplicaWatch& replicas() { return replicas_; }
  const ReplicaWatch& replicas() const { return replicas_; }
  RegionTable& regions() { return regions_; }
  const RegionTable& regions() const { return regions_; }
  absl::Time started() const { return started_; }
  // Reserved memory by purpose and place, as ByPurpose() tells it.
  MemoryPlan ReservedMemory() const { return ByPurpose(budget_->Usage()); }
  // What the ranks of the device tell. One device, which is no group, is told of as if it were rank 0.
  GroupReport Group() const;

  // A payload that is about to be submitted, where the device wants it.
  Payload Staged(Payload payload) const { return engine::Staged(std::move(payload), device_.get()); }

  // Returns the existing head if its configuration is equal; ALREADY_EXISTS if it differs. Over replicas, a
  // creation in the place of an earlier head marks its checkpoints deleted, and waits for locks as
  // DeleteHead.
  absl::StatusOr<std::shared_ptr<Head>> CreateHead(const HeadConfig& config)
      ABSL_LOCKS_EXCLUDED(checkpoint_mutex_, together_mutex_);
  // It is there whole or not at all, and its weights have the source's version. The same call again, by its
  // id, answers the same, unless the copy was written to since; a head that is there otherwise is
  // ALREADY_EXISTS. Waits for the device. Errors of CreateHead and Head::CheckCopied.
  absl::StatusOr<CopiedHead> CopyHead(const HeadCopy& copy);
  // A replica's, in the place of one of another configuration. Waits until that one's memory is free.
  absl::StatusOr<std::shared_ptr<Head>> ReplaceHead(const HeadConfig& config);
  // A replica's that is to be nowhere. Its checkpoints stay as they are.
  void DropHead(const std::string& name);
  using DiscardGradient = Head::DiscardGradient;
  // If ok, `released` is called once the head's memory is free again. Where there are checkpoints it waits
  // for the disk, and for those that are being saved or restored.
  absl::Status DeleteHead(
      const std::string& name, DiscardGradient discard, std::function<void()> released = [] {})
      ABSL_LOCKS_EXCLUDED(checkpoint_mutex_, together_mutex_);
  // Does not wait. One that is parked begins to come back, and is UNAVAILABLE until it is there, with a delay
  // after which to ask again; RESOURCE_EXHAUSTED if it could not come a moment ago.
  absl::StatusOr<std::shared_ptr<Head>> FindHead(const std::string& name) ABSL_LOCKS_EXCLUDED(mutex_);
  // FindHead for those who may wait until it is there.
  absl::StatusOr<std::shared_ptr<Head>> FindHeadAndWait(const std::string& name)
      ABSL_LOCKS_EXCLUDED(create_mutex_, mutex_);
  // Without those that are parked.
  std::vector<std::shared_ptr<Head>> Heads() const ABSL_LOCKS_EXCLUDED(mutex_);

  // Parked heads (engine_parking.cc)

  // Frees the device of a head that nobody uses: all that it is waits in the host's memory, within
  // options().parking_bytes, until somebody asks for it (FindHead, CreateHead, CopyHead, checkpoints). Waits
  // for the device. Of one that is parked already it tells the same. UNIMPLEMENTED over replicas,
  // FAILED_PRECONDITION without parking_bytes, RESOURCE_EXHAUSTED if they do not suffice; errors of
  // Head::Park.
  absl::StatusOr<HeadInfo> ParkHead(const std::string& name)
      ABSL_LOCKS_EXCLUDED(checkpoint_mutex_, create_mutex_, mutex_);
  // None if it is not parked.
  std::optional<HeadInfo> FindParked(const std::string& name) const ABSL_LOCKS_EXCLUDED(mutex_);
  std::vector<HeadInfo> ParkedHeads() const ABSL_LOCKS_EXCLUDED(mutex_);
  // All heads, as they were at one moment.
  struct HeadList {
    std::vector<std::shared_ptr<Head>> here;
    std::map<std::string, std::shared_ptr<const ParkedHead>> parked;
  };
  HeadList AllHeads() const ABSL_LOCKS_EXCLUDED(mutex_);
  const MemoryBudget& parking() const { return *parking_; }

  absl::StatusOr<OpenedSession> OpenSession(const std::string& head, const SessionRequest& request);
  absl::Status CloseSession(const std::string& session_id);
  // ABORTED if `incarnation` is not this server's.
  absl::StatusOr<FoundSession> FindSession(const std::string& session_id,
                                           const std::string& incarnation) const;
  int64_t sessions() const;
  // What open sessions hold of options().staging_bytes.
  int64_t staging_reserved() const;
  std::map<std::string, int64_t> StagingByHead() const;  // the same, of every head there is
  // RESOURCE_EXHAUSTED, with a delay, while there are as many streams as there may be.
  absl::Status CheckStreams(absl::string_view field);
  // Room for one more stream of this head's rows, which may hold `bytes` until the answer is dropped.
  // RESOURCE_EXHAUSTED, with a delay, if streams or staging are used up; a head's only one is never refused.
  absl::StatusOr<std::shared_ptr<const void>> TakeRowStream(const Head& head, int64_t bytes);
  const RowStreams& row_streams() const { return row_streams_; }
  // Closes sessions whose lease has ended, and ends waits for places (Head::ResumeStalled).
  void ExpireSessions();

  // Checkpoints (engine_checkpoints.cc). They wait for the disk, and are made one at a time.

  // `expected`: what the caller knows of the head; ABORTED if it is another one's past by now, and as
  // Head::Save if its window is another one.
  absl::StatusOr<SavedCheckpoint> SaveCheckpoint(const std::string& head, const std::string& tag,
                                                 const CheckpointPast& expected = {});
  // The newest if `tag` is empty. A head that is not there is created. If an error does not say otherwise
  // (DATA_LOSS of a restore that broke off), nothing has changed.
  absl::StatusOr<CheckpointInfo> RestoreCheckpoint(const std::string& head, const std::string& tag);
  absl::StatusOr<std::vector<CheckpointInfo>> ListCheckpoints(const std::string& head);
  // For good. Of heads that are not there, too.
  absl::StatusOr<DeletedCheckpoint> DeleteCheckpoint(const std::string& head, const std::string& tag);
  // A replica's: what a restore of all of them has put here counts from now on (Head::InstallRestoredPart).
  void InstallRestored(Head& head) ABSL_LOCKS_EXCLUDED(mutex_);
  // At the coordinator, when all have met: heads of which they are not alike go back to their newest
  // checkpoints. One that has none, or was deleted, is gone at all of them, and so is one without weights
  // whose newest cannot be restored. If that of another head cannot, this fails, and that head keeps what it
  // has: no older one is taken unasked. ReplicaLost if one is lost meanwhile. Waits for a save, a restore or
  // a deletion that is under way.
  struct Others {
    std::function<absl::StatusOr<JointReplicas>(const Head&)> replicas;
    // ReplaceHead, and DropHead, at all others.
    std::function<absl::Status(const HeadConfig&)> create;
    std::function<absl::Status(const std::string& name)> drop;
  };
  struct GoneHead {
    std::string head;
    absl::Status why;  // its newest checkpoint cannot be restored; ok: it has none
  };
  struct WentBack {
    std::vector<CheckpointInfo> restored;
    std::vector<GoneHead> gone;
  };
  absl::StatusOr<WentBack> GoBack(const Agreement& agreement, const Others& others)
      ABSL_LOCKS_EXCLUDED(checkpoint_mutex_);
  // At the coordinator: whether the head has no weights and its newest checkpoint has, or cannot be read,
  // since a restore that created it broke off. It goes back then, however alike its replicas are. Waits as
  // GoBack.
  bool IsHalfRestored(const Head& head) ABSL_LOCKS_EXCLUDED(checkpoint_mutex_);
  // Ends the waits of all heads for other replicas, once the epoch is over (Head::LeaveEpoch).
  void LeaveEpoch();
  // Does not wait for what is being saved.
  CheckpointDisk ReadCheckpointDisk() const;
  // Saves every head, when nothing comes any more: another engine with this incarnation and what this leaves
  // behind in the folder goes on as if nothing had happened. Heads that cannot be saved keep no other from
  // it.
  absl::StatusOr<DrainedHeads> SaveForDrain();
  // Before anything comes: the heads of that drain, or without one those that the folder has, as of their
  // newest checkpoints. Over replicas, once all have met: those that none of them has.
  absl::StatusOr<std::vector<CheckpointInfo>> RestoreAtStart(const std::optional<DrainRecord>& drain);

  // From now on no session is opened, no stream attached and no chunk taken: UNAVAILABLE.
  void BeginDrain();
  bool draining() const { return draining_; }
  absl::Status CheckServing() const;
  // RESOURCE_EXHAUSTED with a delay that grows with the number of those that are refused.
  absl::Status Overload(absl::string_view field, absl::string_view message);
  // Waits until everything accepted so far has been applied and answered.
  void WaitIdle() { scheduler_.Flush(); }
  // Waits for what replicas exchange or publish, as far as it was asked for (Head::SumPart, StepPart,
  // PublishPrepared), and for a save, a restore or a deletion that has begun.
  void AwaitExchanges() ABSL_LOCKS_EXCLUDED(checkpoint_mutex_);
  // The device has failed where no head has asked for anything. The first failure of all is told
  // (EngineOptions::on_device_failure).
  void OnDeviceFailure(const absl::Status& status);
  // One turn of the device's loop, where nobody else runs it (EngineOptions::device_loop).
  void StepDevice() { scheduler_.Step(); }

 private:
  // Checkpoints of an earlier head of the name.
  enum class Earlier { kStay, kMarkDeleted };
  // CreateOne makes a head at this replica. Together has all replicas make it, and calls `here` once.
  using CreateOne = absl::FunctionRef<absl::StatusOr<std::shared_ptr<Head>>()>;
  using Together = absl::FunctionRef<absl::Status(absl::FunctionRef<absl::Status()> here)>;
  absl::StatusOr<std::shared_ptr<Head>> CreateTogether(const std::string& name, CreateOne create_here,
                                                       Together together)
      ABSL_LOCKS_EXCLUDED(checkpoint_mutex_, together_mutex_);
  absl::StatusOr<std::shared_ptr<Head>> CreateAtAll(const std::string& name, Earlier earlier,
                                                    CreateOne create_here, Together together)
      ABSL_LOCKS_EXCLUDED(together_mutex_);
  absl::StatusOr<std::shared_ptr<Head>> CreateHere(const HeadConfig& config);
  absl::Status CheckCreated(const HeadConfig& config) const;
  int64_t OtherHeads(const std::string& name) const ABSL_LOCKS_EXCLUDED(mutex_);
  // One that is not among heads_ yet.
  absl::StatusOr<std::shared_ptr<Head>> MakeHead(const HeadConfig& config)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(create_mutex_) ABSL_LOCKS_EXCLUDED(mutex_);
  void AddHead(const std::shared_ptr<Head>& head) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<CopiedHead> CopyHere(const HeadCopy& copy) ABSL_LOCKS_EXCLUDED(create_mutex_, mutex_);
  absl::StatusOr<CopiedHead> MakeCopy(Head& source, const HeadCopy& copy)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(create_mutex_) ABSL_LOCKS_EXCLUDED(mutex_);
  Engine(EngineOptions options, std::unique_ptr<Device> device);

  // Not one that is parked: UNAVAILABLE.
  absl::StatusOr<std::shared_ptr<Head>> FindHere(const std::string& name) const ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<std::shared_ptr<Head>> FindHereLocked(const std::string& name) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckParks() const;
  absl::Status CheckNotAwaited(const std::string& name) const ABSL_LOCKS_EXCLUDED(mutex_);
  struct ParkedEntry {
    std::shared_ptr<const ParkedHead> head;
    int64_t checkpoint_steps = 0;  // Head's
    bool coming_back = false;
    absl::Status failure = {};  // of the last time that it was to come back
    absl::Time failed_at = absl::InfinitePast();
    std::vector<Student> waiting = {};  // AwaitHead
  };
  // Waits for the device. Nothing of a head that is not parked.
  absl::Status BringBack(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(create_mutex_)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<std::shared_ptr<Head>> Revive(std::shared_ptr<const ParkedHead> parked)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(create_mutex_) ABSL_LOCKS_EXCLUDED(mutex_);
  // Has one that is parked come back. Not ok if it could not a moment ago.
  absl::Status BeginReturnLocked(const std::string& name, ParkedEntry* entry)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // HeadEnvironment::await_head.
  bool AwaitHead(const std::string& name, const Student& student) ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether there was one.
  absl::StatusOr<bool> DeleteParked(const std::string& name, DiscardGradient discard)
      ABSL_LOCKS_EXCLUDED(create_mutex_, mutex_);
  void ResumeAside(std::vector<Student> students);
  absl::StatusOr<SavedCheckpoint> SaveParked(const ParkedHead& parked)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(checkpoint_mutex_);
  absl::StatusOr<SavedCheckpoint> SaveParkedUncounted(const ParkedHead& parked)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(checkpoint_mutex_);
  absl::StatusOr<SavedCheckpoint> Counted(absl::Time begun, absl::StatusOr<SavedCheckpoint> saved);
  absl::StatusOr<bool> ParkDrained(CheckpointReader& reader) ABSL_LOCKS_EXCLUDED(mutex_);
  static void ReleaseEnded(Head& head);
  void ForgetFailures() ABSL_LOCKS_EXCLUDED(mutex_);
  HeadList HeadsToDrain() ABSL_LOCKS_EXCLUDED(create_mutex_, mutex_);

  // What OpenSession does once it has found what a deterministic session needs: the memory, for the head that
  // it was taken of.
  absl::StatusOr<OpenedSession> OpenSessionWith(SessionMemory memory, const std::shared_ptr<Head>& of_memory,
                                                const std::string& head_name, const SessionRequest& request)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Check(const SessionRequest& request) const;
  absl::Status AdmitLocked(const Head& head, const SessionRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string StagingObstacleLocked(const Head& head, int64_t bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AddSessionLocked(const std::string& id, std::shared_ptr<Head> head, int32_t lanes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t HoldLocked(const Head& head, const std::string& session_id, int64_t wanted)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status DeleteAtAll(const std::string& name, DiscardGradient discard,
                           const std::function<void()>& released)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(checkpoint_mutex_) ABSL_LOCKS_EXCLUDED(together_mutex_);
  // From this server alone; its checkpoints stay, but no start brings it back.
  absl::Status DeleteHere(const std::string& name, DiscardGradient discard, std::function<void()> released)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(checkpoint_mutex_);
  // The head, and nothing of what the disk has of it.
  absl::Status RemoveHead(const std::string& name, DiscardGradient discard, std::function<void()> released)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status CloseSession(const std::string& session_id, std::optional<absl::Time> idle_since)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // What the session needs if it is a new one: a gradient, and memory for tiles. Nothing for frozen heads.
  absl::StatusOr<SessionMemory> MemoryOf(Head& head, const std::string& client_key, int32_t rank)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(create_mutex_);
  absl::StatusOr<SessionMemory> TakeMemory(const HeadConfig& config)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(create_mutex_);
  absl::Status CheckPast(const Head& head, const CheckpointPast& expected) const;
  using Marks = std::vector<SessionMarks>;
  absl::StatusOr<SavedCheckpoint> Save(Head& head, const std::string& tag, Head::SaveAs as,
                                       const Marks& named = {})
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(checkpoint_mutex_);
  absl::StatusOr<SavedCheckpoint> SaveUncounted(Head& head, const std::string& tag, Head::SaveAs as,
                                                const Marks& named)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(checkpoint_mutex_);
  absl::StatusOr<SavedCheckpoint> Commit(Head& head, CheckpointWriter& writer, HeadCheckpoint checkpoint)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(checkpoint_mutex_);
  // Saves by EngineOptions::checkpoint_steps (engine_step_saves.cc).
  absl::StatusOr<std::shared_ptr<StepSaver>> MakeStepSaver(const HeadConfig& config,
                                                           const HeadBackend& backend);
  void OnStepSave(std::shared_ptr<Head> head, StepSaver::Due due);
  // Writes what is pending of this head, if anything is.
  void WriteStepSave(Head& head) ABSL_EXCLUSIVE_LOCKS_REQUIRED(checkpoint_mutex_) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<SavedCheckpoint> WriteStepSaveUncounted(Head& head, const StepSaver::Pending& pending)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(checkpoint_mutex_);
  absl::StatusOr<HeadCheckpoint> WriteStepOfAll(Head& head, const StepSaver::Pending& pending,
                                                StateSink* sink)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(checkpoint_mutex_);
  // CANCELLED if nobody wants it any more.
  absl::Status CheckStepSave(const Head& head, const StepSaver::Pending& pending) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  void DeleteBeyondKept(int64_t keep, SavedCheckpoint* saved)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(checkpoint_mutex_);
  void MeasureCheckpoints() ABSL_EXCLUSIVE_LOCKS_REQUIRED(checkpoint_mutex_);
  absl::StatusOr<CheckpointInfo> Restore(CheckpointReader reader, Head::RestoreAs as)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(checkpoint_mutex_);
  absl::StatusOr<CheckpointInfo> RestoreUncounted(CheckpointReader reader, Head::RestoreAs as)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(checkpoint_mutex_);
  absl::StatusOr<CheckpointInfo> MarkRestored(Head& head, const CheckpointReader& reader)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(checkpoint_mutex_);
  absl::StatusOr<std::vector<SessionMemory>> MissingMemory(const Head& head, const HeadCheckpoint& checkpoint)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(checkpoint_mutex_) ABSL_LOCKS_EXCLUDED(create_mutex_);
  absl::StatusOr<FileKeys> TryToRestore(Head& head, Head::RestoreAs as, const RestoreNumbers& numbers,
                                        const std::shared_ptr<const CheckpointReader>& reader)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(checkpoint_mutex_) ABSL_LOCKS_EXCLUDED(create_mutex_);
  absl::Status RestoreTo(Head& head, const std::shared_ptr<const CheckpointReader>& reader,
                         Head::RestoreAs as, const Others& others)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(checkpoint_mutex_);
  // Drops, at all replicas, the head that a failed restore has created.
  void DropCreated(const Head& head, const Others& others) ABSL_EXCLUSIVE_LOCKS_REQUIRED(checkpoint_mutex_)
      ABSL_LOCKS_EXCLUDED(together_mutex_);
  // Whether a start, or a meeting of replicas, would restore a checkpoint of the head.
  absl::StatusOr<bool> HasLiveCheckpoints(const std::string& head) const;
  // NOT_FOUND for a head that has nothing to go back to.
  absl::StatusOr<CheckpointReader> NewestWithWeights(const std::string& head)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(checkpoint_mutex_);
  absl::StatusOr<CheckpointInfo> GoBackTo(CheckpointReader found, const Others& others)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(checkpoint_mutex_);
  void AdoptSessions(const Head& head) ABSL_LOCKS_EXCLUDED(mutex_);
  // Not ok where checkpoints are another server's to keep, or nobody's.
  absl::Status CheckKeepsCheckpoints() const;
  bool IsAtOthers(const std::string& name) const ABSL_LOCKS_EXCLUDED(mutex_);
  // EngineOptions'.
  Others ConfiguredOthers();
  absl::StatusOr<HeadCheckpoint> WriteState(Head& head, Head::SaveAs as, const Marks& named, StateSink* sink);
  absl::StatusOr<HeadCheckpoint> WriteStateOfAll(Head& head, const Marks& named, SavedWindow window,
                                                 StateSink* sink);
  absl::StatusOr<FileKeys> RestoreHere(Head& head, Head::RestoreAs as, const RestoreNumbers& numbers,
                                       const std::shared_ptr<const CheckpointReader>& reader)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(checkpoint_mutex_);
  absl::StatusOr<FileKeys> RestoreAll(Head& head, const RestoreNumbers& numbers,
                                      const std::shared_ptr<const CheckpointReader>& reader,
                                      const Others& others) ABSL_EXCLUSIVE_LOCKS_REQUIRED(checkpoint_mutex_);
  int64_t StagingOfLocked(const Head* head) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What a session with so many lanes may have under way.
  int64_t CreditOf(int32_t lanes) const;

  struct SessionEntry {
    std::shared_ptr<Head> head;
    std::shared_ptr<SessionCredit> credit;
    std::shared_ptr<HeldHiddenStates> held;

    int64_t staging_bytes() const { return credit->limit() + held->limit(); }
  };

  const EngineOptions options_;
  const std::string incarnation_;
  const absl::Time started_;
  Counters counters_;
  ReplicaWatch replicas_;
  std::atomic<bool> draining_ = false;
  const std::shared_ptr<std::optional<absl::Time>> device_done_ =
      std::make_shared<std::optional<absl::Time>>();
  std::atomic<bool> device_failed_ = false;

  const std::shared_ptr<MemoryBudget> budget_;
  const std::shared_ptr<MemoryBudget> parking_;
  const std::unique_ptr<Device> device_;
  std::unique_ptr<MemoryReservation> device_reservation_;
  RegionTable regions_;

  Mutex checkpoint_mutex_ ABSL_ACQUIRED_BEFORE(together_mutex_, create_mutex_, mutex_);
  // One creation or deletion at all replicas at a time.
  Mutex together_mutex_ ABSL_ACQUIRED_BEFORE(create_mutex_, mutex_);
  Mutex create_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  mutable Mutex mutex_;
  std::map<std::string, std::shared_ptr<Head>> heads_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, ParkedEntry> parked_ ABSL_GUARDED_BY(mutex_);
  // Heads that have come back for somebody who has not found them since, and until when that is waited for.
  std::map<std::string, absl::Time> awaited_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, SessionEntry> sessions_ ABSL_GUARDED_BY(mutex_);
  int64_t staging_reserved_ ABSL_GUARDED_BY(mutex_) = 0;  // by all sessions
  RowStreams row_streams_;
  RetrySlots retry_slots_;

  BatchScheduler scheduler_;  // its thread stops before what it uses goes
  WorkerPool returns_{1};     // heads come back one at a time; they need all the rest
  WorkerPool step_saves_{1};  // writes them; needs all the rest
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_ENGINE_H_
