#include "server/engine/regions/region_table.h"

#include <array>
#include <map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"
#include "server/engine/common/monotonic_clock.h"
#include "server/engine/common/mutex.h"

namespace lossd::engine {
namespace {

// The client of regions that are not attached yet.
constexpr int64_t kNobody = -1;

absl::Status Unknown(absl::string_view field) {
  return MakeError(absl::StatusCode::kNotFound, RejectReason::kUnknownRegion, field,
                   "there is no such region: it was deleted, its client's lease or the time to attach it "
                   "ended, or the server was restarted; call CreateRegion and attach again");
}

absl::Status TooMuch(absl::string_view what, int64_t asked, int64_t free, int64_t limit,
                     absl::string_view advice) {
  return MakeError(absl::StatusCode::kResourceExhausted, RejectReason::kOutOfMemory, "bytes",
                   absl::StrCat("a region of ", asked, " bytes was asked for; ", free, " of ", what, " (",
                                limit, " bytes) are free: ", advice));
}

}  // namespace

// Who holds what

class RegionAccount {
 public:
  explicit RegionAccount(const RegionLimits& limits) : limits_(limits) {}

  absl::Status Take(RegionKind kind, int64_t bytes) {
    const MutexLock lock(mutex_);
    int64_t used = 0;
    int64_t regions = 0;
    for (const RegionTable::Usage& usage : usage_) {
      used += usage.bytes;
      regions += usage.regions;
    }
    if (regions >= limits_.most) {
      return MakeError(absl::StatusCode::kResourceExhausted, RejectReason::kOverload, "bytes",
                       absl::StrCat("there are ", regions, " regions; that is the most"));
    }
    if (bytes > limits_.total_bytes - used) {
      return TooMuch("--region_bytes", bytes, limits_.total_bytes - used, limits_.total_bytes,
                     "use a smaller region, delete one or raise the limit");
    }
    int64_t& waiting = by_client_[kNobody];
    if (bytes > limits_.client_bytes) {
      return TooMuch("--region_client_bytes", bytes, limits_.client_bytes, limits_.client_bytes,
                     "use a smaller region or raise the limit");
    }
    if (bytes > limits_.client_bytes - waiting) {
      absl::Status status =
          TooMuch("--region_client_bytes", bytes, limits_.client_bytes - waiting, limits_.client_bytes,
                  "others were created and are not attached yet; try again");
      AttachRetryDelay(&status, absl::Seconds(1));
      return status;
    }
    waiting += bytes;
    AtLocked(kind).bytes += bytes;
    ++AtLocked(kind).regions;
    return absl::OkStatus();
  }

  // From nobody.
  absl::Status Give(int64_t client, int64_t bytes) {
    const MutexLock lock(mutex_);
    const auto it = by_client_.find(client);
    const int64_t have = it == by_client_.end() ? 0 : it->second;
    if (bytes > limits_.client_bytes - have) {
      return TooMuch("--region_client_bytes", bytes, limits_.client_bytes - have, limits_.client_bytes,
                     "this process has the others; delete one or raise the limit");
    }
    by_client_[client] += bytes;
    by_client_[kNobody] -= bytes;
    return absl::OkStatus();
  }

  void Release(RegionKind kind, int64_t client, int64_t bytes) {
    const MutexLock lock(mutex_);
    AtLocked(kind).bytes -= bytes;
    --AtLocked(kind).regions;
    const auto it = by_client_.find(client);
    it->second -= bytes;
    if (it->second == 0) by_client_.erase(it);
  }

  RegionTable::Usage usage(RegionKind kind) const {
    const MutexLock lock(mutex_);
    return usage_[static_cast<size_t>(kind)];
  }

 private:
  RegionTable::Usage& AtLocked(RegionKind kind) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return usage_[static_cast<size_t>(kind)];
  }

  const RegionLimits limits_;
  mutable Mutex mutex_;
  std::array<RegionTable::Usage, kRegionKindCount> usage_ ABSL_GUARDED_BY(mutex_){};
  std::map<int64_t, int64_t> by_client_ ABSL_GUARDED_BY(mutex_);
};

// Regions

Region::Region(RegionHandle handle, RegionKind kind, std::shared_ptr<RegionMemory> memory,
               std::unique_ptr<MemoryReservation> reservation, std::shared_ptr<RegionAccount> account)
    : handle_(handle),
      kind_(kind),
      size_(memory->size()),
      account_(std::move(account)),
      reservation_(std::move(reservation)),
      memory_(std::move(memory)),
      client_(kNobody) {}

