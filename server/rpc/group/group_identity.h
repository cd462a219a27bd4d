// What all ranks of a group must agree on.
#ifndef LOSSD_SERVER_RPC_GROUP_GROUP_IDENTITY_H_
#define LOSSD_SERVER_RPC_GROUP_GROUP_IDENTITY_H_

#include <cstdint>
#include <map>
#include <string>

namespace lossd::rpc {

struct GroupIdentity {
  // 0: at a member whichever the leader has, at the leader a random one. Where one process starts all ranks
  // it gives them a number, so that nobody joins an epoch before or after its own.
  int64_t epoch = 1;
  int32_t ranks = 2;  // the leader, rank 0, too
  std::string version;
  std::string device_kind;  // "cpu", "cuda"
  // Whatever else has to be the same everywhere: flags, by their names without dashes, and their values as
  // people read them.
  std::map<std::string, std::string> agreed = {};
  std::string member = "rank";  // what messages call one of them; not compared
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_GROUP_GROUP_IDENTITY_H_
