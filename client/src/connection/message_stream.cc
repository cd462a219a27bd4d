#include "client/src/connection/message_stream.h"

#include <utility>

#include "client/src/connection/grpc_status.h"

namespace lossd::internal {
namespace {

constexpr size_t kMostAhead = 3;

}  // namespace

MessageStream::MessageStream(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                             const grpc::ByteBuffer& request, std::shared_ptr<CallMetadata> metadata)
    : metadata_(std::move(metadata)), added_(metadata_->AddTo(&context_)), stub_(channel), request_(request) {
  stub_.PrepareBidiStreamingCall(&context_, method, {}, this);
  AddHold();  // Read starts operations from outside the reactions; goes when reading ends
  StartWriteLast(&request_, {});
  StartRead(&read_buffer_);
  StartCall();
}

MessageStream::~MessageStream() {
  context_.TryCancel();
  std::unique_lock lock(mutex_);
  received_.clear();
  ResumeReading();
  changed_.wait(lock, [this] { return done_; });
}

bool MessageStream::Read(grpc::ByteBuffer* message) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !received_.empty() || done_; });
  if (received_.empty()) return false;
  message->Swap(&received_.front());
  received_.pop_front();
  ResumeReading();
  return true;
}

absl::Status MessageStream::EndStatus() {
  const std::lock_guard lock(mutex_);
  return metadata_->Judge(FromGrpcStatus(status_), added_);
}

void MessageStream::ResumeReading() {
  if (!read_paused_) return;
  read_paused_ = false;
  StartRead(&read_buffer_);
}

void MessageStream::OnReadDone(bool ok) {
  if (!ok) return RemoveHold();
  const std::lock_guard lock(mutex_);
  received_.emplace_back();
  received_.back().Swap(&read_buffer_);
  if (received_.size() < kMostAhead) {
    StartRead(&read_buffer_);
  } else {
    read_paused_ = true;
  }
  changed_.notify_all();
}

void MessageStream::OnDone(const grpc::Status& status) {
  const std::lock_guard lock(mutex_);
  status_ = status;
  done_ = true;
  changed_.notify_all();  // under the lock: the waiter may destroy this object right after
}

}  // namespace lossd::internal
