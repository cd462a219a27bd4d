// An engine on a fake device with one head "h" that has weights, and a listener that remembers what it hears.
#ifndef LOSSD_TESTS_UNIT_ENGINE_ENGINE_FIXTURE_H_
#define LOSSD_TESTS_UNIT_ENGINE_ENGINE_FIXTURE_H_

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "server/engine/engine.h"
#include "tests/unit/engine/fake_device.h"

namespace lossd::engine {

// Thread-safe.
class RecordingListener : public LaneListener {
 public:
  void OnAnswer(ChunkAnswer answer) override;
  void OnApplied(uint64_t applied) override;
  void OnEnd(absl::Status status) override;

  // Waits until `count` answers have come, and returns them.
  std::vector<ChunkAnswer> AwaitAnswers(size_t count);
  std::optional<absl::Status> ended();
  uint64_t applied();
  size_t answers();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<ChunkAnswer> answers_;
  uint64_t applied_ = 0;
  std::optional<absl::Status> ended_;
};

class EngineFixture {
 public:
  static constexpr int64_t kVocab = 4;
  static constexpr int64_t kHidden = 2;

  // The head's name, size and type are added to `config`.
  explicit EngineFixture(EngineOptions options = {}, FakeOptions device = {}, HeadConfig config = {});
  ~EngineFixture() { gate.LetThrough(); }

  // One valid token; `scale` is what it adds to the gradient.
  static Chunk MakeChunk(uint64_t sequence, float scale, uint64_t generation = 1);
  std::string Open(const std::string& client_key, int32_t lanes = 1);
  LaneAttachment Attach(const std::string& session, std::shared_ptr<LaneListener> listener, int32_t lane = 0);
  // Submits and expects it to be taken.
  void Submit(const LaneAttachment& lane, Chunk chunk);
  // Publishes weights of zeros as one more version, which is returned.
  uint64_t WriteWeights() { return WriteWeights(*head); }
  static uint64_t WriteWeights(Head& head);
  // The marks that the window has now.
  std::vector<SessionMarks> Marks() const { return head->Info().window_marks; }
  // Waits for the answer.
  absl::StatusOr<FlushInfo> BeginFlush(uint64_t generation, std::vector<SessionMarks> marks,
                                       float gradient_scale = 1.0f);
  // Waits for the answer.
  absl::StatusOr<StepResult> ApplyStep(uint64_t generation, std::vector<SessionMarks> marks,
                                       const StepRequest& request);
  absl::StatusOr<Head::WindowStats> ReadStats(uint64_t generation, std::vector<SessionMarks> marks,
                                              double gradient_scale = 1);
  // The first weight; all are alike. The fake optimizer: fake_device.h.
  float Weight();
  // The fake gradient: the sum of the scales of what was accumulated. Flushes and aborts.
  float GradientSum();

  FakeGate gate;
  std::unique_ptr<Engine> engine;
  std::shared_ptr<Head> head;
};

}  // namespace lossd::engine

#endif  // LOSSD_TESTS_UNIT_ENGINE_ENGINE_FIXTURE_H_