Region::~Region() {
  memory_.reset();  // before what counts it
  reservation_.reset();
  account_->Release(kind_, client_, size_);
}

// The table

RegionTable::RegionTable(RegionLimits limits, RegionSource* source, std::shared_ptr<MemoryBudget> budget)
    : limits_(limits),
      source_(source),
      budget_(std::move(budget)),
      account_(std::make_shared<RegionAccount>(limits)),
      regions_(0, RegionHandle::Hash::Random()) {}

absl::StatusOr<std::shared_ptr<const Region>> RegionTable::Create(RegionKind kind, int64_t bytes) {
  if (!enabled()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kOption, "",
                     "regions are off; start lossd with --same_host_regions, or send payloads");
  }
  if (bytes < 1) {
    return MakeError(absl::StatusCode::kInvalidArgument, RejectReason::kOption, "bytes",
                     absl::StrCat("bytes is ", bytes, "; it must be at least 1"));
  }
  if (bytes > limits_.total_bytes) {  // before it is rounded up
    return TooMuch("--region_bytes", bytes, limits_.total_bytes, limits_.total_bytes, "use a smaller region");
  }
  bytes = source_->RegionBytes(kind, bytes);
  if (absl::Status status = account_->Take(kind, bytes); !status.ok()) return status;
  const auto give_back = [&](const absl::Status& status) {
    account_->Release(kind, kNobody, bytes);
    return status;
  };
  auto reservation = budget_->Reserve("", "a region", source_->PlanRegion(kind, bytes));
  if (!reservation.ok()) return give_back(reservation.status());
  absl::StatusOr<std::shared_ptr<RegionMemory>> memory = source_->CreateRegionMemory(kind, bytes);
  if (!memory.ok()) return give_back(memory.status());
  auto region = std::make_shared<Region>(RegionHandle::Random(), kind, *std::move(memory),
                                         *std::move(reservation), account_);
  const MutexLock lock(mutex_);
  regions_.emplace(region->handle(), Entry{region, false, MonotonicNow()});
  return region;
}

absl::StatusOr<std::shared_ptr<const Region>> RegionTable::Attach(const RegionHandle& handle,
                                                                  int64_t client) {
  const MutexLock lock(mutex_);
  const auto it = regions_.find(handle);
  if (it == regions_.end()) return Unknown("handle");
  Entry& entry = it->second;
  if (entry.attached) {
    return MakeError(absl::StatusCode::kAlreadyExists, RejectReason::kConflict, "handle",
                     "the region is attached; each takes one lease");
  }
  if (absl::Status status = account_->Give(client, entry.region->size()); !status.ok()) return status;
  entry.region->client_ = client;
  entry.attached = true;
  return entry.region;
}

absl::StatusOr<std::shared_ptr<const Region>> RegionTable::Find(const RegionHandle& handle,
                                                                absl::string_view field) const {
  const MutexLock lock(mutex_);
  const auto it = regions_.find(handle);
  if (it == regions_.end() || !it->second.attached) return Unknown(field);
  return it->second.region;
}

absl::Status RegionTable::Drop(const RegionHandle& handle) {
  Entry dropped;  // freed without the lock
  const MutexLock lock(mutex_);
  const auto it = regions_.find(handle);
  if (it == regions_.end()) return Unknown("handle");
  dropped = std::move(it->second);
  dropped.region->memory_->GiveUp();
  regions_.erase(it);
  return absl::OkStatus();
}

void RegionTable::Expire() {
  std::vector<Entry> dropped;
  const absl::Time before = MonotonicNow() - limits_.attach_timeout;
  const MutexLock lock(mutex_);
  for (auto it = regions_.begin(); it != regions_.end();) {
    if (it->second.attached || it->second.created > before) {
      ++it;
    } else {
      it->second.region->memory_->GiveUp();
      dropped.push_back(std::move(it->second));
      it = regions_.erase(it);
    }
  }
}

RegionTable::Usage RegionTable::usage(RegionKind kind) const { return account_->usage(kind); }

int64_t RegionTable::reserved_bytes() const {
  int64_t bytes = 0;
  for (const RegionKind kind : {RegionKind::kSystem, RegionKind::kDevice}) {
    bytes += TotalBytes(source_->PlanRegion(kind, usage(kind).bytes));
  }
  return bytes;
}

}  // namespace lossd::engine
