#include "server/startup/group/rank_lanes.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "server/rpc/transport/listen_address.h"
#include "server/telemetry/common/logging.h"

namespace lossd {
namespace {

using telemetry::Log;
using telemetry::LogLevel;

using Addresses = std::vector<std::string>;

constexpr int kMostPort = 65535;
// How long clients may take their last answers when the leader has ended the group.
constexpr absl::Duration kLastAnswers = absl::Seconds(3);

// The port `steps` behind `base`; 0: a free one.
int PortBehind(int base, int32_t steps, const std::set<int>& taken) {
  int port = base;
  for (int32_t i = 0; base != 0 && i < steps; ++i) {
    do {
      ++port;
    } while (taken.count(port) > 0);
  }
  return port;
}

// Those of `hosts` with the rank's port.
Addresses WithOwnPort(const Addresses& hosts, int32_t steps, const std::set<int>& taken) {
  if (hosts.empty()) return {};
  const int base = rpc::SplitHostPort(hosts.front()).port;
  const int port = PortBehind(base, steps, taken);
  Addresses own;
  for (const std::string& address : hosts) {
    // Clients are told one port, so where any will do it is that of one host.
    if (port > kMostPort || (base == 0 && !own.empty())) break;
    own.push_back(absl::StrCat(address.substr(0, address.rfind(':')), ":", port));
  }
  return own;
}

}  // namespace

LanePlace FindLanePlace(const GroupOptions& group, const std::string& listen, const std::string& host,
                        const std::set<int>& taken) {
  const int32_t number = group.host_rank + group.process->rank - group.first_rank();
  Addresses hosts;
  Addresses files;
  for (std::string& address : Addresses(absl::StrSplit(listen, ','))) {
    (rpc::IsUnixSocket(address) ? files : hosts).push_back(std::move(address));
  }
  if (!group.IsBesideLeader()) {
    const bool own_host_alone = std::all_of(hosts.begin(), hosts.end(), rpc::IsLoopback);
    if (own_host_alone && !rpc::IsLoopback(absl::StrCat(host, ":0"))) return {};
    const Addresses own = WithOwnPort(hosts, number, taken);
    return own.empty() ? LanePlace() : LanePlace{.listen = absl::StrJoin(own, ","), .host = host};
  }
  Addresses own = WithOwnPort(hosts, number, taken);
  const std::string suffix = files.empty() ? "" : absl::StrCat(".", number);
  for (const std::string& file : files) own.push_back(absl::StrCat(file, suffix));
  return {.listen = absl::StrJoin(own, ","), .suffix = suffix};
}

std::unique_ptr<RankLanes> RankLanes::Open(const RankLaneOptions& options) {
  std::unique_ptr<RankLanes> lanes(new RankLanes(options));
  if (options.place.listen.empty()) return lanes;
  rpc::LaneServerOptions own = options.server;
  own.listen = options.place.listen;
  absl::StatusOr<std::unique_ptr<rpc::LaneServer>> server = rpc::LaneServer::Open(own);
  if (server.ok()) {
    lanes->server_ = *std::move(server);
    return lanes;
  }
  Log(LogLevel::kWarning, "this rank takes no lanes: the leader takes all",
      {{"listen", own.listen},
       {"reason", std::string(server.status().message())},
       {"remedy",
        "give each host a --listen of its own, such as 0.0.0.0:50051, and free the ports behind that of the "
        "leader, which its ranks take"}});
  return lanes;
}

rpc::RankLanes RankLanes::told() const {
  if (server_ == nullptr) return {};
  return {.host = options_.place.host, .port = server_->port(), .suffix = options_.place.suffix};
}

void RankLanes::Serve(rpc::LaneRelay::Stage stage, engine::RankPayloads* payloads, rpc::LeaderCalls leader) {
  if (server_ == nullptr) return;
  server_->Serve(std::move(stage), payloads, std::move(leader));
  ticker_ = std::make_unique<rpc::Ticker>(absl::Seconds(1), [this] { options_.each_second(*server_); });
  Log(LogLevel::kInfo, "takes lanes", {{"listen", options_.place.listen}, {"port", server_->port()}});
}

void RankLanes::SetReady(bool ready) {
  if (server_ != nullptr) server_->SetReady(ready);
}

void RankLanes::End() {
  ticker_.reset();
  if (server_ != nullptr && !std::exchange(ended_, true)) server_->Drain(kLastAnswers);
}

}  // namespace lossd
