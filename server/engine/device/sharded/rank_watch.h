// What a rank does, for others to look at.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_SHARDED_RANK_WATCH_H_
#define LOSSD_SERVER_ENGINE_DEVICE_SHARDED_RANK_WATCH_H_

#include <array>
#include <chrono>
#include <deque>
#include <list>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "kernels/exchange.h"
#include "server/engine/common/counters.h"
#include "server/engine/common/mutex.h"
#include "server/engine/device/device_report.h"

namespace lossd::engine {

// Thread-safe. Those who execute and those who look wait for no more than a few lines of each other.
class RankWatch final : public kernels::ExchangeObserver {
 public:
  struct Begun {
    const char* command = nullptr;
    std::chrono::steady_clock::time_point at;
  };

  // As long as it lives, the rank does what a command says. `watch` may be null.
  class Executing {
   public:
    // `command` is a literal.
    Executing(RankWatch* watch, const char* command) : watch_(watch) {
      if (watch_ != nullptr) begun_ = watch_->Begin(command);
    }
    ~Executing() {
      if (watch_ != nullptr) watch_->End(begun_);
    }
    Executing(const Executing&) = delete;
    Executing& operator=(const Executing&) = delete;

   private:
    RankWatch* const watch_;
    std::list<Begun>::iterator begun_;
  };

  // Batches, which devices may go on with when their command is executed. They end in their order.
  void BatchStarted() ABSL_LOCKS_EXCLUDED(mutex_);
  void BatchEnded() ABSL_LOCKS_EXCLUDED(mutex_);

  void OnWaiting(kernels::Exchange exchange) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnWaited(kernels::Exchange exchange, double seconds) override ABSL_LOCKS_EXCLUDED(mutex_);

  RankActivity Read() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  using Clock = std::chrono::steady_clock;

  std::list<Begun>::iterator Begin(const char* command) ABSL_LOCKS_EXCLUDED(mutex_);
  void End(std::list<Begun>::iterator begun) ABSL_LOCKS_EXCLUDED(mutex_);

  const Clock::time_point ready_ = Clock::now();
  std::array<DurationHistogram, kernels::kExchanges.size()> waits_;

  mutable Mutex mutex_;
  std::list<Begun> executing_ ABSL_GUARDED_BY(mutex_);       // the oldest first
  std::deque<Begun> batches_ ABSL_GUARDED_BY(mutex_);        // that are under way; the same
  Clock::time_point done_ ABSL_GUARDED_BY(mutex_) = ready_;  // with a command or a batch
  std::optional<kernels::Exchange> waits_at_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_SHARDED_RANK_WATCH_H_
