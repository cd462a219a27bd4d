// The flags of a group: which devices, which hosts, and by what its ranks know each other.
#ifndef LOSSD_SERVER_STARTUP_GROUP_FLAGS_H_
#define LOSSD_SERVER_STARTUP_GROUP_FLAGS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/rpc/group/group_credentials.h"
#include "server/startup/group/group_options.h"
#include "server/startup/group/lane_place.h"

namespace lossd {

// `devices` is --devices; empty: it is not given. `replicas`: there are some, which have flags in common with
// groups over hosts. INVALID_ARGUMENT naming the flag or the launcher's variable, and what to do.
// FAILED_PRECONDITION: CheckInterfaces()'s. UNAVAILABLE if a rank's process cannot read what its parent
// could.
absl::StatusOr<GroupOptions> ReadGroupFlags(const std::string& devices, bool replicas);

// Where this process, a rank that is not the leader, takes lanes, if the server listens at `listen` and for
// other things at the addresses of `others`, of which some may be empty. Otherwise nowhere.
absl::StatusOr<LanePlace> ReadLaneFlags(const GroupOptions& group, const std::string& listen,
                                        const std::vector<std::string>& others);

// What groups over hosts and replicas have in common: the same flags.

// By what they know each other; `needed_by` is the flag that asks for it.
absl::Status ReadGroupCredentials(const char* needed_by, rpc::GroupCredentials* credentials);
// The interface by which replicas reach each other; empty: loopback, which only those of one host may.
absl::Status ReadNetworkOfReplicas(bool one_host, std::string* interface);
// As it stands before a port.
absl::StatusOr<std::string> AdvertisedHost(const std::string& interface);

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_GROUP_FLAGS_H_
