// Many streams, cuts, repeats and flushes at once: whatever the interleaving, every chunk counts exactly
// once. Meant for ThreadSanitizer as much as for its assertion.
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "server/engine/common/errors.h"
#include "tests/unit/engine/end_flush.h"
#include "tests/unit/engine/engine_fixture.h"

namespace lossd::engine::concurrency_test {
namespace {

// Sends chunks 1..count, each worth 1, over streams that are cut at random; resends what the marks say is
// missing.
void RunClient(EngineFixture& fixture, int client, uint64_t count) {
  std::mt19937 random(static_cast<uint32_t>(client));
  const std::string session = fixture.Open("client " + std::to_string(client));
  uint64_t done = 0;
  while (done < count) {
    auto listener = std::make_shared<RecordingListener>();
    const LaneAttachment lane = fixture.Attach(session, listener);
    // Sometimes from before the mark: those must come back as repeats.
    uint64_t sequence = lane.marks.accepted + 1;
    if (sequence > 1 && random() % 2 == 0) --sequence;
    const uint64_t stop = std::min(count, sequence + random() % 20);
    for (; sequence <= stop; ++sequence) fixture.Submit(lane, EngineFixture::MakeChunk(sequence, 1));
    if (random() % 4 == 0) fixture.engine->WaitIdle();
    fixture.head->DetachLane(lane);
    fixture.engine->WaitIdle();
    done = fixture.Attach(session, listener).marks.applied;
  }
}

class Concurrency : public ::testing::TestWithParam<FakeOptions> {
 protected:
  static EngineOptions Options() {
    EngineOptions options;
    options.batching_window = absl::Microseconds(100);
    return options;
  }
};

TEST_P(Concurrency, EveryChunkCountsExactlyOnceWhateverIsCut) {
  constexpr int kClients = 4;
  constexpr uint64_t kChunks = 200;
  EngineFixture fixture(Options(), GetParam());
  std::atomic<bool> stop = false;
  std::thread observer([&] {  // what operators do meanwhile
    while (!stop) {
      fixture.head->Info();
      fixture.engine->ReservedMemory();
      fixture.engine->ExpireSessions();
    }
  });
  std::vector<std::thread> clients;
  for (int client = 0; client < kClients; ++client) {
    clients.emplace_back([&fixture, client] { RunClient(fixture, client, kChunks); });
  }
  for (std::thread& client : clients) client.join();
  stop = true;
  observer.join();
  EXPECT_EQ(fixture.GradientSum(), kClients * kChunks);
  EXPECT_EQ(fixture.engine->counters().queued_chunks, 0);
}

TEST_P(Concurrency, FlushesBetweenStreamsLoseAndDoubleNothing) {
  constexpr int kWindows = 30;
  constexpr int kClients = 3;
  EngineFixture fixture(Options(), GetParam());
  std::vector<std::string> sessions;
  for (int client = 0; client < kClients; ++client) {
    sessions.push_back(fixture.Open("c" + std::to_string(client)));
  }
  float total = 0;
  for (int window = 1; window <= kWindows; ++window) {
    std::vector<std::thread> clients;
    for (int client = 0; client < kClients; ++client) {
      clients.emplace_back([&, client] {
        const LaneAttachment lane =
            fixture.Attach(sessions[static_cast<size_t>(client)], std::make_shared<RecordingListener>());
        for (int i = 1; i <= 5; ++i) {
          fixture.Submit(lane, EngineFixture::MakeChunk(lane.marks.accepted + static_cast<uint64_t>(i), 1,
                                                        static_cast<uint64_t>(window)));
        }
      });
    }
    for (std::thread& client : clients) client.join();
    total += fixture.GradientSum();
    const absl::StatusOr<FlushInfo> flush =
        fixture.BeginFlush(static_cast<uint64_t>(window), fixture.Marks());
    ASSERT_TRUE(flush.ok()) << flush.status();
    ASSERT_TRUE(CommitFlush(*fixture.head, flush->flush_id).ok());
  }
  EXPECT_EQ(total, kWindows * kClients * 5);
}

INSTANTIATE_TEST_SUITE_P(Devices, Concurrency, ::testing::Values(FakeOptions{1, 1}, FakeOptions{3, 8}),
                         [](const auto& test) {
                           return "BatchesOf" + std::to_string(test.param.rows_per_batch);
                         });

}  // namespace
}  // namespace lossd::engine::concurrency_test
