// Looks after one wait for a server: it ends when the caller no longer wants it, and when the server has been
// silent for call_timeout and, asked over a new connection, does not answer there either. One that is only
// busy answers.
#ifndef LOSSD_CLIENT_SRC_CONNECTION_WATCH_H_
#define LOSSD_CLIENT_SRC_CONNECTION_WATCH_H_

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "client/src/connection/breaker.h"
#include "client/src/connection/call_metadata.h"
#include "client/src/connection/waiting.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/completion_queue.h"
#include "lossd/client.h"

namespace lossd::internal {

// Where a watch asks. Outlives it.
struct WatchedServer {
  std::string target;
  const ClientOptions& options;
  std::shared_ptr<CallMetadata> metadata;
  std::shared_ptr<grpc::Channel> channel;  // that is there anyway
  const Breaker& breaker;                  // of its connection
  std::function<std::shared_ptr<grpc::Channel>()> connect;
  // Whether others may serve instead of it.
  enum class Others { kNone, kAre } others = Others::kNone;
};

// A call that may take so long had none. UNAVAILABLE where others may serve: there the call is made again.
absl::Status NoAnswer(const WatchedServer& server, std::chrono::milliseconds time);
// Whether a call ended with `status` because the server was silent and others may serve.
bool WasSilent(const absl::Status& status);

// Used by one thread, for one wait, which begins with it.
class Watch {
 public:
  // What silence means.
  enum class Silence {
    kIsEnough,  // the wait has an end of its own
    kIsAsked    // the server may be gone
  };
  // `deadline` of the call, from now on: gRPC keeps it, but not while it cannot get rid of a message.
  Watch(const WatchedServer& server, Silence silence,
        std::optional<std::chrono::milliseconds> deadline = std::nullopt)
      : server_(server), silence_(silence), deadline_(deadline) {}
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // How long to wait before Look is called.
  std::chrono::milliseconds slice() const;
  // OK: wait on.
  absl::Status Look();
  // Breaks the connection that is there anyway.
  void Break() const { server_.breaker.Break(); }
  // What the call ended with; where its connection was given up as silent, that the server still is.
  absl::Status Judge(const absl::Status& ended);

  // Waits until `ready`; on an error it may not be. `lock` is held when `ready` is called.
  template <class Ready>
  absl::Status Wait(std::unique_lock<std::mutex>* lock, std::condition_variable* changed, Ready ready) {
    while (!changed->wait_for(*lock, slice(), ready)) {
      lock->unlock();
      absl::Status looked = Look();
      lock->lock();
      if (!looked.ok() && !ready()) return looked;
    }
    return absl::OkStatus();
  }

 private:
  using Clock = std::chrono::steady_clock;
  class Ping;

  // Asks after `wait_before` of silence, and looks at what became of that.
  absl::Status AskServer(std::chrono::milliseconds wait_before);

  void StopPing();

  const WatchedServer& server_;
  const Silence silence_;
  const std::optional<std::chrono::milliseconds> deadline_;
  Clock::time_point heard_ = Clock::now();
  std::shared_ptr<Ping> ping_;
};

// Waits for the one event of `queue`. On an error `context`'s call was cancelled, and is over.
absl::Status Await(grpc::CompletionQueue* queue, grpc::ClientContext* context, Watch* watch, bool* ok);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_CONNECTION_WATCH_H_
