// Whether the ranks of a group, each of which the leader hears, reach each other.
#ifndef LOSSD_SERVER_STARTUP_GROUP_PARTED_RANKS_H_
#define LOSSD_SERVER_STARTUP_GROUP_PARTED_RANKS_H_

#include <chrono>
#include <functional>
#include <utility>
#include <vector>

#include "server/engine/device/device_report.h"

namespace lossd {

// A rank that is slow waits for nobody, so that StuckRanks leaves it its time. But where every rank waits at
// an exchange and none comes on, nobody is slow: what some of them have sent does not arrive. Exchanges that
// only devices wait for are not seen. One thread's.
class PartedRanks {
 public:
  using Clock = std::chrono::steady_clock;

  // `parted` is called when they have waited so for the group's patience.
  explicit PartedRanks(std::function<void()> parted) : parted_(std::move(parted)) {}

  // Every second or so.
  void Look(const engine::GroupReport& group, Clock::time_point now = Clock::now());

 private:
  const std::function<void()> parted_;
  std::vector<double> waited_;  // by each rank at exchanges that are over; empty: one of them does not wait
  Clock::time_point since_;     // it has been so
};

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_GROUP_PARTED_RANKS_H_
