// A head at a real server, and sessions of it.
#ifndef LOSSD_TESTS_SUPPORT_SESSION_FIXTURE_H_
#define LOSSD_TESTS_SUPPORT_SESSION_FIXTURE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lossd/client.h"
#include "tests/support/call_recorder.h"
#include "tests/support/real_server.h"
#include "tests/support/session_data.h"
#include "tests/support/wait.h"

namespace lossd::testing {

class SessionTest : public ::testing::Test {
 protected:
  void Connect(const ClientOptions& options = {.reconnect_timeout = std::chrono::seconds(20)}) {
    auto client = Client::Connect(server_.target(), options);
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    auto head = client_->GetHead(kHeadName);
    ASSERT_TRUE(head.ok()) << head.status();
    head_ = std::make_unique<Head>(*std::move(head));
  }

  Session Open(const std::string& client_key = "trainer", int32_t lanes = 1) {
    if (!client_) Connect();
    auto session =
        head_->OpenSession({.client_key = client_key,
                            .chunk_bytes = kTokensPerChunk * kHidden * static_cast<int64_t>(sizeof(float)),
                            .lanes = lanes});
    EXPECT_TRUE(session.ok()) << session.status();
    return *std::move(session);
  }

  // Chunk `sequence` of a lane, of any one or of this one, meets `fate` the first time that it is sent.
  void Script(uint64_t sequence, Fate fate, int lane = -1) {
    server_.recorder().on_chunk = [=](int at, uint64_t sent, int attempt) {
      return (lane < 0 || at == lane) && sent == sequence && attempt == 0 ? fate : Fate::kTake;
    };
  }

  // Until `lanes` have chunks that were refused in window 1, and wait for window 2.
  void AwaitNextWindow(size_t lanes = 1) {
    Await("chunks of window 2", [&] {
      const auto observed = server_.observed();
      std::set<int> waiting;
      for (size_t i = 0; i < observed.chunks.size(); ++i) {
        if (observed.chunks[i].generation() == 2) waiting.insert(observed.chunk_lanes[i]);
      }
      return waiting.size() == lanes;
    });
  }

  RealServer server_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Head> head_;
};

// Sessions of one lane, and of several.
class LanesFixture : public SessionTest {
 protected:
  explicit LanesFixture(int32_t lanes) : lanes_(lanes) {}

  static constexpr int64_t kChunks = 10;  // of a batch: of four lanes, 0 and 1 have three, the others two
  static constexpr int64_t kTokens = kChunks * kTokensPerChunk;

  Session OpenLanes(const std::string& client_key = "trainer") { return Open(client_key, lanes_); }

  // How many of a batch's chunks come to each lane; with `more`, so many more.
  std::vector<uint64_t> Dealt(int64_t chunks = kChunks, uint64_t more = 0) const {
    std::vector<uint64_t> dealt;
    for (int64_t lane = 0; lane < lanes_; ++lane) {
      dealt.push_back(static_cast<uint64_t>((chunks - lane + lanes_ - 1) / lanes_) + more);
    }
    return dealt;
  }
  static std::vector<uint64_t> AcceptedOf(const Session& session) {
    std::vector<uint64_t> accepted;
    for (const LaneMarks& lane : session.marks().lanes) accepted.push_back(lane.accepted);
    return accepted;
  }
  // How often chunks of a lane were sent.
  int64_t Sent(int lane) const {
    const auto lanes = server_.observed().chunk_lanes;
    return std::count(lanes.begin(), lanes.end(), lane);
  }
  // Every chunk of the only batch was the one that its lane and sequence stand for.
  void ExpectPlaces() const {
    const auto observed = server_.observed();
    for (size_t i = 0; i < observed.chunks.size(); ++i) {
      const v1::Chunk& chunk = observed.chunks[i];
      const int64_t index = static_cast<int64_t>(chunk.sequence() - 1) * lanes_ + observed.chunk_lanes[i];
      EXPECT_EQ(chunk.first_token(), index * kTokensPerChunk);
      EXPECT_EQ(chunk.generation(), 1U);
    }
  }

  const int32_t lanes_;
  const int last_ = lanes_ - 1;
};

class LanesTest : public LanesFixture, public ::testing::WithParamInterface<int32_t> {
 protected:
  LanesTest() : LanesFixture(GetParam()) {}
};

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_SUPPORT_SESSION_FIXTURE_H_
