// Says now and then why a start waits.
#ifndef LOSSD_SERVER_STARTUP_GROUP_WAITING_LOG_H_
#define LOSSD_SERVER_STARTUP_GROUP_WAITING_LOG_H_

#include <chrono>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "server/telemetry/common/logging.h"

namespace lossd {

// Not thread-safe.
class WaitingLog {
 public:
  // What waits: the event of its lines. `limit`: for how long it does.
  WaitingLog(std::string event, absl::Duration limit)
      : event_(std::move(event)), limit_(absl::FormatDuration(limit)) {}

  // Logs why after a few seconds, and again twice a minute.
  void Look(const std::string& why) {
    const Clock::time_point now = Clock::now();
    if (now < next_) return;
    next_ = now + std::chrono::seconds(30);
    telemetry::Log(telemetry::LogLevel::kWarning, event_, {{"reason", why}, {"group_start_timeout", limit_}});
  }

 private:
  using Clock = std::chrono::steady_clock;

  const std::string event_;
  const std::string limit_;
  Clock::time_point next_ = Clock::now() + std::chrono::seconds(3);
};

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_GROUP_WAITING_LOG_H_
