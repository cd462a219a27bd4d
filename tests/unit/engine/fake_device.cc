#include "tests/unit/engine/fake_device.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "absl/time/clock.h"
#include "server/engine/errors.h"

namespace lossd::engine {

void FakeGate::Hold() {
  const std::lock_guard lock(mutex_);
  may_answer_ = may_end_ = ended_;
}

void FakeGate::LetThrough() {
  const std::lock_guard lock(mutex_);
  may_answer_ = may_end_ = kAll;
}

void FakeGate::LetAnswers(size_t batches) {
  const std::lock_guard lock(mutex_);
  may_answer_ = std::max(may_answer_, may_end_) + batches;
}

void FakeGate::LetThrough(size_t batches) {
  const std::lock_guard lock(mutex_);
  may_end_ += batches;
  may_answer_ = std::max(may_answer_, may_end_);
}

void FakeGate::Fail() {
  const std::lock_guard lock(mutex_);
  failing_ = true;
}

void FakeGate::AwaitArrival() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return batches_.size() > ended_; });
}

void FakeGate::AwaitStarted(size_t batches) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return batches_.size() >= batches; });
}

std::vector<FakeBatch> FakeGate::batches() {
  const std::lock_guard lock(mutex_);
  return batches_;
}

std::vector<RowKind> FakeGate::kinds() {
  const std::lock_guard lock(mutex_);
  return kinds_;
}

size_t FakeGate::Arrive(FakeBatch batch, const RowKind& kind) {
  const std::lock_guard lock(mutex_);
  kinds_.push_back(kind);
  batches_.push_back(std::move(batch));
  changed_.notify_all();
  return batches_.size() - 1;
}

bool FakeGate::MayAnswer(size_t number) {
  const std::lock_guard lock(mutex_);
  return number < may_answer_;
}

bool FakeGate::MayEnd(size_t number) {
  const std::lock_guard lock(mutex_);
  if (number >= may_end_) return false;
  ended_ = number + 1;
  return true;
}

bool FakeGate::failing() {
  const std::lock_guard lock(mutex_);
  return failing_;
}

namespace {

// The owner thread's, like a device's.
struct BatchUnderWay {
  size_t number = 0;
  RowKind kind;
  std::vector<ChunkRows> chunks;
  BatchCallbacks callbacks;
  float* sum = nullptr;
  bool answered = false;
};
using Ring = std::deque<BatchUnderWay>;

struct FakeGradient : Gradient {
  float sum = 0;
};

class FakeBackend : public HeadBackend {
 public:
  FakeBackend(HeadConfig config, FakeGate* gate, FakeOptions options, Ring* ring)
      : config_(std::move(config)), gate_(gate), options_(options), ring_(ring) {}

  absl::Status PublishWeights(WeightBuffers staged) override {
    weights_ = std::move(staged.weights);
    bias_ = std::move(staged.bias);
    return absl::OkStatus();
  }
  absl::Status ReadWeightRows(int64_t first_row, int64_t rows, kernels::DataType type, void* out) override {
    const int64_t size = kernels::SizeOf(config_.weight_type);
    kernels::Convert(config_.weight_type, weights_.data() + first_row * config_.hidden_size * size, type, out,
                     rows * config_.hidden_size);
    return absl::OkStatus();
  }
  absl::Status ReadBias(int64_t first_row, int64_t rows, float* out) override {
    std::copy_n(reinterpret_cast<const float*>(bias_.data()) + first_row, rows, out);
    return absl::OkStatus();
  }
  absl::Status PrepareTeacher(const HeadBackend& /*teacher*/) override {
    if (options_.room_for_teachers) return absl::OkStatus();
    return MakeError(absl::StatusCode::kInvalidArgument, RejectReason::kShape, "options.distillation.teacher",
                     "there is no room for a teacher");
  }
  int64_t RowsPerBatch(const RowKind& /*kind*/) const override { return options_.rows_per_batch; }
  void StartBatch(const RowKind& kind, std::span<const ChunkRows> chunks, BatchCallbacks callbacks) override {
    FakeBatch scales;
    for (const ChunkRows& chunk : chunks) scales.push_back(chunk.gradient_scale);
    ring_->push_back({gate_->Arrive(std::move(scales), kind),
                      kind,
                      {chunks.begin(), chunks.end()},
                      std::move(callbacks),
                      &Find(kind.gradient).sum,
                      false});
  }
  absl::Status ReadGradient(const Gradient* of, int64_t /*first_row*/, int64_t rows, float* out) override {
    if (gate_->failing()) return absl::InternalError("nothing can be read any more");
    const float sum = of == nullptr ? own_.sum : static_cast<const FakeGradient*>(of)->sum;
    std::fill_n(out, rows * config_.hidden_size, sum);
    return absl::OkStatus();
  }
  // Twice the other one, so that the two are not taken for each other.
  absl::Status ReadBiasGradient(const Gradient* of, int64_t /*first_row*/, int64_t rows,
                                float* out) override {
    if (gate_->failing()) return absl::InternalError("nothing can be read any more");
    std::fill_n(out, rows, 2 * (of == nullptr ? own_.sum : static_cast<const FakeGradient*>(of)->sum));
    return absl::OkStatus();
  }
  void Reset(Gradient* gradient) override { Find(gradient).sum = 0; }
  MemoryPlan MemoryReport() const override { return {}; }

