#include "client/src/batch/lent_memory.h"

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace lossd::internal {

struct LentMemory::Count {
  std::mutex mutex;
  std::condition_variable changed;
  int64_t lent = 0;
};

LentMemory::LentMemory() : count_(std::make_shared<Count>()) {}

LentMemory::~LentMemory() {
  std::unique_lock lock(count_->mutex);
  count_->changed.wait(lock, [this] { return count_->lent == 0; });
}

grpc::Slice LentMemory::Lend(std::span<const std::byte> bytes) const {
  if (bytes.empty()) return {};
  using Holder = std::shared_ptr<Count>;
  auto holder = std::make_unique<Holder>(count_);
  {
    const std::lock_guard lock(count_->mutex);
    ++count_->lent;
  }
  const auto give_back = [](void* held) {
    const std::unique_ptr<Holder> owner(static_cast<Holder*>(held));
    Count& count = **owner;
    const std::lock_guard lock(count.mutex);
    --count.lent;
    count.changed.notify_all();
  };
  // gRPC's slices have no form that is only read; none of its users writes to one.
  auto* const data = const_cast<std::byte*>(bytes.data());
  return {data, bytes.size(), give_back, holder.release()};
}

}  // namespace lossd::internal
