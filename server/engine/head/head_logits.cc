// Logits of a head. Calls wait in a line of the head's own, of which only the first one waits for the device,
// with some of its rows at a time: between those whatever chunks have come go first, so that calls for
// logits, however many, never keep a trainer waiting for longer than these rows take. What they cost counts
// against the head's share of the device.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/common/errors.h"
#include "server/engine/head/head.h"

namespace lossd::engine {
namespace {

// A call whose rows the weights outran so often gets all of them at once.
constexpr int32_t kMostRestarts = 4;

}  // namespace

void Head::Logits(LogitsRequest request, LogitsCallback done) {
  LogitsCall call;
  call.done = std::move(done);
  absl::Status refused = ValidateLogits(request, config_, environment_.limits);
  if (refused.ok()) {
    const int64_t bytes = LogitsBytes(request, config_);
    call.request = std::move(request);
    call.taken = absl::Now();
    const MutexLock lock(mutex_);
    refused = lifecycle_.admits().ok() ? logits_.Add(call, bytes) : lifecycle_.admits();
    if (refused.ok()) {
      if (logits_.size() == 1) PostLogitsLocked();
      return;
    }
  }
  call.done(std::move(refused));
}

void Head::PostLogitsLocked() {
  const LogitsCall& call = logits_.front();
  const int64_t rows = std::min(logits_rows_, call.request.rows - call.rows_done);
  environment_.scheduler->PostJob(shared_from_this(), rows,
                                  [self = shared_from_this()] { self->AnswerLogits(); });
}

// On the device thread.
void Head::AnswerLogits() {
  LogitsCall* call = nullptr;
  absl::Status status;
  {
    const MutexLock lock(mutex_);
    call = &logits_.front();  // stays where it is until it is taken out below
    status = BeginLogitsLocked(*call);
  }
  if (status.ok()) status = ComputeLogits(*call);
  LogitsCall answered;
  {
    const MutexLock lock(mutex_);
    if (status.ok() && call->rows_done < call->request.rows) {
      PostLogitsLocked();
      return;
    }
    answered = logits_.TakeFront();
    if (!logits_.empty()) PostLogitsLocked();
  }
  if (!status.ok()) {
    answered.done(std::move(status));
    return;
  }
  Counters& counters = *environment_.counters;
  ++counters.logits_calls;
  counters.logits_rows += static_cast<uint64_t>(answered.request.rows);
  counters.logits_seconds.Observe(absl::ToDoubleSeconds(absl::Now() - answered.taken));
  answered.done(std::move(answered.answer));
}

// Whether rows of the call can be computed now. It begins again if the weights are others than those of the
// rows before.
absl::Status Head::BeginLogitsLocked(LogitsCall& call) const {
  const uint64_t version = weights_.version();
  const bool others = call.answer.weight_version != version || call.answer.restores != history_.restores();
  if (others && call.rows_done > 0) ++call.restarts;
  if (others) call.rows_done = 0;
  call.answer.weight_version = version;
  call.answer.restores = history_.restores();
  const LogitsRequest& request = call.request;
  if (!lifecycle_.alive().ok()) return lifecycle_.alive();
  if (request.cancelled && request.cancelled()) return absl::CancelledError("the client went away");
  if (absl::Status weights = weights_.CheckPresent(); !weights.ok()) return weights;
  if (request.weight_version.value_or(version) == version) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kFailedPrecondition, RejectReason::kWeightVersion, "weight_version",
      absl::StrCat("weight_version is ", *request.weight_version, "; the weights are of version ", version));
}

absl::Status Head::ComputeLogits(LogitsCall& call) {
  const LogitsRequest& request = call.request;
  if (call.rows_done == 0 && call.restarts == 0) MakeRoom(request, config_, &call.answer);
  const int64_t left = request.rows - call.rows_done;
  const int64_t rows = call.restarts < kMostRestarts ? std::min(logits_rows_, left) : left;
  LogitsTile tile(request, config_, call.rows_done, rows, environment_.device, &call.answer);
  if (absl::Status status = backend_->Logits(tile.rows()); !status.ok()) {
    OnDeviceFailure(status);
    return status;
  }
  tile.TakeResults();
  call.rows_done += rows;
  return absl::OkStatus();
}

}  // namespace lossd::engine
