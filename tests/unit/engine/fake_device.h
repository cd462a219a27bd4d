// A device whose gradient is a list of what was added to it, and that can be held before each batch.
#ifndef LOSSD_TESTS_UNIT_ENGINE_FAKE_DEVICE_H_
#define LOSSD_TESTS_UNIT_ENGINE_FAKE_DEVICE_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "server/engine/head_backend.h"

namespace lossd::engine {

// Shared by the test and the backends. Thread-safe.
class FakeGate {
 public:
  // The next batches wait until they are let through.
  void Hold();
  void LetThrough();
  // Waits until a batch stands at the gate.
  void AwaitArrival();
  void Fail() { failing_ = true; }  // the next batches fail with parts of them in dW
  // Called by the backend; false if the batch has to fail.
  bool Pass();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> failing_ = false;
  bool held_ = false;
  int waiting_ = 0;
};

// gradient_scale identifies a batch: each accumulated batch adds it to every element of the gradient.
std::unique_ptr<Device> MakeFakeDevice(FakeGate* gate);

}  // namespace lossd::engine

#endif  // LOSSD_TESTS_UNIT_ENGINE_FAKE_DEVICE_H_
