// The flags of a group: which devices, which hosts, and by what its ranks know each other.
#ifndef LOSSD_SERVER_STARTUP_GROUP_FLAGS_H_
#define LOSSD_SERVER_STARTUP_GROUP_FLAGS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/startup/group/group_options.h"
#include "server/startup/group/rank_lanes.h"

namespace lossd {

// `devices` is --devices; empty: it is not given. INVALID_ARGUMENT naming the flag or the launcher's
// variable, and what to do. UNAVAILABLE if a rank's process cannot read what its parent could.
absl::StatusOr<GroupOptions> ReadGroupFlags(const std::string& devices);

// Where this process, a rank that is not the leader, takes lanes, if the server listens at `listen` and for
// other things at the addresses of `others`, of which some may be empty. Otherwise nowhere.
absl::StatusOr<LanePlace> ReadLaneFlags(const GroupOptions& group, const std::string& listen,
                                        const std::vector<std::string>& others);

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_GROUP_FLAGS_H_
