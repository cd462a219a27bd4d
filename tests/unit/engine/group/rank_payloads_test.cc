// Tensors that a rank holds, and the leader's hold on them.
#include "server/engine/group/rank_payloads.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/group/rank_channel.h"

namespace lossd::engine::rank_payloads_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

std::shared_ptr<RankPayload> Some(const std::string& bytes = "hidden") {
  return std::make_shared<RankPayload>(Payload::Of(bytes), Payload());
}

TEST(RankPayloads, AreFoundByTheirNumberUntilTheyAreReleased) {
  RankPayloads payloads;
  const std::shared_ptr<RankPayload> first = Some();
  const uint64_t number = payloads.Add(first);
  const uint64_t other = payloads.Add(Some());
  EXPECT_GT(number, 0u) << "0 is that of chunks at the leader";
  EXPECT_NE(number, other);
  EXPECT_EQ(payloads.Find(number), first);
  EXPECT_EQ(payloads.Find(number + 100), nullptr);
  EXPECT_EQ(payloads.count(), 2);
  payloads.Release(number);
  EXPECT_EQ(payloads.Find(number), nullptr);
  EXPECT_EQ(first.use_count(), 1) << "and its memory is given back";
  payloads.Release(number);  // it may come from both sides
  payloads.Release(other);
  EXPECT_EQ(payloads.count(), 0);
  EXPECT_GT(payloads.Add(Some()), other) << "a number is never another's";
}

TEST(RankPayloads, GetTheirDxOnceTheyAreAnswered) {
  RankPayload payload(Payload::Of("hidden"), Payload::Of("teacher"));
  EXPECT_EQ(payload.hidden_states().size(), 6);
  EXPECT_EQ(payload.teacher_hidden().size(), 7);
  EXPECT_EQ(payload.dx().size(), 0);
  const ResultBytes dx(24);
  payload.Answer(dx);
  EXPECT_EQ(payload.dx().size(), 24);
  EXPECT_EQ(payload.dx().data(), dx.data());
}

// Writes down what one rank is told alone.
class TellingChannel : public RankChannel {
 public:
  void Send(GroupCommand /*command*/) override { ADD_FAILURE() << "to all"; }
  void SendTo(int32_t rank, GroupCommand command) override {
    released.emplace_back(rank, std::get<ReleasePayloadCommand>(command).payload);
  }
  absl::Status Ask(GroupCommand /*command*/) override { return absl::OkStatus(); }
  std::vector<AnsweredChunk> TakeAnswered() override { return {}; }
  uint64_t BatchesApplied() const override { return 0; }
  GroupReport Report() const override { return {}; }

  std::vector<std::pair<int32_t, uint64_t>> released;
};

TEST(RankPayloads, AreReleasedByTheLeaderWithTheLastThatNamesThem) {
  const auto channel = std::make_shared<TellingChannel>();
  Chunk chunk;
  PlaceAtRank({.rank = 3, .number = 7, .hidden_bytes = 100, .teacher_bytes = 50}, HoldAtRank(channel, 3, 7),
              &chunk);
  Chunk copy = chunk;
  chunk = {};
  EXPECT_THAT(channel->released, IsEmpty());
  copy.DropPayload();
  EXPECT_THAT(channel->released, ElementsAre(Pair(3, 7u)));
}

}  // namespace
}  // namespace lossd::engine::rank_payloads_test
