#include "server/rpc/calls/open_calls.h"

#include <algorithm>

namespace lossd::rpc {

OpenCalls::Watch::Watch(OpenCalls* calls) : calls_(calls) {
  const engine::MutexLock lock(calls_->mutex_);
  ++calls_->watches_;
}

OpenCalls::Watch::~Watch() {
  const engine::MutexLock lock(calls_->mutex_);
  --calls_->watches_;
  if (told_ == Told::kYes) --calls_->told_;
  calls_->changed_.NotifyAll();
}

void OpenCalls::Watch::NoteSend() {
  const engine::MutexLock lock(calls_->mutex_);
  if (calls_->draining_ && told_ == Told::kNothing) told_ = Told::kSending;
}

void OpenCalls::Watch::NoteSent() {
  const engine::MutexLock lock(calls_->mutex_);
  if (told_ != Told::kSending) return;
  told_ = Told::kYes;
  ++calls_->told_;
  calls_->changed_.NotifyAll();
}

void OpenCalls::Begin() {
  const engine::MutexLock lock(mutex_);
  ++calls_;
  if (draining_) changed_.NotifyAll();
}

void OpenCalls::End() {
  const engine::MutexLock lock(mutex_);
  last_end_ = std::chrono::steady_clock::now();
  if (--calls_ == 0) changed_.NotifyAll();
}

void OpenCalls::BeginDrain() {
  const engine::MutexLock lock(mutex_);
  draining_ = true;
}

bool OpenCalls::AwaitEnd(std::chrono::milliseconds patience) {
  const engine::MutexLock lock(mutex_);
  while (!stopped_ && calls_ != 0) changed_.Wait(mutex_);
  const auto until = std::chrono::steady_clock::now() + patience;
  while (!stopped_ && told_ != watches_) {
    if (changed_.WaitUntil(mutex_, until) == std::cv_status::timeout) break;
  }
  return !stopped_;
}

bool OpenCalls::AwaitFarewell(std::chrono::milliseconds shortest, std::chrono::milliseconds after_last) {
  const engine::MutexLock lock(mutex_);
  const auto until = std::max(std::chrono::steady_clock::now() + shortest, last_end_ + after_last);
  while (!stopped_ && calls_ == 0) {
    if (changed_.WaitUntil(mutex_, until) == std::cv_status::timeout) break;
  }
  return !stopped_ && calls_ == 0;
}

void OpenCalls::Stop() {
  const engine::MutexLock lock(mutex_);
  stopped_ = true;
  changed_.NotifyAll();
}

}  // namespace lossd::rpc
