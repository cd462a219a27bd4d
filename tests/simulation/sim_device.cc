#include "tests/simulation/sim_device.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <string>
#include <utility>
#include <vector>

namespace lossd::simulation {

using engine::ChunkRows;
using engine::ComputeMode;
using engine::Gradient;

bool SimGate::Strikes(Sabotage what) {
  if (sabotage != what || ++occasions_ % 3 != 0) return false;
  ++sabotaged;
  return true;
}

namespace {

struct SimGradient : Gradient {
  SimGradient(size_t vocab, size_t hidden) : dw(vocab * hidden), db(vocab) {}
  void Clear() {
    std::fill(dw.begin(), dw.end(), 0.0f);
    std::fill(db.begin(), db.end(), 0.0f);
  }
  std::vector<float> dw;
  std::vector<float> db;
};

struct Underway {
  engine::BatchKey kind;
  std::vector<ChunkRows> chunks;
  engine::BatchCallbacks callbacks;
  SimGradient* gradient = nullptr;
  const std::vector<float>* weights = nullptr;
  const std::vector<float>* bias = nullptr;
  size_t answered = 0;
};
using Ring = std::deque<Underway>;

// Hidden states as they arrived, in pieces.
std::vector<float> Gather(const engine::HiddenRows& rows, size_t count) {
  std::vector<float> values(count);
  if (rows.data != nullptr) {
    std::memcpy(values.data(), rows.data, count * sizeof(float));
  } else {
    engine::Gather(rows.parts, reinterpret_cast<std::byte*>(values.data()));
  }
  return values;
}

class SimBackend : public engine::HeadBackend {
 public:
  SimBackend(const engine::HeadConfig& config, SimGate* gate, int64_t rows_per_batch, Ring* ring)
      : vocab_(static_cast<size_t>(config.vocab_size)),
        hidden_(static_cast<size_t>(config.hidden_size)),
        gate_(gate),
        rows_per_batch_(rows_per_batch),
        ring_(ring),
        weights_(vocab_ * hidden_),
        bias_(vocab_),
        own_(vocab_, hidden_) {}

  absl::Status PublishWeights(engine::WeightBuffers staged) override {
    std::memcpy(weights_.data(), staged.weights.data(), weights_.size() * sizeof(float));
    std::memcpy(bias_.data(), staged.bias.data(), bias_.size() * sizeof(float));
    return absl::OkStatus();
  }
  absl::Status ReadWeightRows(int64_t first, int64_t rows, kernels::DataType /*type*/, void* out) override {
    return ReadState("weight", first, rows, out);
  }
  absl::Status ReadBias(int64_t first, int64_t rows, float* out) override {
    return ReadState("bias", first, rows, out);
  }
  int64_t RowsPerBatch(const engine::BatchKey& /*kind*/) const override { return rows_per_batch_; }
  void StartBatch(const engine::BatchKey& kind, std::span<const ChunkRows> chunks,
                  engine::BatchCallbacks callbacks) override {
    ring_->push_back({kind,
                      {chunks.begin(), chunks.end()},
                      std::move(callbacks),
                      &Find(kind.gradient),
                      &weights_,
                      &bias_,
                      0});
  }
  absl::Status ReadGradient(const Gradient* of, int64_t first, int64_t rows, float* out) override {
    std::copy_n(Find(of).dw.data() + first * Hidden(), rows * Hidden(), out);
    return absl::OkStatus();
  }
  absl::Status ReadBiasGradient(const Gradient* of, int64_t first, int64_t rows, float* out) override {
    std::copy_n(Find(of).db.data() + first, rows, out);
    return absl::OkStatus();
  }
  void Reset(Gradient* gradient) override {
    if (!gate_->Strikes(Sabotage::kResetForgotten)) Find(gradient).Clear();
  }
  absl::Status Fold(Gradient* from, Gradient* to) override {
    SimGradient& source = Find(from);
    if (!gate_->Strikes(Sabotage::kFoldLost)) {
      SimGradient& target = Find(to);
      std::transform(source.dw.begin(), source.dw.end(), target.dw.begin(), target.dw.begin(), std::plus<>());
      std::transform(source.db.begin(), source.db.end(), target.db.begin(), target.db.begin(), std::plus<>());
    }
    source.Clear();
    return absl::OkStatus();
  }
  absl::StatusOr<engine::GradientStats> Summarize(const Gradient* of, double scale) override {
    engine::GradientStats stats;
    for (const float value : Find(of).dw) stats.norm += scale * value * scale * value;
    stats.norm = std::sqrt(stats.norm);
    return stats;
  }
  absl::StatusOr<engine::GradientStats> ApplyStep(const Gradient* of,
                                                  const engine::StepArguments& arguments) override {
    const double factor =
        arguments.learning_rate * arguments.gradient_scale * (gate_->Strikes(Sabotage::kStepTwice) ? 2 : 1);
    const auto step = [factor](float value, float gradient) {
      return value - static_cast<float>(factor * gradient);
    };
    const SimGradient& gradient = Find(of);
    std::transform(weights_.begin(), weights_.end(), gradient.dw.begin(), weights_.begin(), step);
    std::transform(bias_.begin(), bias_.end(), gradient.db.begin(), bias_.begin(), step);
    return Summarize(of, arguments.gradient_scale);
  }

