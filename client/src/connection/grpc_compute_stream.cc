#include "client/src/connection/grpc_compute_stream.h"

#include <utility>

#include "client/src/connection/grpc_status.h"

namespace lossd::internal {
namespace {
constexpr char kMethod[] = "/lossd.v1.LossService/Compute";
// The server's byte credit bounds what arrives; this bounds it against a server that ignores its own credit.
constexpr size_t kMostReceived = 256;
}  // namespace

GrpcComputeStream::GrpcComputeStream(std::shared_ptr<grpc::Channel> channel,
                                     std::shared_ptr<CallMetadata> metadata,
                                     std::shared_ptr<TrafficCounter> traffic)
    : traffic_(std::move(traffic)),
      metadata_(std::move(metadata)),
      added_(metadata_->AddTo(&context_)),
      stub_(std::move(channel)) {
  stub_.PrepareBidiStreamingCall(&context_, kMethod, {}, this);
  // Write, Read and Close start operations from outside the reactions; the hold keeps the call alive for them
  // and goes when reading ends.
  AddHold();
  StartRead(&read_buffer_);
  StartCall();
}

GrpcComputeStream::~GrpcComputeStream() {
  context_.TryCancel();
  std::unique_lock lock(mutex_);
  received_.clear();
  ResumeReading();
  changed_.wait(lock, [this] { return done_; });
}

bool GrpcComputeStream::Write(grpc::ByteBuffer message) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !writing_ || done_; });
  if (write_failed_ || done_) return false;
  writing_ = true;
  if (traffic_ != nullptr) traffic_->NoteSent(message.Length());
  write_buffer_.Swap(&message);
  write_time_ = std::chrono::system_clock::now();  // StartWrite may do some of the sending itself
  StartWrite(&write_buffer_);
  return true;
}

ComputeStream::ReadResult GrpcComputeStream::Read(grpc::ByteBuffer* message,
                                                  std::optional<std::chrono::milliseconds> timeout) {
  std::unique_lock lock(mutex_);
  const auto ready = [this] { return !received_.empty() || done_; };
  if (!timeout) {
    changed_.wait(lock, ready);
  } else if (!changed_.wait_for(lock, *timeout, ready)) {
    return ReadResult::kTimeout;
  }
  if (received_.empty()) return ReadResult::kEnded;
  message->Swap(&received_.front().message);
  read_time_ = received_.front().time;
  received_.pop_front();
  ResumeReading();
  return ReadResult::kMessage;
}

bool GrpcComputeStream::Ended() {
  std::lock_guard lock(mutex_);
  return done_;
}

absl::Status GrpcComputeStream::EndStatus() {
  std::lock_guard lock(mutex_);
  return metadata_->Judge(FromGrpcStatus(status_), added_);
}

void GrpcComputeStream::Close(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !writing_ || done_; });
  if (done_ || write_failed_) return;
  writing_ = true;  // nothing may be written from now on
  StartWritesDone();
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  do {
    received_.clear();
    ResumeReading();
  } while (!done_ && changed_.wait_until(lock, deadline) == std::cv_status::no_timeout);
}

void GrpcComputeStream::ResumeReading() {
  if (!read_paused_) return;
  read_paused_ = false;
  StartRead(&read_buffer_);
}

void GrpcComputeStream::OnWriteDone(bool ok) {
  std::lock_guard lock(mutex_);
  writing_ = false;
  write_buffer_.Clear();
  if (!ok) write_failed_ = true;
  changed_.notify_all();
}

void GrpcComputeStream::OnReadDone(bool ok) {
  bool ended = false;
  {
    std::lock_guard lock(mutex_);
    if (ok) {
      if (traffic_ != nullptr) traffic_->NoteReceived(read_buffer_.Length());
      received_.emplace_back();
      received_.back().message.Swap(&read_buffer_);
      received_.back().time = std::chrono::system_clock::now();
      if (received_.size() < kMostReceived) {
        StartRead(&read_buffer_);
      } else {
        read_paused_ = true;
      }
      changed_.notify_all();
    } else {
      write_failed_ = true;  // the call is over: no write may start once the hold is gone
      ended = true;
    }
  }
  if (ended) RemoveHold();
}

void GrpcComputeStream::OnDone(const grpc::Status& status) {
  std::lock_guard lock(mutex_);
  status_ = status;
  done_ = true;
  changed_.notify_all();  // under the lock: the waiter may destroy this object right after
}

}  // namespace lossd::internal
