// Replicas that are groups of ranks: they have the weights of one device that was given the sum, and a
// replica that is lost ends no group but its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "kernels/collectives/rendezvous.h"
#include "kernels/slices.h"
#include "server/engine/device/cpu/cpu_backend.h"
#include "server/engine/device/sharded/replica_rendezvous.h"
#include "tests/conformance/head_under_test.h"
#include "tests/conformance/rank_threads.h"
#include "tests/conformance/replicas/replicas_under_test.h"
#include "tests/unit/kernels/optimizer_reference.h"
#include "tests/unit/kernels/thread_ranks.h"

namespace lossd::engine::testing::groups_test {
namespace {

using kernels::RowSpan;
using kernels::SliceLayout;
using kernels::collectives::Rendezvous;
using kernels::collectives::Result;
using kernels::testing::MeetOnThreads;
using kernels::testing::NormalFloats;
using kernels::testing::SameBits;
using ::testing::HasSubstr;

constexpr int64_t kVocab = 37;
constexpr int64_t kHidden = 6;

struct Size {
  int32_t replicas;
  int32_t ranks;
  DataType type = DataType::kFloat32;
};
void PrintTo(const Size& size, std::ostream* out) {
  *out << size.replicas << " x " << size.ranks << " in " << kernels::Name(size.type);
}

// 16-bit heads have a master.
HeadConfig ConfigOf(DataType type) {
  HeadConfig config{"h", kVocab, kHidden, type};
  config.bias = true;
  config.optimizer.kind = OptimizerKind::kAdamW;
  config.master_weights = type != DataType::kFloat32;
  return config;
}

StepArguments StepOf(const HeadConfig& config, int64_t number) {
  return {.learning_rate = 1e-2, .gradient_scale = 0.5, .optimizer = config.optimizer, .step = number};
}

std::vector<unsigned char> BytesOf(const std::vector<float>& values) {
  const auto* const bytes = reinterpret_cast<const unsigned char*>(values.data());
  return {bytes, bytes + values.size() * sizeof(float)};
}

// dW, and behind it db.
struct GradientOf {
  std::vector<float> dw;
  std::vector<float> db;

  explicit GradientOf(uint64_t seed)
      : dw(NormalFloats(kVocab * kHidden, 1, seed)), db(NormalFloats(kVocab, 1, seed + 1)) {}
  void Add(const GradientOf& other) {
    for (size_t i = 0; i < dw.size(); ++i) dw[i] += other.dw[i];
    for (size_t i = 0; i < db.size(); ++i) db[i] += other.db[i];
  }
  void WriteTo(HeadBackend& backend) const {
    const absl::Status written = backend.WriteGradient(nullptr, 0, kVocab, dw.data(), db.data());
    EXPECT_TRUE(written.ok()) << written;
  }
};
GradientOf SumOf(int32_t replicas, uint64_t seed) {
  GradientOf sum(seed);
  for (int32_t replica = 1; replica < replicas; ++replica) {
    sum.Add(GradientOf(seed + 10 * static_cast<uint64_t>(replica)));
  }
  return sum;
}

std::vector<float> StateRows(HeadBackend& backend, const StateTensor& tensor, const RowSpan& rows) {
  std::vector<float> values(static_cast<size_t>(rows.count * tensor.columns));
  const absl::Status read = backend.ReadState(tensor.name, rows.first, rows.count, values.data());
  EXPECT_TRUE(read.ok()) << tensor.name << ": " << read;
  return values;
}

std::vector<float> SumRows(HeadBackend& backend, const RowSpan& rows) {
  std::vector<float> values(static_cast<size_t>(rows.count * kHidden));
  std::vector<float> bias(static_cast<size_t>(rows.count));
  EXPECT_TRUE(backend.ReadSum(rows.first, rows.count, values.data()).ok());
  EXPECT_TRUE(backend.ReadBiasSum(rows.first, rows.count, bias.data()).ok());
  values.insert(values.end(), bias.begin(), bias.end());
  return values;
}

// A head at `replicas` groups, each a device of `ranks` threads.
class Groups {
 public:
  struct One {
    std::unique_ptr<Device> device;
    std::shared_ptr<RankChannel> channel;
    HeadShard shard;
    std::unique_ptr<HeadUnderTest> head;
    std::shared_ptr<ReplicaConnection> connection;

