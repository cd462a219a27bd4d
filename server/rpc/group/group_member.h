// The end that every rank but the leader has of the control of a group.
#ifndef LOSSD_SERVER_RPC_GROUP_GROUP_MEMBER_H_
#define LOSSD_SERVER_RPC_GROUP_GROUP_MEMBER_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/collectives/rendezvous.h"
#include "server/engine/group/rank_channel.h"
#include "server/rpc/convert/lane_addresses.h"
#include "server/rpc/group/group_credentials.h"
#include "server/rpc/group/group_identity.h"

namespace lossd::rpc {

// What the leader has last said of itself (GroupLeader::SetServing, TellDraining).
enum class Serving { kNotYet, kReady, kNotReady, kDraining };

struct GroupMemberOptions {
  // The leader's, as GroupLeaderOptions has it. A name is looked up again at each try.
  std::string address;
  GroupCredentials credentials;
  GroupIdentity identity;
  int32_t rank = 1;
  RankLanes lanes = {};  // which the leader tells clients of
  absl::Duration start_timeout = absl::Seconds(60);
  absl::Duration rank_timeout = absl::Seconds(10);
  // Asked by Join about ten times a second, with why the leader has not been found yet: whether it goes on.
  // May be null: it does.
  std::function<bool(const std::string& why)> on_waiting = nullptr;
  // Told once, by one of the member's threads, when the leader has been silent for rank_timeout or is gone
  // without an end in order. A command may be under way then, and never return: the process should end here.
  std::function<void(const absl::Status& why)> on_lost;
  // When the leader has ended the group in order, by the thread that reads the stream: it must not wait long,
  // nor destroy the member. May be null.
  std::function<void()> on_end = nullptr;
  // When serving() has become something else, by the thread that reads the stream: it must not wait, nor
  // destroy the member. May be null.
  std::function<void(Serving serving)> on_serving = nullptr;
};

// Heartbeats go out and are expected as long as it lives, in a thread of its own, whatever commands take.
class GroupMember {
 public:
  // Tries until start_timeout: the leader may start later, its name may not be known yet, and the leader of
  // an epoch before may not be gone. DEADLINE_EXCEEDED if there was none by then, with what the last try came
  // to; what the leader refuses the rank with (group.proto) at once, but for a number that another rank has,
  // since that may be one that died: this is borne for rank_timeout. CANCELLED: on_waiting has ended it.
  // INVALID_ARGUMENT: CheckCredentials.
  static absl::StatusOr<std::unique_ptr<GroupMember>> Join(const GroupMemberOptions& options);
  // Leaves. For the leader the rank is lost, unless it has ended the group.
  virtual ~GroupMember() = default;

  // The leader's.
  virtual int64_t epoch() const = 0;
  // Whether the leader has ended the group in order. Any thread.
  virtual bool ended() const = 0;
  // Any thread.
  virtual Serving serving() const = 0;
  // Asks the leader to end the group in order. Any thread.
  virtual void RequestDrain() = 0;
  // Leaves before this goes: whatever waits here fails as if the leader were lost. Any thread.
  virtual void Leave() = 0;

  // Lives as long as this; for one thread at a time. Fails with kPeerLost once the leader is lost.
  virtual kernels::collectives::Rendezvous& rendezvous() = 0;

  // To the leader's server, whose other services (GroupLeaderOptions) are called over it.
  virtual std::shared_ptr<grpc::Channel> channel() const = 0;

  // Executes the leader's commands in their order, in this thread but for those that take memory
  // (RankExecutor), and tells the leader what the executor reports: at once, and then as often as there are
  // heartbeats. OK when the leader has ended the group in order. UNAVAILABLE when it is lost; the error of a
  // command that is not replied to, or that cannot be understood: then the rank has to end, and the executor
  // is in use as long as this lives. Once.
  virtual absl::Status Run(engine::RankExecutor& executor) = 0;

  // The same for what the leader asks by RankQuestions: `take` is called with one command after the
  // other by this thread, and must not wait. `reply` may be called by any thread, once, and after this has
  // gone does nothing.
  using Reply = std::function<void(absl::StatusOr<std::string> data)>;
  using Take = std::function<void(const std::string& command, Reply reply)>;
  // CANCELLED once `stop` says so, which is asked now and then.
  virtual absl::Status Answer(const Take& take, const std::function<bool()>& stop) = 0;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_GROUP_GROUP_MEMBER_H_
