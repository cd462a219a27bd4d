#include "server/rpc/replicas/remote_part.h"

#include <utility>

#include "server/rpc/replicas/replica_questions.h"
#include "server/rpc/replicas/replica_wire.h"
#include "server/rpc/replicas/replies.h"

namespace lossd::rpc {
namespace {

using group::v1::ReplicaCommand;

// Parses a message that the replica has answered.
template <class Message>
absl::StatusOr<Message> Parsed(const absl::StatusOr<std::string>& data) {
  Message message;
  if (!data.ok()) return data.status();
  if (!message.ParseFromString(*data)) return absl::InternalError("an answer cannot be read");
  return message;
}

}  // namespace

RemotePart::RemotePart(std::shared_ptr<RankQuestions> questions, int32_t replica,
                       const engine::HeadConfig& config)
    : questions_(std::move(questions)),
      replica_(replica),
      head_(config.name),
      fingerprint_(FingerprintOf(config)) {}

void RemotePart::Ask(const char* name, ReplicaCommand command,
                     std::function<void(const absl::StatusOr<std::string>&)> done) {
  command.set_head(head_);
  AskReplica(*questions_, replica_, name, command, std::move(done));
}

void RemotePart::Seal(const engine::WindowEnd& end,
                      std::function<void(absl::StatusOr<engine::SealedWindow>)> done) {
  ReplicaCommand command;
  ToProto(head_, end, command.mutable_seal());
  command.mutable_seal()->set_fingerprint(fingerprint_);
  Ask("SealWindow", std::move(command), [done = std::move(done)](const absl::StatusOr<std::string>& data) {
    const auto sealed = Parsed<group::v1::Sealed>(data);
    if (!sealed.ok()) return done(sealed.status());
    done(engine::SealedWindow{sealed->window_tokens(), {sealed->ranks().begin(), sealed->ranks().end()}});
  });
}

void RemotePart::Sum(const engine::JointSum& sum,
                     std::function<void(absl::StatusOr<engine::GradientStats>)> done) {
  ReplicaCommand command;
  command.mutable_sum()->set_window_tokens(sum.window_tokens);
  command.mutable_sum()->mutable_sessions()->Add(sum.sessions.begin(), sum.sessions.end());
  Ask("SumWindow", std::move(command), [done = std::move(done)](const absl::StatusOr<std::string>& data) {
    const auto summed = Parsed<group::v1::JointStep>(data);
    if (summed.ok()) return done(ToEngine(*summed).stats);
    done(summed.status());
  });
}

void RemotePart::Step(const engine::JointStep& step, Done done) {
  ReplicaCommand command;
  ToProto(step, command.mutable_step()->mutable_step());
  Ask("StepWindow", std::move(command), WithoutData(std::move(done)));
}

void RemotePart::Reopen(const absl::Status& why, Done done) {
  ReplicaCommand command;
  command.mutable_reopen()->set_why(std::string(why.message()));
  Ask("ReopenWindow", std::move(command), WithoutData(std::move(done)));
}

void RemotePart::Hold(const engine::FlushInfo& flush, Done done) {
  ReplicaCommand command;
  ToProto(flush, command.mutable_hold());
  Ask("HoldFlush", std::move(command), WithoutData(std::move(done)));
}

void RemotePart::EndFlush(const std::string& flush_id, engine::FlushFate fate, Done done) {
  ReplicaCommand command;
  command.mutable_end_flush()->set_flush_id(flush_id);
  command.mutable_end_flush()->set_commit(fate == engine::FlushFate::kCommit);
  Ask("EndFlush", std::move(command), WithoutData(std::move(done)));
}

void RemotePart::ReadRows(const engine::PartRows& rows,
                          std::function<void(absl::StatusOr<std::string>)> done) {
  ReplicaCommand command;
  ToProto(rows, command.mutable_read_rows());
  Ask("ReadRows", std::move(command), std::move(done));
}

void RemotePart::WriteRows(const engine::PartRows& rows, std::string bytes, Done done) {
  ReplicaCommand command;
  ToProto(rows, command.mutable_write_rows()->mutable_rows());
  command.mutable_write_rows()->set_data(std::move(bytes));
  Ask("WriteRows", std::move(command), WithoutData(std::move(done)));
}

}  // namespace lossd::rpc
