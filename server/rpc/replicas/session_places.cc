#include "server/rpc/replicas/session_places.h"

#include <algorithm>

namespace lossd::rpc {

SessionLoad LoadOf(const engine::Engine& engine, const std::string& head, const std::string& client_key) {
  SessionLoad load;
  for (const std::shared_ptr<engine::Head>& each : engine.Heads()) {
    for (const auto& [id, lanes] : each->OpenSessions()) load.lanes += lanes;
    if (each->config().name == head) load.has_session = each->HasSession(client_key);
  }
  return load;
}

int32_t ChoosePlace(const std::vector<SessionLoad>& loads, std::optional<int32_t> deterministic_rank) {
  const auto has =
      std::find_if(loads.begin(), loads.end(), [](const SessionLoad& load) { return load.has_session; });
  if (has == loads.end() && deterministic_rank.has_value()) {
    return engine::ReplicaOfRank(*deterministic_rank, static_cast<int32_t>(loads.size()));
  }
  const auto least =
      std::min_element(loads.begin(), loads.end(),
                       [](const SessionLoad& a, const SessionLoad& b) { return a.lanes < b.lanes; });
  return static_cast<int32_t>((has != loads.end() ? has : least) - loads.begin());
}

}  // namespace lossd::rpc
