#include "server/rpc/replicas/epoch_calls.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace lossd::rpc {

void EpochCalls::Add(const std::shared_ptr<grpc::ClientContext>& call) {
  {
    const engine::MutexLock lock(mutex_);
    if (ended_.ok()) {
      std::erase_if(calls_, [](const auto& other) { return other.expired(); });
      calls_.push_back(call);
      return;
    }
  }
  call->TryCancel();
}

void EpochCalls::End(const absl::Status& why) {
  std::vector<std::weak_ptr<grpc::ClientContext>> calls;
  {
    const engine::MutexLock lock(mutex_);
    if (!ended_.ok()) return;
    ended_ = why;
    calls = std::move(calls_);
  }
  // What a call comes to may be told before this returns, and asks Told.
  for (const std::weak_ptr<grpc::ClientContext>& call : calls) {
    if (const std::shared_ptr<grpc::ClientContext> held = call.lock(); held != nullptr) held->TryCancel();
  }
}

grpc::Status EpochCalls::Told(const grpc::Status& status) const {
  const engine::MutexLock lock(mutex_);
  if (ended_.ok() || status.error_code() != grpc::StatusCode::CANCELLED) return status;
  return {grpc::StatusCode::UNAVAILABLE,
          absl::StrCat("the call was passed on to replica 0, which may have served it, but not all replicas "
                       "are there any more: ",
                       ended_.message())};
}

}  // namespace lossd::rpc
