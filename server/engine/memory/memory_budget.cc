#include "server/engine/memory/memory_budget.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {
namespace {

void Add(const MemoryItem& item, MemoryPlan* plan) {
  const auto same = std::find_if(plan->begin(), plan->end(), [&](const MemoryItem& candidate) {
    return candidate.purpose == item.purpose && candidate.place == item.place;
  });
  if (same == plan->end()) {
    plan->push_back(item);
  } else {
    same->bytes += item.bytes;
  }
}

void AppendRow(absl::string_view name, int64_t bytes, std::string* table) {
  absl::StrAppendFormat(table, "  %-24s %16d\n", name, bytes);
}

}  // namespace

int64_t TotalBytes(const MemoryPlan& plan) {
  int64_t total = 0;
  for (const MemoryItem& item : plan) total += item.bytes;
  return total;
}

std::string HeadMemoryAdvice(absl::string_view bound) {
  return absl::StrCat("delete a head, park one that is not in use, ",
                      bound.empty() ? "raise --memory_limit_bytes"
                                    : absl::StrCat("raise the limit of the ", bound, " and restart lossd"),
                      ", create a smaller head, or lower --workspace_bytes");
}

MemoryPlan Merged(const MemoryPlan& plan) {
  MemoryPlan merged;
  for (const MemoryItem& item : plan) Add(item, &merged);
  return merged;
}

MemoryPlan ByPurpose(const MemoryUsage& usage) {
  MemoryPlan plan;
  for (const absl::string_view purpose : kMemoryPurposes) {
    for (int place = 0; place < kMemoryPlaceCount; ++place) {
      plan.push_back({std::string(purpose), 0, static_cast<MemoryPlace>(place)});
    }
  }
  plan.insert(plan.end(), usage.shared.begin(), usage.shared.end());
  for (const auto& [head, items] : usage.heads) plan.insert(plan.end(), items.begin(), items.end());
  return Merged(plan);
}

absl::Status MemoryBudget::CheckLocked(const std::string& head, absl::string_view what,
                                       const MemoryPlan& plan) const {
  const int64_t wanted = TotalBytes(plan);
  const auto account = accounts_.find(head);
  const int64_t used = account == accounts_.end() ? 0 : TotalBytes(account->second);
  const bool over_quota = !head.empty() && head_quota_ > 0 && wanted > head_quota_ - used;
  if (wanted <= limit_ - reserved_ && !over_quota) return absl::OkStatus();
  std::string table = absl::StrFormat("not enough memory for %s; bytes:\n", what);
  for (const MemoryItem& item : Merged(plan)) {
    AppendRow(absl::StrCat(item.purpose, " (", Name(item.place), ")"), item.bytes, &table);
  }
  AppendRow("asked for", wanted, &table);
  if (over_quota) {
    AppendRow("free of quota", head_quota_ - used, &table);
    AppendRow("used by head", used, &table);
    AppendRow("quota of a head", head_quota_, &table);
  }
  AppendRow("free", limit_ - reserved_, &table);
  AppendRow("reserved", reserved_, &table);
  AppendRow("limit", limit_, &table);
  absl::StrAppend(&table, over_quota ? "raise --head_quota_bytes, or create a smaller head" : advice_);
  return MakeError(absl::StatusCode::kResourceExhausted, RejectReason::kOutOfMemory, "config", table);
}

absl::StatusOr<std::unique_ptr<MemoryReservation>> MemoryBudget::Reserve(const std::string& head,
                                                                         absl::string_view what,
                                                                         MemoryPlan plan) {
  {
    const MutexLock lock(mutex_);
    if (absl::Status status = CheckLocked(head, what, plan); !status.ok()) return status;
    reserved_ += TotalBytes(plan);
    peak_ = std::max(peak_, reserved_);
    for (const MemoryItem& item : plan) Add(item, &accounts_[head]);
  }
  return std::make_unique<MemoryReservation>(shared_from_this(), head, std::move(plan));
}

int64_t MemoryBudget::reserved() const {
  const MutexLock lock(mutex_);
  return reserved_;
}

int64_t MemoryBudget::peak() const {
  const MutexLock lock(mutex_);
  return peak_;
}

MemoryUsage MemoryBudget::Usage() const {
  const MutexLock lock(mutex_);
  MemoryUsage usage{.reserved = reserved_, .heads = {}, .shared = {}};
  for (const auto& [head, account] : accounts_) {
    (head.empty() ? usage.shared : usage.heads[head]) = account;
  }
  return usage;
}

void MemoryBudget::Release(const std::string& head, const MemoryPlan& plan) {
  const MutexLock lock(mutex_);
  reserved_ -= TotalBytes(plan);
  const auto account = accounts_.find(head);
  if (account == accounts_.end()) return;  // of a plan without items
  for (const MemoryItem& item : plan) Add({item.purpose, -item.bytes, item.place}, &account->second);
  std::erase_if(account->second, [](const MemoryItem& item) { return item.bytes == 0; });
  if (account->second.empty()) accounts_.erase(account);
}

MemoryReservation::MemoryReservation(std::shared_ptr<MemoryBudget> budget, std::string head, MemoryPlan plan)
    : budget_(std::move(budget)), head_(std::move(head)), plan_(std::move(plan)) {}

MemoryReservation::~MemoryReservation() { budget_->Release(head_, plan_); }

}  // namespace lossd::engine
