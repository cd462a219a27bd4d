// Payload bytes, in and out, that the streams of one session have under way together.
//
// Thread-safe. A stream holds its own lock while it calls, so nothing is called back from here: what Return
// gives has to be called once that lock is released.
#ifndef LOSSD_SERVER_ENGINE_SCHEDULE_SESSION_CREDIT_H_
#define LOSSD_SERVER_ENGINE_SCHEDULE_SESSION_CREDIT_H_

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "server/engine/common/counters.h"
#include "server/engine/common/mutex.h"

namespace lossd::engine {

class SessionCredit {
 public:
  using Waiter = std::function<void()>;

  // `bytes` may be under way; `total` is that of all sessions, and outlives this.
  SessionCredit(int64_t bytes, Gauge* total) : limit_(bytes), total_(total) {}
  SessionCredit(const SessionCredit&) = delete;
  SessionCredit& operator=(const SessionCredit&) = delete;

  int64_t limit() const { return limit_; }

  // Whether more may be taken. If not, `waiter` is kept until it may, or until `who` is forgotten: one of
  // each.
  bool MayTake(const void* who, Waiter waiter);
  // A stream that ends; also one that never waited.
  void Forget(const void* who);
  // Never refused: how large a message is shows when it is there.
  void Take(int64_t bytes);
  // Those that may take again.
  [[nodiscard]] std::vector<Waiter> Return(int64_t bytes);

 private:
  const int64_t limit_;
  Gauge* const total_;
  Mutex mutex_;
  int64_t taken_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<const void*, Waiter> waiters_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_SCHEDULE_SESSION_CREDIT_H_
