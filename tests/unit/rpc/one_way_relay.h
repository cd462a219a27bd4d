// A TCP relay on loopback whose directions can be silenced one by one, as a network does that has lost a
// route.
#ifndef LOSSD_TESTS_UNIT_RPC_ONE_WAY_RELAY_H_
#define LOSSD_TESTS_UNIT_RPC_ONE_WAY_RELAY_H_

#include <atomic>
#include <string>
#include <thread>

#include "server/rpc/transport/file_descriptor.h"

namespace lossd::rpc::testing {

// Passes one connection on.
class OneWayRelay {
 public:
  // To 127.0.0.1:`port`.
  explicit OneWayRelay(int port);
  ~OneWayRelay();
  OneWayRelay(const OneWayRelay&) = delete;
  OneWayRelay& operator=(const OneWayRelay&) = delete;

  std::string address() const;
  // What comes from there goes nowhere from now on, the end of the connection neither.
  void SilenceServer() { server_silent_ = true; }
  void SilenceClient() { client_silent_ = true; }

 private:
  void Run(int port);
  static void Pass(int from, int to, const std::atomic<bool>& silent);

  FileDescriptor listener_;
  FileDescriptor client_;
  FileDescriptor server_;
  std::atomic<bool> server_silent_ = false;
  std::atomic<bool> client_silent_ = false;
  std::thread thread_;
};

}  // namespace lossd::rpc::testing

#endif  // LOSSD_TESTS_UNIT_RPC_ONE_WAY_RELAY_H_
