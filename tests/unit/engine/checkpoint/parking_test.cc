// Heads that are parked in the host's memory: they come back as they were when somebody wants them, nothing
// is lost whoever comes in between, and the memory of both places is what was promised.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "server/engine/common/errors.h"
#include "tests/support/wait.h"
#include "tests/unit/engine/checkpoint/checkpoint_fixture.h"

namespace lossd::engine::parking_test {
namespace {

using ::testing::HasSubstr;

class ParkingTest : public CheckpointTest {
 protected:
  ParkingTest() {
    parking_bytes_ = 1 << 20;
    StartEngine(Start::kEmpty);
    CreateHead(WithEverything());
    WriteWeights(1);
  }
  // One more chunk of a session that is closed again: the window keeps what it has added.
  void Add(const std::string& client, int64_t place) {
    const absl::StatusOr<OpenedSession> opened = OpenOf(client);
    ASSERT_TRUE(opened.ok()) << opened.status();
    head_ = opened->head;
    const LaneAttachment lane = Attach(opened->info.session_id);
    Send(lane, lane.marks.accepted + 1, place, head_->Info().generation);
    engine_->WaitIdle();
    ASSERT_TRUE(engine_->CloseSession(opened->info.session_id).ok());
  }
  void Park() {
    const absl::StatusOr<HeadInfo> parked = engine_->ParkHead("h");
    ASSERT_TRUE(parked.ok()) << parked.status();
    EXPECT_GT(parked->parked_bytes, 0);
  }
  // As libraries do: asks until it is there, or cannot come.
  template <typename Call>
  static auto Ask(Call call) {
    decltype(call()) answer = absl::UnavailableError("");
    testing::Await("the head", [&] { return !absl::IsUnavailable((answer = call()).status()); });
    return answer;
  }
  absl::StatusOr<std::shared_ptr<Head>> Find() {
    return Ask([this] { return engine_->FindHead("h"); });
  }
  absl::StatusOr<OpenedSession> OpenOf(const std::string& client,
                                       Deterministic deterministic = Deterministic::kNo) {
    return Ask([&] { return engine_->OpenSession("h", {client, 0, 1, deterministic}); });
  }
  void BringBack() {
    const absl::StatusOr<std::shared_ptr<Head>> back = Find();
    ASSERT_TRUE(back.ok()) << back.status();
    head_ = *back;
  }
  int64_t OnDevice() const {
    const MemoryUsage usage = engine_->budget().Usage();
    const auto found = usage.heads.find("h");
    return found == usage.heads.end() ? 0 : TotalBytes(found->second);
  }
  // What a flush or a step has to name.
  static void ExpectSameMarks(const std::vector<SessionMarks>& a, const std::vector<SessionMarks>& b) {
    ASSERT_EQ(a.size(), b.size());
    ASSERT_FALSE(a.empty());
    for (size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(a[i].session_id, b[i].session_id);
      EXPECT_EQ(a[i].generation, b[i].generation);
      EXPECT_EQ(a[i].past.incarnation, b[i].past.incarnation);
      EXPECT_EQ(a[i].past.restores, b[i].past.restores);
      ASSERT_EQ(a[i].lanes.size(), b[i].lanes.size());
      EXPECT_EQ(a[i].lanes[0].accepted, b[i].lanes[0].accepted);
      EXPECT_EQ(a[i].lanes[0].applied, b[i].lanes[0].applied);
    }
  }
  static void ExpectError(const absl::Status& status, absl::StatusCode code, const std::string& text) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  }
};

TEST_F(ParkingTest, AHeadThatComesBackGoesOnAsIfNothingHadHappened) {
  Add("a", 0);
  ASSERT_TRUE(Step().ok());
  Add("b", 10);
  const Content before = Look();
  ASSERT_GT(before.window_tokens, 0U);
  // What an undisturbed head would become.
  ASSERT_TRUE(engine_->SaveCheckpoint("h", "here").ok());
  Add("b", 20);
  ASSERT_TRUE(Step().ok());
  const Content undisturbed = Look();
  ASSERT_TRUE(engine_->RestoreCheckpoint("h", "here").ok());
  const uint64_t version = head_->weight_version();

  const std::vector<SessionMarks> marks = head_->Info().window_marks;
  Park();
  ExpectSameMarks(engine_->FindParked("h")->window_marks, marks);
  BringBack();
  ExpectSameMarks(head_->Info().window_marks, marks);
  EXPECT_EQ(Look(), before);
  EXPECT_EQ(head_->weight_version(), version);
  EXPECT_EQ(head_->restores(), 1U) << "to be parked is no restore";
  Add("b", 20);
  ASSERT_TRUE(Step().ok());
  EXPECT_EQ(Look(), undisturbed) << "moments, step count and the lane's marks came back too";
}

TEST_F(ParkingTest, ItsMemoryIsThatOfTheHostWhileItIsParkedAndThatOfTheDeviceBeforeAndAfter) {
  Add("a", 0);
  const int64_t needed = OnDevice();
  const int64_t all = engine_->budget().reserved();
  Park();
  EXPECT_EQ(OnDevice(), 0);
  EXPECT_EQ(engine_->budget().reserved(), all - needed);
  // The master, of which the weights are made, gradient and two moments, each with a bias.
  constexpr int64_t kState = (kVocab * kHidden + kVocab) * 4 * 4;
  EXPECT_EQ(engine_->parking().reserved(), kState);
  EXPECT_EQ(engine_->FindParked("h")->parked_bytes, kState);
  EXPECT_TRUE(engine_->Heads().empty());
  ASSERT_EQ(engine_->ParkedHeads().size(), 1U);
  BringBack();
  EXPECT_EQ(OnDevice(), needed);
  EXPECT_EQ(engine_->parking().reserved(), 0);
  EXPECT_FALSE(engine_->FindParked("h").has_value());
  EXPECT_TRUE(engine_->ParkedHeads().empty());
  EXPECT_EQ(engine_->counters().heads_parked, 1U);
  EXPECT_EQ(engine_->counters().heads_brought_back, 1U);
}

TEST_F(ParkingTest, ToParkItAgainTellsTheSame) {
  const absl::StatusOr<HeadInfo> first = engine_->ParkHead("h");
  const absl::StatusOr<HeadInfo> second = engine_->ParkHead("h");
  ASSERT_TRUE(first.ok() && second.ok()) << second.status();
  EXPECT_EQ(first->parked_bytes, second->parked_bytes);
  EXPECT_EQ(second->weight_version, 1U);
  EXPECT_EQ(engine_->counters().heads_parked, 1U);
}

TEST_F(ParkingTest, AHeadWithoutWeightsIsParkedToo) {
  HeadConfig config = WithEverything();
  config.name = "empty";
  ASSERT_TRUE(engine_->CreateHead(config).ok());
  ASSERT_TRUE(engine_->ParkHead("empty").ok());
  const absl::StatusOr<std::shared_ptr<Head>> back = Ask([this] { return engine_->FindHead("empty"); });
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ((*back)->weight_version(), 0U);
}

TEST_F(ParkingTest, WhoeverWantsItBringsItBack) {
  const auto is_back = [this](const std::string& what) {
    EXPECT_FALSE(engine_->FindParked("h").has_value()) << what;
    Park();
  };
  Park();
  ExpectError(engine_->OpenSession("h", {"c", 0, 1}).status(), absl::StatusCode::kUnavailable, "ask again");
  const absl::StatusOr<OpenedSession> opened = OpenOf("c");
  ASSERT_TRUE(opened.ok()) << opened.status();
  ASSERT_TRUE(engine_->CloseSession(opened->info.session_id).ok());
  is_back("a session");
  const absl::StatusOr<OpenedSession> deterministic = OpenOf("d", Deterministic::kYes);
  ASSERT_TRUE(deterministic.ok()) << deterministic.status();
  ASSERT_TRUE(engine_->CloseSession(deterministic->info.session_id).ok());
  is_back("a deterministic session");
  ASSERT_TRUE(engine_->CreateHead(WithEverything()).ok());
  is_back("who creates it again");
  HeadConfig other = WithEverything();
  other.bias = false;
  EXPECT_EQ(engine_->CreateHead(other).status().code(), absl::StatusCode::kAlreadyExists);
  is_back("who creates another one of its name");
  ASSERT_TRUE(engine_->CopyHead({.source = "h", .name = "copy", .copy_id = "id"}).ok());
  is_back("who copies it");
  ASSERT_TRUE(engine_->SaveCheckpoint("h", "a").ok());
  is_back("who saves it");
  ASSERT_TRUE(engine_->RestoreCheckpoint("h", "a").ok());
  is_back("who restores it");
}

TEST_F(ParkingTest, AHeadThatIsInUseStaysWhereItIsAndSaysWhy) {
  const std::string session = engine_->OpenSession("h", {"c", 0, 1})->info.session_id;
  ExpectError(engine_->ParkHead("h").status(), absl::StatusCode::kFailedPrecondition, "1 open session;");
  Send(Attach(session), 1, 0, 1);
  engine_->WaitIdle();
  ASSERT_TRUE(engine_->CloseSession(session).ok());

  const absl::StatusOr<FlushInfo> flush = BeginFlush();
  ASSERT_TRUE(flush.ok()) << flush.status();
  ExpectError(engine_->ParkHead("h").status(), absl::StatusCode::kFailedPrecondition, "sealed by flush");
  ASSERT_TRUE(AbortFlush(*head_, flush->flush_id).ok());

  const std::string write = *head_->BeginWrite("key", Head::Replace::kNo, RandomId());
  const std::string row(kHidden * 4, '\0');
  const std::string bias(4, '\0');
  ASSERT_TRUE((*head_->FindWrite(write))->Write(0, 1, kernels::DataType::kFloat32, row, bias).ok());
  ExpectError(engine_->ParkHead("h").status(), absl::StatusCode::kFailedPrecondition, "under way");
  // As the message says: one that nobody has written to is no obstacle.
  ASSERT_TRUE(head_->BeginWrite("another", Head::Replace::kYes, RandomId()).ok());

  ExpectError(engine_->ParkHead("stranger").status(), absl::StatusCode::kNotFound, "does not exist");
  EXPECT_EQ(engine_->parking().reserved(), 0);
  EXPECT_EQ(head_->Info().window_tokens, 9U);
  Park();
}

TEST_F(ParkingTest, GradientsOfDeterministicSessionsAreNotParked) {
  const absl::StatusOr<OpenedSession> opened = engine_->OpenSession("h", {"d", 0, 1, Deterministic::kYes});
  ASSERT_TRUE(opened.ok()) << opened.status();
  Submit(Attach(opened->info.session_id), DeterministicTest::MakeChunk(1, 0, kMostTokens));
  engine_->WaitIdle();
  ASSERT_TRUE(engine_->CloseSession(opened->info.session_id).ok());
  ExpectError(engine_->ParkHead("h").status(), absl::StatusCode::kFailedPrecondition, "deterministic");
  ASSERT_TRUE(Step().ok());
  Park();
}

TEST_F(ParkingTest, ToBeRefusedDoesNotChangeTheBitsOfADeterministicSession) {
  const auto gradient = [this](bool asked) {
    const std::string session = engine_->OpenSession("h", {"d", 0, 1, Deterministic::kYes})->info.session_id;
    const LaneAttachment lane = Attach(session);
    const uint64_t generation = head_->Info().generation;
    // Tiles of 16 tokens are cut by chunks of 10.
    for (uint64_t sequence = 1; sequence <= 4; ++sequence) {
      const auto place = static_cast<int64_t>(sequence - 1) * 10;
      Submit(lane, DeterministicTest::MakeChunk(sequence, place, 10, generation));
      if (!asked) continue;
      ExpectError(engine_->ParkHead("h").status(), absl::StatusCode::kFailedPrecondition, "open session");
    }
    engine_->WaitIdle();
    const std::vector<float> read = Look().gradient;
    const absl::StatusOr<FlushInfo> flush = BeginFlush();
    EXPECT_TRUE(flush.ok()) << flush.status();
    std::promise<void> committed;
    head_->CommitFlush(flush->flush_id, [&](const absl::StatusOr<uint64_t>&) { committed.set_value(); });
    testing::Await("the flush to be committed", committed);
    EXPECT_TRUE(engine_->CloseSession(session).ok());
    return read;
  };
  EXPECT_EQ(gradient(true), gradient(false));
}

TEST_F(ParkingTest, WithoutRoomForItInTheHostsMemoryItStaysOnTheDevice) {
  Add("a", 0);
  const Content before = Look();
  parking_bytes_ = 100;
  ASSERT_TRUE(engine_->SaveForDrain().ok());
  StartEngine(Start::kDrained);
  const absl::Status full = engine_->ParkHead("h").status();
  ExpectError(full, absl::StatusCode::kResourceExhausted, "not enough memory for parking head h");
  EXPECT_THAT(std::string(full.message()), HasSubstr("--parking_bytes"));
  EXPECT_EQ(Look(), before);

  parking_bytes_ = 0;
  ASSERT_TRUE(engine_->SaveForDrain().ok());
  StartEngine(Start::kDrained);
  ExpectError(engine_->ParkHead("h").status(), absl::StatusCode::kFailedPrecondition,
              "start it with --parking_bytes");
  EXPECT_EQ(Look(), before);
}

TEST_F(ParkingTest, WithoutRoomForItOnTheDeviceItStaysParkedUntilThereIs) {
  memory_limit_bytes_ = engine_->budget().reserved() + OnDevice() / 2;  // no two of them
  ASSERT_TRUE(engine_->SaveForDrain().ok());
  StartEngine(Start::kDrained);
  const Content before = Look();
  Park();
  HeadConfig other = WithEverything();
  other.name = "other";
  const auto created = engine_->CreateHead(other);
  ASSERT_TRUE(created.ok()) << created.status();
  const absl::Status full = Find().status();
  ExpectError(full, absl::StatusCode::kResourceExhausted, "not enough memory for head h");
  EXPECT_THAT(std::string(full.message()), HasSubstr("park one that is not in use"));
  EXPECT_EQ(OpenOf("c").status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(engine_->CreateHead(WithEverything()).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(engine_->FindParked("h").has_value());
  std::promise<void> released;
  ASSERT_TRUE(engine_->DeleteHead("other", Engine::DiscardGradient::kNo, [&] { released.set_value(); }).ok());
  testing::Await("the head to be released", released);
  // Who was told a moment ago that there is no room need not wait to be told otherwise.
  BringBack();
  EXPECT_EQ(Look(), before);
}

TEST_F(ParkingTest, WhoHadFoundItBeforeIsAskedToAskAgain) {
  const std::shared_ptr<Head> before = head_;
  Park();
  ExpectError(before->BeginWrite("key", Head::Replace::kNo, "id").status(), absl::StatusCode::kUnavailable,
              "ask again");
  EXPECT_EQ(BeginFlush().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Step().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(before->OpenSession("c", 0, 1, "id").status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(ParkingTest, ADeletedOneIsGoneWithItsMemoryAndItsGradientIsNotDroppedUnasked) {
  Add("a", 0);
  Park();
  ExpectError(engine_->DeleteHead("h", Engine::DiscardGradient::kNo), absl::StatusCode::kFailedPrecondition,
              "set discard_gradient");
  EXPECT_TRUE(engine_->FindParked("h").has_value());
  bool released = false;
  ASSERT_TRUE(engine_->DeleteHead("h", Engine::DiscardGradient::kYes, [&] { released = true; }).ok());
  EXPECT_TRUE(released);
  EXPECT_EQ(engine_->parking().reserved(), 0);
  EXPECT_EQ(engine_->FindHead("h").status().code(), absl::StatusCode::kNotFound);
  StartEngine(Start::kKilled);
  EXPECT_EQ(engine_->FindHead("h").status().code(), absl::StatusCode::kNotFound) << "no start brings it back";
}

TEST_F(ParkingTest, ItCountsAmongTheHeadsThatThereMayBe) {
  Park();
  HeadConfig config = WithEverything();
  config.optimizer = {};
  config.master_weights = false;
  const int64_t most = engine_->options().max_heads;
  for (int64_t i = 1; i < most; ++i) {
    config.name = absl::StrCat("head", i);
    ASSERT_TRUE(engine_->CreateHead(config).ok());
  }
  config.name = "beyond";
  ExpectError(engine_->CreateHead(config).status(), absl::StatusCode::kResourceExhausted, "the limit is");
  BringBack();
}

TEST_F(ParkingTest, ADrainKeepsItAndTheNextServerHasItParkedAgain) {
  Add("a", 0);
  ASSERT_TRUE(Step().ok());
  Add("a", 10);
  const Content before = Look();
  Park();
  engine_->BeginDrain();
  EXPECT_EQ(engine_->FindHead("h").status().code(), absl::StatusCode::kUnavailable);
  const absl::StatusOr<DrainedHeads> heads = engine_->SaveForDrain();
  ASSERT_TRUE(heads.ok()) << heads.status();
  EXPECT_EQ(heads->saved.size(), 1U);
  StartEngine(Start::kDrained);
  ASSERT_TRUE(restored_.ok()) << restored_.status();
  EXPECT_EQ(restored_->size(), 1U);
  BringBack();
  EXPECT_EQ(engine_->counters().heads_brought_back, 1U);
  EXPECT_EQ(Look(), before);
}

TEST_F(ParkingTest, ADrainFindsAHeadThatIsJustComingBack) {
  const Content before = Look();
  for (int turn = 0; turn < 10; ++turn) {
    Park();
    EXPECT_EQ(engine_->FindHead("h").status().code(), absl::StatusCode::kUnavailable);
    engine_->BeginDrain();
    const absl::StatusOr<DrainedHeads> heads = engine_->SaveForDrain();
    ASSERT_TRUE(heads.ok()) << heads.status();
    ASSERT_EQ(heads->saved.size(), 1U);
    StartEngine(Start::kDrained);
    BringBack();
  }
  EXPECT_EQ(Look(), before);
}

TEST_F(ParkingTest, AServerWithoutRoomForWhatWasParkedHasItOnTheDevice) {
  Add("a", 0);
  const Content before = Look();
  Park();
  ASSERT_TRUE(engine_->SaveForDrain().ok());
  parking_bytes_ = 0;
  StartEngine(Start::kDrained);
  ASSERT_TRUE(restored_.ok()) << restored_.status();
  EXPECT_FALSE(engine_->FindParked("h").has_value());
  EXPECT_EQ(Look(), before);
}

TEST_F(ParkingTest, UsersAndThoseWhoParkItAtTheSameTimeAllGetWhatTheyWant) {
  constexpr int kTurns = 20;
  std::atomic<int> users = 3;
  const auto use = [&](const std::string& client) {
    for (int turn = 0; turn < kTurns; ++turn) {
      const absl::StatusOr<OpenedSession> opened = OpenOf(client);
      ASSERT_TRUE(opened.ok()) << opened.status();
      EXPECT_EQ(opened->head->weight_version(), 1U);
      ASSERT_TRUE(engine_->CloseSession(opened->info.session_id).ok());
    }
    --users;
  };
  std::vector<std::thread> threads;
  for (const char* client : {"a", "b", "c"}) threads.emplace_back(use, client);
  // At least once while they come and go.
  const auto park = [this] {
    const absl::Status parked = engine_->ParkHead("h").status();
    EXPECT_TRUE(parked.ok() || absl::IsFailedPrecondition(parked) || absl::IsUnavailable(parked)) << parked;
    return engine_->counters().heads_parked > 0;
  };
  while (users > 0) park();
  testing::Await("the head to be parked", park);
  for (std::thread& thread : threads) thread.join();
  BringBack();
  EXPECT_GT(engine_->counters().heads_brought_back, 0U);
  EXPECT_EQ(head_->Info().open_sessions, 0);
}

}  // namespace
}  // namespace lossd::engine::parking_test
