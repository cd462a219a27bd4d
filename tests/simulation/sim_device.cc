#include "tests/simulation/sim_device.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "kernels/collectives/slice_exchange.h"
#include "server/engine/device/rank_status.h"
#include "server/engine/device/slice_tallies.h"
#include "tests/simulation/sim_batch.h"
#include "tests/simulation/workload.h"

namespace lossd::simulation {

using engine::ChunkRows;
using engine::ComputeMode;
using engine::Gradient;
using engine::ReplicaCommunicators;
using kernels::collectives::SliceExchange;

bool SimGate::Strikes(Sabotage what) {
  if (sabotage != what || ++occasions_ % 3 != 0) return false;
  ++sabotaged;
  return true;
}

namespace {

struct Underway {
  SimBatch batch;
  absl::Status failure = {};
};
using Ring = std::deque<Underway>;

class SimBackend : public engine::HeadBackend {
 public:
  SimBackend(const engine::HeadConfig& config, const engine::HeadShard& shard, SimGate* gate,
             int64_t rows_per_batch, Ring* ring)
      : gate_(gate),
        rows_per_batch_(rows_per_batch),
        ring_(ring),
        weights_(config.vocab_size, config.hidden_size, shard),
        own_(weights_.rows, weights_.hidden),
        sum_(weights_.rows, weights_.hidden) {}

  absl::Status PublishWeights(engine::WeightBuffers staged) override {
    std::memcpy(weights_.matrix.data(), staged.weights.data(), weights_.matrix.size() * sizeof(float));
    std::memcpy(weights_.bias.data(), staged.bias.data(), weights_.bias.size() * sizeof(float));
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
    ring_->push_back({SimBatch(kind, chunks, std::move(callbacks), &weights_, &Find(kind.gradient))});
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
  absl::StatusOr<engine::GradientTallies> Summarize(const Gradient* of, double scale) override {
    return Tally(Find(of), scale);
  }
  absl::StatusOr<engine::GradientTallies> ApplyStep(const Gradient* of,
                                                    const engine::StepArguments& arguments) override {
    Step(Find(of), {0, static_cast<int64_t>(weights_.rows)}, arguments);
    return Summarize(of, arguments.gradient_scale);
  }

  // Over replicas. The sum is there of all rows, and holds that of those which are stepped here.
  absl::Status SumSlices(Gradient* of, const ReplicaCommunicators& replicas) override {
    summed_ = false;
    const SimGradient nothing(weights_.rows, weights_.hidden);
    const SimGradient& gradient = gate_->Strikes(Sabotage::kReplicaLeftOut) ? nothing : Find(of);
    absl::Status summed = Sum(gradient.dw, Hidden(), replicas, &sum_.dw);
    if (summed.ok()) summed = Sum(gradient.db, 1, replicas, &sum_.db);
    summed_ = summed.ok();
    return summed;
  }
  absl::StatusOr<engine::GradientTallies> TallySum(double scale,
                                                   const ReplicaCommunicators& replicas) override {
    if (!summed_) return absl::InternalError("there is no sum");
    return engine::MergeTallies(Tally(sum_, scale), replicas.host);
  }
  absl::Status StepSlices(const engine::StepArguments& arguments) override {
    if (!summed_) return absl::InternalError("there is no sum");
    if (absl::Status computed = ComputeStarted(); !computed.ok()) return computed;
    Step(sum_, weights_.shard.stepped(), arguments);
    return absl::OkStatus();
  }
  absl::Status GatherSlices(const ReplicaCommunicators& replicas) override {
    if (absl::Status computed = ComputeStarted(); !computed.ok()) return computed;
    const std::vector<float> own = weights_.matrix;
    absl::Status gathered = Gather(Hidden(), replicas, &weights_.matrix);
    if (gathered.ok()) gathered = Gather(1, replicas, &weights_.bias);
    if (gathered.ok() && gate_->Strikes(Sabotage::kGatherForgotten)) weights_.matrix = own;
    return gathered;
  }
  absl::Status ReadSum(int64_t first, int64_t rows, float* out) override {
    if (!summed_) return absl::InternalError("there is no sum");
    std::copy_n(sum_.dw.data() + first * Hidden(), rows * Hidden(), out);
    return absl::OkStatus();
  }
  absl::Status ReadBiasSum(int64_t first, int64_t rows, float* out) override {
    if (!summed_) return absl::InternalError("there is no sum");
    std::copy_n(sum_.db.data() + first, rows, out);
    return absl::OkStatus();
  }

  std::vector<engine::StateTensor> StateTensors() const override {
    const auto rows = static_cast<int64_t>(weights_.rows);
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
  static engine::GradientTallies Tally(const SimGradient& gradient, double scale) {
    engine::GradientTallies tallies;
    for (const float value : gradient.dw) tallies.dw.front().squares += scale * value * scale * value;
    return tallies;
  }
  // Batches that are under way meet the weights that there were when they were started.
  absl::Status ComputeStarted() {
    for (Underway& one : *ring_) {
      if (!one.batch.computed()) one.failure.Update(one.batch.Compute());
      if (!one.failure.ok()) return one.failure;
    }
    return absl::OkStatus();
  }
  void Step(const SimGradient& gradient, const kernels::RowSpan& rows,
            const engine::StepArguments& arguments) {
    const double factor =
        arguments.learning_rate * arguments.gradient_scale * (gate_->Strikes(Sabotage::kStepTwice) ? 2 : 1);
    const auto step = [factor](float* values, const float* by, int64_t count) {
      std::transform(values, values + count, by, values,
                     [factor](float value, float one) { return value - static_cast<float>(factor * one); });
    };
    const int64_t first = rows.first * Hidden();
    step(weights_.matrix.data() + first, gradient.dw.data() + first, rows.count * Hidden());
    step(weights_.bias.data() + rows.first, gradient.db.data() + rows.first, rows.count);
  }
  absl::Status Sum(const std::vector<float>& values, int64_t columns, const ReplicaCommunicators& replicas,
                   std::vector<float>* sum) {
    const engine::HeadShard& shard = weights_.shard;
    SliceExchange exchange(shard.slices(), columns, replicas.device);
    const int64_t scratch = SliceExchange::ScratchBytes(shard.slices(), shard.replica, columns, 1);
    std::vector<std::byte> others(static_cast<size_t>(scratch));
    std::fill(sum->begin(), sum->end(), 0.0f);
    return engine::ToStatus(exchange.Sum(values.data(), 0, 1, sum->data() + shard.stepped().first * columns,
                                         others.data(), nullptr));
  }
  absl::Status Gather(int64_t columns, const ReplicaCommunicators& replicas, std::vector<float>* values) {
    SliceExchange exchange(weights_.shard.slices(), columns, replicas.device);
    return engine::ToStatus(exchange.Gather(values->data(), sizeof(float), 0, 1, nullptr));
  }
  int64_t Hidden() const { return static_cast<int64_t>(weights_.hidden); }
  std::pair<std::vector<float>*, int64_t> Tensor(const std::string& name) {
    return name == "weight" ? std::pair(&weights_.matrix, Hidden()) : std::pair(&weights_.bias, int64_t{1});
  }
  SimGradient& Find(Gradient* gradient) {
    return gradient == nullptr ? own_ : *static_cast<SimGradient*>(gradient);
  }
  const SimGradient& Find(const Gradient* gradient) const {
    return gradient == nullptr ? own_ : *static_cast<const SimGradient*>(gradient);
  }

  SimGate* const gate_;
  const int64_t rows_per_batch_;
  Ring* const ring_;
  SimWeights weights_;
  SimGradient own_;
  SimGradient sum_;
  bool summed_ = false;
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
    return CreateShard(config, engine::HeadShard::Whole(config.vocab_size));
  }
  absl::StatusOr<engine::MemoryPlan> PlanShard(const engine::HeadConfig& config,
                                               const engine::HeadShard& /*shard*/) const override {
    return PlanMemory(config);
  }
  absl::StatusOr<std::unique_ptr<engine::HeadBackend>> CreateShard(const engine::HeadConfig& config,
                                                                   const engine::HeadShard& shard) override {
    return std::make_unique<SimBackend>(config, shard, gate_, options_.rows_per_batch, &ring_);
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
      while (ring_[i].failure.ok() && !ring_[i].batch.AllAnswered() && (gate_->free || gate_->answers > 0)) {
        gate_->answers = std::max(0, gate_->answers - 1);
        Answer(ring_[i]);
      }
    }
    while (!ring_.empty() && MayEnd(ring_.front())) {
      gate_->ends = std::max(0, gate_->ends - 1);
      End();
    }
    gate_->answers = gate_->ends = 0;
  }

