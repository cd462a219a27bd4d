#include "server/engine/device/cpu/cpu_backend.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/linear_cross_entropy.h"
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
  std::string description() const override {
    return absl::StrCat("CPU, ", std::max(1U, std::thread::hardware_concurrency()), " hardware threads");
  }

  int64_t AvailableMemory() const override {
    return DefaultHeadBytes(engine::AvailableMemory(), staging_bytes_);
  }
  DeviceTotals Totals() const override { return {TotalMemory(), engine::AvailableMemory()}; }

  absl::StatusOr<MemoryPlan> PlanMemory(const HeadConfig& config) const override {
    const int64_t row = kernels::WorkspaceBytes(1, config.vocab_size, config.hidden_size, config.weight_type);
    if (row > workspace_.size()) {
      return MakeError(
          absl::StatusCode::kInvalidArgument, RejectReason::kShape, "vocab_size",
          absl::StrCat("one row of vocab_size ", config.vocab_size, " needs a workspace of ", row,
                       " bytes, the server has ", workspace_.size(), "; raise --workspace_bytes"));
    }
    // A write is staged in a second buffer ("weight_staging"), which becomes the weights, or the master if
    // there is one, when it is published.
    MemoryPlan plan = {{"weights", config.weight_bytes() + config.bias_bytes()}};
    if (config.master_weights) plan.push_back({"master_weights", config.master_bytes()});
    if (config.gradient_bytes() > 0) {
      const int64_t gradient = config.gradient_bytes() + config.bias_gradient_bytes();
      plan.push_back({"gradient", config.double_buffer ? 2 * gradient : gradient});
    }
    if (config.optimizer_bytes() > 0) plan.push_back({"optimizer", config.optimizer_bytes()});
    plan.push_back({"weight_staging", config.staged_bytes() + config.bias_bytes()});
    return plan;
  }

  absl::StatusOr<std::unique_ptr<HeadBackend>> CreateHead(const HeadConfig& config) override {
    auto backend = std::make_unique<CpuBackend>(config, &workspace_);
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
