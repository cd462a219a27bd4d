// Time for leases and time-outs: it goes on evenly when somebody sets the clock. Points in it are comparable
// with each other alone; what is shown or sent to others is of absl::Now.
#ifndef LOSSD_SERVER_ENGINE_COMMON_MONOTONIC_CLOCK_H_
#define LOSSD_SERVER_ENGINE_COMMON_MONOTONIC_CLOCK_H_

#include <chrono>

#include "absl/time/time.h"

namespace lossd::engine {

inline absl::Time MonotonicNow() {
  return absl::UnixEpoch() + absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_COMMON_MONOTONIC_CLOCK_H_
