#ifndef LOSSD_SERVER_ENGINE_MEMORY_PROCESS_MEMORY_H_
#define LOSSD_SERVER_ENGINE_MEMORY_PROCESS_MEMORY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace lossd::engine {

struct ProcessMemory {
  int64_t resident_bytes = 0;
  int64_t peak_bytes = 0;  // largest resident size since the start
  int64_t virtual_bytes = 0;
  int64_t threads = 0;
};

// As the kernel counts them for this process; zeros where it does not say.
ProcessMemory ReadProcessMemory();

// What this process may still take, in bytes: the smaller of the system's available memory and the room left
// in its control groups.
int64_t AvailableMemory();

// For messages: the control group that bounds AvailableMemory(), and its limit. Empty if the system does.
std::string MemoryBound();

// All that there is: the smaller of the system's memory and the limit of this process's control groups.
int64_t TotalMemory();

// What clients may have under way in all, if nobody says: a quarter of `available`, at most 64 GiB, and 2 GiB
// or half of `available` at least.
int64_t DefaultStagingBytes(int64_t available);

// What heads and the workspace may reserve of the host's memory, if nobody says: what `staging_bytes` leave
// of `available`, but for a tenth of that and 1 GiB (or a quarter) at least, which the process has for
// itself.
int64_t DefaultHeadBytes(int64_t available, int64_t staging_bytes);

// Raises the limit of open files to the most that the system allows, and returns it: gRPC 1.51 never accepts
// a connection again once there was none left for it.
int64_t RaiseFileLimit();

// Lets malloc keep the memory of large messages instead of returning it to the system and clearing it anew
// for each: chunks, answers and gRPC's buffers come and go all the time. Once, before other threads start;
// other allocators than glibc's are left as they are.
void RaiseMallocThresholds();

// Returns to the system what malloc has kept beyond `kept_bytes` for a while. malloc itself returns only what
// lies at the end of one of its arenas, where a single block in use holds back everything before it:
// gigabytes after a burst of calls. Not thread-safe; other allocators than glibc's are left as they are.
class FreedMemory {
 public:
  // So many looks in a row find memory unused before it is returned: what is used again and again stays.
  static constexpr size_t kLooks = 3;

  explicit FreedMemory(int64_t kept_bytes) : kept_bytes_(kept_bytes) {}

  // Every few seconds. Stops threads that allocate for some milliseconds if there is much to return.
  void Look();

 private:
  const int64_t kept_bytes_;
  std::array<int64_t, kLooks> unused_{};  // bytes, at the last looks
  size_t next_ = 0;
  int64_t resident_after_ = 0;  // bytes of the process, when memory was last returned
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_MEMORY_PROCESS_MEMORY_H_
