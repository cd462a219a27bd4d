// Whether a group is ready: every rank comes on with what it is told to do.
#ifndef LOSSD_SERVER_STARTUP_GROUP_STUCK_RANKS_H_
#define LOSSD_SERVER_STARTUP_GROUP_STUCK_RANKS_H_

#include <functional>
#include <utility>

#include "server/engine/device/device_report.h"

namespace lossd {

// A rank whose heartbeats come may still hang in a command. Nobody ends it for that, since a slow device
// takes its time; the server says that it is not ready, until the rank comes on. One thread's.
class StuckRanks {
 public:
  // `tell` is called when that changes, with whether all ranks come on; at first they do.
  explicit StuckRanks(std::function<void(bool ready)> tell) : tell_(std::move(tell)) {}

  // Every second or so.
  void Look(const engine::GroupReport& group);

 private:
  const std::function<void(bool ready)> tell_;
  bool ready_ = true;
};

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_GROUP_STUCK_RANKS_H_
