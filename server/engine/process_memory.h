#ifndef LOSSD_SERVER_ENGINE_PROCESS_MEMORY_H_
#define LOSSD_SERVER_ENGINE_PROCESS_MEMORY_H_

#include <cstdint>

namespace lossd::engine {

struct ProcessMemory {
  int64_t resident_bytes = 0;
  int64_t peak_bytes = 0;  // largest resident size since the start
  int64_t virtual_bytes = 0;
  int64_t threads = 0;
};

// As the kernel counts them for this process; zeros where it does not say.
ProcessMemory ReadProcessMemory();

// What this process may still take: the smaller of the system's available memory and the room left in its
// control group.
int64_t AvailableMemory();

// All that there is: the smaller of the system's memory and the limit of this process's control group.
int64_t TotalMemory();

// What clients may have under way in all, if nobody says: a quarter of what this process may still take, from
// 2 GiB to 64 GiB.
int64_t DefaultStagingBytes();

// Raises the limit of open files to the most that the system allows, and returns it: gRPC 1.51 never accepts
// a connection again once there was none left for it.
int64_t RaiseFileLimit();

// Lets malloc keep the memory of large messages instead of returning it to the system and clearing it anew
// for each: chunks, answers and gRPC's buffers come and go all the time. Once, before other threads start;
// other allocators than glibc's are left as they are.
void RaiseMallocThresholds();

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_PROCESS_MEMORY_H_