    HeadBackend& backend() const { return head->backend(); }
    const ReplicaCommunicators& others() const { return connection->communicators(); }
  };

  explicit Groups(const Size& size) : config_(ConfigOf(size.type)) {
    HeadShard shard = HeadShard::Whole(kVocab);
    shard.replicas = size.replicas;
    for (shard.replica = 0; shard.replica < size.replicas; ++shard.replica) {
      auto group = *CreateRankThreadGroup({.ranks = size.ranks, .workspace_bytes = kWorkspaceBytes});
      auto head = std::make_unique<HeadUnderTest>(group.leader.get(), config_, shard);
      ones_.push_back({std::move(group.leader), group.channel, shard, std::move(head), nullptr});
    }
    Connect();
    const std::vector<float> weights = NormalFloats(kVocab * kHidden, 1, 1);
    const std::vector<float> bias = NormalFloats(kVocab, 1, 2);
    for (One& one : ones_) one.head->Publish(BytesOf(weights), bias);
    one_ = std::make_unique<HeadUnderTest>(cpu_.get(), config_);
    one_->Publish(BytesOf(weights), bias);
  }

  int32_t size() const { return static_cast<int32_t>(ones_.size()); }
  One& at(int32_t replica) { return ones_[static_cast<size_t>(replica)]; }
  const HeadConfig& config() const { return config_; }
  // A device of its own, which is given sums.
  HeadUnderTest& one() { return *one_; }
  SliceLayout slices() const { return {kVocab, size()}; }

  std::vector<absl::Status> TryConnect(const std::string& interface) {
    std::vector<absl::Status> connected(ones_.size());
    MeetOnThreads(size(), [&](int32_t replica, Rendezvous& rendezvous) {
      auto connection = at(replica).device->ConnectReplicas({.place = {replica, size()},
                                                             .interface = interface,
                                                             .timeout = std::chrono::seconds(100),
                                                             .connect_timeout = std::chrono::seconds(100)},
                                                            rendezvous);
      connected[static_cast<size_t>(replica)] = connection.status();
      if (connection.ok()) at(replica).connection = *std::move(connection);
    });
    return connected;
  }
  void Connect() {
    for (const absl::Status& connected : TryConnect("")) EXPECT_TRUE(connected.ok()) << connected;
  }
  // Runs work(replica, what it has) at all of them at the same time.
  template <class Work>
  void Together(Work work) {
    MeetOnThreads(size(), [&](int32_t replica, Rendezvous& /*rendezvous*/) { work(replica, at(replica)); });
  }
  void WriteAll(uint64_t seed) {
    for (int32_t replica = 0; replica < size(); ++replica) {
      GradientOf(seed + 10 * static_cast<uint64_t>(replica)).WriteTo(at(replica).backend());
    }
  }
  // One step everywhere, and at the one device by the sum.
  void Step(int64_t number, uint64_t seed) {
    SumOf(size(), seed).WriteTo(one_->backend());
    const auto alone = one_->backend().ApplyStep(nullptr, StepOf(config_, number));
    ASSERT_TRUE(alone.ok()) << alone.status();
    const GradientStats expected = StatsOf(*alone);
    Together([&](int32_t /*replica*/, One& one) {
      absl::Status status = one.backend().SumSlices(nullptr, one.others());
      const absl::StatusOr<GradientTallies> tallies = one.backend().TallySum(0.5, one.others());
      status.Update(tallies.status());
      status.Update(one.backend().StepSlices(StepOf(config_, number)));
      status.Update(one.backend().GatherSlices(one.others()));
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_NEAR(StatsOf(*tallies).norm, expected.norm, 1e-9 * expected.norm);
      EXPECT_NEAR(StatsOf(*tallies).bias_norm, expected.bias_norm, 1e-9 * expected.bias_norm);
      EXPECT_EQ(StatsOf(*tallies).largest, expected.largest);
    });
  }
  // The rows that this replica steps.
  std::vector<RowSpan> SteppedRows(int32_t replica) {
    return at(replica).backend().SliceRows(slices(), replica);
  }
  // All weights are those of the one device, and so is the state of what a replica steps, bit for bit.
  void ExpectSame() {
    for (int32_t replica = 0; replica < size(); ++replica) {
      HeadUnderTest& head = *at(replica).head;
      EXPECT_EQ(head.Weights(config_.weight_type, 0, kVocab), one_->Weights(config_.weight_type, 0, kVocab))
          << "at replica " << replica;
      EXPECT_TRUE(SameBits(head.Bias(0, kVocab), one_->Bias(0, kVocab))) << "at replica " << replica;
      for (const StateTensor& tensor : head.backend().StateTensors()) {
        for (const RowSpan& rows : SteppedRows(replica)) {
          EXPECT_TRUE(
              SameBits(StateRows(head.backend(), tensor, rows), StateRows(one_->backend(), tensor, rows)))
              << tensor.name << " from row " << rows.first << " at replica " << replica;
        }
      }
    }
  }

