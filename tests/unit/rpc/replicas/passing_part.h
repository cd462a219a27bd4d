// A replica that a test changes in one respect.
#ifndef LOSSD_TESTS_UNIT_RPC_REPLICAS_PASSING_PART_H_
#define LOSSD_TESTS_UNIT_RPC_REPLICAS_PASSING_PART_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/replicas/joint_checkpoint.h"

namespace lossd::rpc::replica_set_test {

// Passes everything on to `part`.
class PassingPart : public engine::ReplicaPart {
 public:
  explicit PassingPart(std::shared_ptr<engine::ReplicaPart> part) : part_(std::move(part)) {}

  void Seal(const engine::WindowEnd& end,
            std::function<void(absl::StatusOr<engine::SealedWindow>)> done) override {
    part_->Seal(end, std::move(done));
  }
  void Sum(const engine::JointSum& sum,
           std::function<void(absl::StatusOr<engine::GradientStats>)> done) override {
    part_->Sum(sum, std::move(done));
  }
  void Step(const engine::JointStep& step, Done done) override { part_->Step(step, std::move(done)); }
  void Reopen(const absl::Status& why, Done done) override { part_->Reopen(why, std::move(done)); }
  void Hold(const engine::FlushInfo& flush, Done done) override { part_->Hold(flush, std::move(done)); }
  void EndFlush(const std::string& flush_id, engine::FlushFate fate, Done done) override {
    part_->EndFlush(flush_id, fate, std::move(done));
  }
  void Capture(const engine::WindowPlace& place, const std::vector<engine::SessionMarks>& named,
               std::function<void(absl::StatusOr<engine::HeadCheckpoint>)> done) override {
    part_->Capture(place, named, std::move(done));
  }
  void SumCaptured(Done done) override { part_->SumCaptured(std::move(done)); }
  void Release(Done done) override { part_->Release(std::move(done)); }
  void ReadRows(const engine::PartRows& rows,
                std::function<void(absl::StatusOr<std::string>)> done) override {
    part_->ReadRows(rows, std::move(done));
  }
  void BeginRestore(std::function<void(absl::StatusOr<engine::RestoringPart>)> done) override {
    part_->BeginRestore(std::move(done));
  }
  void WriteRows(const engine::PartRows& rows, std::string bytes, Done done) override {
    part_->WriteRows(rows, std::move(bytes), std::move(done));
  }
  void FinishRestore(const engine::RestoredPart& part, Done done) override {
    part_->FinishRestore(part, std::move(done));
  }
  void CancelRestore(Done done) override { part_->CancelRestore(std::move(done)); }
  void InstallRestored(Done done) override { part_->InstallRestored(std::move(done)); }

 private:
  const std::shared_ptr<engine::ReplicaPart> part_;
};

}  // namespace lossd::rpc::replica_set_test

#endif  // LOSSD_TESTS_UNIT_RPC_REPLICAS_PASSING_PART_H_
