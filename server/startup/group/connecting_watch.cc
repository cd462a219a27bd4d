#include "server/startup/group/connecting_watch.h"

#include <chrono>
#include <cstdlib>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/startup/group/led_group.h"

namespace lossd {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kLookEvery{100};
// Most ranks are connected at once, and then end in order.
constexpr std::chrono::seconds kPatience{3};

}  // namespace

ConnectingWatch::ConnectingWatch(absl::Duration timeout, std::function<bool()> told_to_end)
    : told_to_end_(std::move(told_to_end)), thread_([this, timeout] { Watch(timeout); }) {}

ConnectingWatch::~ConnectingWatch() {
  {
    const engine::MutexLock lock(mutex_);
    connected_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

void ConnectingWatch::Watch(absl::Duration timeout) {
  const Clock::time_point deadline = Clock::now() + absl::ToChronoNanoseconds(timeout);
  const engine::MutexLock lock(mutex_);
  std::optional<Clock::time_point> ends_at;  // since it was told to end
  while (!connected_) {
    if (!ends_at.has_value() && told_to_end_ != nullptr && told_to_end_()) {
      ends_at = Clock::now() + kPatience;
    }
    if (ends_at.has_value() && Clock::now() >= *ends_at) {
      EndRank(EXIT_FAILURE, "told to end, and the ranks do not get through to each other");
    }
    if (Clock::now() >= deadline) {
      EndRank(
          EXIT_FAILURE,
          absl::StrCat("the ranks did not get through to each other within ", absl::FormatDuration(timeout),
                       " (--group_start_timeout). Between GPUs NCCL_DEBUG=INFO shows what NCCL waits for; "
                       "NCCL_P2P_DISABLE=1 tries without access to each other's memory"));
    }
    changed_.WaitUntil(mutex_, Clock::now() + kLookEvery);
  }
}

}  // namespace lossd