 private:
  const HeadConfig config_;
  std::vector<One> ones_;
  std::unique_ptr<Device> cpu_ = *CreateCpuDevice(kWorkspaceBytes);
  std::unique_ptr<HeadUnderTest> one_;
};

class GroupsTest : public ::testing::TestWithParam<Size> {};

std::vector<Size> Sizes() {
  std::vector<Size> sizes = {{2, 2}, {2, 2, DataType::kBFloat16}};
  if (TriesMoreReplicas()) {
    for (const Size& more : {Size{3, 2}, Size{2, 3}, Size{4, 3}, Size{3, 2, DataType::kBFloat16}}) {
      sizes.push_back(more);
    }
  }
  return sizes;
}
INSTANTIATE_TEST_SUITE_P(Sizes, GroupsTest, ::testing::ValuesIn(Sizes()));

TEST_P(GroupsTest, StepsHaveTheBitsOfOneDeviceThatHasTheSum) {
  Groups groups(GetParam());
  for (int64_t step = 1; step <= 3; ++step) {
    const uint64_t seed = 100 * static_cast<uint64_t>(step);
    groups.WriteAll(seed);
    groups.Step(step, seed);
    groups.ExpectSame();
    for (int32_t replica = 0; replica < groups.size(); ++replica) {
      for (const RowSpan& rows : groups.SteppedRows(replica)) {
        const GradientOf sum = SumOf(groups.size(), seed);
        std::vector<float> expected(sum.dw.begin() + rows.first * kHidden,
                                    sum.dw.begin() + rows.end() * kHidden);
        expected.insert(expected.end(), sum.db.begin() + rows.first, sum.db.begin() + rows.end());
        EXPECT_TRUE(SameBits(SumRows(groups.at(replica).backend(), rows), expected));
      }
    }
  }
}

// Also where others step them, which have the master alone.
TEST_P(GroupsTest, WeightsThatArePublishedAreThereBeforeAnyStep) {
  Groups groups(GetParam());
  groups.ExpectSame();
}

TEST_P(GroupsTest, SlicesAreAllRowsOnce) {
  Groups groups(GetParam());
  std::vector<int> times(kVocab);
  for (int32_t slice = 0; slice < groups.size(); ++slice) {
    for (const RowSpan& rows : groups.at(0).backend().SliceRows(groups.slices(), slice)) {
      for (int64_t row = rows.first; row < rows.end(); ++row) ++times[static_cast<size_t>(row)];
    }
  }
  EXPECT_THAT(times, ::testing::Each(1));
}

// Refused at the leader: an error of a rank would end the group.
TEST_P(GroupsTest, RowsThatOthersStepAreNotHere) {
  Groups groups(GetParam());
  groups.WriteAll(5);
  groups.Step(1, 5);
  std::array<float, kHidden> row{};
  for (int32_t replica = 0; replica < groups.size(); ++replica) {
    HeadBackend& backend = groups.at(replica).backend();
    const int32_t others = (replica + 1) % groups.size();
    for (const RowSpan& rows : backend.SliceRows(groups.slices(), others)) {
      for (const absl::Status& refused :
           {backend.ReadState("exp_avg", rows.first, 1, row.data()),
            backend.WriteState("exp_avg", rows.first, 1, row.data()),
            backend.ReadSum(rows.first, 1, row.data()), backend.ReadBiasSum(rows.first, 1, row.data())}) {
        EXPECT_EQ(refused.code(), absl::StatusCode::kInternal);
        EXPECT_THAT(std::string(refused.message()), HasSubstr("are not all stepped at this replica"));
      }
      if (!groups.config().master_weights) continue;
      EXPECT_FALSE(backend.ReadWeightRows(rows.first, 1, DataType::kFloat32, row.data()).ok());
    }
  }
  groups.ExpectSame();
}

// The first replica sums, and waits for the others, which have yet to come.
std::future<absl::Status> BeginSum(Groups& groups) {
  return std::async(std::launch::async, [&groups] {
    Groups::One& first = groups.at(0);
    return first.backend().SumSlices(nullptr, first.others());
  });
}

TEST_P(GroupsTest, ASumThatIsAbortedHereEndsNoGroupAndIsMadeAgain) {
  Groups groups(GetParam());
  groups.WriteAll(5);
  std::future<absl::Status> summed = BeginSum(groups);
  EXPECT_EQ(summed.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  groups.at(0).connection->Abort();
  const absl::Status lost = summed.get();
  EXPECT_EQ(lost.code(), absl::StatusCode::kUnavailable) << lost;
  // Nobody comes by the connection that was aborted, and its end is not that of the next.
  EXPECT_EQ(BeginSum(groups).get().code(), absl::StatusCode::kUnavailable);
  groups.Connect();
  groups.Step(1, 5);
  groups.ExpectSame();
}

TEST_P(GroupsTest, ASumWhoseOtherReplicaIsLostEndsNoGroupAndIsMadeAgain) {
  Groups groups(GetParam());
  groups.WriteAll(5);
  std::future<absl::Status> summed = BeginSum(groups);
  for (int32_t other = 1; other < groups.size(); ++other) groups.at(other).connection->Abort();
  const absl::Status lost = summed.get();
  EXPECT_EQ(lost.code(), absl::StatusCode::kUnavailable) << lost;
  groups.Connect();
  groups.Together([](int32_t replica, Groups::One& one) {
    ASSERT_TRUE(one.backend().SumSlices(nullptr, one.others()).ok());
    ASSERT_TRUE(one.backend().TallySum(1, one.others()).ok());
    if (replica == 1) return one.connection->Abort();
    const absl::Status untold = one.backend().TallySum(1, one.others()).status();
    EXPECT_EQ(untold.code(), absl::StatusCode::kUnavailable) << untold;
  });
  groups.Connect();
  groups.Step(1, 5);
  groups.ExpectSame();
}

TEST_P(GroupsTest, WhatOneRankAloneCannotSumNoneOfItsGroupHasSummed) {
  Groups groups(GetParam());
  groups.WriteAll(5);
  Groups::One& first = groups.at(0);
  first.channel->SendTo(1, AbortReplicasCommand{first.others().connection});
  groups.Together([](int32_t replica, Groups::One& one) {
    const absl::Status summed = one.backend().SumSlices(nullptr, one.others());
    EXPECT_EQ(summed.code(), absl::StatusCode::kUnavailable) << summed;
    if (replica == 0) {
      EXPECT_THAT(std::string(summed.message()), HasSubstr("rank 1: "));
    }
  });
  groups.Connect();
  groups.Step(1, 5);
  groups.ExpectSame();
}

TEST_P(GroupsTest, ThoseThatCannotConnectEndNoGroup) {
  Groups groups(GetParam());
  for (const absl::Status& refused : groups.TryConnect("no_such_interface")) {
    EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("no_such_interface"));
  }
  groups.Connect();
  groups.WriteAll(5);
  groups.Step(1, 5);
  groups.ExpectSame();
}

// Two groups of two ranks: whatever one rank comes to, all of its group end the same rounds.
class RendezvousTest : public ::testing::Test {
 protected:
  static constexpr std::chrono::milliseconds kTimeout = std::chrono::seconds(100);
  using Body = std::function<void(int32_t replica, int32_t rank, ReplicaRendezvous& rounds)>;

