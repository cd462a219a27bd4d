// Breaks a connection. A cancelled call is not over before gRPC has got rid of the message that it was just
// writing, which refers to the caller's memory; and a server that stands still does not take it.
#ifndef LOSSD_CLIENT_SRC_CONNECTION_BREAKER_H_
#define LOSSD_CLIENT_SRC_CONNECTION_BREAKER_H_

#include <chrono>
#include <memory>

#include "grpcpp/support/channel_arguments.h"

namespace lossd::internal {

// How long a cancelled call may take to end before its connection is broken.
inline constexpr std::chrono::milliseconds kCancelPatience(200);

// Thread-safe.
class Breaker {
 public:
  Breaker();
  ~Breaker();
  Breaker(const Breaker&) = delete;
  Breaker& operator=(const Breaker&) = delete;

  // The channel made with these arguments is the one whose connection Break breaks.
  void AddTo(grpc::ChannelArguments* arguments) const;
  // Calls that are under way over it fail as if the network had cut it.
  void Break() const;

 private:
  class Sockets;
  struct Mutator;

  const std::shared_ptr<Sockets> sockets_;
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_CONNECTION_BREAKER_H_
