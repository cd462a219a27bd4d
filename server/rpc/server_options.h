// Options of rpc::Server.
#ifndef LOSSD_SERVER_RPC_SERVER_OPTIONS_H_
#define LOSSD_SERVER_RPC_SERVER_OPTIONS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/rpc/connections/connection_limits.h"
#include "server/rpc/convert/lane_addresses.h"
#include "server/rpc/convert/row_messages.h"
#include "server/rpc/lanes/relay_group.h"
#include "server/rpc/transport/tls_files.h"
#include "server/telemetry/common/service_counters.h"

namespace lossd::rpc {

class AccessControl;
class RelayService;
class ReplicaSet;

struct ServerOptions {
  // One or more, with commas: host:port, where port 0 takes a free one, or unix:PATH.
  std::string listen = "127.0.0.1:50051";
  TlsFiles tls = {};                   // of host:port; a socket file is guarded by its permissions
  std::string region_socket_dir = {};  // RegionSocket's, if the engine has regions
  std::string weights_dir = {};        // WeightLoader's folder
  int64_t row_message_bytes = kRowMessageBytes;
  std::function<void()> on_drain = {};              // StatusService's
  telemetry::ServiceCounters* counters = nullptr;   // of MethodNames(); outlives the server
  std::shared_ptr<AccessControl> access = nullptr;  // who is let in; null: everybody
  ConnectionLimits connections = {};
  // At a group's leader: what lanes that clients open at other ranks come by, and where they do. `relays` is
  // null if they do not, and outlives the server.
  RelayService* relays = nullptr;
  RelayGroup group = {};
  std::vector<RankLanes> lanes = {};  // from rank 1 on
  // Its place among replicas, which the others may call from Serve() to Drain(); outlives the server. Null:
  // there are none.
  ReplicaSet* replicas = nullptr;
  // The host by which clients reach this one, where another replica has sent them; with `listen`'s first
  // port.
  std::string advertised_host = {};
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_SERVER_OPTIONS_H_
