// What heads may reserve on a device, and who has reserved what. Everything a head needs is reserved when it
// is created; nothing later asks for more.
#ifndef LOSSD_SERVER_ENGINE_MEMORY_BUDGET_H_
#define LOSSD_SERVER_ENGINE_MEMORY_BUDGET_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lossd::engine {

struct MemoryItem {
  std::string purpose;
  int64_t bytes = 0;
};
using MemoryPlan = std::vector<MemoryItem>;

int64_t TotalBytes(const MemoryPlan& plan);

class MemoryReservation;

// Thread-safe.
class MemoryBudget : public std::enable_shared_from_this<MemoryBudget> {
 public:
  explicit MemoryBudget(int64_t limit_bytes) : limit_(limit_bytes) {}

  // RESOURCE_EXHAUSTED with a table of what was asked for and what is free.
  absl::StatusOr<std::unique_ptr<MemoryReservation>> Reserve(absl::string_view owner, MemoryPlan plan);

  int64_t limit() const { return limit_; }
  int64_t reserved() const;

 private:
  friend class MemoryReservation;
  void Release(int64_t bytes);

  const int64_t limit_;
  mutable std::mutex mutex_;
  int64_t reserved_ = 0;
};

// Gives its bytes back when destroyed.
class MemoryReservation {
 public:
  MemoryReservation(std::shared_ptr<MemoryBudget> budget, MemoryPlan plan);
  ~MemoryReservation();
  MemoryReservation(const MemoryReservation&) = delete;
  MemoryReservation& operator=(const MemoryReservation&) = delete;

  const MemoryPlan& plan() const { return plan_; }

 private:
  std::shared_ptr<MemoryBudget> budget_;
  MemoryPlan plan_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_MEMORY_BUDGET_H_
