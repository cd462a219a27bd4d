#include "server/rpc/replicas/joint_heads.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lossd/group/v1/replica.pb.h"
#include "server/engine/replicas/joint_replicas.h"
#include "server/rpc/convert/convert.h"

namespace lossd::rpc {
namespace {

using group::v1::DeleteReplica;
using group::v1::ReplicaCommand;
using Discard = engine::Engine::DiscardGradient;

// How much of the weights goes to other replicas at once.
constexpr int64_t kPieceBytes = int64_t{4} << 20;

ReplicaCommand DeleteCommand(const std::string& name, DeleteReplica::Step step, Discard discard) {
  ReplicaCommand command;
  command.mutable_remove()->set_head(name);
  command.mutable_remove()->set_step(step);
  command.mutable_remove()->set_discard_gradient(discard == Discard::kYes);
  return command;
}

void Name(const engine::Head& head, const engine::StagedWrite& write, group::v1::WriteOfHead* proto) {
  proto->set_head(head.config().name);
  proto->set_write_id(write.id());
}

// Takes back what was created at those that did.
void UndoCreation(const OtherReplicas& others, const std::string& name,
                  const OtherReplicas::Answers& answers) {
  const ReplicaCommand undo = DeleteCommand(name, DeleteReplica::UNDO, Discard::kYes);
  for (size_t i = 0; i < answers.size(); ++i) {
    group::v1::Created created;
    if (!answers[i].ok() || !created.ParseFromString(*answers[i]) || !created.is_new()) continue;
    others.AskOne(static_cast<int32_t>(i) + 1, "DeleteReplica", undo).IgnoreError();
  }
}

absl::Status AskToCreate(const OtherReplicas& others, const char* what, const std::string& name,
                         const ReplicaCommand& command) {
  const OtherReplicas::Answers answers = others.AskEach(what, command);
  absl::Status created = FirstError(answers);
  if (!created.ok()) UndoCreation(others, name, answers);
  return created;
}

// The others have every row of a write that is complete here, and wait for PublishAtOthers with it.
absl::Status PrepareAtOthers(const OtherReplicas& others, const engine::Head& head,
                             const engine::StagedWrite& write) {
  const engine::HeadConfig& config = head.config();
  const int64_t row_bytes = config.hidden_size * kernels::SizeOf(config.master_type());
  const int64_t most = std::max<int64_t>(1, kPieceBytes / row_bytes);
  for (int64_t first = 0; first < config.vocab_size; first += most) {
    const int64_t rows = std::min(most, config.vocab_size - first);
    absl::StatusOr<engine::StagedWrite::Rows> read = write.Read(first, rows);
    if (!read.ok()) return read.status();
    ReplicaCommand command;
    group::v1::StageRows& stage = *command.mutable_stage();
    stage.set_head(config.name);
    stage.set_write_id(write.id());
    stage.set_write_key(write.key());
    stage.set_first_row(first);
    stage.set_rows(rows);
    stage.set_weights(std::move(read->weights));
    stage.set_bias(std::move(read->bias));
    if (absl::Status staged = others.Ask("StageRows", command); !staged.ok()) return staged;
  }
  ReplicaCommand prepare;
  Name(head, write, prepare.mutable_prepare());
  return others.Ask("PrepareWrite", prepare);
}

absl::Status PublishAtOthers(const OtherReplicas& others, const engine::Head& head,
                             const engine::StagedWrite& write) {
  ReplicaCommand command;
  Name(head, write, command.mutable_publish());
  return others.Ask("PublishWrite", command);
}

// What is prepared is given up, where it is.
void DropAtOthers(const OtherReplicas& others, const engine::Head& head, const engine::StagedWrite& write) {
  ReplicaCommand command;
  Name(head, write, command.mutable_drop_write());
  others.Ask("DropWrite", command).IgnoreError();
}

}  // namespace

absl::Status CreateAtOthers(const OtherReplicas& others, const engine::HeadConfig& config) {
  ReplicaCommand command;
  ToProto(config, command.mutable_create()->mutable_config());
  return AskToCreate(others, "CreateReplica", config.name, command);
}

absl::Status CopyAtOthers(const OtherReplicas& others, const engine::HeadCopy& copy) {
  ReplicaCommand command;
  ToProto(copy, command.mutable_copy());
  return AskToCreate(others, "CopyHead", copy.name, command);
}

absl::Status ReplaceAtOthers(const OtherReplicas& others, const engine::HeadConfig& config) {
  ReplicaCommand command;
  ToProto(config, command.mutable_create()->mutable_config());
  command.mutable_create()->set_replaces(true);
  return others.Ask("CreateReplica", command);
}

absl::Status DropHeadAtOthers(const OtherReplicas& others, const std::string& name) {
  return others.Ask("DeleteReplica", DeleteCommand(name, DeleteReplica::UNDO, Discard::kYes));
}

absl::StatusOr<bool> DeleteAtAll(const OtherReplicas& others, const std::string& name, Discard discard,
                                 absl::FunctionRef<absl::Status()> delete_here) {
  absl::Status begun = others.Ask("DeleteReplica", DeleteCommand(name, DeleteReplica::BEGIN, discard));
  if (begun.ok()) begun = delete_here();
  if (!begun.ok()) {
    others.Ask("DeleteReplica", DeleteCommand(name, DeleteReplica::CANCEL, discard)).IgnoreError();
    return begun;
  }
  const OtherReplicas::Answers answers =
      others.AskEach("DeleteReplica", DeleteCommand(name, DeleteReplica::REMOVE, discard));
  if (absl::Status removed = FirstError(answers); !removed.ok()) return removed;
  return std::any_of(answers.begin(), answers.end(), [](const absl::StatusOr<std::string>& answer) {
    group::v1::Deleted deleted;
    return deleted.ParseFromString(*answer) && deleted.was_there();
  });
}

void PublishAtAll(const OtherReplicas& others, const std::shared_ptr<engine::Head>& head,
                  const engine::StagedWrite& write,
                  const std::function<void(const absl::Status& why)>& lose) {
  absl::Status done = PrepareAtOthers(others, *head, write);
  if (!done.ok() && !engine::IsReplicaLost(done)) {
    DropAtOthers(others, *head, write);
    return head->DropPrepared(done);
  }
  if (done.ok()) done = PublishAtOthers(others, *head, write);
  if (done.ok()) return head->PublishPrepared([](const absl::StatusOr<uint64_t>&) {});
  // Some may have published it, and some not: all meet again.
  lose(absl::UnavailableError(done.message()));
  head->TellCommitting(
      absl::UnavailableError(absl::StrCat("a replica was lost while the weights of head ",
                                          head->config().name, " were published; commit them again")));
}

}  // namespace lossd::rpc
