// The regions of a client, by where they lie in its memory.
#ifndef LOSSD_CLIENT_SRC_REGIONS_REGION_MAP_H_
#define LOSSD_CLIENT_SRC_REGIONS_REGION_MAP_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lossd/client.h"

namespace lossd::internal {

// A place that a chunk can name.
struct RegionPlace {
  std::string handle;
  int64_t offset = 0;
  RegionKind kind = RegionKind::kSystem;
};

// Thread-safe.
class RegionMap {
 public:
  struct Entry {
    int64_t bytes = 0;
    std::string handle;
    RegionKind kind = RegionKind::kSystem;
    std::function<bool()> alive;  // whether the server still has it
  };
  void Add(const void* data, Entry entry);
  void Remove(const void* data);
  bool empty() const {
    const std::lock_guard lock(mutex_);
    return regions_.empty();
  }

  // Where `bytes` bytes at `data` are; none if they do not begin in a region. INVALID_ARGUMENT, calling them
  // `name`, if they end beyond it, FAILED_PRECONDITION if the server has lost it.
  absl::StatusOr<std::optional<RegionPlace>> Find(const void* data, int64_t bytes, const char* name) const;

 private:
  mutable std::mutex mutex_;
  std::map<const std::byte*, Entry, std::less<>> regions_;
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_REGIONS_REGION_MAP_H_
