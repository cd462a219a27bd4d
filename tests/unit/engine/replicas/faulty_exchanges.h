// Exchanges between replicas that hang, or fail, and devices that hang, as a test has it.
#ifndef LOSSD_TESTS_UNIT_ENGINE_REPLICAS_FAULTY_EXCHANGES_H_
#define LOSSD_TESTS_UNIT_ENGINE_REPLICAS_FAULTY_EXCHANGES_H_

#include <atomic>
#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "kernels/collectives/result.h"
#include "server/engine/common/mutex.h"
#include "server/engine/device/head_backend.h"

namespace lossd::engine::testing {

// What is to happen at one replica. Thread-safe.
class ExchangeFaults {
 public:
  // Called in place of an exchange, by the thread that makes it; the connection fails with what it returns.
  // It may ask whether the connection was aborted.
  using Fault = std::function<kernels::collectives::Result(const std::function<bool()>& aborted)>;

  // The next exchange.
  void Arm(Fault fault) {
    const MutexLock lock(mutex_);
    fault_ = std::move(fault);
  }
  // The next time that it is connected.
  void RefuseToConnect(absl::Status why) {
    const MutexLock lock(mutex_);
    refused_ = std::move(why);
  }

  // The device does nothing until it goes on.
  void HangDevice() { hangs_ = true; }
  void GoOn() { hangs_ = false; }

  bool hangs() const { return hangs_; }
  Fault Take() {
    const MutexLock lock(mutex_);
    return std::exchange(fault_, nullptr);
  }
  absl::Status TakeRefusal() {
    const MutexLock lock(mutex_);
    return std::exchange(refused_, absl::OkStatus());
  }

 private:
  Mutex mutex_;
  Fault fault_ ABSL_GUARDED_BY(mutex_);
  absl::Status refused_ ABSL_GUARDED_BY(mutex_);
  std::atomic<bool> hangs_ = false;
};

// A device of the host that is `device` but for its faults and its exchanges with other replicas, whose
// devices have to be such ones, too. `faults` outlives it.
std::unique_ptr<Device> CreateFaultyDevice(std::unique_ptr<Device> device, ExchangeFaults* faults);

}  // namespace lossd::engine::testing

#endif  // LOSSD_TESTS_UNIT_ENGINE_REPLICAS_FAULTY_EXCHANGES_H_
