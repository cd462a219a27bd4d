#include "server/rpc/calls/open_calls.h"

#include <algorithm>

namespace lossd::rpc {

OpenCalls::Watch::Watch(OpenCalls* calls) : calls_(calls) {
  const std::lock_guard lock(calls_->mutex_);
  ++calls_->watches_;
}

OpenCalls::Watch::~Watch() {
  const std::lock_guard lock(calls_->mutex_);
  --calls_->watches_;
  if (told_ == Told::kYes) --calls_->told_;
  calls_->changed_.notify_all();
}

void OpenCalls::Watch::NoteSend() {
  const std::lock_guard lock(calls_->mutex_);
  if (calls_->draining_ && told_ == Told::kNothing) told_ = Told::kSending;
}

void OpenCalls::Watch::NoteSent() {
  const std::lock_guard lock(calls_->mutex_);
  if (told_ != Told::kSending) return;
  told_ = Told::kYes;
  ++calls_->told_;
  calls_->changed_.notify_all();
}

void OpenCalls::Begin() {
  const std::lock_guard lock(mutex_);
  ++calls_;
  if (draining_) changed_.notify_all();
}

void OpenCalls::End() {
  const std::lock_guard lock(mutex_);
  last_end_ = std::chrono::steady_clock::now();
  if (--calls_ == 0) changed_.notify_all();
}

void OpenCalls::BeginDrain() {
  const std::lock_guard lock(mutex_);
  draining_ = true;
}

bool OpenCalls::AwaitEnd(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return stopped_ || calls_ == 0; });
  changed_.wait_for(lock, patience, [this] { return stopped_ || told_ == watches_; });
  return !stopped_;
}

bool OpenCalls::AwaitFarewell(std::chrono::milliseconds shortest, std::chrono::milliseconds after_last) {
  std::unique_lock lock(mutex_);
  const auto until = std::max(std::chrono::steady_clock::now() + shortest, last_end_ + after_last);
  return !changed_.wait_until(lock, until, [this] { return stopped_ || calls_ > 0; });
}

void OpenCalls::Stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

}  // namespace lossd::rpc
