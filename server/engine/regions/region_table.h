// The regions there are: memory shared with clients on the same host, by unguessable handle.
//
// A region belongs to the table until its client's lease ends (Drop, Delete), and to every chunk that names
// it until that chunk is done; the last of them frees the memory and gives its bytes back. Thread-safe.
#ifndef LOSSD_SERVER_ENGINE_REGIONS_REGION_TABLE_H_
#define LOSSD_SERVER_ENGINE_REGIONS_REGION_TABLE_H_

#include <cstdint>
#include <memory>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/engine/common/mutex.h"
#include "server/engine/common/region_handle.h"
#include "server/engine/memory/memory_budget.h"
#include "server/engine/regions/region_memory.h"

namespace lossd::engine {

struct RegionLimits {
  int64_t total_bytes = 0;   // of all regions; 0: there are none
  int64_t client_bytes = 0;  // of one client process; also of all that are not attached yet
  absl::Duration attach_timeout = absl::Seconds(10);
  int64_t most = 1024;  // regions; each has a mapping, a file and a connection
};

// Who holds how many bytes.
class RegionAccount;

class Region {
 public:
  Region(RegionHandle handle, RegionKind kind, std::shared_ptr<RegionMemory> memory,
         std::unique_ptr<MemoryReservation> reservation, std::shared_ptr<RegionAccount> account);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  const RegionHandle& handle() const { return handle_; }
  RegionKind kind() const { return kind_; }
  const RegionMemory& memory() const { return *memory_; }
  int64_t size() const { return size_; }

 private:
  friend class RegionTable;

  const RegionHandle handle_;
  const RegionKind kind_;
  const int64_t size_;
  const std::shared_ptr<RegionAccount> account_;
  std::unique_ptr<MemoryReservation> reservation_;
  std::shared_ptr<RegionMemory> memory_;
  int64_t client_;  // whom the account counts it for
};

class RegionTable {
 public:
  // `source` outlives the table.
  RegionTable(RegionLimits limits, RegionSource* source, std::shared_ptr<MemoryBudget> budget);

  const RegionLimits& limits() const { return limits_; }
  bool enabled() const { return limits_.total_bytes > 0; }

  // FAILED_PRECONDITION if there are no regions here, RESOURCE_EXHAUSTED beyond the limits (with a delay
  // after which to try again, if others have only to be attached).
  absl::StatusOr<std::shared_ptr<const Region>> Create(RegionKind kind, int64_t bytes);
  // Once for each region, by the process `client`: chunks may name it from now on. NOT_FOUND;
  // RESOURCE_EXHAUSTED if the client would have too much.
  absl::StatusOr<std::shared_ptr<const Region>> Attach(const RegionHandle& handle, int64_t client);
  // Finds those that are attached. NOT_FOUND, naming `field`.
  absl::StatusOr<std::shared_ptr<const Region>> Find(const RegionHandle& handle,
                                                     absl::string_view field) const;
  // No chunk can name it from now on. NOT_FOUND.
  absl::Status Drop(const RegionHandle& handle);
  // Drops what nobody attached in time.
  void Expire();

  // Regions in use, those included that only chunks under way hold.
  struct Usage {
    int64_t regions = 0;
    int64_t bytes = 0;
  };
  Usage usage(RegionKind kind) const;
  // The part of it that is in the memory budget.
  int64_t reserved_bytes() const;

 private:
  struct Entry {
    std::shared_ptr<Region> region;
    bool attached = false;
    absl::Time created;
  };

  const RegionLimits limits_;
  RegionSource* const source_;
  const std::shared_ptr<MemoryBudget> budget_;
  const std::shared_ptr<RegionAccount> account_;

  mutable Mutex mutex_;
  std::unordered_map<RegionHandle, Entry, RegionHandle::Hash> regions_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_REGIONS_REGION_TABLE_H_
