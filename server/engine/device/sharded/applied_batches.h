// Which batches are in every rank's part of dW: a batch is done when it is, and no mark moves before.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_SHARDED_APPLIED_BATCHES_H_
#define LOSSD_SERVER_ENGINE_DEVICE_SHARDED_APPLIED_BATCHES_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/device/head_backend.h"

namespace lossd::engine {

// Belongs to the device's owner thread.
class AppliedBatches {
 public:
  using OnDone = std::function<void(absl::StatusOr<BatchReport>)>;

  // A batch was started at every rank, as the next one; the leader's own part calls what is returned when it
  // is done. It has to be called before this object goes.
  OnDone Start(OnDone on_done);
  // Calls back, in order, for every batch that the leader is done with and that `applied`, the number of
  // batches that all other ranks have applied, covers. If one failed at the leader, it and those before it,
  // which are then never waited for, fail with its error.
  void Poll(uint64_t applied);

  // The number of the batch that was started last, from 1.
  uint64_t started() const { return started_; }
  int64_t under_way() const { return static_cast<int64_t>(batches_.size()); }

 private:
  struct Batch {
    uint64_t number = 0;
    OnDone on_done;
    std::optional<absl::StatusOr<BatchReport>> own = {};
  };

  // The first one at the leader; OK if there is none.
  absl::Status Failure() const;

  uint64_t started_ = 0;
  std::deque<Batch> batches_;  // in order; elements stay where they are
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_SHARDED_APPLIED_BATCHES_H_
