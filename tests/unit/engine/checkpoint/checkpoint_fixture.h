// A head on the CPU, with an optimizer, that is saved and comes back, in the same engine or in another one.
#ifndef LOSSD_TESTS_UNIT_ENGINE_CHECKPOINT_CHECKPOINT_FIXTURE_H_
#define LOSSD_TESTS_UNIT_ENGINE_CHECKPOINT_CHECKPOINT_FIXTURE_H_

#include <gtest/gtest.h>

#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/checkpoint/checkpoint_store.h"
#include "tests/support/wait.h"
#include "tests/unit/engine/checkpoint/checkpoint_folder.h"
#include "tests/unit/engine/end_flush.h"
#include "tests/unit/engine/head/deterministic_fixture.h"

namespace lossd::engine {

class CheckpointTest : public DeterministicTest {
 protected:
  static HeadConfig WithEverything() {
    HeadConfig config;
    config.name = "h";
    config.vocab_size = kVocab;
    config.hidden_size = kHidden;
    config.weight_type = kernels::DataType::kBFloat16;
    config.master_weights = true;
    config.bias = true;
    config.optimizer.kind = OptimizerKind::kAdamW;
    config.optimizer.weight_decay = 0.01;
    return config;
  }

  // A new engine on the folder; what the last one left behind is continued only if it is asked for.
  enum class Start { kEmpty, kDrained, kKilled };
  void StartEngine(Start start, int64_t max_chunk_tokens = kMostTokens) {
    StopEngine();
    store_ = *CheckpointStore::Open(folder_.path(), fault_);
    EngineOptions options;
    options.memory_limit_bytes = memory_limit_bytes_;
    options.chunk_limits = {.max_chunk_bytes = 1 << 16, .max_chunk_tokens = max_chunk_tokens};
    options.checkpoints = store_;
    options.parking_bytes = parking_bytes_;
    options.checkpoint_steps = checkpoint_steps_;
    options.checkpoint_keep = checkpoint_keep_;
    options.on_step_save = on_step_save_;
    std::optional<DrainRecord> drain;
    if (start == Start::kDrained) drain = *store_->ReadDrain();
    if (drain.has_value()) options.incarnation = drain->incarnation;
    // One row of a bf16 head takes 4 MiB where the processor multiplies bf16 by itself.
    engine_ = *Engine::Create(options, *CreateCpuDevice(8 << 20));
    if (start == Start::kEmpty) return;
    restored_ = engine_->RestoreAtStart(drain);
    if (const auto head = engine_->FindHead("h"); head.ok()) head_ = *head;
  }
  void StopEngine() {
    head_ = nullptr;
    listeners_.clear();
    engine_ = nullptr;
    store_ = nullptr;  // it has the folder for itself
  }
  void CreateHead(const HeadConfig& config) {
    const absl::StatusOr<std::shared_ptr<Head>> head = engine_->CreateHead(config);
    ASSERT_TRUE(head.ok()) << head.status();
    head_ = *head;
  }
  void WriteWeights(float scale) {
    const std::string write = *head_->BeginWrite(RandomId(), Head::Replace::kNo, RandomId());
    std::vector<float> rows(kVocab * kHidden);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = scale * static_cast<float>((i * 31) % 97) / 97;
    std::vector<float> bias(head_->config().bias ? kVocab : 0);
    for (size_t i = 0; i < bias.size(); ++i) bias[i] = scale * static_cast<float>(i) / 50;
    const absl::Status written =
        (*head_->FindWrite(write))
            ->Write(0, kVocab, kernels::DataType::kFloat32, BytesOf(rows), BytesOf(bias));
    ASSERT_TRUE(written.ok()) << written;
    std::promise<void> published;
    head_->CommitWrite(write, [&](const absl::StatusOr<uint64_t>&) { published.set_value(); });
    testing::Await("weights to be published", published);
  }
  static absl::string_view BytesOf(const std::vector<float>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
  }

  // In turn: what a stream sends, without a place for sessions that are not deterministic.
  void Send(const LaneAttachment& lane, uint64_t sequence, int64_t place, uint64_t generation,
            int64_t tokens = 10) {
    Chunk chunk = MakeChunk(sequence, place, tokens, generation);
    Submit(lane, std::move(chunk));
  }
  absl::StatusOr<StepResult> Step(double learning_rate = 0.1) {
    const HeadInfo info = head_->Info();
    return StepWith(info.generation, info.window_marks, learning_rate);
  }
  absl::StatusOr<StepResult> StepWith(uint64_t generation, std::vector<SessionMarks> marks,
                                      double learning_rate) {
    std::promise<absl::StatusOr<StepResult>> answer;
    head_->ApplyStep(generation, std::move(marks), {.learning_rate = learning_rate},
                     [&](absl::StatusOr<StepResult> step) { answer.set_value(std::move(step)); });
    return testing::Await("the answer", answer);
  }
  // What the head is, as far as clients can see it. The window is open again afterwards.
  struct Content {
    std::vector<float> weights;
    std::vector<float> gradient;
    uint64_t generation = 0;
    uint64_t window_tokens = 0;
    int64_t optimizer_steps = 0;
    bool operator==(const Content&) const = default;
  };
  std::vector<float> Weights() {
    std::vector<float> weights(kVocab * kHidden + kVocab);
    std::promise<void> read;
    head_->ReadWeights(0, kVocab, kernels::DataType::kFloat32,
                       {weights.data(), weights.data() + kVocab * kHidden},
                       [&](const absl::StatusOr<uint64_t>& version) {
                         EXPECT_TRUE(version.ok()) << version.status();
                         read.set_value();
                       });
    testing::Await("what is read", read);
    return weights;
  }
  Content Look() {
    engine_->WaitIdle();
    const HeadInfo info = head_->Info();
    Content content{Weights(), {}, info.generation, info.window_tokens, info.optimizer_steps};
    const absl::StatusOr<FlushInfo> flush = BeginFlush();
    EXPECT_TRUE(flush.ok()) << flush.status();
    if (!flush.ok()) return content;
    content.gradient = Read(*flush);
    EXPECT_TRUE(AbortFlush(*head_, flush->flush_id).ok());
    return content;
  }

  CheckpointFolder folder_;
  // The next engine has:
  int64_t memory_limit_bytes_ = int64_t{1} << 30;
  int64_t parking_bytes_ = 0;
  int64_t checkpoint_steps_ = 0;
  int64_t checkpoint_keep_ = 0;
  std::function<void(const StepSaveReport&)> on_step_save_ = [](const StepSaveReport&) {};
  DurableFiles::Fault fault_;
  std::shared_ptr<CheckpointStore> store_;
  absl::StatusOr<std::vector<CheckpointInfo>> restored_ = std::vector<CheckpointInfo>();
};

}  // namespace lossd::engine

#endif  // LOSSD_TESTS_UNIT_ENGINE_CHECKPOINT_CHECKPOINT_FIXTURE_H_
