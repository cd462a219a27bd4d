// Replicas of one process over a folder of checkpoints, and all of their state.
#ifndef LOSSD_TESTS_UNIT_RPC_REPLICAS_CHECKPOINTED_SERVERS_H_
#define LOSSD_TESTS_UNIT_RPC_REPLICAS_CHECKPOINTED_SERVERS_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/checkpoint/checkpoint_store.h"
#include "server/engine/device/optimizer_state.h"
#include "tests/unit/engine/checkpoint/checkpoint_folder.h"
#include "tests/unit/rpc/replicas/set_under_test.h"

namespace lossd::rpc::replica_set_test {

using engine::CheckpointFolder;
using engine::CheckpointInfo;
using engine::CheckpointStore;
using engine::Engine;
using engine::EngineOptions;
using engine::PartRows;
using engine::SavedCheckpoint;
using engine::SessionMarks;
using engine::StateTensor;
using engine::StepResult;

inline HeadConfig MasterHead() {
  HeadConfig config = ReplicaServers::AdamWHead();
  config.weight_type = kernels::DataType::kBFloat16;
  config.master_weights = true;
  config.bias = true;
  config.optimizer.weight_decay = 0.01;
  return config;
}

inline ReplicaServers::Customize KeptIn(const CheckpointFolder& folder,
                                        const engine::DurableFiles::Fault& fault = nullptr) {
  return [path = folder.path(), fault](int32_t replica, EngineOptions& options) {
    options.memory_limit_bytes = int64_t{1} << 30;
    if (replica == 0) options.checkpoints = *CheckpointStore::Open(path, fault);
  };
}

// CheckpointedServers that have met, or one alone.
class CheckpointedServers {
 public:
  CheckpointedServers(const SetSize& size, const HeadConfig& config, const CheckpointFolder& folder,
                      const engine::DurableFiles::Fault& fault = nullptr)
      : CheckpointedServers(size, config, KeptIn(folder, fault)) {}
  CheckpointedServers(const SetSize& size, const HeadConfig& config,
                      const ReplicaServers::Customize& customize)
      : replicas_(size.replicas) {
    if (replicas_ == 1) {
      one_ = std::make_unique<ReplicaServers>(size, config, nullptr, nullptr, customize);
      return;
    }
    set_ = std::make_unique<SetUnderTest>(size, config, nullptr, std::nullopt, customize);
    set_->MeetAll();
  }

  int32_t replicas() const { return replicas_; }
  SetUnderTest& set() { return *set_; }
  ReplicaServers& all() { return set_ != nullptr ? set_->servers() : *one_; }
  Engine& engine() { return all().at(0).engine(); }
  uint64_t generation() { return all().at(0).generation(); }

  void Compute(uint64_t seed) {
    for (int32_t replica = 0; replica < replicas_; ++replica) {
      all().at(replica).Compute(seed + static_cast<uint64_t>(replica), 3 + replica, generation());
    }
  }
  absl::StatusOr<StepResult> Step() { return all().Step(generation(), {.learning_rate = 1e-2}); }
  absl::StatusOr<SavedCheckpoint> Save(const std::string& tag, const std::vector<SessionMarks>& marks = {}) {
    return engine().SaveCheckpoint("h", tag, {.marks = marks});
  }
  absl::StatusOr<CheckpointInfo> Restore(const std::string& tag) {
    absl::StatusOr<CheckpointInfo> restored = engine().RestoreCheckpoint("h", tag);
    ReconnectAll();
    return restored;
  }
  void ReconnectAll() {
    for (int32_t replica = 0; replica < replicas_; ++replica) all().at(replica).Reconnect();
  }

  // Every tensor of the head, and whether all who have its rows have the same.
  std::map<std::string, std::string> State() {
    std::map<std::string, std::string> state;
    for (const StateTensor& tensor : TensorsOf(all().at(0).head()->config())) {
      std::string& bytes = state[tensor.name];
      const int64_t row_bytes = tensor.columns * kernels::SizeOf(tensor.type);
      bytes.resize(static_cast<size_t>(tensor.rows * row_bytes));
      const auto slices = all().at(0).head()->SliceRows();
      for (int32_t slice = 0; slice < replicas_; ++slice) {
        for (const kernels::RowSpan& span : slices[static_cast<size_t>(slice)]) {
          const PartRows rows{tensor.name, span};
          const std::string own = Read(slice, rows);
          bytes.replace(static_cast<size_t>(span.first * row_bytes), own.size(), own);
        }
      }
    }
    return state;
  }
  // As batches use them, at every replica.
  std::vector<float> Weights(int32_t replica) {
    const std::shared_ptr<engine::Head> head = all().at(replica).head();
    const HeadConfig& config = head->config();
    std::string bytes(static_cast<size_t>(config.weight_bytes()), '\0');
    std::promise<void> read;
    head->ReadWeights(0, config.vocab_size, config.weight_type, {bytes.data()},
                      [&](const absl::StatusOr<uint64_t>& version) {
                        EXPECT_TRUE(version.ok()) << version.status();
                        read.set_value();
                      });
    read.get_future().wait();
    std::vector<float> weights(static_cast<size_t>(config.elements()));
    kernels::Convert(config.weight_type, bytes.data(), kernels::DataType::kFloat32, weights.data(),
                     config.elements());
    return weights;
  }
  void ExpectAllAlike() {
    for (int32_t replica = 1; replica < replicas_; ++replica) {
      EXPECT_EQ(Weights(replica), Weights(0)) << "at replica " << replica;
      EXPECT_EQ(all().at(replica).head()->restores(), all().at(0).head()->restores());
      EXPECT_EQ(all().at(replica).head()->weight_version(), all().at(0).head()->weight_version());
      EXPECT_EQ(all().at(replica).generation(), generation());
    }
  }
  // After a restore of a window of Compute(seed) at three replicas, one of which was killed meanwhile: the
  // state is that of the checkpoint, `saved`, its sessions are all there or none, and a step makes `stepped`
  // of it.
  void ExpectRestoredAsAWhole(uint64_t seed, const std::map<std::string, std::string>& saved,
                              const std::map<std::string, std::string>& stepped) {
    set().AwaitWhole();
    ReconnectAll();
    EXPECT_EQ(State(), saved);
    ExpectAllAlike();
    const size_t known = all().Marks().size();
    EXPECT_TRUE(known == 3 || known == 0) << known << " of the sessions are left, which have one gradient";
    if (known == 0) Compute(seed);
    const absl::StatusOr<StepResult> step = Step();
    ASSERT_TRUE(step.ok()) << step.status();
    EXPECT_EQ(State(), stepped);
  }

 private:
  static std::vector<StateTensor> TensorsOf(const HeadConfig& config) {
    return engine::StateTensorsOf(config);
  }
  std::string Read(int32_t replica, const PartRows& rows) {
    std::promise<absl::StatusOr<std::string>> read;
    all().at(replica).head()->ReadPartRows(
        rows, [&](absl::StatusOr<std::string> bytes) { read.set_value(std::move(bytes)); });
    const absl::StatusOr<std::string> bytes = read.get_future().get();
    EXPECT_TRUE(bytes.ok()) << bytes.status();
    return bytes.value_or("");
  }

  const int32_t replicas_;
  std::unique_ptr<SetUnderTest> set_;
  std::unique_ptr<ReplicaServers> one_;
};

}  // namespace lossd::rpc::replica_set_test

#endif  // LOSSD_TESTS_UNIT_RPC_REPLICAS_CHECKPOINTED_SERVERS_H_
