// Rank 0's end of the control of a group: a gRPC server of its own, which the other ranks join.
#ifndef LOSSD_SERVER_RPC_GROUP_GROUP_LEADER_H_
#define LOSSD_SERVER_RPC_GROUP_GROUP_LEADER_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/collectives/rendezvous.h"
#include "server/engine/group/rank_channel.h"
#include "server/rpc/convert/lane_addresses.h"
#include "server/rpc/group/group_credentials.h"
#include "server/rpc/group/group_identity.h"
#include "server/rpc/group/group_state.h"

namespace lossd::rpc {

struct GroupLeaderOptions {
  // "unix:PATH", in a folder that is for the process's user alone, or "host:port" with the brackets of IPv6
  // and 0 for any free port.
  std::string address;
  GroupCredentials credentials;
  GroupIdentity identity;
  absl::Duration rank_timeout = absl::Seconds(10);
  // What else is served there; outlives the leader. They look after themselves (ShowsToken).
  std::vector<grpc::Service*> services = {};
  // At a time, of one connection. A rank has one for as long as it lives; those to `services` count, too.
  int calls = 4;
  // When a rank's stream breaks, or it is silent or takes nothing for rank_timeout, also before all have
  // joined. The process may end in it.
  RankLost on_lost;
  // When a rank first asks that the group end in order (GroupMember::RequestDrain), by the thread of its
  // stream, without a lock. May be null.
  std::function<void(int32_t rank)> on_drain = nullptr;
  // May be null.
  AnswerLate on_late = nullptr;
  // How long a connection may last of which nobody has said who it is.
  absl::Duration hello_timeout = absl::Seconds(10);
};

// By commands that are none of engine::GroupCommand's. Thread-safe.
class RankQuestions {
 public:
  virtual ~RankQuestions() = default;

  // Does not wait. A rank takes what it is asked in this order (GroupMember::Answer), and may answer in any.
  // `done` is called once, by any thread and without a lock; with a loss if a rank, whichever, is lost
  // before, or the group has ended.
  virtual void Ask(int32_t rank, const std::string& name, std::string command, Answers answers,
                   RankAnswered done) = 0;
};

// Thread-safe. Heartbeats go out and are expected from the start to the end, in a thread of its own.
class GroupLeader {
 public:
  // INVALID_ARGUMENT if the credentials cannot work (CheckCredentials); UNAVAILABLE if the address cannot be
  // had.
  static absl::StatusOr<std::unique_ptr<GroupLeader>> Start(GroupLeaderOptions options);
  virtual ~GroupLeader() = default;  // End()

  virtual int64_t epoch() const = 0;
  virtual int port() const = 0;  // 0: a Unix socket

  // Returns when all ranks have joined. DEADLINE_EXCEEDED, naming those that have not; UNAVAILABLE if one is
  // lost meanwhile.
  virtual absl::Status AwaitRanks(absl::Duration timeout) = 0;
  // The same until all ranks execute commands and have told of themselves.
  virtual absl::Status AwaitReports(absl::Duration timeout) = 0;
  // Where the other ranks take lanes, from rank 1 on. After AwaitRanks.
  virtual std::vector<RankLanes> Lanes() = 0;
  // The leader's own; lives as long as this. It fails with kPeerLost once a rank is lost.
  virtual kernels::collectives::Rendezvous& rendezvous() = 0;
  // What a thread that is in it waits for. Any thread.
  virtual AwaitedOffers Awaited() = 0;
  // To one rank; may outlive this.
  virtual std::shared_ptr<RankQuestions> Questions() = 0;
  // To all ranks; may outlive this, and then sends nothing. Once a rank is lost, Send drops its command and
  // Ask returns UNAVAILABLE.
  virtual std::unique_ptr<engine::RankChannel> Channel() = 0;

  // Tells the ranks that clients are served, and whether the leader is ready for them. What they know is told
  // once.
  virtual void SetServing(bool ready) = 0;
  // Tells them that the group has begun to end in order: they must not begin another epoch if it is lost.
  virtual void TellDraining() = 0;

  // Tells the ranks that the group ends in order, behind all commands, and waits a while for them to have
  // heard it. What was to be sent afterwards is dropped. Again, it does nothing.
  virtual void End() = 0;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_GROUP_GROUP_LEADER_H_
