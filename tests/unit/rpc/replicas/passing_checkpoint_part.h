// A replica's part in checkpoints that a test changes in one respect.
#ifndef LOSSD_TESTS_UNIT_RPC_REPLICAS_PASSING_CHECKPOINT_PART_H_
#define LOSSD_TESTS_UNIT_RPC_REPLICAS_PASSING_CHECKPOINT_PART_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/replicas/joint_checkpoint.h"

namespace lossd::rpc::replica_set_test {

// Passes everything on to `part`.
class PassingCheckpointPart : public engine::CheckpointPart {
 public:
  explicit PassingCheckpointPart(std::shared_ptr<engine::CheckpointPart> part) : part_(std::move(part)) {}

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
  const std::shared_ptr<engine::CheckpointPart> part_;
};

}  // namespace lossd::rpc::replica_set_test

#endif  // LOSSD_TESTS_UNIT_RPC_REPLICAS_PASSING_CHECKPOINT_PART_H_
