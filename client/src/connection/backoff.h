// Waiting between attempts: exponential, with jitter so that many clients of a restarted server do not come
// back at once, and with an end. Not thread-safe.
#ifndef LOSSD_CLIENT_SRC_CONNECTION_BACKOFF_H_
#define LOSSD_CLIENT_SRC_CONNECTION_BACKOFF_H_

#include <chrono>
#include <optional>
#include <random>

namespace lossd::internal {

class Backoff {
 public:
  // Gives up `give_up_after` after the first failure that followed the last progress.
  explicit Backoff(std::chrono::milliseconds give_up_after);

  // Something went well: the next failure starts from the beginning.
  void Reset();

  // Called after a failure: how long to wait, at least `at_least`, or nothing when it is time to give up.
  std::optional<std::chrono::milliseconds> NextDelay(
      std::chrono::milliseconds at_least = std::chrono::milliseconds(0));

 private:
  using Clock = std::chrono::steady_clock;
  std::chrono::milliseconds give_up_after_;
  std::chrono::milliseconds delay_;
  bool failing_ = false;
  Clock::time_point first_failure_;
  std::minstd_rand random_;
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_CONNECTION_BACKOFF_H_
