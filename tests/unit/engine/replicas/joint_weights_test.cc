// Weights of a head over replicas in another type than its own, of which each replica has a part.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <future>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/unit/engine/replicas/replica_servers.h"

namespace lossd::engine::joint_weights_test {
namespace {

using kernels::DataType;
using ::testing::HasSubstr;
using testing::ReplicaServers;
using testing::SetSize;

HeadConfig MasterHead(DataType type) {
  HeadConfig config = ReplicaServers::AdamWHead();
  config.weight_type = type;
  config.master_weights = true;
  config.bias = true;
  return config;
}

struct Read {
  absl::StatusOr<uint64_t> version;
  std::string matrix;
  std::vector<float> bias;

  bool operator==(const Read&) const = default;
};

Read ReadRows(Head& head, const kernels::RowSpan& rows, DataType type) {
  Read read;
  read.matrix.resize(static_cast<size_t>(rows.count * head.config().hidden_size * kernels::SizeOf(type)));
  read.bias.resize(static_cast<size_t>(rows.count));
  std::promise<absl::StatusOr<uint64_t>> done;
  head.ReadWeights(rows.first, rows.count, type, {read.matrix.data(), read.bias.data()},
                   [&done](const absl::StatusOr<uint64_t>& version) { done.set_value(version); });
  read.version = done.get_future().get();
  return read;
}

class JointWeightsTest : public ::testing::TestWithParam<SetSize> {};

TEST_P(JointWeightsTest, AreThoseOfOneServerInEveryType) {
  for (const DataType type : {DataType::kBFloat16, DataType::kFloat16}) {
    ReplicaServers one(1, MasterHead(type));
    ReplicaServers set(GetParam(), MasterHead(type));
    for (const DataType wanted : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
      for (const kernels::RowSpan& rows : {kernels::RowSpan{0, ReplicaServers::kVocab}, {11, 17}, {36, 1}}) {
        EXPECT_TRUE(ReadRows(*set.at(0).head(), rows, wanted) == ReadRows(*one.at(0).head(), rows, wanted))
            << kernels::Name(type) << " as " << kernels::Name(wanted) << ", rows from " << rows.first;
      }
    }
  }
}

TEST_P(JointWeightsTest, OneReadIsOfOneVersion) {
  constexpr uint64_t kSteps = 12;
  const kernels::RowSpan all{0, ReplicaServers::kVocab};
  ReplicaServers set(GetParam(), MasterHead(DataType::kBFloat16));
  std::map<uint64_t, Read> expected;
  std::vector<Read> found;
  std::atomic<bool> over = false;
  std::thread reads([&] {
    while (!over) found.push_back(ReadRows(*set.at(0).head(), all, DataType::kFloat32));
  });
  for (uint64_t generation = 1; generation <= kSteps; ++generation) {
    for (int32_t replica = 0; replica < GetParam().replicas; ++replica) {
      set.at(replica).Compute(generation * 10 + static_cast<uint64_t>(replica), 3, generation);
    }
    const auto stepped = set.Step(generation, {.learning_rate = 0.1});
    ASSERT_TRUE(stepped.ok()) << stepped.status();
    Read read = ReadRows(*set.at(0).head(), all, DataType::kFloat32);
    ASSERT_TRUE(read.version.ok()) << read.version.status();
    expected[*read.version] = std::move(read);
  }
  over = true;
  reads.join();
  EXPECT_EQ(expected.size(), kSteps);
  for (const Read& read : found) {
    ASSERT_TRUE(read.version.ok()) << read.version.status();
    if (expected.count(*read.version) == 0) continue;  // of before the first step
    EXPECT_TRUE(read == expected[*read.version]) << "version " << *read.version;
  }
}

TEST_P(JointWeightsTest, AreReadAtTheCoordinator) {
  ReplicaServers set(GetParam(), MasterHead(DataType::kBFloat16));
  const Read read = ReadRows(*set.at(1).head(), {0, 1}, DataType::kFloat32);
  EXPECT_THAT(std::string(read.version.status().message()), HasSubstr("replica 1"));
}

INSTANTIATE_TEST_SUITE_P(Replicas, JointWeightsTest,
                         ::testing::Values(SetSize{2}, SetSize{3}, SetSize{2, 2}));

}  // namespace
}  // namespace lossd::engine::joint_weights_test
