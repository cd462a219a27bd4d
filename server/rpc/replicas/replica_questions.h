// How the coordinator asks other replicas over their control streams.
#ifndef LOSSD_SERVER_RPC_REPLICAS_REPLICA_QUESTIONS_H_
#define LOSSD_SERVER_RPC_REPLICAS_REPLICA_QUESTIONS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lossd/group/v1/replica.pb.h"
#include "server/rpc/group/group_leader.h"

namespace lossd::rpc {

// `done` gets engine::ReplicaLost, or what the replica has answered, with its number before its errors.
// `name` is what the command is called in messages.
void AskReplica(RankQuestions& questions, int32_t replica, const char* name,
                const group::v1::ReplicaCommand& command,
                std::function<void(const absl::StatusOr<std::string>&)> done);

// The same of all but the coordinator, whose thread waits. Thread-safe.
class OtherReplicas {
 public:
  OtherReplicas(std::shared_ptr<RankQuestions> questions, int32_t replicas)
      : questions_(std::move(questions)), replicas_(replicas) {}

  using Answers = std::vector<absl::StatusOr<std::string>>;
  // By replica from 1 on.
  Answers AskEach(const char* name, const group::v1::ReplicaCommand& command) const;
  // engine::ReplicaLost if one was lost, else the first error.
  absl::Status Ask(const char* name, const group::v1::ReplicaCommand& command) const;
  absl::StatusOr<std::string> AskOne(int32_t replica, const char* name,
                                     const group::v1::ReplicaCommand& command) const;

 private:
  const std::shared_ptr<RankQuestions> questions_;
  const int32_t replicas_;
};

// That of a replica that was lost, before anything else: what the others say decides nothing then.
absl::Status FirstError(const OtherReplicas::Answers& answers);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_REPLICAS_REPLICA_QUESTIONS_H_
