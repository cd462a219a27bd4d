// A head's saves by themselves, at the end of some of its steps: its state is copied to the host's memory,
// and written to the disk from there while the next windows are computed.
#ifndef LOSSD_SERVER_ENGINE_HEAD_STEP_SAVER_H_
#define LOSSD_SERVER_ENGINE_HEAD_STEP_SAVER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/common/mutex.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/head/parts/head_state.h"
#include "server/engine/head/parts/head_state_io.h"
#include "server/engine/memory/memory_budget.h"
#include "server/engine/regions/region_memory.h"

namespace lossd::engine {

// Thread-safe: the device thread begins saves, whoever holds the engine's checkpoint mutex writes and ends
// them.
class StepSaver {
 public:
  // Room for one copy of these tensors, taken at once. Without tensors saves have no copy (replicas).
  // `budget`: what it is reserved from for head `name`; null: it is not counted. RESOURCE_EXHAUSTED if there
  // is no room.
  static absl::StatusOr<std::shared_ptr<StepSaver>> Create(int64_t every, const std::string& name,
                                                           const std::vector<StateTensor>& tensors,
                                                           RegionSource* source, MemoryBudget* budget);

  enum class Due { kNo, kBegins, kPassedOver };
  // Whether a head that has come to so many steps, of which `restores` is the number of its past, is saved
  // now. kPassedOver: a save is due, and the one before has not ended.
  Due Look(int64_t steps, uint64_t restores) ABSL_LOCKS_EXCLUDED(mutex_);
  // Behind kBegins: copies `captured`, which is of the end of that step, with an empty window. The error is
  // the device's. Not over replicas.
  absl::Status Begin(absl::StatusOr<CapturedHead> captured, HeadBackend* backend) ABSL_LOCKS_EXCLUDED(mutex_);

  struct Pending {
    int64_t steps = 0;
    uint64_t restores = 0;
    absl::Time begun;
    int64_t passed_over = 0;  // saves that were due since
  };
  // The save that has begun and has not ended.
  std::optional<Pending> pending() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits until the copy is there. The error is the device's.
  absl::Status AwaitCopy() ABSL_LOCKS_EXCLUDED(mutex_);
  // Writes the copy's files, and returns what is in them. `go_on` is asked between pieces; its error ends
  // the write.
  absl::StatusOr<HeadCheckpoint> WriteTo(StateSink* sink, absl::FunctionRef<absl::Status()> go_on) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns how many were passed over since it began.
  int64_t End() ABSL_LOCKS_EXCLUDED(mutex_);

  MemoryPlan memory() const { return reservation_ == nullptr ? MemoryPlan() : reservation_->plan(); }

 private:
  explicit StepSaver(int64_t every) : every_(every) {}

  const int64_t every_;
  std::unique_ptr<MemoryReservation> reservation_;  // before what it covers
  std::shared_ptr<RegionMemory> memory_;
  std::vector<StateCopy> copies_;

  mutable Mutex mutex_;
  std::optional<Pending> pending_ ABSL_GUARDED_BY(mutex_);  // from kBegins to End
  absl::StatusOr<CapturedHead> captured_ ABSL_GUARDED_BY(mutex_);
  HeadBackend::CopyDone copied_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_STEP_SAVER_H_
