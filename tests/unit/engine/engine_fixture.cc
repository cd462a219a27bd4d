#include "tests/unit/engine/engine_fixture.h"

#include <gtest/gtest.h>

#include <future>
#include <utility>

#include "server/engine/common/random_id.h"
#include "tests/support/wait.h"
#include "tests/unit/engine/end_flush.h"

namespace lossd::engine {

void RecordingListener::OnAnswer(ChunkAnswer answer) {
  const std::lock_guard lock(mutex_);
  answers_.push_back(std::move(answer));
  changed_.notify_all();
}

void RecordingListener::OnApplied(uint64_t applied) {
  const std::lock_guard lock(mutex_);
  applied_ = applied;
}

void RecordingListener::OnEnd(absl::Status status) {
  const std::lock_guard lock(mutex_);
  ended_ = std::move(status);
}

std::vector<ChunkAnswer> RecordingListener::AwaitAnswers(size_t count) {
  std::unique_lock lock(mutex_);
  testing::Await("answers", changed_, lock, [&] { return answers_.size() >= count; });
  return answers_;
}

std::optional<absl::Status> RecordingListener::ended() {
  const std::lock_guard lock(mutex_);
  return ended_;
}

uint64_t RecordingListener::applied() {
  const std::lock_guard lock(mutex_);
  return applied_;
}

size_t RecordingListener::answers() {
  const std::lock_guard lock(mutex_);
  return answers_.size();
}

EngineFixture::EngineFixture(EngineOptions options, FakeOptions device, HeadConfig config) {
  engine = *Engine::Create(std::move(options), MakeFakeDevice(&gate, std::move(device)));
  config.name = "h";
  config.vocab_size = kVocab;
  config.hidden_size = kHidden;
  config.weight_type = kernels::DataType::kFloat32;
  head = *engine->CreateHead(config);
  EXPECT_EQ(WriteWeights(), 1U);
  engine->WaitIdle();
}

uint64_t EngineFixture::WriteWeights(Head& head) {
  const HeadConfig& config = head.config();
  const std::string write = *head.BeginWrite(RandomId(), Head::Replace::kNo, RandomId());
  const std::string rows(static_cast<size_t>(config.weight_bytes()), '\0');
  const std::string bias(static_cast<size_t>(config.bias_bytes()), '\0');
  EXPECT_TRUE((*head.FindWrite(write))->Write(0, config.vocab_size, config.weight_type, rows, bias).ok());
  std::promise<uint64_t> published;
  head.CommitWrite(write, [&](const absl::StatusOr<uint64_t>& version) { published.set_value(*version); });
  return testing::Await("weights to be published", published);
}

Chunk EngineFixture::MakeChunk(uint64_t sequence, float scale, uint64_t generation) {
  Chunk chunk;
  chunk.sequence = sequence;
  chunk.generation = generation;
  chunk.tokens = 1;
  chunk.gradient_scale = scale;
  chunk.labels.resize(8);  // label 0
  chunk.hidden_states = Payload::Of(std::string(kHidden * 4, '\0'));
  return chunk;
}

std::string EngineFixture::Open(const std::string& client_key, int32_t lanes) {
  const absl::StatusOr<OpenedSession> opened = engine->OpenSession("h", {client_key, 0, lanes});
  EXPECT_TRUE(opened.ok()) << opened.status();
  return opened->info.session_id;
}

LaneAttachment EngineFixture::Attach(const std::string& session, std::shared_ptr<LaneListener> listener,
                                     int32_t lane) {
  const absl::StatusOr<LaneAttachment> attachment = head->AttachLane(session, lane, std::move(listener));
  EXPECT_TRUE(attachment.ok()) << attachment.status();
  return *attachment;
}

void EngineFixture::Submit(const LaneAttachment& lane, Chunk chunk) {
  const absl::StatusOr<Head::Submission> submission =
      head->Submit(lane, chunk, [] { ADD_FAILURE() << "a taken chunk must not be resumed"; });
  ASSERT_TRUE(submission.ok()) << submission.status();
  EXPECT_EQ(*submission, Head::Submission::kTaken);
}

absl::StatusOr<FlushInfo> EngineFixture::BeginFlush(uint64_t generation, std::vector<SessionMarks> marks,
                                                    float gradient_scale) {
  std::promise<absl::StatusOr<FlushInfo>> answer;
  head->BeginFlush(generation, std::move(marks), gradient_scale,
                   [&](absl::StatusOr<FlushInfo> flush) { answer.set_value(std::move(flush)); });
  return testing::Await("the flush to begin", answer);
}

absl::StatusOr<StepResult> EngineFixture::ApplyStep(uint64_t generation, std::vector<SessionMarks> marks,
                                                    const StepRequest& request) {
  std::promise<absl::StatusOr<StepResult>> answer;
  head->ApplyStep(generation, std::move(marks), request,
                  [&](absl::StatusOr<StepResult> step) { answer.set_value(std::move(step)); });
  return testing::Await("the step", answer);
}

absl::StatusOr<Head::WindowStats> EngineFixture::ReadStats(uint64_t generation,
                                                           std::vector<SessionMarks> marks,
                                                           double gradient_scale) {
  std::promise<absl::StatusOr<Head::WindowStats>> answer;
  head->ReadStats(generation, std::move(marks), gradient_scale,
                  [&](absl::StatusOr<Head::WindowStats> stats) { answer.set_value(std::move(stats)); });
  return testing::Await("the statistics", answer);
}

float EngineFixture::Weight() {
  std::promise<void> read;
  std::vector<float> row(static_cast<size_t>(head->config().hidden_size));
  head->ReadWeights(0, 1, kernels::DataType::kFloat32, {row.data()},
                    [&](const absl::StatusOr<uint64_t>& version) {
                      EXPECT_TRUE(version.ok()) << version.status();
                      read.set_value();
                    });
  testing::Await("what is read", read);
  return row[0];
}

float EngineFixture::GradientSum() {
  engine->WaitIdle();
  const absl::StatusOr<FlushInfo> flush = BeginFlush(head->Info().generation, Marks());
  EXPECT_TRUE(flush.ok()) << flush.status();
  float sum = 0;
  std::vector<float> row(kHidden);
  head->ReadGradient(flush->flush_id, 0, 1, kernels::DataType::kFloat32, {row.data()},
                     [](const absl::Status& status) { EXPECT_TRUE(status.ok()); });
  engine->WaitIdle();
  sum = row[0];
  EXPECT_TRUE(AbortFlush(*head, flush->flush_id).ok());
  return sum;
}

}  // namespace lossd::engine
