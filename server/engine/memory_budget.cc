#include "server/engine/memory_budget.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/engine/errors.h"

namespace lossd::engine {

int64_t TotalBytes(const MemoryPlan& plan) {
  int64_t total = 0;
  for (const MemoryItem& item : plan) total += item.bytes;
  return total;
}

absl::StatusOr<std::unique_ptr<MemoryReservation>> MemoryBudget::Reserve(absl::string_view owner,
                                                                         MemoryPlan plan) {
  const int64_t wanted = TotalBytes(plan);
  {
    const std::lock_guard lock(mutex_);
    if (wanted > limit_ - reserved_) {
      std::string table = absl::StrFormat("not enough memory for %s; bytes:\n", owner);
      for (const MemoryItem& item : plan) {
        absl::StrAppendFormat(&table, "  %-16s %16d\n", item.purpose, item.bytes);
      }
      absl::StrAppendFormat(&table, "  %-16s %16d\n  %-16s %16d\n", "asked for", wanted, "free",
                            limit_ - reserved_);
      absl::StrAppendFormat(&table, "  %-16s %16d\n  %-16s %16d\n", "reserved", reserved_, "limit", limit_);
      absl::StrAppend(&table, "delete a head, raise --memory_limit_bytes, or create a smaller head");
      return MakeError(absl::StatusCode::kResourceExhausted, RejectReason::kOutOfMemory, "config", table);
    }
    reserved_ += wanted;
  }
  return std::make_unique<MemoryReservation>(shared_from_this(), std::move(plan));
}

int64_t MemoryBudget::reserved() const {
  const std::lock_guard lock(mutex_);
  return reserved_;
}

void MemoryBudget::Release(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  reserved_ -= bytes;
}

MemoryReservation::MemoryReservation(std::shared_ptr<MemoryBudget> budget, MemoryPlan plan)
    : budget_(std::move(budget)), plan_(std::move(plan)) {}

MemoryReservation::~MemoryReservation() { budget_->Release(TotalBytes(plan_)); }

}  // namespace lossd::engine
