// Those who have called the leader and have yet to say who they are.
#ifndef LOSSD_SERVER_RPC_GROUP_LOBBY_H_
#define LOSSD_SERVER_RPC_GROUP_LOBBY_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "server/engine/common/mutex.h"
#include "server/rpc/group/group_timing.h"

namespace lossd::rpc {

// Each of them takes a thread: there are few at a time, and none stays for long. Thread-safe.
class Lobby {
 public:
  // `most` at a time, each for as long as `patience`.
  Lobby(size_t most, absl::Duration patience) : most_(most), patience_(patience) {}

  // A call that waits for its first message.
  class Visit {
   public:
    Visit(Lobby* lobby, grpc::ServerContext* call)
        : lobby_(lobby), call_(call), admitted_(lobby->Enter(call)) {}
    ~Visit() {
      if (admitted_) lobby_->Leave(call_);
    }
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;

    bool admitted() const { return admitted_; }

   private:
    Lobby* const lobby_;
    grpc::ServerContext* const call_;
    const bool admitted_;
  };

  // Cancels the calls of those whose time is over. To be called every second or so.
  void Look() ABSL_LOCKS_EXCLUDED(mutex_) {
    const engine::MutexLock lock(mutex_);
    const Clock::time_point now = Clock::now();
    for (const auto& [call, deadline] : waiting_) {
      if (now >= deadline) call->TryCancel();
    }
  }

 private:
  using Clock = std::chrono::steady_clock;

  bool Enter(grpc::ServerContext* call) ABSL_LOCKS_EXCLUDED(mutex_) {
    const engine::MutexLock lock(mutex_);
    if (waiting_.size() >= most_) return false;
    waiting_.emplace(call, DeadlineAfter(patience_));
    return true;
  }
  void Leave(grpc::ServerContext* call) ABSL_LOCKS_EXCLUDED(mutex_) {
    const engine::MutexLock lock(mutex_);
    waiting_.erase(call);
  }

  const size_t most_;
  const absl::Duration patience_;
  engine::Mutex mutex_;
  std::map<grpc::ServerContext*, Clock::time_point> waiting_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_GROUP_LOBBY_H_
