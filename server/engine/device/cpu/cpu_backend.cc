#include "server/engine/device/cpu/cpu_backend.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/linear_cross_entropy.h"
#include "kernels/threads.h"
#include "server/engine/common/errors.h"
#include "server/engine/device/cpu/cpu_head.h"
#include "server/engine/memory/process_memory.h"

namespace lossd::engine {
namespace {

class CpuDevice : public Device {
 public:
  CpuDevice(HostBuffer workspace, int64_t staging_bytes)
      : workspace_(std::move(workspace)), staging_bytes_(staging_bytes) {}

  std::string name() const override { return "cpu"; }
  bool IsHost() const override { return true; }
  std::string description() const override {
    const int64_t threads = kernels::LoopThreads();
    return absl::StrCat("CPU, ", threads, threads == 1 ? " thread" : " threads");
  }

  int64_t AvailableMemory() const override {
    return DefaultHeadBytes(engine::AvailableMemory(), staging_bytes_);
  }
  DeviceTotals Totals() const override { return {TotalMemory(), engine::AvailableMemory()}; }

  absl::StatusOr<MemoryPlan> PlanMemory(const HeadConfig& config) const override {
    return PlanShard(config, HeadShard::Whole(config.vocab_size));
  }
  bool SpreadsHeads() const override { return true; }
  absl::StatusOr<MemoryPlan> PlanShard(const HeadConfig& config, const HeadShard& shard) const override {
    const int64_t row = CpuBackend::LeastWorkspaceBytes(config, shard, nullptr);
    if (row > workspace_.size()) {
      return MakeError(
          absl::StatusCode::kInvalidArgument, RejectReason::kShape, "vocab_size",
          absl::StrCat("one row of vocab_size ", shard.layout.vocab(), " needs a workspace of ", row,
                       " bytes, the server has ", workspace_.size(), "; raise --workspace_bytes"));
    }
    // A write is staged in a second buffer ("weight_staging"), which becomes the weights, or the master if
    // there is one, when it is published; replicas copy what they keep of a master.
    MemoryPlan plan = {{"weights", config.weight_bytes() + config.bias_bytes()}};
    const HeadConfig stepped = WithRows(config, shard.stepped().count);
    if (config.master_weights) plan.push_back({"master_weights", stepped.master_bytes()});
    if (config.gradient_bytes() > 0) {
      const int64_t gradient = config.gradient_bytes() + config.bias_gradient_bytes();
      plan.push_back({"gradient", config.double_buffer ? 2 * gradient : gradient});
    }
    if (stepped.optimizer_bytes() > 0) plan.push_back({"optimizer", stepped.optimizer_bytes()});
    if (shard.replicas > 1) plan.push_back({"replica_sums", CpuBackend::SumBytes(config, shard)});
    plan.push_back({"weight_staging", config.staged_bytes() + config.bias_bytes()});
    return plan;
  }

  absl::StatusOr<std::unique_ptr<HeadBackend>> CreateHead(const HeadConfig& config) override {
    return CreateShard(config, HeadShard::Whole(config.vocab_size));
  }
  absl::StatusOr<std::unique_ptr<HeadBackend>> CreateShard(const HeadConfig& config,
                                                           const HeadShard& shard) override {
    auto backend = std::make_unique<CpuBackend>(config, shard, &workspace_);
    if (absl::Status status = backend->Allocate(); !status.ok()) return status;
    return backend;
  }

  MemoryPlan PlanGradient(const HeadConfig& config) const override {
    return {{"gradient", config.gradient_bytes() + config.bias_gradient_bytes()}};
  }
  absl::StatusOr<std::unique_ptr<Gradient>> CreateGradient(const HeadConfig& config) override {
    absl::StatusOr<CpuGradient> gradient = CpuGradient::Create(config);
    if (!gradient.ok()) return gradient.status();
    return std::make_unique<CpuGradient>(*std::move(gradient));
  }

  bool HasFixedSegments(const HeadConfig& /*config*/) const override { return true; }
  MemoryPlan SharedMemory() const override { return {{"workspace", workspace_.size()}}; }

 private:
  HostBuffer workspace_;
  const int64_t staging_bytes_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> CreateCpuDevice(int64_t workspace_bytes) {
  return CreateCpuDevice(workspace_bytes, 0);
}

absl::StatusOr<std::unique_ptr<Device>> CreateCpuDevice(int64_t workspace_bytes, int64_t staging_bytes) {
  absl::StatusOr<HostBuffer> workspace = HostBuffer::Create(workspace_bytes, Commit::kOnUse);
  if (!workspace.ok()) return workspace.status();
  return std::make_unique<CpuDevice>(*std::move(workspace), staging_bytes);
}

}  // namespace lossd::engine
