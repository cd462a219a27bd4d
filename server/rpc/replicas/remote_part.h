// Another server's replica of a head, as the coordinator asks it over the control stream.
#ifndef LOSSD_SERVER_RPC_REPLICAS_REMOTE_PART_H_
#define LOSSD_SERVER_RPC_REPLICAS_REMOTE_PART_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "lossd/group/v1/replica.pb.h"
#include "server/engine/head/head.h"
#include "server/engine/head/replica/replica_part.h"
#include "server/rpc/group/group_leader.h"

namespace lossd::rpc {

class RemotePart final : public engine::ReplicaPart {
 public:
  // `config`: of the coordinator's own; that of the other one is to be the same.
  RemotePart(std::shared_ptr<RankQuestions> questions, int32_t replica, const engine::HeadConfig& config);

  void Seal(const engine::WindowEnd& end,
            std::function<void(absl::StatusOr<engine::SealedWindow>)> done) override;
  void Sum(const engine::JointSum& sum,
           std::function<void(absl::StatusOr<engine::GradientStats>)> done) override;
  void Step(const engine::JointStep& step, Done done) override;
  void Reopen(const absl::Status& why, Done done) override;
  void Hold(const engine::FlushInfo& flush, Done done) override;
  void EndFlush(const std::string& flush_id, engine::FlushFate fate, Done done) override;
  void ReadRows(const engine::PartRows& rows, std::function<void(absl::StatusOr<std::string>)> done) override;
  void WriteRows(const engine::PartRows& rows, std::string bytes, Done done) override;

  // part_checkpoints.cc
  void Capture(const engine::WindowPlace& place, const std::vector<engine::SessionMarks>& named,
               std::function<void(absl::StatusOr<engine::HeadCheckpoint>)> done) override;
  void SumCaptured(Done done) override;
  void Release(Done done) override;
  void BeginRestore(std::function<void(absl::StatusOr<engine::RestoringPart>)> done) override;
  void FinishRestore(const engine::RestoredPart& part, Done done) override;
  void CancelRestore(Done done) override;
  void InstallRestored(Done done) override;

 private:
  // Names the head. `done` gets ReplicaLost, or what the replica has answered, with its number before its
  // errors.
  void Ask(const char* name, group::v1::ReplicaCommand command,
           std::function<void(const absl::StatusOr<std::string>&)> done);

  const std::shared_ptr<RankQuestions> questions_;
  const int32_t replica_;
  const std::string head_;
  const uint64_t fingerprint_;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_REPLICAS_REMOTE_PART_H_
