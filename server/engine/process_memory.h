#ifndef LOSSD_SERVER_ENGINE_PROCESS_MEMORY_H_
#define LOSSD_SERVER_ENGINE_PROCESS_MEMORY_H_

#include <cstdint>

namespace lossd::engine {

struct ProcessMemory {
  int64_t resident_bytes = 0;
  int64_t peak_bytes = 0;  // largest resident size since the start
};

// As the kernel counts them for this process; zeros where it does not say.
ProcessMemory ReadProcessMemory();

// What this process may still take: the smaller of the system's available memory and the room left in its
// control group.
int64_t AvailableMemory();

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_PROCESS_MEMORY_H_
