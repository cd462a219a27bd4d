// Memory that the server shares with a client on the same host.
#ifndef LOSSD_SERVER_ENGINE_REGIONS_REGION_MEMORY_H_
#define LOSSD_SERVER_ENGINE_REGIONS_REGION_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/engine/memory/memory_budget.h"
#include "server/engine/memory/payload.h"

namespace lossd::engine {

enum class RegionKind { kSystem, kDevice };
inline constexpr int kRegionKindCount = 2;
const char* Name(RegionKind kind);  // "system", "device"

// Owns the memory and gives it back when destroyed, on any thread. The client can write to it at any time, so
// nothing read from it twice need be equal.
class RegionMemory {
 public:
  RegionMemory() = default;
  virtual ~RegionMemory() = default;
  RegionMemory(const RegionMemory&) = delete;
  RegionMemory& operator=(const RegionMemory&) = delete;

  // The first of size() bytes, aligned to a page; of kDevice an address there.
  virtual std::byte* data() const = 0;
  virtual int64_t size() const = 0;
  virtual MemoryPlace place() const = 0;

  // Its client is done with it: the pages go when this is destroyed, even if somebody still has them mapped.
  // (A server that ends leaves its clients what they have.)
  virtual void GiveUp() {}

  // How another process maps it. System memory: a file descriptor, which stays the region's; else -1.
  virtual int file() const { return -1; }
  // Device memory: cudaIpcMemHandle_t, and the PCI bus id of its device; else empty.
  virtual std::string device_handle() const { return ""; }
  virtual std::string device_bus_id() const { return ""; }
};

// Makes memory that is to be shared with a client: a device.
class RegionSource {
 public:
  virtual ~RegionSource() = default;

  // What a region of `asked` bytes is rounded up to.
  virtual int64_t RegionBytes(RegionKind kind, int64_t asked) const = 0;
  // What of it counts against the memory budget.
  virtual MemoryPlan PlanRegion(RegionKind kind, int64_t bytes) const = 0;
  // Takes the memory, of RegionBytes bytes, from any thread and beside other calls: FAILED_PRECONDITION if
  // there is no memory of this kind, RESOURCE_EXHAUSTED if the system does not give it. Outlives the memory.
  virtual absl::StatusOr<std::shared_ptr<RegionMemory>> CreateRegionMemory(RegionKind kind,
                                                                           int64_t bytes) = 0;
};

// `bytes` rounded up to whole pages.
int64_t WholePages(int64_t bytes);

// Zero-filled pages, taken from the system at once, that can neither shrink nor grow: nobody who has the file
// descriptor can make an access of the server's fail. `bytes` are whole pages, at least one.
// RESOURCE_EXHAUSTED if the system does not give them.
absl::StatusOr<std::shared_ptr<RegionMemory>> CreateSystemMemory(int64_t bytes);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_REGIONS_REGION_MEMORY_H_
