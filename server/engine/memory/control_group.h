#ifndef LOSSD_SERVER_ENGINE_MEMORY_CONTROL_GROUP_H_
#define LOSSD_SERVER_ENGINE_MEMORY_CONTROL_GROUP_H_

#include <cstdint>
#include <limits>
#include <string>

namespace lossd::engine {

// In bytes; the largest number there is where no control group sets a limit.
struct ControlGroupMemory {
  int64_t limit_bytes = std::numeric_limits<int64_t>::max();
  int64_t available_bytes = std::numeric_limits<int64_t>::max();  // to be taken before the limit is reached
  // For messages: the group with the fewest available bytes, its limit's file and value. Empty: no limit.
  std::string tightest;
};

// What the control group of this process and those above it allow, the tightest of them; of version 1 or 2.
// As in MemAvailable, memory that the kernel can reclaim without swapping counts as available. `root` stands
// before /proc and /sys in tests. From any thread.
ControlGroupMemory ReadControlGroupMemory(const std::string& root = "");

// Processors that the quota of the same groups amounts to; infinity where there is none.
double ReadControlGroupProcessors(const std::string& root = "");

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_MEMORY_CONTROL_GROUP_H_