  static void Run(const Body& body) {
    MeetOnThreads(2, [&](int32_t replica, Rendezvous& leaders) {
      MeetOnThreads(2, [&](int32_t rank, Rendezvous& ranks) {
        RankPlace place{.rank = rank, .ranks = 2};
        place.rendezvous = &ranks;
        ReplicaRendezvous rounds(place, rank == 0 ? &leaders : nullptr);
        body(replica, rank, rounds);
      });
    });
  }
};

TEST_F(RendezvousTest, RanksOfOneNumberMeet) {
  Run([](int32_t replica, int32_t rank, ReplicaRendezvous& rounds) {
    for (int round = 0; round < 3; ++round) {
      const std::string rest = ":" + std::to_string(rank) + std::string(1, '\0') + std::to_string(round);
      std::vector<std::string> all;
      const Result met = rounds.AllGather(std::to_string(replica) + rest, kTimeout, &all);
      EXPECT_TRUE(met.ok()) << met.message();
      EXPECT_THAT(all, ::testing::ElementsAre("0" + rest, "1" + rest));
    }
    EXPECT_TRUE(rounds.Finish(absl::OkStatus()).ok());
  });
}

TEST_F(RendezvousTest, WhatOneRankComesToAllOfItsGroupHear) {
  for (const int32_t broken : {0, 1}) {
    Run([broken](int32_t /*replica*/, int32_t rank, ReplicaRendezvous& rounds) {
      if (rank == broken) {
        EXPECT_EQ(rounds.Finish(absl::ResourceExhaustedError("no sockets")).message(), "no sockets");
        return;
      }
      std::vector<std::string> all;
      const Result met = rounds.AllGather("here", kTimeout, &all);
      EXPECT_FALSE(met.ok());
      const absl::Status finished = rounds.Finish(absl::UnavailableError(met.message()));
      EXPECT_THAT(std::string(finished.message()), HasSubstr("no sockets"));
    });
  }
}

TEST_F(RendezvousTest, ADeviceThatFailsIsToldFromAReplicaThatIsLost) {
  Run([](int32_t /*replica*/, int32_t rank, ReplicaRendezvous& rounds) {
    std::vector<std::string> all;
    EXPECT_TRUE(rounds.AllGather("here", kTimeout, &all).ok());
    const absl::Status finished = rounds.Finish(rank == 1 ? absl::InternalError("gone") : absl::OkStatus());
    EXPECT_EQ(finished.code(), absl::StatusCode::kInternal) << finished;
  });
}

TEST_F(RendezvousTest, ARankThatFailsBehindTheLastRoundIsHeardOf) {
  Run([](int32_t /*replica*/, int32_t rank, ReplicaRendezvous& rounds) {
    std::vector<std::string> all;
    EXPECT_TRUE(rounds.AllGather("here", kTimeout, &all).ok());
    const absl::Status own = rank == 1 ? absl::UnavailableError("refused") : absl::OkStatus();
    const absl::Status finished = rounds.Finish(own);
    EXPECT_EQ(finished.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(finished.message()), HasSubstr("refused"));
  });
}

}  // namespace
}  // namespace lossd::engine::testing::groups_test