 private:
  const HeadConfig config_;
  FakeGate* const gate_;
  const FakeOptions options_;
  Ring* const ring_;
  FakeGradient& Find(Gradient* gradient) {
    return gradient == nullptr ? own_ : *static_cast<FakeGradient*>(gradient);
  }

  HostBuffer weights_;
  HostBuffer bias_;
  FakeGradient own_;
};

void Fill(const RowKind& kind, const ChunkRows& rows) {
  if (kind.mode == ComputeMode::kWeightGradientOnly) return;
  const auto fill = [&rows](auto* values, auto value) {
    if (values != nullptr) std::fill_n(values, rows.tokens, value);
  };
  for (int64_t i = 0; i < rows.tokens; ++i) {
    rows.losses[i] = rows.gradient_scale * (rows.token_weights == nullptr ? 1 : rows.token_weights[i]);
    if (rows.returns.log_sum_exp != nullptr) {
      rows.returns.log_sum_exp[i] = rows.lse_gradients == nullptr ? 0 : rows.lse_gradients[i];
    }
  }
  fill(rows.returns.z_loss, kind.options.lse_square_scale);
  fill(rows.returns.log_probability, 1.0f);
  fill(rows.returns.entropy, 1.0f);
  fill(rows.returns.prediction, 1);
  fill(rows.returns.target_rank, 1);
  fill(rows.returns.divergence, 1.0f);
  if (rows.returns.top_k == 0) return;
  std::fill_n(rows.returns.top_tokens, rows.tokens * rows.returns.top_k, 1);
  std::fill_n(rows.returns.top_log_probabilities, rows.tokens * rows.returns.top_k, 1.0f);
}

class FakeDevice : public Device {
 public:
  FakeDevice(FakeGate* gate, FakeOptions options) : gate_(gate), options_(options) {}

  std::string name() const override { return "fake"; }
  std::string description() const override { return "fake"; }
  int64_t AvailableMemory() const override { return int64_t{1} << 40; }
  absl::StatusOr<MemoryPlan> PlanMemory(const HeadConfig& config) const override {
    return MemoryPlan{{"weights", config.weight_bytes()}, {"gradient", config.gradient_bytes()}};
  }
  absl::StatusOr<std::unique_ptr<HeadBackend>> CreateHead(const HeadConfig& config) override {
    return std::make_unique<FakeBackend>(config, gate_, options_, &ring_);
  }
  absl::StatusOr<std::unique_ptr<Gradient>> CreateGradient(const HeadConfig& /*config*/) override {
    return std::make_unique<FakeGradient>();
  }
  MemoryPlan SharedMemory() const override { return {{"workspace", 0}}; }

  int64_t MostBatches() const override { return options_.most_batches; }
  int64_t BatchesUnderWay() const override { return static_cast<int64_t>(ring_.size()); }
  void Poll() override {
    for (BatchUnderWay& batch : ring_) {
      if (gate_->failing() || !gate_->MayAnswer(batch.number)) break;
      Answer(batch);
    }
    while (!ring_.empty() && gate_->MayEnd(ring_.front().number)) {
      BatchUnderWay batch = std::move(ring_.front());
      ring_.pop_front();
      const bool failed = gate_->failing();
      if (!failed) Answer(batch);
      for (const ChunkRows& chunk : batch.chunks) {
        if (chunk.accumulate == ChunkRows::Accumulate::kYes) {
          *batch.sum += failed ? chunk.gradient_scale / 2 : chunk.gradient_scale;
        }
      }
      if (failed) {
        batch.callbacks.on_done(absl::InternalError("half of it was added"));
      } else {
        batch.callbacks.on_done(BatchReport{});
      }
    }
  }

 private:
  static void Answer(BatchUnderWay& batch) {
    if (batch.answered) return;
    batch.answered = true;
    if (batch.callbacks.on_times) {
      const absl::Time now = absl::Now();
      batch.callbacks.on_times({.input_ready = now, .computed = now});
    }
    for (size_t i = 0; i < batch.chunks.size(); ++i) {
      Fill(batch.kind, batch.chunks[i]);
      batch.callbacks.on_input_gradients(i);
    }
  }

  FakeGate* const gate_;
  const FakeOptions options_;
  Ring ring_;
};

}  // namespace

std::unique_ptr<Device> MakeFakeDevice(FakeGate* gate, FakeOptions options) {
  return std::make_unique<FakeDevice>(gate, options);
}

}  // namespace lossd::engine
