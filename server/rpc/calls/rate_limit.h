// Keeps clients from filling the log.
#ifndef LOSSD_SERVER_RPC_CALLS_RATE_LIMIT_H_
#define LOSSD_SERVER_RPC_CALLS_RATE_LIMIT_H_

#include <chrono>
#include <cstdint>
#include <optional>

namespace lossd::rpc {

// Lets `burst` through at once, and then `per_second`; the others are counted. Not thread-safe.
class RateLimit {
 public:
  using Time = std::chrono::steady_clock::time_point;

  RateLimit(double burst, double per_second) : burst_(burst), per_second_(per_second), room_(burst) {}

  // How many were held back since the last that was let through; none: this one is held back.
  std::optional<uint64_t> Take(Time now);

 private:
  const double burst_;
  const double per_second_;
  double room_;
  Time at_{};
  uint64_t held_back_ = 0;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CALLS_RATE_LIMIT_H_