  std::vector<engine::StateTensor> StateTensors() const override {
    const auto rows = static_cast<int64_t>(vocab_);
    return {{"weight", kernels::DataType::kFloat32, rows, Hidden()},
            {"bias", kernels::DataType::kFloat32, rows, 1}};
  }
  absl::Status ReadState(const std::string& tensor, int64_t first, int64_t rows, void* out) override {
    const auto [values, columns] = Tensor(tensor);
    std::copy_n(values->data() + first * columns, rows * columns, static_cast<float*>(out));
    return absl::OkStatus();
  }
  absl::Status WriteState(const std::string& tensor, int64_t first, int64_t rows, const void* in) override {
    if (gate_->on_write_state) std::exchange(gate_->on_write_state, nullptr)();
    const auto [values, columns] = Tensor(tensor);
    std::copy_n(static_cast<const float*>(in), rows * columns, values->data() + first * columns);
    return absl::OkStatus();
  }
  absl::Status WriteGradient(Gradient* gradient, int64_t first, int64_t rows, const float* dw,
                             const float* bias) override {
    std::copy_n(dw, rows * Hidden(), Find(gradient).dw.data() + first * Hidden());
    if (bias != nullptr) std::copy_n(bias, rows, Find(gradient).db.data() + first);
    return absl::OkStatus();
  }
  engine::MemoryPlan MemoryReport() const override { return {}; }

 private:
  int64_t Hidden() const { return static_cast<int64_t>(hidden_); }
  std::pair<std::vector<float>*, int64_t> Tensor(const std::string& name) {
    return name == "weight" ? std::pair(&weights_, Hidden()) : std::pair(&bias_, int64_t{1});
  }
  SimGradient& Find(Gradient* gradient) {
    return gradient == nullptr ? own_ : *static_cast<SimGradient*>(gradient);
  }
  const SimGradient& Find(const Gradient* gradient) const {
    return gradient == nullptr ? own_ : *static_cast<const SimGradient*>(gradient);
  }

  const size_t vocab_;
  const size_t hidden_;
  SimGate* const gate_;
  const int64_t rows_per_batch_;
  Ring* const ring_;
  std::vector<float> weights_;
  std::vector<float> bias_;
  SimGradient own_;
};

class SimDevice : public engine::Device {
 public:
  SimDevice(SimGate* gate, SimDeviceOptions options) : gate_(gate), options_(options) {}

