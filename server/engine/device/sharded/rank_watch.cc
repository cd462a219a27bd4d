#include "server/engine/device/sharded/rank_watch.h"

#include "server/engine/group/group_command.h"

namespace lossd::engine {
namespace {

double Seconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace

std::list<RankWatch::Begun>::iterator RankWatch::Begin(const char* command) {
  const MutexLock lock(mutex_);
  return executing_.insert(executing_.end(), {command, Clock::now()});
}

void RankWatch::End(std::list<Begun>::iterator begun) {
  const MutexLock lock(mutex_);
  executing_.erase(begun);
  done_ = Clock::now();
}

void RankWatch::BatchStarted() {
  const MutexLock lock(mutex_);
  batches_.push_back({kStartBatch, Clock::now()});
}

void RankWatch::BatchEnded() {
  const MutexLock lock(mutex_);
  if (!batches_.empty()) batches_.pop_front();
  done_ = Clock::now();
}

void RankWatch::OnWaiting(kernels::Exchange exchange) {
  const MutexLock lock(mutex_);
  waits_at_ = exchange;
}

void RankWatch::OnWaited(kernels::Exchange exchange, double seconds) {
  waits_[static_cast<size_t>(exchange)].Observe(seconds);
  const MutexLock lock(mutex_);
  waits_at_.reset();
}

RankActivity RankWatch::Read() const {
  RankActivity activity;
  for (size_t i = 0; i < waits_.size(); ++i) activity.waits[i] = waits_[i].Read();
  const MutexLock lock(mutex_);
  const Clock::time_point now = Clock::now();
  activity.uptime_seconds = Seconds(now - ready_);
  activity.last_done_seconds = Seconds(now - done_);
  activity.waits_at = waits_at_;
  std::optional<Begun> oldest;
  if (!executing_.empty()) oldest = executing_.front();
  if (!batches_.empty() && (!oldest.has_value() || batches_.front().at < oldest->at)) {
    oldest = batches_.front();
  }
  if (oldest.has_value()) {
    activity.command = oldest->command;
    activity.command_seconds = Seconds(now - oldest->at);
  }
  return activity;
}

}  // namespace lossd::engine
