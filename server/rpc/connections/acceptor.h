// Takes connections for a gRPC server.
//
// gRPC's own sockets (1.51) stop listening for good the first time that no file descriptor is left for a
// connection: a crowd of connections, of anybody who reaches the port, would shut the server up until it is
// started again. These go on. And a few descriptors are kept back, for checkpoints, certificates and probes:
// a connection that would take one of those is closed at once, so that its client learns it and tries again.
// Connections that flood the server with calls are ended (ConnectionGuard), by a thread that does nothing
// else. Those that send without a pause from the beginning are ended, too, and keep others waiting for a
// moment at most (Handovers).
#ifndef LOSSD_SERVER_RPC_CONNECTIONS_ACCEPTOR_H_
#define LOSSD_SERVER_RPC_CONNECTIONS_ACCEPTOR_H_

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <semaphore>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/common/counters.h"
#include "server/rpc/calls/rate_limit.h"
#include "server/rpc/connections/call_counts.h"
#include "server/rpc/connections/connection_guard.h"
#include "server/rpc/connections/handovers.h"
#include "server/rpc/connections/tcp_address.h"
#include "server/rpc/transport/file_descriptor.h"
#include "server/rpc/transport/listener.h"

namespace lossd::rpc {

// Not thread-safe; has threads of its own.
class Acceptor {
 public:
  // Probes and members of a group get at descriptors that clients do not. Members know the port beforehand.
  enum class For { kClients, kProbes, kMembers };

  // What became of connections beside being served. Outlives it; null: not counted.
  struct Counters {
    engine::Counter* refused = nullptr;  // closed at once, for want of descriptors
    // Ended by the guard, or since its handover took too much time; or closed at once, since too many wait
    // because of these.
    engine::Counter* flooding = nullptr;
  };
  Acceptor(For whom, Counters counters) : for_(whom), counters_(counters) {}
  ~Acceptor() { Stop(); }
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  // Connections to `address` (Listener::Open) wait from now on, to be served with `credentials`. Before the
  // server is built. UNAVAILABLE without a descriptor.
  absl::Status Listen(const std::string& address, const std::shared_ptr<grpc::ServerCredentials>& credentials,
                      grpc::ServerBuilder& builder);
  // After the server was built: all that it takes to serve. UNAVAILABLE if no thread can be started.
  absl::Status Prepare();
  // Connections are taken from now on. Once, after Prepare.
  void Start() { begin_.release(); }
  // Addresses are free when it returns, and connections that nobody took closed. Before the server shuts
  // down.
  void Stop();
  // After Stop: ends all connections that are still gRPC's, at once. How many there were.
  int CutOffAll();

  int port() const;  // of the first address that has one; 0: none has

 private:
  struct Place {
    std::unique_ptr<Listener> listener;
    // One for each handover at a time: gRPC holds a lock of it for as long as that takes.
    std::vector<std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor>> servers;
  };

  // A connection of a host that has flooded the server: it is served later.
  struct Waiting {
    ConnectionGuard::Time at;
    std::string host;
    int listener;
    Place* place;
    FileDescriptor socket;
  };

  // What the threads do.
  void TakeConnections();
  void EndFloods();
  // Takes connections until none waits. False: there is no descriptor for the next, or no room to hand it
  // over.
  bool TakeAll(int listener, Place& place);
  void Take(int listener, Place& place, FileDescriptor socket);
  // There is room for a handover.
  void Serve(int listener, Place& place, FileDescriptor socket);
  void EndHandovers();
  // Serves waiting connections whose time has come.
  void ServeWaiting();
  // Milliseconds until there is something to do, as poll takes them.
  int Patience();
  void LogShortage(const char* connection);
  static void LogFlood(const std::string& peer, int port, const char* why, RateLimit& lines);

  const For for_;
  const Counters counters_;
  std::vector<Place> places_;
  FileDescriptor stop_;
  std::counting_semaphore<2> begin_{0};  // Start() or Stop() has come

  absl::Mutex mutex_;
  ChannelzCounts call_counts_ ABSL_GUARDED_BY(mutex_);
  ConnectionGuard guard_ ABSL_GUARDED_BY(mutex_){&call_counts_};
  bool guarded_ ABSL_GUARDED_BY(mutex_) = false;  // there has been a connection
  // Sockets that were handed to gRPC, with their cookies: which of them it has closed since these tell.
  std::map<int, uint64_t> served_ ABSL_GUARDED_BY(mutex_);
  bool over_ ABSL_GUARDED_BY(mutex_) = false;  // no connection is taken any more

  // Those of the thread that takes connections.
  std::list<Waiting> waiting_;
  Handovers handovers_;
  RateLimit lines_{1, 0.1};
  RateLimit handover_lines_{5, 0.1};
  std::thread taking_;

  // Those of the thread that ends floods.
  RateLimit flood_lines_{5, 0.1};
  std::thread guarding_;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CONNECTIONS_ACCEPTOR_H_
