// How long ranks wait for each other, and bear each other's silence.
#ifndef LOSSD_SERVER_RPC_GROUP_GROUP_TIMING_H_
#define LOSSD_SERVER_RPC_GROUP_GROUP_TIMING_H_

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "absl/time/time.h"

namespace lossd::rpc {

inline absl::Duration HeartbeatInterval(absl::Duration rank_timeout) {
  return std::min(rank_timeout / 5, absl::Seconds(1));
}

// Silence is counted in one's own heartbeats, not in time: who was stopped itself meanwhile (a debugger, a
// machine that sleeps) must not take the others for lost when it goes on.
inline int64_t HeartbeatsToLoss(absl::Duration rank_timeout) {
  const absl::Duration interval = HeartbeatInterval(rank_timeout);
  return absl::Ceil(rank_timeout, interval) / interval;
}

// A rank that is this long at one command does not come on, as far as others can tell: it may compute on a
// slow device.
inline absl::Duration PatienceWithCommands(absl::Duration rank_timeout) { return 6 * rank_timeout; }

// A rank that does not answer within this what takes it no time, or that of taking memory, is stuck, though
// it says that it is there.
inline absl::Duration PatienceWithAnswers(absl::Duration rank_timeout) {
  return std::max(PatienceWithCommands(rank_timeout), absl::Minutes(5));
}

// For ever is a year.
inline std::chrono::steady_clock::time_point DeadlineAfter(absl::Duration timeout) {
  const absl::Duration some = std::clamp(timeout, absl::ZeroDuration(), absl::Hours(24 * 365));
  return std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(some);
}

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_GROUP_GROUP_TIMING_H_
