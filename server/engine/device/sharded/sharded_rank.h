// What a rank that is not the leader does: its part of every head, as the leader says.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_SHARDED_SHARDED_RANK_H_
#define LOSSD_SERVER_ENGINE_DEVICE_SHARDED_SHARDED_RANK_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/common/mutex.h"
#include "server/engine/device/sharded/shard_head.h"
#include "server/engine/device/staging.h"
#include "server/engine/group/rank_channel.h"
#include "server/engine/group/rank_payloads.h"
#include "server/engine/memory/memory_budget.h"

namespace lossd::engine {

// Threads are RankExecutor's; Report() is any thread's.
class ShardedRank : public RankExecutor {
 public:
  // `place`'s communicators outlive it. `memory_limit_bytes`: what heads and the device's own buffers may
  // take here; RESOURCE_EXHAUSTED if the latter do not fit. `memory_bound`: as in EngineOptions.
  static absl::StatusOr<std::unique_ptr<ShardedRank>> Create(std::unique_ptr<Device> device,
                                                             const RankPlace& place,
                                                             int64_t memory_limit_bytes,
                                                             const std::string& memory_bound = "");

  absl::Status Execute(GroupCommand command) override;
  absl::StatusOr<BatchProgress> Poll() override;
  void TellAnswersTo(std::function<void(AnsweredChunk)> tell) override { tell_answered_ = std::move(tell); }
  RankReport Report() const override;

  // Chunks that came to this rank. They may outlive it.
  const std::shared_ptr<RankPayloads>& payloads() const { return payloads_; }
  // Where the device copies from by itself, if it is worth it: see Staged. Any thread's.
  Payload Stage(Payload payload) const { return Staged(std::move(payload), device_.get()); }

 private:
  struct HeadEntry {
    std::unique_ptr<MemoryReservation> memory;
    std::unique_ptr<ShardHead> head;
  };
  struct GradientEntry {
    std::unique_ptr<MemoryReservation> memory;
    std::unique_ptr<Gradient> gradient;
  };

  // A chunk of a batch that this rank holds.
  struct HeldChunk {
    std::shared_ptr<RankPayload> payload;
    AnsweredChunk answer;
    ResultBytes dx;
  };
  // What a batch reads, and where its results go.
  struct Batch {
    std::vector<ChunkHeader> chunks;
    std::vector<HeldChunk> held;  // as many, or none
  };

  ShardedRank(std::unique_ptr<Device> device, const RankPlace& place, std::shared_ptr<MemoryBudget> budget);

  absl::Status Do(const CreateHeadCommand& command);
  absl::Status Do(const DeleteHeadCommand& command);
  absl::Status Do(const CreateGradientCommand& command);
  absl::Status Do(const DeleteGradientCommand& command);
  absl::Status Do(const ReadRowsCommand& command);
  absl::Status Do(const WriteRowsCommand& command);
  absl::Status Do(const RestoreStateCommand& command);
  absl::Status Do(const BlendWeightsCommand& command);
  absl::Status Do(const CopyOptimizerCommand& command);
  absl::Status Do(const ResetCommand& command);
  absl::Status Do(const FoldCommand& command);
  absl::Status Do(const SummarizeCommand& command);
  absl::Status Do(const ApplyStepCommand& command);
  absl::Status Do(const SumSlicesCommand& command);
  absl::Status Do(const AddToSumCommand& command);
  absl::Status Do(const TallySumCommand& command);
  absl::Status Do(const StepSlicesCommand& command);
  absl::Status Do(const GatherSlicesCommand& command);
  absl::Status Do(const ConnectReplicasCommand& command);
  absl::Status Do(const AbortReplicasCommand& command);
  absl::Status Do(const LogitsCommand& command);
  absl::Status Do(const PrepareTeacherCommand& command);
  absl::Status Do(const StartBatchCommand& command);
  absl::Status Do(const ReleasePayloadCommand& command);
  // Finds the tensors of its chunks, and makes places for their results.
  absl::Status Hold(const StartBatchCommand& command, const BatchKey& kind, const HeadConfig& config,
                    Batch* batch) const;
  absl::StatusOr<std::shared_ptr<RankPayload>> FindPayload(const ChunkHeader& chunk, const BatchKey& kind,
                                                           const HeadConfig& config) const;
  // Its results are final.
  void Answer(HeldChunk& chunk) const;
  absl::Status Do(const ProbeCommand& /*command*/) { return device_->RoundTrip(); }
  // The oldest batch under way is done.
  void End(const absl::StatusOr<BatchReport>& report);

  // What is found lives until the same thread deletes it.
  absl::StatusOr<ShardHead*> Find(uint64_t head) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Null for number 0, the head's own.
  absl::StatusOr<Gradient*> FindGradient(uint64_t number) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Null if it is none that this rank has; what is found may be aborted at any time.
  std::shared_ptr<ReplicaConnection> FindConnection(uint64_t number) const ABSL_LOCKS_EXCLUDED(mutex_);
  // In place of the one before, which nothing uses any more.
  void TakeConnection(uint64_t number, const std::shared_ptr<ReplicaConnection>& connection)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Does `work` with both, if they are here.
  using HeadWork = absl::FunctionRef<absl::Status(ShardHead& head, Gradient* gradient)>;
  absl::Status With(uint64_t head, uint64_t gradient, HeadWork work);
  // The same of what a head does with another one.
  using BothWork = absl::FunctionRef<absl::Status(HeadBackend& head, const HeadBackend& other)>;
  absl::Status WithBoth(uint64_t head, uint64_t other, BothWork work);

  const std::unique_ptr<Device> device_;
  const RankPlace place_;
  const std::shared_ptr<MemoryBudget> budget_;
  std::unique_ptr<MemoryReservation> device_reservation_;
  mutable Mutex mutex_;
  std::map<uint64_t, GradientEntry> gradients_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, HeadEntry> heads_ ABSL_GUARDED_BY(mutex_);
  // With the ranks of this number in the groups of other replicas.
  uint64_t connection_number_ ABSL_GUARDED_BY(mutex_) = 0;
  std::shared_ptr<ReplicaConnection> connection_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_aborted_ ABSL_GUARDED_BY(mutex_) = 0;
  const std::shared_ptr<RankPayloads> payloads_ = std::make_shared<RankPayloads>();
  std::function<void(AnsweredChunk)> tell_answered_ = [](const AnsweredChunk& /*chunk*/) {};
  std::deque<Batch> under_way_;  // batches, in their order
  BatchProgress progress_;
  absl::Status batch_failure_;  // of the first that failed
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_SHARDED_SHARDED_RANK_H_
