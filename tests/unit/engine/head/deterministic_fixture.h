// A head on the CPU whose sessions are deterministic, and chunks of a window's tokens by their places.
#ifndef LOSSD_TESTS_UNIT_ENGINE_HEAD_DETERMINISTIC_FIXTURE_H_
#define LOSSD_TESTS_UNIT_ENGINE_HEAD_DETERMINISTIC_FIXTURE_H_

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/common/random_id.h"
#include "server/engine/device/cpu/cpu_backend.h"
#include "tests/support/wait.h"
#include "tests/unit/engine/end_flush.h"
#include "tests/unit/engine/engine_fixture.h"

namespace lossd::engine {

inline constexpr int64_t kVocab = 50;
inline constexpr int64_t kHidden = 16;
inline constexpr int64_t kTokens = 150;     // of a window
inline constexpr int64_t kMostTokens = 16;  // of a chunk, and of a tile

class DeterministicTest : public ::testing::Test {
 protected:
  DeterministicTest() { Create({}); }

  void Create(HeadConfig config, int64_t limit_bytes = int64_t{1} << 30, int64_t max_chunk_bytes = 1 << 16,
              absl::Duration place_timeout = absl::Seconds(10)) {
    EngineOptions options;
    options.memory_limit_bytes = limit_bytes;
    options.place_timeout = place_timeout;
    options.chunk_limits = {.max_chunk_bytes = max_chunk_bytes, .max_chunk_tokens = kMostTokens};
    options.regions.total_bytes = options.regions.client_bytes = 1 << 20;
    head_ = nullptr;
    engine_ = *Engine::Create(options, *CreateCpuDevice(1 << 20));
    config.name = "h";
    config.vocab_size = kVocab;
    config.hidden_size = kHidden;
    config.weight_type = kernels::DataType::kFloat32;
    head_ = *engine_->CreateHead(config);
    Write(1);
  }
  void Write(float scale) {
    const std::string write = *head_->BeginWrite(RandomId(), Head::Replace::kNo, RandomId());
    std::string rows(kVocab * kHidden * 4, '\0');
    auto* values = reinterpret_cast<float*>(rows.data());
    for (int64_t i = 0; i < kVocab * kHidden; ++i) values[i] = scale * static_cast<float>((i * 31) % 97) / 97;
    ASSERT_TRUE((*head_->FindWrite(write))->Write(0, kVocab, kernels::DataType::kFloat32, rows).ok());
    std::promise<void> published;
    head_->CommitWrite(write, [&](const absl::StatusOr<uint64_t>&) { published.set_value(); });
    testing::Await("weights to be published", published);
  }

  // Where chunks have to end: what they are sent with changes there.
  static int64_t EndOfOptions(int64_t place) { return place < 43 ? 43 : place < 100 ? 100 : kTokens; }
  static Chunk MakeChunk(uint64_t sequence, int64_t place, int64_t tokens, uint64_t generation = 1) {
    Chunk chunk;
    chunk.sequence = sequence;
    chunk.generation = generation;
    chunk.tokens = tokens;
    chunk.window_token = place;
    if (place >= 43 && place < 100) chunk.options.loss.label_smoothing = 0.1f;
    if (place >= 100) chunk.gradient_scale = 0.3f;
    if (place >= 100) chunk.options.loss.lse_square_scale = 1e-3f;
    std::vector<float> hidden;
    for (int64_t token = place; token < place + tokens; ++token) {
      const int64_t label = token % 7 == 3 ? -100 : (token * 13) % kVocab;
      chunk.labels.append(reinterpret_cast<const char*>(&label), 8);
      const float weight = 0.5f + static_cast<float>(token % 5) / 5;
      if (place < 43) chunk.token_weights.append(reinterpret_cast<const char*>(&weight), 4);
      for (int64_t h = 0; h < kHidden; ++h) {
        hidden.push_back(std::sin(static_cast<float>(token * 37 + h * h)));
      }
    }
    chunk.hidden_states =
        Payload::Of(std::string(reinterpret_cast<const char*>(hidden.data()), hidden.size() * 4));
    return chunk;
  }

