#include "server/rpc/replicas/part_commands.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lossd/group/v1/replica.pb.h"
#include "server/engine/common/monotonic_clock.h"
#include "server/rpc/replicas/part_checkpoints.h"
#include "server/rpc/replicas/replica_wire.h"
#include "server/rpc/replicas/replies.h"

namespace lossd::rpc {
namespace {

using group::v1::ReplicaCommand;
using Replicas = std::shared_ptr<const engine::ReplicaCommunicators>;
using FoundHead = std::shared_ptr<engine::Head>;

void Do(const FoundHead& head, const group::v1::SealWindow& seal, GroupMember::Reply reply) {
  if (seal.fingerprint() != FingerprintOf(head->config())) {
    return reply(absl::FailedPreconditionError(
        absl::StrCat("head ", head->config().name, " has another configuration here than at replica ",
                     engine::ReplicaPlace::kCoordinator)));
  }
  head->SealPart(ToEnd(seal), [reply = std::move(reply)](const absl::StatusOr<engine::SealedWindow>& window) {
    if (!window.ok()) return reply(window.status());
    group::v1::Sealed sealed;
    sealed.set_window_tokens(window->tokens);
    sealed.mutable_ranks()->Add(window->ranks.begin(), window->ranks.end());
    reply(sealed.SerializeAsString());
  });
}

void Do(const FoundHead& head, const group::v1::SumWindow& sum, const Replicas& replicas,
        GroupMember::Reply reply) {
  head->SumPart({sum.window_tokens(), {sum.sessions().begin(), sum.sessions().end()}}, replicas,
                [reply = std::move(reply)](const absl::StatusOr<engine::GradientStats>& stats) {
                  if (!stats.ok()) return reply(stats.status());
                  group::v1::JointStep summed;
                  ToProto(engine::JointStep{.stats = *stats}, &summed);
                  reply(summed.SerializeAsString());
                });
}

void Do(const FoundHead& head, const group::v1::StepWindow& command, const Replicas& replicas,
        GroupMember::Reply reply) {
  const engine::JointStep step = ToEngine(command.step());
  head->StepPart(step, replicas, [head, step, reply = std::move(reply)](const absl::Status& stepped) {
    if (!stepped.ok()) return reply(stepped);
    head->PublishPart(step);
    reply("");
  });
}

void Do(const FoundHead& head, const group::v1::HeldRows& rows, GroupMember::Reply reply) {
  head->ReadPartRows(ToEngine(rows), std::move(reply));
}

void Do(const FoundHead& head, const group::v1::WriteHeldRows& write, GroupMember::Reply reply) {
  head->WritePartRows(ToEngine(write.rows()), write.data(), Replied(std::move(reply)));
}

// None for what takes no part in the end of a window.
std::optional<engine::ReplicaPhase> PhaseOf(const ReplicaCommand& command) {
  if (command.has_seal()) return engine::ReplicaPhase::kSeal;
  if (command.has_sum()) return engine::ReplicaPhase::kSum;
  if (command.has_step()) return engine::ReplicaPhase::kStep;
  const bool flushes = command.has_hold() || command.has_end_flush();
  if (flushes) return engine::ReplicaPhase::kFlush;
  return std::nullopt;
}

// Notes how long it has taken when it is done.
GroupMember::Reply Timed(engine::ReplicaWatch& watch, engine::ReplicaPhase phase, GroupMember::Reply reply) {
  return [&watch, phase, asked = engine::MonotonicNow(),
          reply = std::move(reply)](const absl::StatusOr<std::string>& data) {
    if (data.ok()) watch.NotePhase(phase, engine::MonotonicNow() - asked);
    reply(data);
  };
}

}  // namespace

void DoPart(engine::Engine& engine, const Replicas& replicas, const ReplicaCommand& command,
            GroupMember::Reply reply, std::function<void(const absl::Status& why)> lose) {
  if (command.has_sum() || command.has_step() || IsExchange(command.checkpoint())) {
    reply = [reply = std::move(reply), lose = std::move(lose)](const absl::StatusOr<std::string>& data) {
      if (!data.ok()) lose(data.status());
      reply(data);
    };
  }
  if (const std::optional<engine::ReplicaPhase> phase = PhaseOf(command); phase.has_value()) {
    reply = Timed(engine.replicas(), *phase, std::move(reply));
  }
  const absl::StatusOr<FoundHead> head = engine.FindHead(command.head());
  if (!head.ok()) return reply(head.status());
  switch (command.command_case()) {
    case ReplicaCommand::kSeal:
      return Do(*head, command.seal(), std::move(reply));
    case ReplicaCommand::kSum:
      return Do(*head, command.sum(), replicas, std::move(reply));
    case ReplicaCommand::kStep:
      return Do(*head, command.step(), replicas, std::move(reply));
    case ReplicaCommand::kReopen:
      (*head)->ReopenPart(absl::AbortedError(command.reopen().why()));
      return reply("");
    case ReplicaCommand::kHold:
      return Replied(std::move(reply))((*head)->HoldPart(ToEngine(command.hold())));
    case ReplicaCommand::kEndFlush:
      return Replied(std::move(reply))((*head)->EndFlushPart(
          command.end_flush().flush_id(),
          command.end_flush().commit() ? engine::FlushFate::kCommit : engine::FlushFate::kAbort));
    case ReplicaCommand::kReadRows:
      return Do(*head, command.read_rows(), std::move(reply));
    case ReplicaCommand::kWriteRows:
      return Do(*head, command.write_rows(), std::move(reply));
    case ReplicaCommand::kCheckpoint:
      return DoCheckpointPart(engine, *head, replicas, command.checkpoint(), std::move(reply));
    default:
      return reply(absl::InternalError("a command says nothing that is known here"));
  }
}

}  // namespace lossd::rpc
