#include "server/engine/device/sharded/applied_batches.h"

#include <utility>

namespace lossd::engine {

AppliedBatches::OnDone AppliedBatches::Start(OnDone on_done) {
  Batch& batch = batches_.emplace_back();
  batch.number = ++started_;
  batch.on_done = std::move(on_done);
  return [&batch](absl::StatusOr<BatchReport> report) { batch.own = std::move(report); };
}

void AppliedBatches::Poll(uint64_t applied) {
  while (!batches_.empty() && batches_.front().own.has_value()) {
    if (batches_.front().own->ok() && batches_.front().number > applied) {
      // Behind a failure nobody may ever apply it.
      const absl::Status failure = Failure();
      if (failure.ok()) return;
      batches_.front().own = failure;
    }
    // What is called may start the next batch.
    const Batch batch = std::move(batches_.front());
    batches_.pop_front();
    batch.on_done(*batch.own);
  }
}

absl::Status AppliedBatches::Failure() const {
  for (const Batch& batch : batches_) {
    if (batch.own.has_value() && !batch.own->ok()) return batch.own->status();
  }
  return absl::OkStatus();
}

}  // namespace lossd::engine
