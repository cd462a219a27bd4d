// Who gets how much of the device: sessions of a head by rows, heads by cost.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "tests/unit/engine/schedule/batch_queue_fixture.h"

namespace lossd::engine::batch_sharing_test {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

constexpr BatchKey kOtherKind{kernels::DataType::kBFloat16, kernels::DataType::kFloat32,
                              ComputeMode::kLossAndGradients};

// Sessions that always have chunks waiting, and what they were given.
class BatchSharingTest : public BatchQueueTest {
 protected:
  struct Client {
    int64_t rows = 0;  // of a chunk
    BatchKey kind = {};
    int64_t waiting = 2;  // chunks, kept up
    int64_t given = 0;    // rows
    int32_t holders = 1;  // ranks that its chunks come to, in turn
    int64_t sent = 0;     // chunks
  };

  // Ends one batch after the other and keeps every client's chunks waiting, until `batches` have started.
  void Serve(size_t batches) {
    Refill();
    while (a_->batch_rows.size() < batches) {
      Account(Run());
      if (a_->under_way() > 0) a_->EndOldest();
      Refill();
    }
  }
  // The rows by which the client that was given most is ahead of the one that was given least.
  int64_t Spread() const {
    const auto less = [](const auto& a, const auto& b) { return a.second.given < b.second.given; };
    const auto [least, most] = std::minmax_element(clients_.begin(), clients_.end(), less);
    return most->second.given - least->second.given;
  }
  void Account(const std::vector<std::string>& batches) {
    for (const std::string& batch : batches) {
      for (size_t start = 0; start < batch.size();) {
        const size_t end = std::min(batch.find('+', start), batch.size());
        Client& client = clients_.at(std::stoull(batch.substr(start, end - start)));
        client.given += client.rows;
        --queued_[std::stoull(batch.substr(start, end - start))];
        start = end + 1;
      }
    }
  }
  void Refill() {
    for (auto& [id, client] : clients_) {
      for (int64_t& queued = queued_[id]; queued < client.waiting; ++queued) {
        client.kind.holder = static_cast<int32_t>(client.sent++ % client.holders);
        AddOf(id, std::to_string(id), client.rows, client.kind);
      }
    }
  }

