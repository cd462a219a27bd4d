// Hands connections over to gRPC.
//
// gRPC begins to read a connection in the thread that hands it over, and keeps that thread for as long as
// there is more to read: a client that sends without a pause, be it nothing but frames that mean nothing,
// keeps it for as long as it likes. So each handover has a thread to itself, and nobody else waits for it
// until there are as many as may be at a time.
#ifndef LOSSD_SERVER_RPC_CONNECTIONS_HANDOVERS_H_
#define LOSSD_SERVER_RPC_CONNECTIONS_HANDOVERS_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/rpc/connections/tcp_address.h"
#include "server/rpc/transport/file_descriptor.h"

namespace lossd::rpc {

// Used by one thread.
class Handovers {
 public:
  // At a time. Others wait.
  static constexpr size_t kMost = 16;
  // So much of a processor's time one handover may take where another wants its place. A client's first
  // frames take a few, a handshake of TLS included: then it has to wait for answers, or for credit.
  static constexpr std::chrono::milliseconds kMostTime{250};

  Handovers() = default;
  ~Handovers() { Stop(); }
  Handovers(const Handovers&) = delete;
  Handovers& operator=(const Handovers&) = delete;

  bool HasRoom() ABSL_LOCKS_EXCLUDED(mutex_);
  bool AnyLasts() ABSL_LOCKS_EXCLUDED(mutex_);

  // Calls `hand_over` with the number of a place, [0, kMost), that no other has at that time, in a thread of
  // that place; in this one if there can be no thread. There is room. `socket` is open until `hand_over` is
  // called.
  using HandOver = std::function<void(size_t place)>;
  void Begin(int socket, HandOver hand_over) ABSL_LOCKS_EXCLUDED(mutex_);

  // If there is no room, cuts off connections whose handovers have had more than kMostTime, each once.
  // Returns them; none: not of TCP.
  std::vector<std::optional<TcpConnection>> EndOverdue() ABSL_LOCKS_EXCLUDED(mutex_);

  // Waits for all, and cuts off the connections of those that last. None begins any more.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Place {
    std::thread thread;
    HandOver hand_over;                // null: none
    bool ended = false;                // its connection was cut off
    FileDescriptor socket;             // another descriptor of the connection, which gRPC may close
    std::chrono::nanoseconds began{};  // by the clock of the thread's processor time
  };

  void Run(size_t place) ABSL_LOCKS_EXCLUDED(mutex_);
  // Its thread, if it had none. False: there can be none.
  bool Start(size_t place) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool AnyIsFree() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  bool NoneIsLeft() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  absl::Mutex mutex_;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
  std::array<Place, kMost> places_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CONNECTIONS_HANDOVERS_H_
