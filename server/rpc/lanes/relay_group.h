// The group whose ranks relay lanes of clients to the leader.
#ifndef LOSSD_SERVER_RPC_LANES_RELAY_GROUP_H_
#define LOSSD_SERVER_RPC_LANES_RELAY_GROUP_H_

#include <cstdint>
#include <memory>

#include "server/engine/group/rank_channel.h"

namespace lossd::rpc {

struct RelayGroup {
  std::shared_ptr<engine::RankChannel> ranks;
  int64_t epoch = 1;
  int32_t count = 2;  // of ranks
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_LANES_RELAY_GROUP_H_
