#include "client/src/c_api/status_json.h"

#include <utility>

namespace lossd::c_api {
namespace {

using Json = nlohmann::ordered_json;

Json ToJson(const ReplicaSetStatus::Replica& replica) {
  Json late = Json::object();
  for (const auto& [phase, seconds] : replica.late_seconds) late[phase] = seconds;
  return {{"replica", replica.replica},
          {"sessions_placed", replica.sessions_placed},
          {"late_seconds", std::move(late)}};
}

}  // namespace

Json ToJson(const RankStatus& rank) {
  return {{"rank", rank.rank},
          {"device", rank.device},
          {"device_description", rank.device_description},
          {"pci_bus_id", rank.pci_bus_id},
          {"host", rank.host},
          {"memory_limit_bytes", rank.memory_limit_bytes},
          {"memory_reserved_bytes", rank.memory_reserved_bytes},
          {"uptime_seconds", rank.uptime_seconds},
          {"waited_seconds", rank.waited_seconds},
          {"command", rank.command},
          {"command_seconds", rank.command_seconds},
          {"waits_at", rank.waits_at},
          {"stuck", rank.stuck}};
}

Json ToJson(const ReplicaSetStatus& set) {
  if (set.name.empty()) return nullptr;
  Json members = Json::array();
  for (const ReplicaSetStatus::Replica& replica : set.members) members.push_back(ToJson(replica));
  return {{"name", set.name},       {"replica", set.replica}, {"replicas", set.replicas},
          {"whole", set.whole},     {"why_not", set.why_not}, {"epochs", set.epochs},
          {"returns", set.returns}, {"history", set.history}, {"members", std::move(members)}};
}

}  // namespace lossd::c_api
