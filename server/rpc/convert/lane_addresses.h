// Where clients may open lanes, as OpenSessionResponse tells them.
#ifndef LOSSD_SERVER_RPC_CONVERT_LANE_ADDRESSES_H_
#define LOSSD_SERVER_RPC_CONVERT_LANE_ADDRESSES_H_

#include <string>
#include <vector>

namespace lossd::rpc {

// Where one rank of a group takes lanes; nowhere if there is neither.
struct RankLanes {
  std::string host = {};    // that clients are told; empty: the one that they have called
  int port = 0;             // 0: no port
  std::string suffix = {};  // of its socket file, behind the path of the leader's: ".1"; empty: no file

  bool operator==(const RankLanes&) const = default;
};

// OpenSessionResponse.lane_addresses for a client that gRPC calls `peer`. `ranks`: those from rank 1 on.
// Empty if none of them takes lanes of such a client.
std::vector<std::string> LaneAddresses(const std::vector<RankLanes>& ranks, const std::string& peer);
// The same for a client that has called another server, which does not know how it did: `leader` is the
// HOST:PORT by which clients reach this one. Never empty.
std::vector<std::string> LaneAddressesFromElsewhere(const std::vector<RankLanes>& ranks,
                                                    const std::string& leader);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CONVERT_LANE_ADDRESSES_H_
