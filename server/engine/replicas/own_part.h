// The coordinator's own replica of a head. What replicas do one after the other, where the coordinator comes
// last, does nothing here: whoever asks all of them does it at the head when the others have.
#ifndef LOSSD_SERVER_ENGINE_REPLICAS_OWN_PART_H_
#define LOSSD_SERVER_ENGINE_REPLICAS_OWN_PART_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/device/replica_communicators.h"
#include "server/engine/head/head.h"
#include "server/engine/head/replica/replica_part.h"

namespace lossd::engine {

class OwnPart : public ReplicaPart {
 public:
  // `source`: where the gradient of a restore is read from; null where nothing is restored.
  OwnPart(std::shared_ptr<Head> head, std::shared_ptr<const ReplicaCommunicators> replicas,
          std::shared_ptr<const StateSource> source = nullptr)
      : head_(std::move(head)), replicas_(std::move(replicas)), source_(std::move(source)) {}

  void Seal(const WindowEnd& end, std::function<void(absl::StatusOr<SealedWindow>)> done) override {
    head_->SealPart(end, done);
  }
  void Sum(const JointSum& sum, std::function<void(absl::StatusOr<GradientStats>)> done) override {
    head_->SumPart(sum, replicas_, std::move(done));
  }
  void Step(const JointStep& step, Done done) override { head_->StepPart(step, replicas_, std::move(done)); }
  void Reopen(const absl::Status& /*why*/, Done done) override { done(absl::OkStatus()); }
  void Hold(const FlushInfo& /*flush*/, Done done) override { done(absl::OkStatus()); }
  void EndFlush(const std::string& /*flush_id*/, FlushFate /*fate*/, Done done) override {
    done(absl::OkStatus());
  }

  void ReadRows(const PartRows& rows, std::function<void(absl::StatusOr<std::string>)> done) override {
    head_->ReadPartRows(rows, std::move(done));
  }
  void WriteRows(const PartRows& rows, std::string bytes, Done done) override {
    head_->WritePartRows(rows, std::move(bytes), std::move(done));
  }

  void Capture(const WindowPlace& place, const std::vector<SessionMarks>& named,
               std::function<void(absl::StatusOr<HeadCheckpoint>)> done) override {
    head_->CapturePart(place, named, std::move(done));
  }
  void SumCaptured(Done done) override { head_->SumCapturedPart(replicas_, std::move(done)); }
  void Release(Done done) override {
    head_->ReleaseCaptured();
    done(absl::OkStatus());
  }
  void BeginRestore(std::function<void(absl::StatusOr<RestoringPart>)> done) override {
    head_->BeginRestorePart(std::move(done));
  }
  void FinishRestore(const RestoredPart& part, Done done) override {
    head_->FinishRestorePart(part, source_, replicas_, std::move(done));
  }
  void CancelRestore(Done done) override {
    head_->CancelRestorePart();
    done(absl::OkStatus());
  }
  void InstallRestored(Done done) override { done(absl::OkStatus()); }

 private:
  const std::shared_ptr<Head> head_;
  const std::shared_ptr<const ReplicaCommunicators> replicas_;
  const std::shared_ptr<const StateSource> source_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_REPLICAS_OWN_PART_H_
