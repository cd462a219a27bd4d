// Both ends of what the coordinator asks replicas for when it saves or restores all of them.
#include "server/rpc/replicas/part_checkpoints.h"

#include <cstddef>
#include <span>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lossd/group/v1/replica.pb.h"
#include "server/engine/checkpoint/checkpoint_manifest.h"
#include "server/rpc/convert/convert.h"
#include "server/rpc/replicas/remote_part.h"
#include "server/rpc/replicas/replica_wire.h"
#include "server/rpc/replicas/replies.h"

namespace lossd::rpc {
namespace {

using group::v1::CheckpointCommand;
using group::v1::ReplicaCommand;
using FoundHead = std::shared_ptr<engine::Head>;
using Replicas = std::shared_ptr<const engine::ReplicaCommunicators>;

// A checkpoint's files are the coordinator's to read.
class NoFiles : public engine::StateSource {
 public:
  explicit NoFiles(engine::HeadCheckpoint state) : state_(std::move(state)) {}
  const engine::HeadCheckpoint& checkpoint() const override { return state_; }
  absl::Status Read(const std::string& name, int64_t /*offset*/,
                    std::span<std::byte> /*out*/) const override {
    return absl::InternalError(absl::StrCat("file ", name, " of a checkpoint is not at this replica"));
  }

 private:
  const engine::HeadCheckpoint state_;
};

void Capture(const FoundHead& head, const group::v1::CapturePart& capture, GroupMember::Reply reply) {
  head->CapturePart({.generation = capture.generation(),
                     .weight_version = capture.weight_version(),
                     .optimizer_steps = capture.optimizer_steps(),
                     .restores = capture.restores(),
                     .flush_id = capture.flush_id()},
                    ToEngine(capture.marks()),
                    [reply = std::move(reply)](const absl::StatusOr<engine::HeadCheckpoint>& state) {
                      if (!state.ok()) return reply(state.status());
                      reply(engine::StateToText(*state));
                    });
}

void BeginRestore(const FoundHead& head, const group::v1::BeginRestore& begin, GroupMember::Reply reply) {
  if (begin.fingerprint() != FingerprintOf(head->config())) {
    return reply(absl::FailedPreconditionError(
        absl::StrCat("head ", head->config().name, " has another configuration here than at replica ",
                     engine::ReplicaPlace::kCoordinator)));
  }
  head->BeginRestorePart([reply = std::move(reply)](const absl::StatusOr<engine::RestoringPart>& part) {
    if (!part.ok()) return reply(part.status());
    group::v1::RestoringPart restoring;
    restoring.set_incarnation(part->incarnation);
    restoring.set_weight_version(part->weight_version);
    reply(restoring.SerializeAsString());
  });
}

void FinishRestore(const FoundHead& head, const Replicas& replicas, const group::v1::FinishRestore& finish,
                   GroupMember::Reply reply) {
  absl::StatusOr<engine::HeadCheckpoint> state = engine::ParseState(finish.state());
  if (!state.ok()) return reply(state.status());
  auto files = std::make_shared<NoFiles>(*state);
  engine::RestoredPart part{.state = *std::move(state),
                            .numbers = {finish.restores(), finish.weight_version()}};
  head->FinishRestorePart(part, std::move(files), replicas, Replied(std::move(reply)));
}

ReplicaCommand CommandOf(const CheckpointCommand& part) {
  ReplicaCommand command;
  *command.mutable_checkpoint() = part;
  return command;
}

}  // namespace

bool IsExchange(const CheckpointCommand& part) {
  return part.has_sum_captured() || part.has_finish_restore() || part.has_install_restored();
}

void DoCheckpointPart(engine::Engine& engine, const FoundHead& head, const Replicas& replicas,
                      const CheckpointCommand& part, GroupMember::Reply reply) {
  switch (part.part_case()) {
    case CheckpointCommand::kCapture:
      return Capture(head, part.capture(), std::move(reply));
    case CheckpointCommand::kSumCaptured:
      return head->SumCapturedPart(replicas, Replied(std::move(reply)));
    case CheckpointCommand::kRelease:
      head->ReleaseCaptured();
      return reply("");
    case CheckpointCommand::kBeginRestore:
      return BeginRestore(head, part.begin_restore(), std::move(reply));
    case CheckpointCommand::kFinishRestore:
      return FinishRestore(head, replicas, part.finish_restore(), std::move(reply));
    case CheckpointCommand::kCancelRestore:
      head->CancelRestorePart();
      return reply("");
    case CheckpointCommand::kInstallRestored:
      engine.InstallRestored(*head);
      return reply("");
    case CheckpointCommand::PART_NOT_SET:
      return reply(absl::InternalError("a command about a checkpoint says nothing"));
  }
}

void RemotePart::Capture(const engine::WindowPlace& place, const std::vector<engine::SessionMarks>& named,
                         std::function<void(absl::StatusOr<engine::HeadCheckpoint>)> done) {
  CheckpointCommand part;
  group::v1::CapturePart& capture = *part.mutable_capture();
  capture.set_generation(place.generation);
  capture.set_weight_version(place.weight_version);
  capture.set_optimizer_steps(place.optimizer_steps);
  capture.set_restores(place.restores);
  capture.set_flush_id(place.flush_id);
  ToProto(named, capture.mutable_marks());
  Ask("CapturePart", CommandOf(part), [done = std::move(done)](const absl::StatusOr<std::string>& data) {
    if (!data.ok()) return done(data.status());
    done(engine::ParseState(*data));
  });
}

void RemotePart::SumCaptured(Done done) {
  CheckpointCommand part;
  part.mutable_sum_captured();
  Ask("SumCaptured", CommandOf(part), WithoutData(std::move(done)));
}

void RemotePart::Release(Done done) {
  CheckpointCommand part;
  part.mutable_release();
  Ask("ReleaseCaptured", CommandOf(part), WithoutData(std::move(done)));
}

void RemotePart::BeginRestore(std::function<void(absl::StatusOr<engine::RestoringPart>)> done) {
  CheckpointCommand part;
  part.mutable_begin_restore()->set_fingerprint(fingerprint_);
  Ask("BeginRestore", CommandOf(part), [done = std::move(done)](const absl::StatusOr<std::string>& data) {
    if (!data.ok()) return done(data.status());
    group::v1::RestoringPart restoring;
    if (!restoring.ParseFromString(*data)) return done(absl::InternalError("an answer cannot be read"));
    done(engine::RestoringPart{restoring.incarnation(), restoring.weight_version()});
  });
}

void RemotePart::FinishRestore(const engine::RestoredPart& part, Done done) {
  const absl::StatusOr<std::string> state = engine::StateToText(part.state);
  if (!state.ok()) return done(state.status());
  CheckpointCommand command;
  group::v1::FinishRestore& finish = *command.mutable_finish_restore();
  finish.set_state(*state);
  finish.set_restores(part.numbers.restores);
  finish.set_weight_version(part.numbers.weight_version);
  Ask("FinishRestore", CommandOf(command), WithoutData(std::move(done)));
}

void RemotePart::CancelRestore(Done done) {
  CheckpointCommand part;
  part.mutable_cancel_restore();
  Ask("CancelRestore", CommandOf(part), WithoutData(std::move(done)));
}

void RemotePart::InstallRestored(Done done) {
  CheckpointCommand part;
  part.mutable_install_restored();
  Ask("InstallRestored", CommandOf(part), WithoutData(std::move(done)));
}

}  // namespace lossd::rpc
