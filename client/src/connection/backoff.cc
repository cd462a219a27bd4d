#include "client/src/connection/backoff.h"

#include <algorithm>

namespace lossd::internal {
namespace {
constexpr std::chrono::milliseconds kFirstDelay(20);
constexpr std::chrono::milliseconds kLongestDelay(2000);
}  // namespace

Backoff::Backoff(std::chrono::milliseconds give_up_after)
    : give_up_after_(give_up_after), delay_(kFirstDelay), random_(std::random_device()()) {}

void Backoff::Reset() {
  failing_ = false;
  delay_ = kFirstDelay;
}

std::optional<std::chrono::milliseconds> Backoff::NextDelay(std::chrono::milliseconds at_least) {
  const Clock::time_point now = Clock::now();
  if (!failing_) {
    failing_ = true;
    first_failure_ = now;
  }
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(give_up_after_ - (now - first_failure_));
  if (left <= std::chrono::milliseconds(0) || at_least > left) return std::nullopt;

  std::uniform_real_distribution<double> jitter(0.5, 1.0);
  const std::chrono::milliseconds delay(
      static_cast<int64_t>(static_cast<double>(delay_.count()) * jitter(random_)));
  // Those that a server sends away at the same moment do not come back at the same moment.
  std::uniform_real_distribution<double> later(1.0, 1.25);
  const std::chrono::milliseconds asked(
      static_cast<int64_t>(static_cast<double>(at_least.count()) * later(random_)));
  delay_ = std::min(delay_ * 2, kLongestDelay);
  return std::min(std::max(delay, asked), left);
}

}  // namespace lossd::internal
