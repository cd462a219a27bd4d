// A device whose gradient is the sum of what was added to it, whose batches are under way until they are
// polled, and that can be held.
#ifndef LOSSD_TESTS_UNIT_ENGINE_FAKE_DEVICE_H_
#define LOSSD_TESTS_UNIT_ENGINE_FAKE_DEVICE_H_

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "server/engine/device/head_backend.h"

namespace lossd::engine {

// The gradient scales of a batch's chunks, which stand for them.
using FakeBatch = std::vector<float>;

// Shared by the test and the device. Thread-safe.
class FakeGate {
 public:
  // Batches that are not yet under way stay so once they are, without results, until they are let through.
  // Those that are end: their answers may be out already, and the next would wait for them for ever.
  void Hold();
  void LetThrough();
  // The next `batches` that are held are answered, or end, in order; the others stay.
  void LetAnswers(size_t batches);
  void LetThrough(size_t batches);
  // Batches that come to their end from now on fail, with part of them in dW, and so do reads.
  void Fail();
  // Copies of state (HeadBackend::CopyState) that are waited for from now on fail.
  void FailCopies() { failing_copies_ = true; }
  bool failing_copies() const { return failing_copies_; }

  // Waits until a batch is held, or until so many were started since the fake was made.
  void AwaitArrival();
  void AwaitStarted(size_t batches);
  std::vector<FakeBatch> batches();
  std::vector<BatchKey> kinds();  // of these

  // How many batches had been started when logits were computed, each time.
  std::vector<size_t> logits_after();
  // Bytes of the memory that the device registered which are in use, and the most that ever were.
  int64_t registered_bytes() const { return *registered_; }
  int64_t most_registered_bytes() const { return most_registered_; }

  // Called on the device's thread when logits are computed the next time.
  void OnLogits(std::function<void()> hook);

  // Called on the device's thread when state of a head is written the next time.
  void OnWriteState(std::function<void()> hook);

  // Called by the device. Batches are numbered from 0.
  size_t Arrive(FakeBatch batch, const BatchKey& kind);
  bool MayAnswer(size_t number);
  bool MayEnd(size_t number);
  bool failing();
  void WritesState();
  void ComputesLogits();
  ResultBytes Register(int64_t bytes);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<FakeBatch> batches_;
  std::vector<BatchKey> kinds_;
  std::vector<size_t> logits_after_;
  const std::shared_ptr<std::atomic<int64_t>> registered_ = std::make_shared<std::atomic<int64_t>>(0);
  std::atomic<int64_t> most_registered_ = 0;
  size_t ended_ = 0;
  static constexpr size_t kAll = std::numeric_limits<size_t>::max();
  size_t may_answer_ = kAll;  // batches below this number
  size_t may_end_ = kAll;
  bool failing_ = false;
  std::atomic<bool> failing_copies_ = false;
  std::function<void()> on_write_state_;
  std::function<void()> on_logits_;
};

struct FakeOptions {
  int64_t most_batches = 1;
  int64_t rows_per_batch = 1;
  bool room_for_teachers = true;
  int64_t rows_of_logits = 1000;
  bool fixed_segments = false;
  int64_t longest_list = 1 << 20;
  GroupReport group = {};  // without ranks: it is no group
};

// gradient_scale identifies a chunk: its losses are that times the token's weight, and each accumulated chunk
// adds it to every element of the gradient. A log-sum-exp is the token's upstream gradient, a z-loss what the
// kind says it is multiplied by, and every other return 1.
//
// The logit of token v is logit_scale·(x + v) with x the sum of the row's hidden states, and 100 more with
// the bias; the largest are told as they are, and the softcap as the log-sum-exp.
//
// Its optimizer is the same whatever its kind: with g, the gradient times gradient_scale, every weight w goes
// to w·(1 − learning_rate·weight_decay) − learning_rate·(g + m), and m, one moment that is there if the
// optimizer has any ("exp_avg", [V, H]), to m + g. The bias moves by twice of g and has no moment. Weights
// with a master are kept as that alone.
std::unique_ptr<Device> MakeFakeDevice(FakeGate* gate, FakeOptions options = {});

}  // namespace lossd::engine

#endif  // LOSSD_TESTS_UNIT_ENGINE_FAKE_DEVICE_H_
