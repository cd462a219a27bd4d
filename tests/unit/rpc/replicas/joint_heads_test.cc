// Heads are created and deleted, and weights published, at all replicas or at none, whatever happens
// meanwhile.
#include "server/rpc/replicas/joint_heads.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "lossd/group/v1/replica.pb.h"
#include "server/engine/common/random_id.h"
#include "server/rpc/replicas/head_commands.h"
#include "tests/unit/engine/checkpoint/checkpoint_folder.h"
#include "tests/unit/rpc/replicas/checkpointed_servers.h"
#include "tests/unit/rpc/replicas/set_under_test.h"

namespace lossd::rpc::replica_set_test {
namespace {

using ::testing::HasSubstr;

using Discard = engine::Engine::DiscardGradient;

std::vector<float> RowsOf(uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(ReplicaServers::kVocab * ReplicaServers::kHidden);
  for (float& value : values) value = normal(random);
  return values;
}

// All rows at the coordinator; the write's id.
absl::StatusOr<std::string> Stage(engine::Head& head, const std::vector<float>& rows) {
  absl::StatusOr<std::string> id =
      head.BeginWrite(engine::RandomId(), engine::Head::Replace::kYes, engine::RandomId());
  if (!id.ok()) return id;
  const auto write = head.FindWrite(*id);
  if (!write.ok()) return write.status();
  const absl::string_view bytes(reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(float));
  absl::Status written = (*write)->Write(0, ReplicaServers::kVocab, kernels::DataType::kFloat32, bytes, {});
  if (!written.ok()) return written;
  return id;
}

absl::StatusOr<uint64_t> Commit(engine::Head& head, const std::string& id) {
  auto answer = std::make_shared<std::promise<absl::StatusOr<uint64_t>>>();
  std::future<absl::StatusOr<uint64_t>> asked = answer->get_future();
  head.CommitWrite(id, [answer = std::move(answer)](absl::StatusOr<uint64_t> version) {
    answer->set_value(std::move(version));
  });
  return ReplicaServers::Answer(std::move(asked));
}

// As a client writes, until it has an answer; a coordinator in the place of another knows no write of its.
uint64_t WriteUntilPublished(SetUnderTest& set, const std::vector<float>& rows) {
  absl::StatusOr<std::string> id = absl::NotFoundError("");
  for (;; std::this_thread::sleep_for(std::chrono::milliseconds(20))) {
    const absl::StatusOr<std::shared_ptr<engine::Head>> head = set.servers().at(0).engine().FindHead("h");
    if (!head.ok()) continue;
    if (!id.ok()) id = Stage(**head, rows);
    if (!id.ok()) continue;
    const absl::StatusOr<uint64_t> version = Commit(**head, *id);
    if (version.ok()) return *version;
    if (!absl::IsUnavailable(version.status())) id = version.status();
  }
}

class JointHeadsTest : public ::testing::TestWithParam<SetSize> {};

TEST_P(JointHeadsTest, WeightsAreThoseOfAllReplicas) {
  SetUnderTest set(GetParam());
  set.MeetAll();
  const std::vector<float> rows = RowsOf(7);
  const uint64_t version = WriteUntilPublished(set, rows);
  for (int32_t replica = 0; replica < GetParam().replicas; ++replica) {
    EXPECT_EQ(set.servers().at(replica).Weights(), rows) << "at replica " << replica;
    EXPECT_EQ(set.servers().at(replica).head()->weight_version(), version);
  }
}

TEST_P(JointHeadsTest, ACommitThatIsRepeatedAnswersTheSame) {
  SetUnderTest set(GetParam());
  set.MeetAll();
  engine::Head& head = *set.servers().at(0).head();
  const std::string id = *Stage(head, RowsOf(7));
  const absl::StatusOr<uint64_t> version = Commit(head, id);
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(Commit(head, id), version);
  set.MeetAgain();
  EXPECT_EQ(Commit(head, id), version);
}

TEST_P(JointHeadsTest, AWriteThatIsNotWholeIsPublishedNowhere) {
  SetUnderTest set(GetParam());
  set.MeetAll();
  engine::Head& head = *set.servers().at(0).head();
  const std::vector<float> before = set.servers().at(0).Weights();
  const std::string id = *head.BeginWrite("k", engine::Head::Replace::kYes, engine::RandomId());
  EXPECT_EQ(Commit(head, id).status().code(), absl::StatusCode::kFailedPrecondition);
  for (int32_t replica = 0; replica < GetParam().replicas; ++replica) {
    EXPECT_EQ(set.servers().at(replica).Weights(), before);
  }
}

// Neither waits for the other at a replica: what is answered soon is not behind what takes long.
TEST_P(JointHeadsTest, AHeadIsCreatedWhileASessionIsOpened) {
  SetUnderTest set(GetParam());
  set.MeetAll();
  set.servers().at(0).Compute(7, 3);  // the next session is somewhere else
  std::promise<void> asked;
  std::promise<void> let_go;
  const auto nobody = grpc::CreateChannel("unix:/nobody", grpc::InsecureChannelCredentials());
  for (int32_t replica = 0; replica < GetParam().replicas; ++replica) {
    set.set(replica).Serve({.open =
                                [&](const v1::OpenSessionRequest& /*request*/, v1::OpenSessionResponse*) {
                                  asked.set_value();
                                  let_go.get_future().wait();
                                  return absl::OkStatus();
                                },
                            .close = nullptr},
                           nobody);
  }
  v1::OpenSessionRequest request;
  request.set_head("h");
  std::promise<grpc::Status> opened;
  set.set(0).sessions().OpenSession(
      grpc::CallbackServerContext(), request,
      [&opened](const grpc::Status& status, const v1::OpenSessionResponse&) { opened.set_value(status); });
  asked.get_future().wait();
  HeadConfig config = ReplicaServers::AdamWHead();
  config.name = "other";
  EXPECT_TRUE(set.servers().at(0).engine().CreateHead(config).ok());
  let_go.set_value();
  EXPECT_TRUE(opened.get_future().get().ok());
  for (int32_t replica = 0; replica < GetParam().replicas; ++replica) set.set(replica).StopServing();
}

TEST_P(JointHeadsTest, AHeadIsAtAllOrAtNone) {
  const int32_t replicas = GetParam().replicas;
  SetUnderTest set(GetParam());
  set.MeetAll();
  engine::Engine& coordinator = set.servers().at(0).engine();
  HeadConfig config = ReplicaServers::AdamWHead();
  config.name = "other";
  ASSERT_TRUE(coordinator.CreateHead(config).ok());
  ASSERT_TRUE(coordinator.CreateHead(config).ok()) << "again";
  for (int32_t replica = 0; replica < replicas; ++replica) {
    EXPECT_TRUE(set.servers().at(replica).engine().FindHead("other").ok()) << "at replica " << replica;
  }
  ASSERT_TRUE(coordinator.DeleteHead("other", Discard::kNo).ok());
  for (int32_t replica = 0; replica < replicas; ++replica) {
    EXPECT_FALSE(set.servers().at(replica).engine().FindHead("other").ok()) << "at replica " << replica;
  }
  // One that the last replica refuses.
  HeadConfig another = config;
  another.hidden_size *= 2;
  ASSERT_TRUE(set.servers().at(replicas - 1).engine().CreateHead(another).ok());
  const absl::Status refused = coordinator.CreateHead(config).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kAlreadyExists) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("replica " + std::to_string(replicas - 1)));
  for (int32_t replica = 0; replica + 1 < replicas; ++replica) {
    EXPECT_FALSE(set.servers().at(replica).engine().FindHead("other").ok()) << "at replica " << replica;
  }
}

