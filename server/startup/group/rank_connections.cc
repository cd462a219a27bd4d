#include "server/startup/group/rank_connections.h"

#include <chrono>
#include <cstdlib>

#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "kernels/collectives/gloo_communicator.h"
#include "kernels/collectives/nccl_communicator.h"
#include "server/engine/device/rank_status.h"
#include "server/telemetry/common/logging.h"

namespace lossd {
namespace {

// A call waits for what the slowest rank computes before it. That a rank is lost is noticed by its
// heartbeats.
constexpr std::chrono::milliseconds kTimeout = std::chrono::hours(24);

int IndexOf(absl::string_view device) {
  int index = 0;
  absl::ConsumePrefix(&device, "cuda:");
  return absl::SimpleAtoi(device, &index) ? index : 0;
}

// The environment's choice stands: NCCL's setting can say more than one interface.
void WarnOfOtherInterface(const std::string& interface) {
  const char* const set = getenv("NCCL_SOCKET_IFNAME");
  if (interface.empty() || set == nullptr || *set == '\0') return;
  absl::string_view named = set;
  absl::ConsumePrefix(&named, "=");
  if (named == interface) return;
  telemetry::Log(telemetry::LogLevel::kWarning,
                 "NCCL uses the interface of the environment, not --collective_interface",
                 {{"NCCL_SOCKET_IFNAME", set},
                  {"collective_interface", interface},
                  {"remedy", "unset NCCL_SOCKET_IFNAME, unless that network is trusted as well"}});
}

}  // namespace

absl::StatusOr<RankConnections> RankConnections::Connect(const engine::Device& device,
                                                         const GroupOptions& group,
                                                         kernels::collectives::Rendezvous& rendezvous) {
  RankConnections connections(group.host_ranks, rendezvous);
  const int32_t rank = group.process->rank;
  const int32_t ranks = group.ranks();
  const absl::Status host = engine::ToStatus(kernels::collectives::ConnectGloo(
      {.rank = rank, .size = ranks, .interface = group.interface, .timeout = kTimeout}, rendezvous,
      &connections.host_));
  if (!host.ok()) return host;
  if (device.IsHost()) return connections;
  WarnOfOtherInterface(group.interface);
  const absl::Status gpus =
      engine::ToStatus(kernels::collectives::ConnectNccl({.rank = rank,
                                                          .size = ranks,
                                                          .device = IndexOf(device.name()),
                                                          .timeout = kTimeout,
                                                          .interface = group.interface},
                                                         rendezvous, &connections.device_));
  if (!gpus.ok()) return gpus;
  return connections;
}

engine::RankPlace RankConnections::place() const {
  return {.rank = host_->rank(),
          .ranks = host_->size(),
          .host = host_.get(),
          .device = device_ == nullptr ? host_.get() : device_.get(),
          .watch = watch_.get(),
          .host_ranks = host_ranks_,
          .rendezvous = rendezvous_};
}

}  // namespace lossd
