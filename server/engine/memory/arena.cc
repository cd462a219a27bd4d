#include "server/engine/memory/arena.h"

#include <algorithm>
#include <iterator>

#include "kernels/rounding.h"

namespace lossd::engine {

Arena::Arena(int64_t bytes) : free_bytes_(bytes / kUnit * kUnit), capacity_(free_bytes_) {
  if (free_bytes_ > 0) free_.emplace(0, free_bytes_);
}

std::optional<int64_t> Arena::Take(int64_t bytes) {
  const int64_t taken = kernels::RoundUp(bytes, kUnit);
  const auto fits =
      std::find_if(free_.begin(), free_.end(), [taken](const auto& range) { return range.second >= taken; });
  if (fits == free_.end()) return std::nullopt;
  const auto [offset, size] = *fits;
  free_.erase(fits);
  if (size > taken) free_.emplace(offset + taken, size - taken);
  free_bytes_ -= taken;
  peak_ = std::max(peak_, capacity_ - free_bytes_);
  return offset;
}

void Arena::Give(int64_t offset, int64_t bytes) {
  int64_t size = kernels::RoundUp(bytes, kUnit);
  free_bytes_ += size;
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + size == next->first) {
    size += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += size;
      return;
    }
  }
  free_.emplace(offset, size);
}

}  // namespace lossd::engine
