#include "server/engine/head/parts/logits_queue.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {
namespace {

constexpr size_t kMostWaiting = 64;

absl::Status TooMany(absl::string_view message) {
  return MakeError(absl::StatusCode::kResourceExhausted, RejectReason::kOverload, "rows",
                   absl::StrCat(message, ": try again when they are answered"));
}

}  // namespace

absl::Status LogitsQueue::Add(LogitsCall& call, int64_t bytes) {
  if (calls_.size() >= kMostWaiting) {
    return TooMany(
        absl::StrCat(calls_.size(), " calls for logits of head ", head_, " wait, which is the limit"));
  }
  std::shared_ptr<const void> room = room_.Take(bytes, limit_);
  if (room == nullptr) {
    return TooMany(absl::StrCat("rows is ", call.request.rows, ", which takes ", bytes,
                                " bytes; calls for logits of head ", head_, " hold ", room_.taken(), " of ",
                                limit_, " bytes"));
  }
  call.answer.room = std::move(room);
  calls_.push_back(std::move(call));
  return absl::OkStatus();
}

LogitsCall LogitsQueue::TakeFront() {
  LogitsCall call = std::move(calls_.front());
  calls_.pop_front();
  return call;
}

}  // namespace lossd::engine