 private:
  static void Answer(Underway& one) {
    if (!one.batch.computed()) one.failure = one.batch.Compute();
    if (one.failure.ok()) one.batch.AnswerNext();
  }

  bool MayEnd(const Underway& one) const {
    return !one.failure.ok() || (one.batch.AllAnswered() && (gate_->free || gate_->ends > 0));
  }

  void End() {
    Underway one = std::move(ring_.front());
    ring_.pop_front();
    if (one.failure.ok() && gate_->before_adding && !gate_->before_adding()) {
      one.failure = absl::UnavailableError("the rank is killed");
    }
    if (!one.failure.ok()) return one.batch.End(one.failure);
    const bool skipped = gate_->before_adding && gate_->Strikes(Sabotage::kRankSkipsBatch);
    if (one.batch.kind().mode != ComputeMode::kLossOnly && !skipped) AddAll(one.batch);
    one.batch.End(engine::BatchReport{});
  }

  void AddAll(SimBatch& batch) {
    for (size_t i = 0; i < batch.chunks().size(); ++i) {
      const ChunkRows& rows = batch.chunks()[i];
      if (rows.accumulate == ChunkRows::Accumulate::kYes) {
        if (gate_->Strikes(Sabotage::kChunkLost)) continue;
        batch.Add(i);
        if (const auto item = ItemOf(rows.ignore_index); item.has_value()) gate_->added.insert(*item);
      } else if (gate_->Strikes(Sabotage::kRepeatsCount)) {
        batch.Add(i);
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
