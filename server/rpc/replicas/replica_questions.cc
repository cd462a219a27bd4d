#include "server/rpc/replicas/replica_questions.h"

#include <future>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/awaiting.h"
#include "server/engine/replicas/joint_replicas.h"

namespace lossd::rpc {
namespace {

absl::Status OfReplica(int32_t replica, const absl::Status& status) {
  absl::Status error(status.code(), absl::StrCat("replica ", replica, ": ", status.message()));
  status.ForEachPayload(
      [&error](absl::string_view type, const absl::Cord& payload) { error.SetPayload(type, payload); });
  return error;
}

// What waits neither for a device nor for another replica. A head takes memory, which is set to zero.
Answers AnswersTo(const group::v1::ReplicaCommand& command) {
  const bool soon = command.has_find_session() || command.has_open_session() || command.has_close_session() ||
                    command.has_describe() || command.has_create();
  return soon ? Answers::kSoon : Answers::kWhenDone;
}

}  // namespace

void AskReplica(RankQuestions& questions, int32_t replica, const char* name,
                const group::v1::ReplicaCommand& command,
                std::function<void(const absl::StatusOr<std::string>&)> done) {
  questions.Ask(
      replica, name, command.SerializeAsString(), AnswersTo(command),
      [replica, done = std::move(done)](const absl::Status& lost, const absl::StatusOr<std::string>& data) {
        if (!lost.ok()) return done(engine::ReplicaLost(lost.message()));
        if (data.ok()) return done(data);
        done(OfReplica(replica, data.status()));
      });
}

OtherReplicas::Answers OtherReplicas::AskEach(const char* name,
                                              const group::v1::ReplicaCommand& command) const {
  std::vector<std::future<absl::StatusOr<std::string>>> asked;
  for (int32_t replica = 1; replica < replicas_; ++replica) {
    const auto answer = std::make_shared<std::promise<absl::StatusOr<std::string>>>();
    asked.push_back(answer->get_future());
    AskReplica(*questions_, replica, name, command,
               [answer](const absl::StatusOr<std::string>& data) { answer->set_value(data); });
  }
  Answers answers;
  answers.reserve(asked.size());
  for (auto& answer : asked) answers.push_back(engine::Await(answer));
  return answers;
}

absl::Status OtherReplicas::Ask(const char* name, const group::v1::ReplicaCommand& command) const {
  return FirstError(AskEach(name, command));
}

absl::StatusOr<std::string> OtherReplicas::AskOne(int32_t replica, const char* name,
                                                  const group::v1::ReplicaCommand& command) const {
  std::promise<absl::StatusOr<std::string>> answer;
  std::future<absl::StatusOr<std::string>> asked = answer.get_future();
  AskReplica(*questions_, replica, name, command,
             [&answer](const absl::StatusOr<std::string>& data) { answer.set_value(data); });
  return engine::Await(asked);
}

absl::Status FirstError(const OtherReplicas::Answers& answers) {
  absl::Status first;
  for (const absl::StatusOr<std::string>& answer : answers) {
    if (engine::IsReplicaLost(answer.status())) return answer.status();
    first.Update(answer.status());
  }
  return first;
}

}  // namespace lossd::rpc