  // Tokens with lists of tokens, as their places say; the end of the places with the same.
  static ChunkLists::Use UseAt(int64_t place) {
    if (place < 20 || place >= 130) return ChunkLists::Use::kNone;
    return place < 43 || place >= 100 ? ChunkLists::Use::kKept : ChunkLists::Use::kTargets;
  }
  static int64_t EndOfLists(int64_t place) {
    for (const int64_t end : {20, 43, 70, 100, 130}) {
      if (place < end) return end;
    }
    return kTokens;
  }
  // Lists are short and long, so that what they are on average depends on the cut. Those of ignored tokens
  // are as others.
  static Chunk Listed(uint64_t sequence, int64_t place, int64_t tokens, uint64_t generation = 1) {
    Chunk chunk = MakeChunk(sequence, place, tokens, generation);
    chunk.lists.use = UseAt(place);
    if (chunk.lists.use == ChunkLists::Use::kNone) return chunk;
    chunk.options.loss.label_smoothing = 0;
    if (place >= 43 && place < 70) chunk.lists.label_weight = 0.5f;
    std::vector<int64_t> offsets = {0};
    for (int64_t token = place; token < place + tokens; ++token) {
      const int64_t size = token % 9 == 4 ? 40 : 1 + token % 5;
      for (int64_t i = 0; i < size; ++i) {
        // Beginning with the label, and in no order.
        const auto listed = static_cast<int32_t>((token * 13 + i * 7) % kVocab);
        const float probability = 0.8f / static_cast<float>(size);
        chunk.lists.tokens.append(reinterpret_cast<const char*>(&listed), 4);
        if (chunk.lists.use != ChunkLists::Use::kTargets) continue;
        chunk.lists.probabilities.append(reinterpret_cast<const char*>(&probability), 4);
      }
      offsets.push_back(offsets.back() + size);
    }
    chunk.lists.offsets.assign(reinterpret_cast<const char*>(offsets.data()), offsets.size() * 8);
    return chunk;
  }

  absl::StatusOr<OpenedSession> TryOpen(const std::string& client, int32_t rank, int32_t lanes = 1) {
    return engine_->OpenSession("h", {client, rank, lanes, Deterministic::kYes});
  }
  std::string Open(const std::string& client, int32_t rank, int32_t lanes = 1) {
    const absl::StatusOr<OpenedSession> opened = TryOpen(client, rank, lanes);
    EXPECT_TRUE(opened.ok()) << opened.status();
    return opened->info.session_id;
  }
  LaneAttachment Attach(const std::string& session, int32_t lane = 0) {
    listeners_.push_back(std::make_shared<RecordingListener>());
    return *head_->AttachLane(session, lane, listeners_.back());
  }
  // As a stream does: waits if it is told to.
  void Submit(const LaneAttachment& lane, Chunk chunk) {
    for (;;) {
      auto resumed = std::make_shared<std::promise<void>>();
      const absl::StatusOr<Head::Submission> taken =
          head_->Submit(lane, chunk, [resumed] { resumed->set_value(); });
      ASSERT_TRUE(taken.ok()) << taken.status();
      if (*taken == Head::Submission::kTaken) return;
      testing::Await("a waiting lane to be resumed", *resumed);
    }
  }
  ChunkAnswer AnswerOf(const LaneAttachment& lane, Chunk chunk) {
    const std::shared_ptr<RecordingListener> listener = listeners_.back();
    const size_t answers = listener->answers();
    Submit(lane, std::move(chunk));
    return listener->AwaitAnswers(answers + 1).back();
  }
  absl::StatusOr<FlushInfo> BeginFlush() {
    std::promise<absl::StatusOr<FlushInfo>> begun;
    const HeadInfo info = head_->Info();
    head_->BeginFlush(info.generation, info.window_marks, 1.0f,
                      [&](absl::StatusOr<FlushInfo> flush) { begun.set_value(std::move(flush)); });
    return testing::Await("the flush to begin", begun);
  }
  std::vector<float> Read(const FlushInfo& flush) {
    std::vector<float> rows(kVocab * kHidden);
    std::promise<void> read;
    head_->ReadGradient(flush.flush_id, 0, kVocab, kernels::DataType::kFloat32, {rows.data()},
                        [&](const absl::Status& status) {
                          EXPECT_TRUE(status.ok()) << status;
                          read.set_value();
                        });
    testing::Await("what is read", read);
    return rows;
  }
  // The gradient of the window, which ends with it.
  std::vector<float> Flush() {
    const absl::StatusOr<FlushInfo> flush = BeginFlush();
    EXPECT_TRUE(flush.ok()) << flush.status();
    std::vector<float> gradient = Read(*flush);
    EXPECT_TRUE(CommitFlush(*head_, flush->flush_id).ok());
    return gradient;
  }
  // All tokens in order, in the largest chunks. The next sequence.
  uint64_t SendInOrder(const LaneAttachment& lane, int64_t tokens = kTokens, uint64_t generation = 1,
                       uint64_t sequence = 1) {
    for (int64_t place = 0; place < tokens;) {
      const int64_t end = std::min({place + kMostTokens, EndOfOptions(place), tokens});
      Submit(lane, MakeChunk(sequence++, place, end - place, generation));
      place = end;
    }
    return sequence;
  }
  static bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  }

  std::unique_ptr<Engine> engine_;
  std::shared_ptr<Head> head_;
  std::vector<std::shared_ptr<RecordingListener>> listeners_;
};

}  // namespace lossd::engine

#endif  // LOSSD_TESTS_UNIT_ENGINE_HEAD_DETERMINISTIC_FIXTURE_H_
