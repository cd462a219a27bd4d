#include "tests/unit/engine/replicas/faulty_exchanges.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/collectives/communicator.h"
#include "server/engine/device/replica_connection.h"

namespace lossd::engine::testing {
namespace {

using kernels::collectives::Code;
using kernels::collectives::Communicator;
using kernels::collectives::Operation;
using kernels::collectives::RankOrderSum;
using kernels::collectives::Rendezvous;
using kernels::collectives::Result;

// Whatever it does is one of two operations of the other's, so that all ranks have to be like this.
class FaultyCommunicator final : public Communicator {
 public:
  FaultyCommunicator(Communicator* other, ExchangeFaults* faults)
      : Communicator(other->rank(), other->size()), other_(other), faults_(faults) {}

 private:
  Result Carry(Operation /*operation*/, std::span<const Transfer> transfers, void* stream) override {
    if (const ExchangeFaults::Fault fault = faults_->Take(); fault != nullptr) {
      return fault([this] { return aborted(); });
    }
    return other_->Exchange(transfers, stream);
  }
  Result GatherOnHost(Operation /*operation*/, const void* own, int64_t bytes, void* all,
                      void* stream) override {
    const std::vector<int64_t> each(static_cast<size_t>(size()), bytes);
    return other_->AllGatherV(own, each, all, stream);
  }
  Result Sum(const RankOrderSum& sum, void* /*stream*/) override {
    kernels::collectives::SumInRankOrder(sum);
    return {};
  }
  Result Synchronize(void* stream) override { return other_->Wait(stream); }
  Result CheckStream(void* stream) const override {
    return stream == nullptr ? Result() : Result(Code::kInvalidArgument, "there are no streams");
  }
  void Close() override { other_->Abort(); }

  Communicator* const other_;
  ExchangeFaults* const faults_;
};

class FaultyConnection final : public ReplicaConnection {
 public:
  FaultyConnection(std::shared_ptr<ReplicaConnection> connection, ExchangeFaults* faults)
      : connection_(std::move(connection)), communicator_(connection_->communicators().host, faults) {}

  const ReplicaCommunicators& communicators() const override { return communicators_; }
  void Abort() override { communicator_.Abort(); }

 private:
  const std::shared_ptr<ReplicaConnection> connection_;
  FaultyCommunicator communicator_;
  const ReplicaCommunicators communicators_{.device = &communicator_, .host = &communicator_};
};

class FaultyDevice final : public Device {
 public:
  FaultyDevice(std::unique_ptr<Device> device, ExchangeFaults* faults)
      : device_(std::move(device)), faults_(faults) {}

  std::string name() const override { return device_->name(); }
  std::string description() const override { return device_->description(); }
  bool IsHost() const override { return device_->IsHost(); }
  int64_t AvailableMemory() const override { return device_->AvailableMemory(); }
  absl::StatusOr<MemoryPlan> PlanMemory(const HeadConfig& config) const override {
    return device_->PlanMemory(config);
  }
  absl::StatusOr<std::unique_ptr<HeadBackend>> CreateHead(const HeadConfig& config) override {
    return device_->CreateHead(config);
  }
  bool SpreadsHeads() const override { return device_->SpreadsHeads(); }
  absl::StatusOr<MemoryPlan> PlanShard(const HeadConfig& config, const HeadShard& shard) const override {
    return device_->PlanShard(config, shard);
  }
  absl::StatusOr<std::unique_ptr<HeadBackend>> CreateShard(const HeadConfig& config,
                                                           const HeadShard& shard) override {
    return device_->CreateShard(config, shard);
  }
  absl::StatusOr<std::shared_ptr<ReplicaConnection>> ConnectReplicas(const ReplicaNetwork& network,
                                                                     Rendezvous& rendezvous) override {
    if (absl::Status refused = faults_->TakeRefusal(); !refused.ok()) return refused;
    absl::StatusOr<std::shared_ptr<ReplicaConnection>> connection =
        device_->ConnectReplicas(network, rendezvous);
    if (!connection.ok()) return connection;
    return std::make_shared<FaultyConnection>(*std::move(connection), faults_);
  }
  MemoryPlan PlanGradient(const HeadConfig& config) const override { return device_->PlanGradient(config); }
  absl::StatusOr<std::unique_ptr<Gradient>> CreateGradient(const HeadConfig& config) override {
    return device_->CreateGradient(config);
  }
  MemoryPlan SharedMemory() const override { return device_->SharedMemory(); }
  int64_t MostBatches() const override { return device_->MostBatches(); }
  int64_t BatchesUnderWay() const override { return device_->BatchesUnderWay(); }
  void Poll() override {
    while (faults_->hangs()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    device_->Poll();
  }

 private:
  const std::unique_ptr<Device> device_;
  ExchangeFaults* const faults_;
};

}  // namespace

std::unique_ptr<Device> CreateFaultyDevice(std::unique_ptr<Device> device, ExchangeFaults* faults) {
  return std::make_unique<FaultyDevice>(std::move(device), faults);
}

}  // namespace lossd::engine::testing