  std::map<uint64_t, Client> clients_;
  std::map<uint64_t, int64_t> queued_;
};

TEST_F(BatchSharingTest, ALargeAndASmallSenderGetTheSameRows) {
  a_->rows_per_batch = 1;  // a chunk is a batch, as on the CPU
  clients_ = {{1, {.rows = 2048}}, {2, {.rows = 16, .waiting = 8}}};
  Serve(10'000);
  EXPECT_GT(clients_[2].given, 50'000);
  EXPECT_LE(Spread(), 2048 + 16);
}

TEST_F(BatchSharingTest, TheSharesAreTheSameWhenChunksAreGathered) {
  a_->rows_per_batch = 4096;
  clients_ = {{1, {.rows = 2048}}, {2, {.rows = 64, .waiting = 100}}, {3, {.rows = 300, .waiting = 30}}};
  Serve(500);
  EXPECT_GT(clients_[2].given, 100'000);
  EXPECT_LE(Spread(), 2048 + 4096);
}

TEST_F(BatchSharingTest, ASessionOfOneKindSharesWithManyOfAnother) {
  a_->rows_per_batch = 4096;
  clients_ = {{1, {.rows = 256, .kind = kOtherKind, .waiting = 100}}};
  for (uint64_t id = 2; id <= 17; ++id) clients_[id] = {.rows = 256, .waiting = 32};
  Serve(1000);
  EXPECT_LE(Spread(), 2 * 4096) << "a batch of the one is owed to each of the others";
}

TEST_F(BatchSharingTest, SixteenLanesOfASessionGetNoMoreThanOneOfAnother) {
  a_->rows_per_batch = 1;
  clients_ = {{1, {.rows = 32, .waiting = 16}}, {2, {.rows = 32, .waiting = 1}}};
  Serve(1000);
  EXPECT_LE(Spread(), 64);
}

TEST_F(BatchSharingTest, ChunksOfOneSessionAreGatheredByTheRankThatHoldsThem) {
  for (const char* const name : {"a", "b", "c"}) {
    AddOf(1, name + std::string("0"), 2, {.holder = 0});
    AddOf(1, name + std::string("1"), 2, {.holder = 1});
  }
  EXPECT_THAT(Run(), ElementsAre("a0+b0+c0", "a1+b1+c1"));
}

TEST_F(BatchSharingTest, ARankWithEndlessChunksDoesNotKeepThoseOfAnotherWaiting) {
  const auto refill = [this](int count) {
    for (int i = 0; i < count; ++i) AddOf(1, "many", 2, {.holder = 0});
  };
  refill(30);
  AddOf(1, "few", 2, {.holder = 2});
  refill(30);
  EXPECT_THAT(Run(), ElementsAre("many+many+many+many", "many+many+many+many", "many+many+many+many"));
  std::vector<std::string> started;
  while (std::count(started.begin(), started.end(), "few") == 0) {
    ASSERT_LT(started.size(), 6u) << "what came before it goes before it, and no more";
    refill(4);
    a_->EndOldest();
    for (const std::string& batch : Run()) started.push_back(batch);
  }
}

TEST_F(BatchSharingTest, ASessionAtEveryRankGetsNoMoreThanOneAtARank) {
  a_->rows_per_batch = 512;
  clients_ = {{1, {.rows = 64, .waiting = 64, .holders = 8}}, {2, {.rows = 64, .waiting = 16}}};
  Serve(2000);
  EXPECT_GT(clients_[2].given, 100'000);
  EXPECT_LE(Spread(), 2 * (512 + 64));
}

TEST_F(BatchSharingTest, AChunkWithoutRowsDoesNotPassOthersThatItsRankHolds) {
  for (int i = 0; i < 3; ++i) AddOf(1, "full", kMostRows, {.holder = 0});
  EXPECT_THAT(Run(), ElementsAre("full", "full", "full"));
  AddOf(1, "first", 2, {.holder = 1});
  AddOf(1, "rejected", 0, {.holder = 1});
  AddOf(1, "other", 0, {.holder = 2});
  EXPECT_THAT(Run(), IsEmpty()) << "the device is full";
  a_->EndOldest();
  a_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("other+first+rejected"));
}

TEST_F(BatchSharingTest, ChunksWithdrawnFromOneRankLeaveThoseOfTheOthers) {
  const auto at_one = AddOf(1, "one", 2, {.holder = 1});
  AddOf(1, "two", 2, {.holder = 2});
  queue_.Withdraw(a_.get(), {at_one});
  EXPECT_THAT(Run(), ElementsAre("two"));
}

TEST_F(BatchSharingTest, AChunkOfALightSessionWaitsForOneChunkOfEachOtherAtMost) {
  a_->rows_per_batch = 1;
  for (uint64_t id = 1; id <= 5; ++id) clients_[id] = {.rows = 1000, .waiting = 50};
  Serve(57);
  device_.under_way = 3;  // what is under way stays so
  AddOf(9, "light", 1);
  std::vector<std::string> served;
  for (int i = 0; i < 4; ++i) {
    device_.under_way = 0;
    for (const std::string& event : Run()) served.push_back(event);
  }
  const auto before = std::find(served.begin(), served.end(), "light") - served.begin();
  EXPECT_LE(before, 1 + static_cast<int64_t>(clients_.size())) << "with the batch that was gathered already";
}

TEST_F(BatchSharingTest, AWhileAloneIsNotHeldAgainstASession) {
  a_->rows_per_batch = 1;
  clients_ = {{1, {.rows = 100}}};
  Serve(1000);
  clients_[2] = {.rows = 100};
  const int64_t before = clients_[1].given;
  Serve(1100);
  EXPECT_NEAR(static_cast<double>(clients_[1].given - before), static_cast<double>(clients_[2].given), 300);
}

TEST_F(BatchSharingTest, LeavingForAMomentGainsNothing) {
  a_->rows_per_batch = 1;
  // Session 1 has one large chunk at a time: its queue runs empty with each.
  clients_ = {{1, {.rows = 2048, .waiting = 1}}, {2, {.rows = 16, .waiting = 4}}};
  Serve(5000);
  EXPECT_LE(Spread(), 2 * 2048 + 16);
}

TEST_F(BatchSharingTest, SixtyFourSmallSessionsMakeUpFullBatches) {
  a_->rows_per_batch = 16384;
  for (uint64_t id = 1; id <= 64; ++id) clients_[id] = {.rows = 256};
  Serve(20);
  // Started at once because the device had nothing to do; from then on they had time to be gathered.
  EXPECT_THAT(a_->batch_rows, Each(16384));
  EXPECT_LE(Spread(), 256);
}

TEST_F(BatchSharingTest, ABatchIsFilledFromOthersWhenTheNextChunkIsTooLargeForIt) {
  device_.under_way = 3;
  AddOf(1, "small", 3);
  Run();
  AddOf(2, "large", 7);
  AddOf(3, "fits", 5);
  Run();
  device_.under_way = 0;
  EXPECT_THAT(Run(), ElementsAre("small+fits", "large"));
}

TEST_F(BatchSharingTest, AThousandSessionsAllGetTheirTurnInOneRound) {
  a_->rows_per_batch = 1;
  for (uint64_t id = 1; id <= 1000; ++id) clients_[id] = {.rows = static_cast<int64_t>(id % 7 + 1) * 16};
  Serve(1000);
  for (const auto& [id, client] : clients_) EXPECT_EQ(client.given, client.rows) << id;
}

TEST_F(BatchSharingTest, ATaskWaitsForEverySessionAndHoldsBackEverySession) {
  device_.under_way = 3;
  AddOf(1, "1", 5);
  AddOf(2, "2", 5);
  AddTask("task");
  AddOf(1, "1 after", 2);
  AddOf(3, "3 after", 2);
  EXPECT_THAT(Run(), IsEmpty());
  device_.under_way = 0;
  EXPECT_THAT(Run(), ElementsAre("1", "2"));
  a_->EndOldest();
  EXPECT_THAT(Run(), IsEmpty());
  a_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("task", "3 after+1 after")) << "session 3 was given nothing yet";
}

// Withdrawn chunks

TEST_F(BatchSharingTest, AWithdrawnChunkMakesRoomInTheBatchThatItWasGatheredFor) {
  device_.under_way = 3;
  const auto first = AddOf(1, "gone", 5);
  AddOf(2, "2", 3);
  EXPECT_THAT(Run(), IsEmpty());
  AddOf(3, "3", 5);
  EXPECT_THAT(Run(), IsEmpty()) << "the batch is full without it";
  queue_.Withdraw(a_.get(), {first});
  device_.under_way = 2;
  EXPECT_THAT(Run(), ElementsAre("2+3"));
  EXPECT_THAT(a_->batch_rows, ElementsAre(8));
}

TEST_F(BatchSharingTest, ABatchThatLosesItsChunksIsNeitherFullNorOfTheirKind) {
  device_.under_way = 2;
  AddOf(2, "other kind", 1, kOtherKind);
  const auto gone = AddOf(1, "gone", kMostRows);
  queue_.Withdraw(a_.get(), {gone});
  EXPECT_THAT(Run(), IsEmpty()) << "a small batch grows while two are under way";
  device_.under_way = 0;
  EXPECT_THAT(Run(), ElementsAre("other kind"));
}

TEST_F(BatchSharingTest, WithdrawnChunksAreNotCountedAgainstTheirSession) {
  a_->rows_per_batch = 1;
  device_.under_way = 3;
  const auto large = AddOf(1, "large", 1000);
  Run();  // gathered
  queue_.Withdraw(a_.get(), {large});
  for (int i = 0; i < 3; ++i) {
    AddOf(2, "2", 10);
    AddOf(1, "1", 10);
  }
  std::vector<std::string> events;
  for (int i = 0; i < 4; ++i) {
    device_.under_way = 2;
    for (const std::string& event : Run()) events.push_back(event);
  }
  EXPECT_THAT(events, UnorderedElementsAre("1", "1", "2", "2"));
}

TEST_F(BatchSharingTest, WithdrawnChunksLeaveWhereverTheyWaitAndTheRestKeepsItsOrder) {
  device_.under_way = 3;
  const auto first = AddOf(1, "a", 4);
  AddOf(1, "b", 4);
  const auto queued = AddOf(1, "c", 4);
  AddOf(1, "d", 4);
  Run();
  AddTask("task");
  const auto held = AddOf(1, "e", 4);
  AddOf(1, "f", 4);
  queue_.Withdraw(a_.get(), {first, queued, held});
  device_.under_way = 0;
  EXPECT_THAT(Run(), ElementsAre("b+d"));
  a_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("task", "f"));
}

TEST_F(BatchSharingTest, NothingIsLeftWhenAllIsWithdrawn) {
  device_.under_way = 3;
  const auto one = AddOf(1, "1", 4);
  const auto two = AddOf(2, "2", 100);
  Run();
  queue_.Withdraw(a_.get(), {one, two});
  EXPECT_THAT(Run(), IsEmpty());
  EXPECT_TRUE(queue_.Empty());
  queue_.Withdraw(a_.get(), {one});
}

// Heads

// The cost of what a head was given, while both always have full batches waiting.
TEST_F(BatchSharingTest, HeadsShareTheDeviceByCost) {
  a_->rows_per_batch = b_->rows_per_batch = 1024;
  b_->cost_per_row = 10;
  const auto refill = [this] {
    Add("a", 1024);
    Add("b", 512, b_);
    Add("b", 512, b_);
  };
  for (int i = 0; i < 220; ++i) {
    refill();
    Run();
    (a_->under_way() > 0 ? a_ : b_)->EndOldest();
  }
  EXPECT_NEAR(static_cast<double>(a_->batch_rows.size()), 10.0 * static_cast<double>(b_->batch_rows.size()),
              15);
}

TEST_F(BatchSharingTest, AHeadWithOneLargeChunkAtATimeLeavesTheOtherItsShare) {
  a_->rows_per_batch = b_->rows_per_batch = 1;
  int64_t a_rows = 0;
  int64_t b_rows = 0;
  bool a_waits = false;
  for (int i = 0; i < 1000; ++i) {
    if (!a_waits) Add("a", 100'000);
    a_waits = true;
    Add("b", 1000, b_);
    device_.under_way = 2;
    for (const std::string& event : Run()) {
      (event == "a" ? a_rows : b_rows) += event == "a" ? 100'000 : 1000;
      if (event == "a") a_waits = false;
    }
  }
  EXPECT_NEAR(static_cast<double>(a_rows), static_cast<double>(b_rows), 101'000);
}

TEST_F(BatchSharingTest, SmallBatchesCostMoreThanTheirRows) {
  a_->rows_per_batch = b_->rows_per_batch = 128;
  for (int i = 0; i < 100; ++i) {
    Add("b", 1, b_, i % 2 == 0 ? BatchKey() : kOtherKind);
    Add("a", 128);
    device_.under_way = 2;
    Run();
  }
  EXPECT_LE(b_->batch_rows.size(), 51U) << "each takes as much of the device as a full one of a";
  EXPECT_GE(a_->batch_rows.size(), 49U);
}

TEST_F(BatchSharingTest, TasksDoNotKeepBatchesWaiting) {
  Add("b", kMostRows, b_);
  AddTask("task 1");
  AddTask("task 2");
  EXPECT_THAT(Run(), ElementsAre("task 1", "b", "task 2"));
}

// Jobs

// A job of 384 rows costs what a batch of 128 does.
TEST_F(BatchSharingTest, AHeadWithEndlessJobsLeavesTheOtherItsShare) {
  a_->rows_per_batch = 128;
  b_->cost_per_row = 10;
  int jobs = 0;
  bool job_waits = false;
  for (int i = 0; i < 1100; ++i) {
    if (!job_waits) AddJob("job", 384, b_);
    job_waits = true;
    Add("a", 128);
    for (const std::string& event : Run()) {
      if (event != "job") continue;
      ++jobs;
      job_waits = false;
    }
    while (a_->under_way() > 0) a_->EndOldest();
  }
  EXPECT_GE(jobs, 90);
  EXPECT_LE(jobs, 120) << "each costs as much as ten batches of a";
  EXPECT_GE(a_->batch_rows.size(), 900U);
}

TEST_F(BatchSharingTest, AHeadIsChargedForItsJobs) {
  a_->rows_per_batch = b_->rows_per_batch = 128;
  AddJob("job", 1280, b_);
  Add("b", 128, b_);
  for (int i = 0; i < 3; ++i) Add("a", 128);
  EXPECT_THAT(Run(), ElementsAre("job", "a", "a", "a"));
}

TEST_F(BatchSharingTest, AJobWaitsUntilNothingIsUnderWay) {
  Add("first", kMostRows);
  EXPECT_THAT(Run(), ElementsAre("first"));
  AddJob("job", 1, a_);
  EXPECT_THAT(Run(), IsEmpty());
  a_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("job"));
}

TEST_F(BatchSharingTest, NeitherChunksNorTasksWaitForAJobOfTheirHead) {
  device_.under_way = 3;
  AddJob("job", 1, a_);
  AddTask("task");
  EXPECT_THAT(Run(), ElementsAre("task"));
  Add("later", kMostRows);
  device_.under_way = 0;
  EXPECT_THAT(Run(), ElementsAre("job", "later")) << "in the order of their age";
}

TEST_F(BatchSharingTest, AFenceWaitsForJobs) {
  device_.under_way = 1;
  AddJob("job", 1, a_);
  queue_.AddFence([this] { events_.push_back("fence"); });
  EXPECT_THAT(Run(), IsEmpty());
  device_.under_way = 0;
  EXPECT_THAT(Run(), ElementsAre("job", "fence"));
  EXPECT_TRUE(queue_.Empty() || !queue_.Advance(now_).progress);
}

class BatchWindowTest : public BatchQueueTest {
 protected:
  BatchWindowTest() : BatchQueueTest(kWindow) {}
};

TEST_F(BatchWindowTest, AJobDoesNotCutShortTheTimeInWhichABatchGrows) {
  Add("small", 1);
  AddJob("job", 1, a_);
  EXPECT_THAT(Run(), ElementsAre("job"));
  EXPECT_EQ(look_again_, now_ + kWindow);
  Add("more", 1);
  now_ += kWindow;
  EXPECT_THAT(Run(), ElementsAre("small+more"));
}

}  // namespace
}  // namespace lossd::engine::batch_sharing_test