TEST_P(JointHeadsTest, AHeadWhoseGradientSomeReplicaHasIsNotDeletedUnasked) {
  const int32_t last = GetParam().replicas - 1;
  SetUnderTest set(GetParam());
  set.MeetAll();
  set.servers().at(last).Compute(7, 3);
  engine::Engine& coordinator = set.servers().at(0).engine();
  EXPECT_EQ(coordinator.DeleteHead("h", Discard::kNo).code(), absl::StatusCode::kFailedPrecondition);
  for (int32_t replica = 0; replica <= last; ++replica) {
    EXPECT_TRUE(set.servers().at(replica).engine().FindHead("h").ok());
  }
  EXPECT_TRUE(coordinator.DeleteHead("h", Discard::kYes).ok());
}

INSTANTIATE_TEST_SUITE_P(Replicas, JointHeadsTest, ::testing::Values(SetSize{2}, SetSize{3}, SetSize{2, 2}));

TEST(JointHeads, NothingIsSaidToSomeOfThemAlone) {
  SetUnderTest set(2);
  set.Meet(0);
  engine::Engine& coordinator = set.servers().at(0).engine();
  HeadConfig config = ReplicaServers::AdamWHead();
  config.name = "other";
  EXPECT_EQ(coordinator.CreateHead(config).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(coordinator.FindHead("other").ok());
  EXPECT_EQ(coordinator.DeleteHead("h", Discard::kYes).code(), absl::StatusCode::kUnavailable);
  engine::Head& head = *set.servers().at(0).head();
  const std::string id = *Stage(head, RowsOf(7));
  EXPECT_EQ(Commit(head, id).status().code(), absl::StatusCode::kUnavailable);
  set.Meet(1);
  set.AwaitWhole();
  EXPECT_TRUE(Commit(head, id).ok()) << "its rows have stayed";
}

HeadConfig OtherHead() {
  HeadConfig config = ReplicaServers::AdamWHead();
  config.name = "other";
  return config;
}

bool Has(SetUnderTest& set, int32_t replica, const std::string& name) {
  return set.servers().at(replica).engine().FindHead(name).ok();
}

// A meeting between the creation and the mark that no earlier head is gone back to would restore that one.
TEST(JointHeads, OneThatIsCreatedInThePlaceOfAnEarlierOneHasNothingOfThatWheneverAllMeet) {
  const engine::CheckpointFolder folder;
  std::atomic<bool> armed = false;
  SetUnderTest* set = nullptr;
  const auto meet_before_the_mark = [&](absl::string_view step, const std::string& path) {
    if (step != "create" || !absl::StrContains(path, ".deleted") || !armed.exchange(false)) return 0;
    const auto is_whole = [&] { return set->set(0).Whole().ok(); };
    set->proxy().CutAll();
    while (is_whole()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    // It does not come to that where they have to wait for the mark.
    for (int waited = 0; waited < 1000 && !is_whole(); ++waited) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return 0;
  };
  CheckpointedServers servers(SetSize{2}, MasterHead(), folder, meet_before_the_mark);
  set = &servers.set();
  ASSERT_TRUE(servers.Save("a").ok());
  for (int32_t replica = 0; replica < 2; ++replica) set->Leave(replica);
  for (int32_t replica = 0; replica < 2; ++replica) set->Replace(replica);
  set->AwaitWhole();
  armed = true;
  absl::StatusOr<std::shared_ptr<engine::Head>> created = absl::UnavailableError("");
  while (absl::IsUnavailable(created.status())) created = servers.engine().CreateHead(MasterHead());
  ASSERT_TRUE(created.ok()) << created.status();
  EXPECT_FALSE(armed);
  for (int32_t replica = 0; replica < 2; ++replica) {
    EXPECT_EQ(servers.all().at(replica).head()->weight_version(), 0U) << "at replica " << replica;
  }
}

// A save may take minutes.
TEST(JointHeads, OneThatHasNoCheckpointsDoesNotWaitForASave) {
  const engine::CheckpointFolder folder;
  std::promise<void> reached;
  std::promise<void> let_go;
  std::atomic<bool> armed = false;
  CheckpointedServers servers(SetSize{2}, MasterHead(), folder, [&](absl::string_view, const std::string&) {
    if (armed.exchange(false)) {
      reached.set_value();
      let_go.get_future().wait();
    }
    return 0;
  });
  armed = true;
  auto saving = std::async(std::launch::async, [&] { return servers.Save("a"); });
  reached.get_future().wait();
  EXPECT_TRUE(servers.engine().CreateHead(OtherHead()).ok());
  EXPECT_TRUE(servers.engine().CreateHead(MasterHead()).ok()) << "again, of one that is there";
  let_go.set_value();
  EXPECT_TRUE(saving.get().ok());
}

// The coordinator was lost, or a connection, when some had deleted the head.
TEST(JointHeads, OneThatSomeHaveDeletedIsDeletedInTheNextEpoch) {
  SetUnderTest set(3);
  set.MeetAll();
  ASSERT_TRUE(set.servers().at(0).engine().CreateHead(OtherHead()).ok());
  set.servers().at(1).engine().DropHead("other");
  set.MeetAgain();
  for (int32_t replica = 0; replica < 3; ++replica) {
    EXPECT_FALSE(Has(set, replica, "other")) << "at replica " << replica;
    EXPECT_TRUE(Has(set, replica, "h")) << "at replica " << replica;
  }
  HeadConfig another = OtherHead();
  another.hidden_size *= 2;
  EXPECT_TRUE(set.servers().at(0).engine().CreateHead(another).ok());
}

TEST(JointHeads, OneThatSomeHaveCreatedIsDeletedInTheNextEpoch) {
  for (int32_t creator = 0; creator < 2; ++creator) {
    SetUnderTest set(3);
    set.MeetAll();
    ASSERT_TRUE(set.servers().at(0).engine().CreateHead(OtherHead()).ok());
    for (int32_t replica = 0; replica < 3; ++replica) {
      if (replica != creator) set.servers().at(replica).engine().DropHead("other");
    }
    set.MeetAgain();
    for (int32_t replica = 0; replica < 3; ++replica) {
      EXPECT_FALSE(Has(set, replica, "other")) << "at replica " << replica << " of creator " << creator;
    }
  }
}

TEST(JointHeads, OneThatOthersAloneHaveCanBeDeleted) {
  SetUnderTest set(3);
  set.MeetAll();
  ASSERT_TRUE(set.servers().at(2).engine().CreateHead(OtherHead()).ok());
  engine::Engine& coordinator = set.servers().at(0).engine();
  std::promise<void> released;
  const absl::Status deleted =
      coordinator.DeleteHead("other", Discard::kNo, [&released] { released.set_value(); });
  ASSERT_TRUE(deleted.ok()) << deleted;
  released.get_future().wait();
  EXPECT_FALSE(Has(set, 2, "other"));
  EXPECT_EQ(coordinator.DeleteHead("other", Discard::kNo).code(), absl::StatusCode::kNotFound);
}

class DeletedHeadTest : public ::testing::Test {
 protected:
  DeletedHeadTest() { set_.MeetAll(); }
  // As the coordinator has its replica do it.
  absl::Status Do(group::v1::DeleteReplica::Step step) {
    group::v1::ReplicaCommand command;
    command.mutable_remove()->set_head("h");
    command.mutable_remove()->set_step(step);
    return DoHeadCommand(set_.servers().at(1).engine(), command).status();
  }
  std::future<absl::Status> BeginToCompute() {
    set_.servers().at(1).Reconnect();
    std::future<absl::Status> computed =
        std::async(std::launch::async, [this] { return set_.servers().at(1).TryCompute(7, 3, 1); });
    EXPECT_NE(computed.wait_for(std::chrono::milliseconds(100)), std::future_status::ready) << "it waits";
    return computed;
  }

  SetUnderTest set_{2};
};

TEST_F(DeletedHeadTest, ChunksGoOnWhenItIsRefusedElsewhere) {
  ASSERT_TRUE(Do(group::v1::DeleteReplica::BEGIN).ok());
  std::future<absl::Status> computed = BeginToCompute();
  ASSERT_TRUE(Do(group::v1::DeleteReplica::CANCEL).ok());
  const absl::Status taken = computed.get();
  EXPECT_TRUE(taken.ok()) << taken;
  EXPECT_EQ(Do(group::v1::DeleteReplica::BEGIN).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(DeletedHeadTest, AChunkThatComesMeanwhileDoesNotKeepItAtOneReplica) {
  ASSERT_TRUE(Do(group::v1::DeleteReplica::BEGIN).ok());
  const std::shared_ptr<engine::Head> head = set_.servers().at(1).head();
  std::future<absl::Status> computed = BeginToCompute();
  const absl::Status removed = Do(group::v1::DeleteReplica::REMOVE);
  EXPECT_TRUE(removed.ok()) << removed;
  EXPECT_FALSE(computed.get().ok());
}

TEST_F(DeletedHeadTest, ChunksGoOnWhenTheyPartMeanwhile) {
  ASSERT_TRUE(Do(group::v1::DeleteReplica::BEGIN).ok());
  std::future<absl::Status> computed = BeginToCompute();
  set_.MeetAgain();
  const absl::Status taken = computed.get();
  EXPECT_TRUE(taken.ok()) << taken;
}

TEST_F(DeletedHeadTest, ChunksGoOnAtTheCoordinatorWhenAnotherReplicaRefuses) {
  set_.servers().at(1).Compute(7, 3);
  EXPECT_EQ(set_.servers().at(0).engine().DeleteHead("h", Discard::kNo).code(),
            absl::StatusCode::kFailedPrecondition);
  set_.servers().at(0).Compute(8, 3);
  set_.servers().at(1).Compute(9, 3);
}

// Whatever wins: it is at all, with the chunk, or at none.
TEST_F(DeletedHeadTest, ChunksThatRaceWithADeletionLeaveItAtAllOrAtNone) {
  for (int round = 0; round < 20; ++round) {
    std::future<absl::Status> computed =
        std::async(std::launch::async, [this] { return set_.servers().at(1).TryCompute(7, 3, 1); });
    const absl::Status deleted = set_.servers().at(0).engine().DeleteHead("h", Discard::kNo);
    const absl::Status taken = computed.get();
    EXPECT_NE(deleted.ok(), taken.ok()) << deleted << ", " << taken;
    ASSERT_EQ(Has(set_, 0, "h"), !deleted.ok());
    ASSERT_EQ(Has(set_, 1, "h"), !deleted.ok());
    if (!deleted.ok()) {
      ASSERT_TRUE(set_.servers().at(0).engine().DeleteHead("h", Discard::kYes).ok());
    }
    ASSERT_TRUE(set_.servers().at(0).engine().CreateHead(ReplicaServers::AdamWHead()).ok());
    set_.servers().at(0).WriteWeights(1);
    set_.servers().at(1).Reconnect();
  }
}

// Otherwise one of them would wait for what another one does not have any more, and all would have to meet
// again.
TEST_F(DeletedHeadTest, AWindowThatIsLookedAtMeanwhileEndsNothingElse) {
  engine::Engine& coordinator = set_.servers().at(0).engine();
  const auto met = [&coordinator] { return coordinator.replicas().Read().epochs; };
  const uint64_t before = met();
  for (int round = 0; round < 50; ++round) {
    std::promise<absl::Status> looked;
    set_.servers().at(0).head()->ReadStats(
        1, {}, 1, [&looked](const auto& stats) { looked.set_value(stats.status()); });
    absl::Status deleted = coordinator.DeleteHead("h", Discard::kYes);
    const absl::Status found = looked.get_future().get();
    EXPECT_TRUE(found.ok() || absl::IsUnavailable(found) || absl::IsNotFound(found)) << found;
    if (absl::IsUnavailable(deleted)) deleted = coordinator.DeleteHead("h", Discard::kYes);
    ASSERT_TRUE(deleted.ok()) << deleted;
    ASSERT_TRUE(coordinator.CreateHead(ReplicaServers::AdamWHead()).ok());
    set_.servers().at(0).Reconnect();
  }
  EXPECT_EQ(met(), before);
}

// Whoever commits is answered, and whatever wins is so at all.
TEST_F(DeletedHeadTest, AWriteThatIsPublishedMeanwhileIsAnswered) {
  engine::Engine& coordinator = set_.servers().at(0).engine();
  for (int round = 0; round < 50; ++round) {
    const std::shared_ptr<engine::Head> head = set_.servers().at(0).head();
    const absl::StatusOr<std::string> id = Stage(*head, RowsOf(2));
    ASSERT_TRUE(id.ok()) << id.status();
    std::future<absl::StatusOr<uint64_t>> committed =
        std::async(std::launch::async, [&head, &id] { return Commit(*head, *id); });
    absl::Status deleted;
    do {
      deleted = coordinator.DeleteHead("h", Discard::kYes);
    } while (absl::IsUnavailable(deleted));
    ASSERT_TRUE(deleted.ok()) << deleted;
    const absl::StatusOr<uint64_t> version = committed.get();
    EXPECT_TRUE(version.ok() || absl::IsUnavailable(version.status()) || absl::IsNotFound(version.status()))
        << version.status();
    ASSERT_TRUE(coordinator.CreateHead(ReplicaServers::AdamWHead()).ok());
  }
  EXPECT_EQ(coordinator.replicas().Read().epochs, 1U);
}

struct CutWrites {
  int32_t replicas;
  uint32_t seed;
};
void PrintTo(const CutWrites& cut, std::ostream* out) {
  *out << cut.replicas << " replicas, seed " << cut.seed;
}

class CutWritesTest : public ::testing::TestWithParam<CutWrites> {};

TEST_P(CutWritesTest, WhoIsAnsweredFindsTheWeightsEverywhere) {
  const int32_t replicas = GetParam().replicas;
  const engine::CheckpointFolder folder;
  SetUnderTest set(
      {replicas}, ReplicaServers::AdamWHead(),
      [random = std::mt19937(GetParam().seed)](int /*connection*/) mutable {
        return lossd::testing::CutAfter(std::uniform_int_distribution<int64_t>(500, 9000)(random));
      },
      {}, KeptIn(folder));
  for (int32_t replica = 0; replica < replicas; ++replica) set.Meet(replica);
  set.AwaitWhole();
  engine::Engine& coordinator = set.servers().at(0).engine();
  uint64_t last = set.servers().at(0).head()->weight_version();
  for (uint64_t write = 1; write <= 4; ++write) {
    // All go back to what was before it, if some have published it.
    while (!coordinator.SaveCheckpoint("h", absl::StrCat("w-", write)).ok()) set.AwaitWhole();
    const std::vector<float> rows = RowsOf(write);
    const uint64_t version = WriteUntilPublished(set, rows);
    set.AwaitWhole();
    EXPECT_GT(version, last);
    last = version;
    for (int32_t replica = 0; replica < replicas; ++replica) {
      EXPECT_EQ(set.servers().at(replica).Weights(), rows) << "write " << write << " at replica " << replica;
      EXPECT_EQ(set.servers().at(replica).head()->weight_version(), version) << "at replica " << replica;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Replicas, CutWritesTest, ::testing::Values(CutWrites{2, 3}, CutWrites{3, 4}));

}  // namespace
}  // namespace lossd::rpc::replica_set_test
