// --collective_interface.
#ifndef LOSSD_SERVER_STARTUP_GROUP_NETWORK_INTERFACE_H_
#define LOSSD_SERVER_STARTUP_GROUP_NETWORK_INTERFACE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace lossd {

// Whether this process may ask for the network interfaces of its host, as Gloo, NCCL and the functions below
// do. FAILED_PRECONDITION, saying what forbids it and what to change.
absl::Status CheckInterfaces();

// Numeric addresses of an interface that is up, IPv4 first, without those of one link alone where there are
// others. INVALID_ARGUMENT, naming those that there are, if it has none; else CheckInterfaces()'s.
absl::StatusOr<std::vector<std::string>> AddressesOf(const std::string& interface);

// Where node 0 listens for the ranks of others, or replica 0 for others, host:port: the address of the
// interface that `leader`, `flag`'s value, is, or as which its name is known here; the first if it is not
// known. FAILED_PRECONDITION, with both, if it is an address of something else: nobody would reach the leader
// there. May ask the network for the name.
absl::StatusOr<std::string> ControlAddress(const std::string& interface, const std::string& leader,
                                           const char* flag);

// Whether `leader`, host:port, is this host, by an address of an interface or a name of it. May ask the
// network for the name.
bool IsOfThisHost(const std::string& leader);

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_GROUP_NETWORK_INTERFACE_H_
