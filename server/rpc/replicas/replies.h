// Answers that say nothing but whether it was done.
#ifndef LOSSD_SERVER_RPC_REPLICAS_REPLIES_H_
#define LOSSD_SERVER_RPC_REPLICAS_REPLIES_H_

#include <functional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/rpc/group/group_member.h"

namespace lossd::rpc {

// At the replica that is asked.
inline std::function<void(const absl::Status&)> Replied(GroupMember::Reply reply) {
  return [reply = std::move(reply)](const absl::Status& done) {
    if (!done.ok()) return reply(done);
    reply("");
  };
}

// At the one that asks.
inline std::function<void(const absl::StatusOr<std::string>&)> WithoutData(
    std::function<void(absl::Status)> done) {
  return [done = std::move(done)](const absl::StatusOr<std::string>& data) { done(data.status()); };
}

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_REPLICAS_REPLIES_H_