  std::string name() const override { return "simulated"; }
  std::string description() const override { return "simulated"; }
  int64_t AvailableMemory() const override { return int64_t{1} << 40; }
  absl::StatusOr<engine::MemoryPlan> PlanMemory(const engine::HeadConfig& config) const override {
    return engine::MemoryPlan{{"weights", config.weight_bytes()}, {"gradient", config.gradient_bytes()}};
  }
  absl::StatusOr<std::unique_ptr<engine::HeadBackend>> CreateHead(const engine::HeadConfig& config) override {
    return std::make_unique<SimBackend>(config, gate_, options_.rows_per_batch, &ring_);
  }
  absl::StatusOr<std::unique_ptr<Gradient>> CreateGradient(const engine::HeadConfig& config) override {
    return std::make_unique<SimGradient>(static_cast<size_t>(config.vocab_size),
                                         static_cast<size_t>(config.hidden_size));
  }
  engine::MemoryPlan SharedMemory() const override { return {}; }
  int64_t MostBatches() const override { return options_.most_batches; }
  int64_t BatchesUnderWay() const override { return static_cast<int64_t>(ring_.size()); }

  void Poll() override {
    for (size_t i = 0; i < ring_.size(); ++i) {
      while (ring_[i].answered < ring_[i].chunks.size() && (gate_->free || gate_->answers > 0)) {
        gate_->answers = std::max(0, gate_->answers - 1);
        Answer(ring_[i]);
      }
    }
    while (!ring_.empty() && ring_.front().answered == ring_.front().chunks.size() &&
           (gate_->free || gate_->ends > 0)) {
      gate_->ends = std::max(0, gate_->ends - 1);
      End();
    }
    gate_->answers = gate_->ends = 0;
  }

 private:
  static void Answer(Underway& batch) {
    const size_t number = batch.answered++;
    const ChunkRows& rows = batch.chunks[number];
    if (batch.kind.mode != ComputeMode::kWeightGradientOnly) Compute(batch, rows);
    batch.callbacks.on_input_gradients(number);
  }

  static void Compute(const Underway& batch, const ChunkRows& rows) {
    const size_t hidden = batch.weights->size() / batch.bias->size();
    const std::vector<float> x = Gather(rows.hidden_states, static_cast<size_t>(rows.tokens) * hidden);
    auto* dx = static_cast<float*>(rows.dx);
    for (size_t token = 0; token < static_cast<size_t>(rows.tokens); ++token) {
      const bool valid = rows.labels[token] != rows.ignore_index;
      const size_t label = valid ? static_cast<size_t>(rows.labels[token]) : 0;
      float loss = valid ? (*batch.bias)[label] : 0;
      for (size_t h = 0; h < hidden; ++h) {
        const float weight = valid ? (*batch.weights)[label * hidden + h] : 0;
        loss += weight * x[token * hidden + h];
        if (dx != nullptr) dx[token * hidden + h] = weight * rows.gradient_scale;
      }
      rows.losses[token] = loss;
    }
  }

  void End() {
    Underway batch = std::move(ring_.front());
    ring_.pop_front();
    for (const ChunkRows& rows : batch.chunks) {
      if (batch.kind.mode == ComputeMode::kLossOnly) continue;
      if (rows.accumulate == ChunkRows::Accumulate::kYes) {
        if (!gate_->Strikes(Sabotage::kChunkLost)) Add(batch, rows);
      } else if (gate_->Strikes(Sabotage::kRepeatsCount)) {
        Add(batch, rows);
      }
    }
    batch.callbacks.on_done(engine::BatchReport{});
  }

  static void Add(const Underway& batch, const ChunkRows& rows) {
    const size_t hidden = batch.weights->size() / batch.bias->size();
    const std::vector<float> x = Gather(rows.hidden_states, static_cast<size_t>(rows.tokens) * hidden);
    for (size_t token = 0; token < static_cast<size_t>(rows.tokens); ++token) {
      if (rows.labels[token] == rows.ignore_index) continue;
      const auto label = static_cast<size_t>(rows.labels[token]);
      batch.gradient->db[label] += rows.gradient_scale;
      for (size_t h = 0; h < hidden; ++h) {
        batch.gradient->dw[label * hidden + h] += rows.gradient_scale * x[token * hidden + h];
      }
    }
  }

  SimGate* const gate_;
  const SimDeviceOptions options_;
  Ring ring_;
};

}  // namespace

std::unique_ptr<engine::Device> MakeSimDevice(SimGate* gate, SimDeviceOptions options) {
  return std::make_unique<SimDevice>(gate, options);
}

}  // namespace lossd::simulation
