// Where a rank that is not the leader takes lanes of clients.
#ifndef LOSSD_SERVER_STARTUP_GROUP_LANE_PLACE_H_
#define LOSSD_SERVER_STARTUP_GROUP_LANE_PLACE_H_

#include <set>
#include <string>

#include "server/startup/group/group_options.h"

namespace lossd {

// Where a rank takes lanes, and what clients are told of it.
struct LanePlace {
  std::string listen = {};  // as --listen; empty: nowhere
  std::string host = {};    // rpc::RankLanes'
  std::string suffix = {};

  bool operator==(const LanePlace&) const = default;
};

// The place of this rank's process where --listen is `listen`. On the leader's host: at port p + rank in the
// place of p, ports of `taken` not counted, a free one in that of 0, and PATH.rank in that of unix:PATH. On
// another its first rank is at port p, the next one behind it, and clients are told `host`; but nowhere if
// only its own host reaches the addresses, and others `host`.
LanePlace FindLanePlace(const GroupOptions& group, const std::string& listen, const std::string& host,
                        const std::set<int>& taken);

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_GROUP_LANE_PLACE_H_
