#include "server/engine/device/sharded/idle_probe.h"

namespace lossd::engine {

IdleProbe::IdleProbe(Device* local, RankWatch* watch, RankChannel* channel, std::chrono::milliseconds idle)
    : local_(local), watch_(watch), channel_(channel), thread_([this, idle] { Run(idle); }) {}

IdleProbe::~IdleProbe() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

void IdleProbe::Run(std::chrono::milliseconds idle) {
  while (Await(idle / 4)) {
    const RankActivity activity = watch_->Read();
    const std::chrono::duration<double> done(activity.last_done_seconds);
    if (activity.command.empty() && done >= idle) Probe();
  }
}

void IdleProbe::Probe() {
  const GroupCommand probe = ProbeCommand{};
  channel_->Send(probe);
  const RankWatch::Executing own(watch_, NameOf(probe));
  if (local_->RoundTrip().ok()) return;
  // As long as this command lasts, others see that the leader does not come on; the error is that of whatever
  // the device is asked next.
  while (Await(std::chrono::hours(1))) {
  }
}

bool IdleProbe::Await(std::chrono::milliseconds time) {
  const auto until = std::chrono::steady_clock::now() + time;
  const MutexLock lock(mutex_);
  while (!stop_ && changed_.WaitUntil(mutex_, until) == std::cv_status::no_timeout) {
  }
  return !stop_;
}

}  // namespace lossd::engine
