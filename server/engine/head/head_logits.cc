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

// Calls whose hidden states or answers a head may hold: so many of the largest.
constexpr int64_t kLargestCalls = 8;
constexpr size_t kMostWaiting = 64;

// A call whose rows the weights outran so often gets all of them at once.
constexpr int32_t kMostRestarts = 4;

absl::Status TooMany(absl::string_view message) {
  return MakeError(absl::StatusCode::kResourceExhausted, RejectReason::kOverload, "rows",
                   absl::StrCat(message, ": try again when they are answered"));
}

}  // namespace

void Head::Logits(LogitsRequest request, LogitsCallback done) {
  if (absl::Status valid = ValidateLogits(request, config_, environment_.limits); !valid.ok()) {
    done(std::move(valid));
    return;
  }
  const int64_t bytes = LogitsBytes(request, config_);
  const int64_t limit = kLargestCalls * MostLogitsBytes(environment_.limits);
  LogitsCall call;
  call.answer.room = logits_room_.Take(bytes, limit);
  if (call.answer.room == nullptr) {
    done(TooMany(absl::StrCat("rows is ", request.rows, ", which takes ", bytes, " bytes; calls for logits ",
                              "of head ", config_.name, " hold ", logits_room_.taken(), " of ", limit,
                              " bytes")));
    return;
  }
  call.request = std::move(request);
  call.taken = absl::Now();
  absl::Status refused;
  {
    const std::lock_guard lock(mutex_);
    refused = ended_.ok() ? draining_ : ended_;
    if (refused.ok() && logits_calls_.size() >= kMostWaiting) {
      refused = TooMany(absl::StrCat(logits_calls_.size(), " calls for logits of head ", config_.name,
                                     " wait, which is the limit"));
    }
    if (refused.ok()) {
      call.done = std::move(done);
      logits_calls_.push_back(std::move(call));
      if (logits_calls_.size() == 1) PostLogitsLocked();
      return;
    }
  }
  done(std::move(refused));
}

void Head::PostLogitsLocked() {
  const LogitsCall& call = logits_calls_.front();
  const int64_t rows = std::min(logits_rows_, call.request.rows - call.rows_done);
  environment_.scheduler->PostJob(shared_from_this(), rows,
                                  [self = shared_from_this()] { self->AnswerLogits(); });
}

// On the device thread.
void Head::AnswerLogits() {
  LogitsCall* call = nullptr;
  absl::Status status;
  {
    const std::lock_guard lock(mutex_);
    call = &logits_calls_.front();  // stays where it is until it is taken out below
    status = CheckLogitsLocked(call->request);
    const bool others = call->answer.weight_version != weight_version_ || call->answer.restores != restores_;
    if (others && call->rows_done > 0) ++call->restarts;
    if (others) call->rows_done = 0;
    call->answer.weight_version = weight_version_;
    call->answer.restores = restores_;
  }
  if (status.ok()) status = ComputeLogits(*call);
  LogitsCall answered;
  {
    const std::lock_guard lock(mutex_);
    if (status.ok() && call->rows_done < call->request.rows) {
      PostLogitsLocked();
      return;
    }
    answered = std::move(logits_calls_.front());
    logits_calls_.pop_front();
    if (!logits_calls_.empty()) PostLogitsLocked();
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

absl::Status Head::ComputeLogits(LogitsCall& call) {
  const LogitsRequest& request = call.request;
  if (call.rows_done == 0 && call.restarts == 0) MakeRoom(request, config_, &call.answer);
  const int64_t left = request.rows - call.rows_done;
  const int64_t rows = call.restarts < kMostRestarts ? std::min(logits_rows_, left) : left;
  LogitsTile tile(request, config_, call.rows_done, rows, environment_.device, &call.answer);
  if (absl::Status status = backend_->Logits(tile.rows()); !status.ok()) {
    EndByFailure(status);
    return status;
  }
  tile.TakeResults();
  call.rows_done += rows;
  return absl::OkStatus();
}

absl::Status Head::CheckLogitsLocked(const LogitsRequest& request) const {
  if (!ended_.ok()) return ended_;
  if (request.cancelled && request.cancelled()) return absl::CancelledError("the client went away");
  if (weight_version_ == 0) {
    return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kNoWeights, "head",
                     absl::StrCat("head ", config_.name, " has no weights yet"));
  }
  if (request.weight_version.value_or(weight_version_) == weight_version_) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kWeightVersion, "weight_version",
                   absl::StrCat("weight_version is ", *request.weight_version,
                                "; the weights are of version ", weight_version_));
}

}  // namespace lossd::engine
