#include "tests/unit/engine/fake_device.h"

#include <algorithm>
#include <utility>

namespace lossd::engine {

void FakeGate::Hold() {
  const std::lock_guard lock(mutex_);
  held_ = true;
}

void FakeGate::LetThrough() {
  const std::lock_guard lock(mutex_);
  held_ = false;
  changed_.notify_all();
}

void FakeGate::AwaitArrival() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return waiting_ > 0; });
}

bool FakeGate::Pass() {
  std::unique_lock lock(mutex_);
  ++waiting_;
  changed_.notify_all();
  changed_.wait(lock, [this] { return !held_; });
  --waiting_;
  return !failing_;
}

namespace {

class FakeBackend : public HeadBackend {
 public:
  FakeBackend(HeadConfig config, FakeGate* gate) : config_(std::move(config)), gate_(gate) {}

  absl::Status PublishWeights(HostBuffer staged) override {
    weights_ = std::move(staged);
    return absl::OkStatus();
  }
  absl::Status ReadWeightRows(int64_t first_row, int64_t rows, kernels::DataType type, void* out) override {
    const int64_t size = kernels::SizeOf(config_.weight_type);
    kernels::Convert(config_.weight_type, weights_.data() + first_row * config_.hidden_size * size, type, out,
                     rows * config_.hidden_size);
    return absl::OkStatus();
  }
  absl::StatusOr<BatchReport> ProcessBatch(const RowBatch& batch,
                                           absl::FunctionRef<void()> on_input_gradients) override {
    if (!gate_->Pass()) {
      sum_ += batch.gradient_scale / 2;
      return absl::InternalError("half of it was added");
    }
    std::fill_n(batch.losses, batch.tokens, 1.0f);
    on_input_gradients();
    if (batch.accumulate == RowBatch::Accumulate::kYes) sum_ += batch.gradient_scale;
    return BatchReport{batch.tokens, 0};
  }
  absl::Status ReadGradientRows(int64_t /*first_row*/, int64_t rows, float* out) override {
    std::fill_n(out, rows * config_.hidden_size, sum_);
    return absl::OkStatus();
  }
  void ResetGradient() override { sum_ = 0; }
  MemoryPlan MemoryReport() const override { return {}; }

 private:
  const HeadConfig config_;
  FakeGate* const gate_;
  HostBuffer weights_;
  float sum_ = 0;
};

class FakeDevice : public Device {
 public:
  explicit FakeDevice(FakeGate* gate) : gate_(gate) {}

  std::string name() const override { return "fake"; }
  std::string description() const override { return "fake"; }
  int64_t AvailableMemory() const override { return int64_t{1} << 40; }
  absl::StatusOr<MemoryPlan> PlanMemory(const HeadConfig& config) const override {
    return MemoryPlan{{"weights", config.weight_bytes()}, {"gradient", config.gradient_bytes()}};
  }
  absl::StatusOr<std::unique_ptr<HeadBackend>> CreateHead(const HeadConfig& config) override {
    return std::make_unique<FakeBackend>(config, gate_);
  }
  MemoryPlan SharedMemory() const override { return {{"workspace", 0}}; }

 private:
  FakeGate* const gate_;
};

}  // namespace

std::unique_ptr<Device> MakeFakeDevice(FakeGate* gate) { return std::make_unique<FakeDevice>(gate); }

}  // namespace lossd::engine
