// Parked heads through the client library and real gRPC: handles stay good, whoever wants a head has it, and
// a client that meets it on its way asks again by itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "tests/integration/client_server/client_server_fixture.h"
#include "tests/support/wait.h"

namespace lossd::testing::parking_test {
namespace {

using ::testing::HasSubstr;

class ParkingTest : public ClientServerTest {
 protected:
  ParkingTest() {
    TestServerOptions options;
    options.engine.parking_bytes = 1 << 20;
    StartWithWeights(options);
  }
  // A teacher may be in use for a moment after its chunk was answered: until the gradient is added.
  void Park(const std::string& name = "head") {
    absl::StatusOr<HeadInfo> parked = absl::UnknownError("");
    Await("the end of its use", [&] {
      parked = client_->ParkHead(name);
      return !absl::StrContains(parked.status().message(), "under way; try again");
    });
    ASSERT_TRUE(parked.ok()) << parked.status();
    EXPECT_GT(parked->parked_bytes, 0);
    EXPECT_TRUE(parked->memory.empty());
  }
  bool IsParked(const std::string& name = "head") {
    const auto heads = client_->ListHeads();
    EXPECT_TRUE(heads.ok()) << heads.status();
    for (const HeadInfo& head : *heads) {
      if (head.config.name == name) return head.parked_bytes > 0;
    }
    ADD_FAILURE() << name << " is not listed";
    return false;
  }
  void ExpectComingAndGoing() {
    EXPECT_GT(server_->engine().counters().heads_parked, 2U);
    EXPECT_GT(server_->engine().counters().heads_brought_back, 2U);
  }
  std::vector<float> Weights() {
    std::vector<float> weights(kVocab * kHidden);
    const auto version = head_->ReadWeights(DataType::kFloat32, weights.data());
    EXPECT_TRUE(version.ok()) << version.status();
    EXPECT_EQ(*version, 1U);
    return weights;
  }
};

TEST_F(ParkingTest, WhoOnlyLooksLeavesItParkedAndWhoReadsBringsItBack) {
  const std::vector<float> before = Weights();
  Park();
  const auto found = client_->GetHead("head");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->config().vocab_size, kVocab);
  const auto info = head_->Info();
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->weight_version, 1U);
  EXPECT_EQ(info->parked_bytes, kVocab * kHidden * 4);
  EXPECT_TRUE(IsParked());
  EXPECT_EQ(Weights(), before);
  EXPECT_FALSE(IsParked());
}

TEST_F(ParkingTest, AGradientIsFlushedFromAHeadThatWasParkedWithIt) {
  Data data(30);
  {
    Session session = Open();
    Batch batch = data.batch();
    ASSERT_TRUE(session.Compute(batch, data.outputs()).ok());
    EXPECT_EQ(client_->ParkHead("head").status().code(), absl::StatusCode::kFailedPrecondition);
    ASSERT_TRUE(session.Close().ok());
  }
  Park();
  const std::vector<float> gradient = Flush();
  EXPECT_FALSE(IsParked());
  // What a head that was never parked has of the same batch.
  Session session = Open();
  Batch batch = data.batch();
  ASSERT_TRUE(session.Compute(batch, data.outputs()).ok());
  EXPECT_EQ(Flush(), gradient);
}

TEST_F(ParkingTest, AParkedTeacherComesBackForAChunk) {
  auto teacher = client_->CopyHead("head", "teacher", {.frozen = true});
  ASSERT_TRUE(teacher.ok()) << teacher.status();
  Session session = Open();
  Data data(20);
  const auto teach = [&] {
    Batch batch = data.batch();
    batch.distillation =
        Distillation{.teacher = "teacher", .hidden_size = kHidden, .hidden_states = data.hidden.data()};
    const absl::Status taught = session.Compute(batch, data.outputs()).status();
    EXPECT_TRUE(taught.ok()) << taught;
    return data.dx;
  };
  const std::vector<float> before = teach();
  Park("teacher");
  EXPECT_EQ(teach(), before);
  EXPECT_FALSE(IsParked("teacher"));
}

TEST_F(ParkingTest, ATeacherThatIsParkedAgainAndAgainTeachesEveryChunk) {
  auto teacher = client_->CopyHead("head", "teacher", {.frozen = true});
  ASSERT_TRUE(teacher.ok()) << teacher.status();
  std::atomic<bool> done = false;
  std::thread parking([&] {
    while (!done) {
      const absl::Status parked = client_->ParkHead("teacher").status();
      EXPECT_TRUE(parked.ok() || absl::IsFailedPrecondition(parked)) << parked;
    }
  });
  Session session = Open();
  Data data(40);
  std::vector<float> first;
  for (int turn = 0; turn < 30; ++turn) {
    Batch batch = data.batch();
    batch.distillation =
        Distillation{.teacher = "teacher", .hidden_size = kHidden, .hidden_states = data.hidden.data()};
    const absl::Status taught = session.Compute(batch, data.outputs()).status();
    EXPECT_TRUE(taught.ok()) << taught;
    if (turn == 0) first = data.dx;
    EXPECT_EQ(data.dx, first);
  }
  done = true;
  parking.join();
  ExpectComingAndGoing();
}

TEST_F(ParkingTest, ClientsOfAHeadThatIsParkedAgainAndAgainNoticeNothing) {
  const std::vector<float> before = Weights();
  std::atomic<bool> done = false;
  std::thread parking([&] {
    while (!done) {
      const absl::Status parked = client_->ParkHead("head").status();
      EXPECT_TRUE(parked.ok() || absl::IsFailedPrecondition(parked)) << parked;
    }
  });
  for (int turn = 0; turn < 30; ++turn) {
    EXPECT_EQ(Weights(), before);
    auto session = head_->OpenSession({});
    ASSERT_TRUE(session.ok()) << session.status();
    Data data(8);
    Batch batch = data.batch();
    const absl::Status computed = session->Compute(batch, data.outputs()).status();
    EXPECT_TRUE(computed.ok()) << computed;
    EXPECT_TRUE(session->Close().ok());
  }
  done = true;
  parking.join();
  ExpectComingAndGoing();
}

TEST_F(ParkingTest, AServerThatParksNoneSaysWhatToDo) {
  StartWithWeights();
  const absl::Status refused = client_->ParkHead("head").status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("start it with --parking_bytes"));
}

}  // namespace
}  // namespace lossd::testing::parking_test
