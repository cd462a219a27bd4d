#include "server/startup/group/led_group.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/device/device_factory.h"
#include "server/engine/device/sharded/sharded_device.h"
#include "server/rpc/group/group_credentials.h"
#include "server/rpc/lanes/lane_server.h"
#include "server/startup/group/connecting_watch.h"
#include "server/startup/group/network_interface.h"
#include "server/startup/group/waiting_log.h"
#include "server/telemetry/common/logging.h"
#include "server/version.h"

namespace lossd {

namespace {

// How often a leader that waits for its ranks looks whether it is to end.
constexpr absl::Duration kLookAgain = absl::Milliseconds(100);

// Where to look for ranks of other nodes that have not come.
std::string WhereToLook(const GroupOptions& options) {
  if (!options.SpansNodes()) return "";
  return absl::StrCat(". Of ", options.nodes, " nodes each has ", options.local_ranks(),
                      ", node 0 the first: lossd has to run at all of them, and to reach ", options.leader,
                      "; their logs say why one does not");
}

absl::Status Late(const absl::Status& missing, const GroupOptions& options) {
  return absl::DeadlineExceededError(absl::StrCat(missing.message(), " within ",
                                                  absl::FormatDuration(options.start_timeout),
                                                  " (--group_start_timeout)", WhereToLook(options)));
}

using Await = absl::Status (rpc::GroupLeader::*)(absl::Duration timeout);
absl::Status AwaitRanks(rpc::GroupLeader& control, Await await, const GroupOptions& options,
                        const std::function<bool()>& told_to_end) {
  const absl::Time deadline = absl::Now() + options.start_timeout;
  WaitingLog waiting("still waits for the ranks of the group", options.start_timeout);
  for (;;) {
    const absl::Duration left = deadline - absl::Now();
    const absl::Status there = (control.*await)(std::clamp(left, absl::ZeroDuration(), kLookAgain));
    if (!absl::IsDeadlineExceeded(there)) return there;
    if (left <= kLookAgain) return Late(there, options);
    waiting.Look(absl::StrCat(there.message(), WhereToLook(options)));
    if (told_to_end()) return absl::CancelledError("told to end before all ranks were ready");
  }
}

}  // namespace

void EndRank(int status, const std::string& why) {
  static std::atomic<bool> ending = false;
  while (ending.exchange(true)) pause();  // another thread has noticed it first
  telemetry::Log(telemetry::LogLevel::kError, "the group is no longer whole: ended", {{"reason", why}});
  telemetry::FlushLog();
  _exit(status);
}

rpc::GroupIdentity IdentityOf(const GroupOptions& options) {
  return {.epoch = options.SpansNodes() ? 0 : options.process->epoch,
          .ranks = options.ranks(),
          .version = kVersion,
          .device_kind = engine::KindOf(options.devices.front()),
          .agreed = options.agreed};
}

absl::StatusOr<std::string> ControlOf(const GroupOptions& options) {
  if (!options.SpansNodes()) return absl::StrCat("unix:", options.process->socket);
  if (options.node == 0) return ControlAddress(options.interface, options.leader, "--group_leader");
  return options.leader;
}

namespace {

// That of its own, those of its lanes, and what comes after each of these.
constexpr int kCallsOfARank = 4 + 2 * static_cast<int>(rpc::LaneServer::kMostStreams);

absl::StatusOr<std::unique_ptr<rpc::GroupLeader>> StartControl(const GroupOptions& options,
                                                               rpc::RelayService* relays) {
  const absl::StatusOr<std::string> address = ControlOf(options);
  if (!address.ok()) return address.status();
  const auto lost = [](int32_t rank, const std::string& why) {
    EndRank(kRankLost, absl::StrCat("rank ", rank, " was lost: ", why));
  };
  const auto drain = [](int32_t rank) {
    telemetry::Log(telemetry::LogLevel::kInfo, "told to end by a rank of another node", {{"by_rank", rank}});
    kill(getpid(), SIGRTMIN);
  };
  auto control = rpc::GroupLeader::Start({.address = *address,
                                          .credentials = options.credentials,
                                          .identity = IdentityOf(options),
                                          .rank_timeout = options.rank_timeout,
                                          .services = {relays},
                                          .calls = kCallsOfARank,
                                          .on_lost = lost,
                                          .on_drain = drain});
  if (control.ok() && options.SpansNodes()) {
    telemetry::Log(telemetry::LogLevel::kInfo, "listens for the ranks of other nodes",
                   {{"listen", *address}});
  }
  return control;
}

}  // namespace

absl::StatusOr<LedGroup::Led> LedGroup::Lead(const GroupOptions& options,
                                             std::unique_ptr<engine::Device> local,
                                             const std::function<bool()>& told_to_end) {
  if (!local->SpreadsHeads()) return local->NoShards();
  auto relays = std::make_unique<rpc::RelayService>(
      [credentials = options.credentials](const grpc::CallbackServerContext& context) -> grpc::Status {
        if (rpc::ShowsToken(credentials, context)) return grpc::Status::OK;
        return {grpc::StatusCode::PERMISSION_DENIED, "the token is not that of this group"};
      });
  absl::StatusOr<std::unique_ptr<rpc::GroupLeader>> control = StartControl(options, relays.get());
  if (!control.ok()) return control.status();
  const auto await = [&](Await what) { return AwaitRanks(**control, what, options, told_to_end); };
  if (absl::Status joined = await(&rpc::GroupLeader::AwaitRanks); !joined.ok()) return joined;
  auto watch = std::make_optional<ConnectingWatch>(options.start_timeout, told_to_end);
  absl::StatusOr<RankConnections> connections =
      RankConnections::Connect(*local, options, (*control)->rendezvous());
  if (!connections.ok()) return connections.status();
  if (absl::Status joined = local->JoinRanks(connections->place().device); !joined.ok()) {
    // Other ranks may be in the middle of it, and would keep what is connected from ending.
    EndRank(EXIT_FAILURE, std::string(joined.message()));
  }
  watch.reset();
  if (absl::Status ready = await(&rpc::GroupLeader::AwaitReports); !ready.ok()) return ready;
  std::unique_ptr<LedGroup> group(
      new LedGroup(std::move(relays), *std::move(control), *std::move(connections), options.ranks()));
  std::unique_ptr<engine::Device> device =
      engine::CreateShardedDevice(std::move(local), group->connections_.place(), group->control_->Channel());
  return Led{.group = std::move(group), .device = std::move(device)};
}

void LedGroup::TellLanes(rpc::ServerOptions* options) const {
  options->relays = relays_.get();
  options->group = {.ranks = control_->Channel(), .epoch = control_->epoch(), .count = ranks_};
  options->lanes = control_->Lanes();
}

}  // namespace lossd
