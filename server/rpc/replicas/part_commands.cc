#include "server/rpc/replicas/part_commands.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "lossd/group/v1/replica.pb.h"
#include "server/rpc/replicas/replica_wire.h"

namespace lossd::rpc {
namespace {

using group::v1::ReplicaCommand;
using Replicas = std::shared_ptr<const engine::ReplicaCommunicators>;
using FoundHead = std::shared_ptr<engine::Head>;

std::string NameOf(const ReplicaCommand& command) {
  switch (command.command_case()) {
    case ReplicaCommand::kSeal:
      return command.seal().step().head();
    case ReplicaCommand::kSum:
      return command.sum().head();
    case ReplicaCommand::kStep:
      return command.step().head();
    case ReplicaCommand::kReopen:
      return command.reopen().head();
    default:
      return "";
  }
}

void Do(const FoundHead& head, const group::v1::SealWindow& seal, GroupMember::Reply reply) {
  if (seal.fingerprint() != FingerprintOf(head->config())) {
    return reply(absl::FailedPreconditionError(
        absl::StrCat("head ", head->config().name, " has another configuration here than at replica ",
                     engine::ReplicaPlace::kCoordinator)));
  }
  head->SealPart(ToEnd(seal), [reply = std::move(reply)](const absl::StatusOr<uint64_t>& tokens) {
    if (!tokens.ok()) return reply(tokens.status());
    group::v1::Sealed sealed;
    sealed.set_window_tokens(*tokens);
    reply(sealed.SerializeAsString());
  });
}

void Do(const FoundHead& head, const group::v1::SumWindow& sum, const Replicas& replicas,
        GroupMember::Reply reply) {
  head->SumPart(sum.window_tokens(), replicas,
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

}  // namespace

void DoPart(engine::Engine& engine, const Replicas& replicas, const ReplicaCommand& command,
            GroupMember::Reply reply, std::function<void(const absl::Status& why)> lose) {
  if (command.has_sum() || command.has_step()) {
    reply = [reply = std::move(reply), lose = std::move(lose)](const absl::StatusOr<std::string>& data) {
      if (!data.ok()) lose(data.status());
      reply(data);
    };
  }
  const absl::StatusOr<FoundHead> head = engine.FindHead(NameOf(command));
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
    default:
      return reply(absl::InternalError("a command says nothing that is known here"));
  }
}

}  // namespace lossd::rpc
