#include "server/rpc/replicas/head_commands.h"

#include <future>
#include <memory>

#include "server/engine/common/awaiting.h"
#include "server/rpc/convert/convert.h"

namespace lossd::rpc {
namespace {

using group::v1::ReplicaCommand;
using FoundHead = std::shared_ptr<engine::Head>;

std::string IsNew(bool is_new) {
  group::v1::Created created;
  created.set_is_new(is_new);
  return created.SerializeAsString();
}

absl::StatusOr<std::string> Create(engine::Engine& engine, const group::v1::CreateReplica& create) {
  const absl::StatusOr<engine::HeadConfig> config = ToEngine(create.config());
  if (!config.ok()) return config.status();
  const bool was_there = engine.FindHead(config->name).ok();
  const absl::StatusOr<FoundHead> head =
      create.replaces() ? engine.ReplaceHead(*config) : engine.CreateHead(*config);
  if (!head.ok()) return head.status();
  return IsNew(!was_there);
}

absl::StatusOr<std::string> Copy(engine::Engine& engine, const v1::CopyHeadRequest& copy) {
  const bool was_there = engine.FindHead(copy.name()).ok();
  const absl::StatusOr<engine::CopiedHead> copied = engine.CopyHead(ToEngine(copy));
  if (!copied.ok()) return copied.status();
  return IsNew(!was_there);
}

absl::Status Delete(engine::Engine& engine, const FoundHead& head, const group::v1::DeleteReplica& command) {
  const auto discard = command.discard_gradient() ? engine::Engine::DiscardGradient::kYes
                                                  : engine::Engine::DiscardGradient::kNo;
  switch (command.step()) {
    case group::v1::DeleteReplica::BEGIN:
      return head->BeginDeletion(discard);
    case group::v1::DeleteReplica::CANCEL:
      head->CancelDeletion();
      return absl::OkStatus();
    case group::v1::DeleteReplica::UNDO:
      engine.DropHead(command.head());
      return absl::OkStatus();
    default:
      return engine.DeleteHead(command.head(), discard);
  }
}

// A head that is not there is deleted already, by a call that broke off.
absl::StatusOr<std::string> Delete(engine::Engine& engine, const group::v1::DeleteReplica& command) {
  group::v1::Deleted deleted;
  const absl::StatusOr<FoundHead> head = engine.FindHead(command.head());
  deleted.set_was_there(head.ok());
  if (head.ok()) {
    if (absl::Status done = Delete(engine, *head, command); !done.ok()) return done;
  }
  return deleted.SerializeAsString();
}

absl::Status Stage(const FoundHead& head, const group::v1::StageRows& rows) {
  absl::StatusOr<std::string> id =
      head->BeginWrite(rows.write_key(), engine::Head::Replace::kYes, rows.write_id());
  if (id.ok() && *id != rows.write_id()) {  // of the same key, as a coordinator before this one gave it
    head->DropWrite(*id);
    id = head->BeginWrite(rows.write_key(), engine::Head::Replace::kYes, rows.write_id());
  }
  if (!id.ok()) return id.status();
  const absl::StatusOr<std::shared_ptr<engine::StagedWrite>> write = head->FindWrite(rows.write_id());
  if (!write.ok()) return write.status();
  return (*write)->Write(rows.first_row(), rows.rows(), head->config().master_type(), rows.weights(),
                         rows.bias());
}

absl::Status Publish(const FoundHead& head) {
  std::promise<absl::Status> published;
  std::future<absl::Status> done = published.get_future();
  head->PublishPrepared(
      [&published](const absl::StatusOr<uint64_t>& version) { published.set_value(version.status()); });
  return engine::Await(done);
}

absl::StatusOr<std::string> Reply(const absl::Status& done) {
  if (!done.ok()) return done;
  return std::string();
}

}  // namespace

bool IsHeadCommand(const ReplicaCommand& command) {
  switch (command.command_case()) {
    case ReplicaCommand::kCreate:
    case ReplicaCommand::kCopy:
    case ReplicaCommand::kRemove:
    case ReplicaCommand::kStage:
    case ReplicaCommand::kPrepare:
    case ReplicaCommand::kPublish:
    case ReplicaCommand::kDropWrite:
      return true;
    default:
      return false;
  }
}

absl::StatusOr<std::string> DoHeadCommand(engine::Engine& engine, const ReplicaCommand& command) {
  if (command.has_create()) return Create(engine, command.create());
  if (command.has_copy()) return Copy(engine, command.copy());
  if (command.has_remove()) return Delete(engine, command.remove());
  const std::string& name = command.has_stage()     ? command.stage().head()
                            : command.has_prepare() ? command.prepare().head()
                            : command.has_publish() ? command.publish().head()
                                                    : command.drop_write().head();
  const absl::StatusOr<FoundHead> head = engine.FindHead(name);
  if (!head.ok()) return head.status();
  if (command.has_stage()) return Reply(Stage(*head, command.stage()));
  if (command.has_prepare()) return Reply((*head)->PrepareWrite(command.prepare().write_id()));
  if (command.has_publish()) return Reply(Publish(*head));
  (*head)->DropPrepared(absl::AbortedError("the coordinator has given the write up"));
  return std::string();
}

}  // namespace lossd::rpc
