// How long a head's backend must stay though the head was deleted: until the last batch of another head that
// computes with its weights is done.
//
// Belongs to the device thread; no lock.
#ifndef LOSSD_SERVER_ENGINE_HEAD_PARTS_TEACHER_LEASE_H_
#define LOSSD_SERVER_ENGINE_HEAD_PARTS_TEACHER_LEASE_H_

#include <cstdint>
#include <functional>
#include <utility>

namespace lossd::engine {

class TeacherLease {
 public:
  // A batch begins to use the weights, and is done with them.
  void Begin() { ++batches_; }
  void End() {
    if (--batches_ == 0 && release_) std::exchange(release_, nullptr)();
  }
  // Calls `release` as soon as no batch uses the weights, perhaps now. Once, and no Begin comes after it.
  void WhenUnused(std::function<void()> release) {
    release_ = std::move(release);
    if (batches_ == 0) std::exchange(release_, nullptr)();
  }

 private:
  int64_t batches_ = 0;
  std::function<void()> release_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_PARTS_TEACHER_LEASE_H_
