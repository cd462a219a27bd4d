#include "client/src/connection/message_stream.h"

#include "client/src/connection/grpc_status.h"

namespace lossd::internal {
namespace {

constexpr size_t kMostAhead = 3;

}  // namespace

MessageStream::MessageStream(const WatchedServer& server, Watch::Silence silence, const std::string& method,
                             const grpc::ByteBuffer& request)
    : server_(server),
      silence_(silence),
      added_(server.metadata->AddTo(&context_)),
      stub_(server.channel),
      request_(request) {
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
  const auto done = [this] { return done_; };
  if (!changed_.wait_for(lock, kCancelPatience, done)) server_.breaker.Break();
  changed_.wait(lock, done);
}

bool MessageStream::Read(grpc::ByteBuffer* message) {
  Watch watch(server_, silence_);
  {
    std::unique_lock lock(mutex_);
    ended_ = watch.Wait(&lock, &changed_, [this] { return !received_.empty() || done_; });
    if (!ended_.ok()) return false;
    if (!received_.empty()) {
      message->Swap(&received_.front());
      received_.pop_front();
      ResumeReading();
      silence_ = Watch::Silence::kIsAsked;
      return true;
    }
  }
  ended_ = watch.Judge(FromGrpcStatus(status_));
  return false;
}

absl::Status MessageStream::EndStatus() { return server_.metadata->Judge(ended_, added_); }

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
