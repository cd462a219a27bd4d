// What heads may reserve on a device, and who has reserved what. Everything a head needs is reserved when it
// is created, and what a deterministic session needs when that is opened, or when rows with a teacher or with
// lists come to it.
#ifndef LOSSD_SERVER_ENGINE_MEMORY_MEMORY_BUDGET_H_
#define LOSSD_SERVER_ENGINE_MEMORY_MEMORY_BUDGET_H_

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/engine/common/mutex.h"
#include "server/engine/memory/payload.h"

namespace lossd::engine {

struct MemoryItem {
  std::string purpose;
  int64_t bytes = 0;
  MemoryPlace place = MemoryPlace::kHost;
};
using MemoryPlan = std::vector<MemoryItem>;

// Every purpose that memory is reserved for, in the order of reports.
inline constexpr std::array<absl::string_view, 11> kMemoryPurposes = {
    "weights", "master_weights", "weight_staging", "gradient",     "optimizer",      "workspace",
    "tiles",   "regions",        "class_weights",  "replica_sums", "checkpoint_copy"};

int64_t TotalBytes(const MemoryPlan& plan);
// One item for each purpose and place, in the order in which they first occur.
MemoryPlan Merged(const MemoryPlan& plan);

// The remedies for heads that need more than the limit. `bound`: the control group that the limit was taken
// from, as MemoryBound() names it; may be empty.
std::string HeadMemoryAdvice(absl::string_view bound = "");

class MemoryReservation;

// Who has reserved what, all of one moment: `reserved` is the sum of everything below it.
struct MemoryUsage {
  int64_t reserved = 0;
  std::map<std::string, MemoryPlan> heads;  // by name; of those too that are being deleted
  MemoryPlan shared;                        // belongs to the device or to no head
};

// All of it by purpose and place. Purposes and places without any are listed, too.
MemoryPlan ByPurpose(const MemoryUsage& usage);

// Thread-safe.
class MemoryBudget : public std::enable_shared_from_this<MemoryBudget> {
 public:
  // `head_quota_bytes`: most that one head may have with all its sessions; 0: as much as there is. `advice`:
  // what to do where the limit is exceeded.
  explicit MemoryBudget(int64_t limit_bytes, int64_t head_quota_bytes = 0,
                        std::string advice = HeadMemoryAdvice())
      : limit_(limit_bytes), head_quota_(head_quota_bytes), advice_(std::move(advice)) {}

  // For `head`, or if that is empty for what no head owns; `what` is for messages. RESOURCE_EXHAUSTED with a
  // table of what was asked for, what is free and, where it is that which is exceeded, the head's quota.
  absl::StatusOr<std::unique_ptr<MemoryReservation>> Reserve(const std::string& head, absl::string_view what,
                                                             MemoryPlan plan);

  int64_t limit() const { return limit_; }
  int64_t head_quota() const { return head_quota_; }
  int64_t reserved() const;
  int64_t peak() const;  // most that was reserved at once
  MemoryUsage Usage() const;

 private:
  friend class MemoryReservation;
  void Release(const std::string& head, const MemoryPlan& plan);
  // Not OK if `plan` does not fit.
  absl::Status CheckLocked(const std::string& head, absl::string_view what, const MemoryPlan& plan) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int64_t limit_;
  const int64_t head_quota_;
  const std::string advice_;
  mutable Mutex mutex_;
  int64_t reserved_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t peak_ ABSL_GUARDED_BY(mutex_) = 0;
  // By head; "": shared; each purpose and place once.
  std::map<std::string, MemoryPlan> accounts_ ABSL_GUARDED_BY(mutex_);
};

// Gives its bytes back when destroyed.
class MemoryReservation {
 public:
  MemoryReservation(std::shared_ptr<MemoryBudget> budget, std::string head, MemoryPlan plan);
  ~MemoryReservation();
  MemoryReservation(const MemoryReservation&) = delete;
  MemoryReservation& operator=(const MemoryReservation&) = delete;

  const MemoryPlan& plan() const { return plan_; }

 private:
  std::shared_ptr<MemoryBudget> budget_;
  const std::string head_;
  MemoryPlan plan_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_MEMORY_MEMORY_BUDGET_H_
