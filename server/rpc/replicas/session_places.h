// Which replica a client's session is at.
#ifndef LOSSD_SERVER_RPC_REPLICAS_SESSION_PLACES_H_
#define LOSSD_SERVER_RPC_REPLICAS_SESSION_PLACES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "server/engine/engine.h"

namespace lossd::rpc {

// What one replica has of sessions.
struct SessionLoad {
  bool has_session = false;  // that of the client
  int64_t lanes = 0;         // of all sessions, of all heads: they share the device
};
SessionLoad LoadOf(const engine::Engine& engine, const std::string& head, const std::string& client_key);

// The one that has the client's session, else that of the rank of a deterministic session, else the first
// with the fewest lanes. `loads`: by replica, at least one.
int32_t ChoosePlace(const std::vector<SessionLoad>& loads, std::optional<int32_t> deterministic_rank);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_REPLICAS_SESSION_PLACES_H_
