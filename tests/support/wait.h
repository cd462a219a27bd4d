// Waits that have an end: what does not come within a minute ends the test's process, with a word for what
// was waited for.
#ifndef LOSSD_TESTS_SUPPORT_WAIT_H_
#define LOSSD_TESTS_SUPPORT_WAIT_H_

#include <signal.h>
#include <sys/wait.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <future>
#include <iostream>
#include <mutex>
#include <string_view>
#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

namespace lossd::testing {

inline constexpr std::chrono::seconds kPatience(60);
inline constexpr std::chrono::microseconds kPause(100);

[[noreturn]] inline void GiveUp(std::string_view what) {
  std::cerr << "waited " << kPatience.count() << " s for " << what << "\n";
  std::abort();
}

// Whether `ready` comes true, which is asked again and again with a pause between.
template <class Ready>
bool ComesTrue(Ready ready, std::chrono::microseconds pause) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!ready()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(pause);
  }
  return true;
}

template <class Ready>
void Await(std::string_view what, Ready ready, std::chrono::microseconds pause = kPause) {
  if (!ComesTrue(ready, pause)) GiveUp(what);
}

// Until `ready` is true, which changes under the lock, and with a notification.
template <class Ready>
void Await(std::string_view what, std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
           Ready ready) {
  if (!changed.wait_for(lock, kPatience, ready)) GiveUp(what);
}

inline void Await(std::string_view what, const absl::Notification& notification) {
  if (!notification.WaitForNotificationWithTimeout(absl::FromChrono(kPatience))) GiveUp(what);
}

template <class Value>
Value Await(std::string_view what, std::future<Value> future) {
  if (future.wait_for(kPatience) != std::future_status::ready) GiveUp(what);
  return future.get();
}

inline void Await(std::string_view what, const std::shared_future<void>& future) {
  if (future.wait_for(kPatience) != std::future_status::ready) GiveUp(what);
}

template <class Value>
Value Await(std::string_view what, std::promise<Value>& promise) {
  return Await(what, promise.get_future());
}

// The status that a child ends with. One that does not is ended, so that it is not left behind.
inline int AwaitEnd(std::string_view what, pid_t process) {
  int status = 0;
  if (!ComesTrue([&] { return waitpid(process, &status, WNOHANG) == process; }, kPause)) {
    kill(process, SIGABRT);
    GiveUp(what);
  }
  return status;
}

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_SUPPORT_WAIT_H_
