// The group as its leader's process has it.
#ifndef LOSSD_SERVER_STARTUP_GROUP_LED_GROUP_H_
#define LOSSD_SERVER_STARTUP_GROUP_LED_GROUP_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/engine/device/head_backend.h"
#include "server/rpc/group/group_leader.h"
#include "server/rpc/lanes/relay_service.h"
#include "server/rpc/server_options.h"
#include "server/startup/group/group_options.h"
#include "server/startup/group/rank_connections.h"

namespace lossd {

// Ends the group in order when it is destroyed, which is after the device that Lead() made of it.
class LedGroup {
 public:
  struct Led {
    std::unique_ptr<LedGroup> group;
    std::unique_ptr<engine::Device> device;  // of all ranks
  };
  // Waits for the other ranks, and connects them with `local`, the leader's own device. DEADLINE_EXCEEDED,
  // naming the ranks that did not come; CANCELLED if `told_to_end` says so meanwhile. From here on the
  // process ends when a rank is lost (EndRank), and is sent SIGRTMIN when another node is told to end.
  static absl::StatusOr<Led> Lead(const GroupOptions& options, std::unique_ptr<engine::Device> local,
                                  const std::function<bool()>& told_to_end);

  // How clients' lanes come by other ranks, for the server, which this outlives.
  void TellLanes(rpc::ServerOptions* options) const;
  // Tells the other nodes that clients are served, and whether the leader is ready for them.
  void SetServing(bool ready) { control_->SetServing(ready); }
  // Tells them that the group has begun to end in order.
  void TellDraining() { control_->TellDraining(); }

 private:
  LedGroup(std::unique_ptr<rpc::RelayService> relays, std::unique_ptr<rpc::GroupLeader> control,
           RankConnections connections, int32_t ranks)
      : connections_(std::move(connections)),
        ranks_(ranks),
        relays_(std::move(relays)),
        control_(std::move(control)) {}

  const RankConnections connections_;
  const int32_t ranks_;
  const std::unique_ptr<rpc::RelayService> relays_;  // one of control_'s
  const std::unique_ptr<rpc::GroupLeader> control_;
};

// Ends this process, which belongs to a group, at once with kRankLost or kDeviceFailed: what waits for
// another rank may wait for ever, also in libraries when they are to end.
[[noreturn]] void EndRank(int status, const std::string& why);

// The group of these options as this rank expects it.
rpc::GroupIdentity IdentityOf(const GroupOptions& options);
// Where its control is listened on at the leader, and reached from its own node and from others.
absl::StatusOr<std::string> ControlOf(const GroupOptions& options);

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_GROUP_LED_GROUP_H_
