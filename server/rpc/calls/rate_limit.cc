#include "server/rpc/calls/rate_limit.h"

#include <algorithm>
#include <utility>

namespace lossd::rpc {

std::optional<uint64_t> RateLimit::Take(Time now) {
  const double seconds = std::chrono::duration<double>(now - at_).count();
  room_ = std::min(burst_, room_ + seconds * per_second_);
  at_ = now;
  if (room_ < 1) {
    ++held_back_;
    return std::nullopt;
  }
  room_ -= 1;
  return std::exchange(held_back_, 0);
}

}  // namespace lossd::rpc
