#include "server/rpc/connections/handovers.h"

#include <fcntl.h>
#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <system_error>
#include <utility>

namespace lossd::rpc {
namespace {

// How long handovers may go on once nobody else is taken.
constexpr absl::Duration kFarewell = absl::Milliseconds(100);

// The processor's time that a thread has had.
std::chrono::nanoseconds TimeOf(std::thread& thread) {
  clockid_t clock = 0;
  timespec had{};
  if (pthread_getcpuclockid(thread.native_handle(), &clock) != 0 || clock_gettime(clock, &had) != 0) {
    return {};
  }
  return std::chrono::seconds(had.tv_sec) + std::chrono::nanoseconds(had.tv_nsec);
}

}  // namespace

bool Handovers::HasRoom() {
  absl::MutexLock lock(&mutex_);
  return AnyIsFree();
}

bool Handovers::AnyIsFree() const {
  return std::any_of(places_.begin(), places_.end(),
                     [](const Place& place) { return place.hand_over == nullptr; });
}

void Handovers::Begin(int socket, HandOver hand_over) {
  FileDescriptor another(fcntl(socket, F_DUPFD_CLOEXEC, 0));
  size_t number = 0;
  {
    absl::MutexLock lock(&mutex_);
    while (places_[number].hand_over != nullptr) ++number;
    if (Start(number)) {
      Place& place = places_[number];
      place.began = TimeOf(place.thread);
      place.ended = false;
      place.socket = std::move(another);
      place.hand_over = std::move(hand_over);
      return;
    }
  }
  hand_over(number);  // the place is nobody else's as long as this thread does not go on
}

bool Handovers::Start(size_t place) {
  std::thread& thread = places_[place].thread;
  if (thread.joinable()) return true;
  try {
    thread = std::thread([this, place] { Run(place); });
  } catch (const std::system_error&) {
    return false;
  }
  return true;
}

void Handovers::Run(size_t number) {
  absl::MutexLock lock(&mutex_);
  Place& place = places_[number];
  const auto is_told = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return place.hand_over != nullptr || over_;
  };
  for (;;) {
    mutex_.Await(absl::Condition(&is_told));
    if (place.hand_over == nullptr) return;
    mutex_.Unlock();
    place.hand_over(number);  // it is not changed before it is gone
    mutex_.Lock();
    place.socket = FileDescriptor();
    place.hand_over = nullptr;
  }
}

std::vector<std::optional<TcpConnection>> Handovers::EndOverdue() {
  std::vector<std::optional<TcpConnection>> ended;
  absl::MutexLock lock(&mutex_);
  if (AnyIsFree()) return ended;
  for (Place& place : places_) {
    if (place.ended || !place.socket.valid()) continue;
    if (TimeOf(place.thread) - place.began < kMostTime) continue;
    place.ended = true;
    ended.push_back(ConnectionOf(place.socket.get()));
    CutOff(place.socket.get());
  }
  return ended;
}

bool Handovers::AnyLasts() {
  absl::MutexLock lock(&mutex_);
  return !NoneIsLeft();
}

bool Handovers::NoneIsLeft() const {
  return std::all_of(places_.begin(), places_.end(),
                     [](const Place& place) { return place.hand_over == nullptr; });
}

void Handovers::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    over_ = true;
    mutex_.AwaitWithTimeout(absl::Condition(this, &Handovers::NoneIsLeft), kFarewell);
    for (Place& place : places_) {
      if (place.socket.valid()) CutOff(place.socket.get());
    }
    mutex_.Await(absl::Condition(this, &Handovers::NoneIsLeft));
  }
  for (size_t number = 0; number < kMost; ++number) {
    std::thread thread;
    {
      absl::MutexLock lock(&mutex_);
      thread.swap(places_[number].thread);
    }
    if (thread.joinable()) thread.join();
  }
}

}  // namespace lossd::rpc
