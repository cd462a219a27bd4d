#include "server/startup/group/run_rank.h"

#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "server/engine/device/device_factory.h"
#include "server/engine/device/sharded/sharded_device.h"
#include "server/engine/device/sharded/sharded_rank.h"
#include "server/engine/memory/process_memory.h"
#include "server/rpc/group/group_member.h"
#include "server/rpc/group/group_timing.h"
#include "server/startup/group/connecting_watch.h"
#include "server/startup/group/led_group.h"
#include "server/startup/group/rank_connections.h"
#include "server/startup/group/waiting_log.h"
#include "server/telemetry/common/logging.h"

namespace lossd {
namespace {

using telemetry::Log;
using telemetry::LogLevel;

int Fail(const absl::Status& status) {
  Log(LogLevel::kError, "cannot start", {{"reason", std::string(status.message())}});
  return EXIT_FAILURE;
}

absl::StatusOr<std::unique_ptr<rpc::GroupMember>> Join(const GroupOptions& group, RankLanes* lanes) {
  const absl::StatusOr<std::string> address = ControlOf(group);
  if (!address.ok()) return address.status();
  WaitingLog waiting("still looks for the leader of the group", group.start_timeout);
  return rpc::GroupMember::Join(
      {.address = *address,
       .credentials = group.credentials,
       .identity = IdentityOf(group),
       .rank = group.process->rank,
       .lanes = lanes->told(),
       .start_timeout = group.start_timeout,
       .rank_timeout = group.rank_timeout,
       .on_waiting =
           [&](const std::string& why) {
             waiting.Look(absl::StrCat(*address, ": ", why));
             return true;
           },
       .on_lost = [](const absl::Status& why) { EndRank(kRankLost, std::string(why.message())); },
       .on_serving = [lanes](rpc::Serving serving) { lanes->SetReady(serving == rpc::Serving::kReady); }});
}

// Null if the leader, or another rank, is this node's first.
absl::StatusOr<std::unique_ptr<NodeFront>> StartFront(const GroupOptions& group,
                                                      const NodeFrontOptions& front, ParentLink* parent) {
  if (group.node == 0 || group.process->rank != group.first_rank()) return nullptr;
  NodeFrontOptions own = front;
  if (!group.first_of_host) own.health_listen.clear();
  // All nodes may have one command line, and one folder.
  if (!own.port_file.empty()) absl::StrAppend(&own.port_file, ".", group.node);
  return NodeFront::Start(own, parent);
}

absl::StatusOr<RankConnections> Connect(const GroupOptions& group, engine::Device& device,
                                        rpc::GroupMember& member) {
  const ConnectingWatch watch(group.start_timeout, nullptr);
  absl::StatusOr<RankConnections> connections = RankConnections::Connect(device, group, member.rendezvous());
  if (!connections.ok()) return connections;
  if (absl::Status joined = device.JoinRanks(connections->place().device); !joined.ok()) {
    // Other ranks may be in the middle of it, and would keep what is connected from ending.
    EndRank(EXIT_FAILURE, std::string(joined.message()));
  }
  return connections;
}

int EndOf(const absl::Status& ended) {
  if (absl::IsUnavailable(ended)) EndRank(kRankLost, std::string(ended.message()));
  if (ended.ok()) return 0;
  Log(LogLevel::kError, "the device failed", {{"reason", std::string(ended.message())}});
  telemetry::FlushLog();
  _exit(kDeviceFailed);  // others may wait for this rank, and it for them
}

}  // namespace

int RunRank(const GroupOptions& group, const engine::DeviceOptions& device, int64_t memory_limit_bytes,
            const RankLaneOptions& lane_options, const NodeFrontOptions& front_options, ParentLink* parent) {
  const std::unique_ptr<RankLanes> lanes =
      RankLanes::Open(lane_options);         // the member tells it of the leader
  std::unique_ptr<rpc::GroupMember> member;  // outlives the front
  // First, since the node may be asked for its health, and told to end, while a device takes its time.
  absl::StatusOr<std::unique_ptr<NodeFront>> front = StartFront(group, front_options, parent);
  if (!front.ok()) return Fail(front.status());
  absl::StatusOr<engine::ChosenDevice> chosen = engine::CreateDevice(device);
  if (!chosen.ok()) return Fail(chosen.status());
  if (!chosen->device->SpreadsHeads()) return Fail(chosen->device->NoShards());
  std::string memory_bound;
  if (memory_limit_bytes == 0) {
    memory_limit_bytes = engine::AvailableMemoryOf(*chosen->device, group.host_ranks);
    if (chosen->device->IsHost()) memory_bound = engine::MemoryBound();
  }
  const std::string description = chosen->device->description();
  absl::StatusOr<std::unique_ptr<rpc::GroupMember>> joined =
      Join(group, lanes.get());  // who has joined has its device
  if (!joined.ok()) return Fail(joined.status());
  member = *std::move(joined);
  if (*front != nullptr) (*front)->Joined(member.get());
  const absl::StatusOr<RankConnections> connections = Connect(group, *chosen->device, *member);
  if (!connections.ok() && member->ended()) return 0;  // told to end while the ranks were being connected
  if (!connections.ok()) return Fail(connections.status());
  const absl::StatusOr<std::unique_ptr<engine::ShardedRank>> rank = engine::ShardedRank::Create(
      std::move(chosen->device), connections->place(), memory_limit_bytes, memory_bound);
  if (!rank.ok()) return Fail(rank.status());
  Log(LogLevel::kInfo, "ready", {{"device", description}, {"memory_limit_bytes", memory_limit_bytes}});
  if (*front != nullptr) {
    (*front)->Follow([watch = connections->place().watch] { return watch->Read(); },
                     rpc::PatienceWithCommands(group.rank_timeout));
  }
  lanes->Serve([rank = rank->get()](engine::Payload payload) { return rank->Stage(std::move(payload)); },
               (*rank)->payloads().get(),
               {.channel = member->channel(),
                .identify = [credentials = group.credentials](
                                grpc::ClientContext* context) { rpc::ShowToken(credentials, context); },
                .epoch = member->epoch(),
                .rank = group.process->rank});
  const absl::Status ended = member->Run(**rank);
  if (ended.ok()) lanes->End();  // before what it serves with goes
  front->reset();                // it follows what goes now
  return EndOf(ended);
}

}  // namespace lossd
