#include "client/src/connection/grpc_compute_stream.h"

#include <algorithm>
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
                                     std::shared_ptr<TrafficCounter> traffic,
                                     std::shared_ptr<const WatchedServer> server,
                                     std::unique_ptr<Breaker> breaker)
    : traffic_(std::move(traffic)),
      metadata_(std::move(metadata)),
      added_(metadata_->AddTo(&context_)),
      stub_(std::move(channel)),
      server_(std::move(server)),
      breaker_(std::move(breaker)) {
  stub_.PrepareBidiStreamingCall(&context_, kMethod, {}, this);
  // Write, Read and Close start operations from outside the reactions; the hold keeps the call alive for them
  // and goes when reading ends.
  AddHold();
  StartRead(&read_buffer_);
  StartCall();
}

GrpcComputeStream::~GrpcComputeStream() {
  std::unique_lock lock(mutex_);
  received_.clear();
  End(&lock);
}

void GrpcComputeStream::End(std::unique_lock<std::mutex>* lock) {
  lock->unlock();
  context_.TryCancel();
  lock->lock();
  ResumeReading();
  const auto done = [this] { return done_; };
  if (!changed_.wait_for(*lock, kCancelPatience, done) && breaker_ != nullptr) breaker_->Break();
  changed_.wait(*lock, done);
}

template <class Ready>
bool GrpcComputeStream::Wait(std::unique_lock<std::mutex>* lock,
                             std::optional<std::chrono::milliseconds> timeout, Ready ready) {
  if (ready()) return true;
  if (timeout == std::chrono::milliseconds(0)) return false;
  if (server_ == nullptr && !timeout) {
    changed_.wait(*lock, ready);
    return true;
  }
  if (server_ == nullptr) return changed_.wait_for(*lock, *timeout, ready);
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  Watch watch(*server_, heard_ && !timeout ? Watch::Silence::kIsAsked : Watch::Silence::kIsEnough);
  for (;;) {
    Clock::duration slice = watch.slice();
    if (timeout) slice = std::min<Clock::duration>(slice, begin + *timeout - Clock::now());
    if (changed_.wait_for(*lock, slice, ready)) break;
    if (timeout && Clock::now() >= begin + *timeout) return false;
    lock->unlock();
    absl::Status looked = watch.Look();
    lock->lock();
    if (looked.ok() || ready()) continue;
    cut_ = std::move(looked);
    End(lock);
  }
  if (!done_ || !cut_.ok() || !heard_ || timeout) return true;
  const absl::Status ended = FromGrpcStatus(status_);
  lock->unlock();
  absl::Status judged = watch.Judge(ended);
  lock->lock();
  if (judged != ended) cut_ = std::move(judged);
  return true;
}

bool GrpcComputeStream::Write(grpc::ByteBuffer message) {
  std::unique_lock lock(mutex_);
  Wait(&lock, std::nullopt, [this] { return !writing_ || done_; });
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
  // Where messages come one after the other nobody waits for long.
  absl::Status asked = server_ == nullptr ? absl::OkStatus() : Asked(server_->options);
  std::unique_lock lock(mutex_);
  if (!asked.ok() && !done_) {
    cut_ = std::move(asked);
    End(&lock);
  }
  if (!Wait(&lock, timeout, [this] { return !received_.empty() || done_; })) return ReadResult::kTimeout;
  if (received_.empty()) return ReadResult::kEnded;
  heard_ = true;
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
  if (!cut_.ok()) return cut_;
  return metadata_->Judge(FromGrpcStatus(status_), added_);
}

void GrpcComputeStream::Close(std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point deadline = Clock::now() + timeout;
  const auto left = [&deadline] {
    return std::max(std::chrono::milliseconds(0),
                    std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()));
  };
  std::unique_lock lock(mutex_);
  if (!Wait(&lock, timeout, [this] { return !writing_ || done_; })) return;
  if (done_ || write_failed_) return;
  writing_ = true;  // nothing may be written from now on
  StartWritesDone();
  do {
    received_.clear();
    ResumeReading();
  } while (!done_ && Wait(&lock, left(), [this] { return !received_.empty() || done_; }));
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
