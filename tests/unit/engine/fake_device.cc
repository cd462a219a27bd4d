#include "tests/unit/engine/fake_device.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <numeric>
#include <utility>

#include "absl/time/clock.h"
#include "server/engine/common/errors.h"
#include "tests/support/wait.h"

namespace lossd::engine {

void FakeGate::Hold() {
  const std::lock_guard lock(mutex_);
  may_answer_ = may_end_ = batches_.size();
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
  testing::Await("a batch to be held", changed_, lock, [this] { return batches_.size() > ended_; });
}

void FakeGate::AwaitStarted(size_t batches) {
  std::unique_lock lock(mutex_);
  testing::Await("batches to be started", changed_, lock, [&] { return batches_.size() >= batches; });
}

std::vector<FakeBatch> FakeGate::batches() {
  const std::lock_guard lock(mutex_);
  return batches_;
}

std::vector<BatchKey> FakeGate::kinds() {
  const std::lock_guard lock(mutex_);
  return kinds_;
}

size_t FakeGate::Arrive(FakeBatch batch, const BatchKey& kind) {
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

void FakeGate::OnWriteState(std::function<void()> hook) {
  const std::lock_guard lock(mutex_);
  on_write_state_ = std::move(hook);
}

void FakeGate::WritesState() {
  std::function<void()> hook;
  {
    const std::lock_guard lock(mutex_);
    hook = std::exchange(on_write_state_, nullptr);
  }
  if (hook) hook();
}

std::vector<size_t> FakeGate::logits_after() {
  const std::lock_guard lock(mutex_);
  return logits_after_;
}

void FakeGate::OnLogits(std::function<void()> hook) {
  const std::lock_guard lock(mutex_);
  on_logits_ = std::move(hook);
}

void FakeGate::ComputesLogits() {
  std::function<void()> hook;
  {
    const std::lock_guard lock(mutex_);
    logits_after_.push_back(batches_.size());
    hook = std::exchange(on_logits_, nullptr);
  }
  if (hook) hook();
}

ResultBytes FakeGate::Register(int64_t bytes) {
  *registered_ += bytes;
  most_registered_ = std::max<int64_t>(most_registered_, *registered_);
  const std::shared_ptr<std::byte[]> data(new std::byte[static_cast<size_t>(bytes)],
                                          [registered = registered_, bytes](const std::byte* memory) {
                                            *registered -= bytes;
                                            delete[] memory;
                                          });
  return {data, bytes, MemoryPlace::kRegisteredHost};
}

bool FakeGate::failing() {
  const std::lock_guard lock(mutex_);
  return failing_;
}

namespace {

// The owner thread's, like a device's.
struct BatchUnderWay {
  size_t number = 0;
  BatchKey kind;
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
      : config_(std::move(config)),
        gate_(gate),
        options_(std::move(options)),
        ring_(ring),
        moment_(static_cast<size_t>(config_.optimizer.moments() > 0 ? config_.elements() : 0)) {}

  absl::Status PublishWeights(WeightBuffers staged) override {
    weights_ = std::move(staged.weights);
    bias_ = std::move(staged.bias);
    return absl::OkStatus();
  }
  absl::Status ReadWeightRows(int64_t first_row, int64_t rows, kernels::DataType type, void* out) override {
    const int64_t size = kernels::SizeOf(config_.master_type());
    kernels::Convert(config_.master_type(), weights_.data() + first_row * config_.hidden_size * size, type,
                     out, rows * config_.hidden_size);
    return absl::OkStatus();
  }
  absl::Status ReadBias(int64_t first_row, int64_t rows, float* out) override {
    std::copy_n(reinterpret_cast<const float*>(bias_.data()) + first_row, rows, out);
    return absl::OkStatus();
  }
  absl::Status BlendWeights(const HeadBackend& other, double decay) override {
    if (gate_->failing()) return absl::InternalError("nothing can be blended any more");
    const auto& source = static_cast<const FakeBackend&>(other);
    if (weights_.size() == 0) {
      weights_ = *HostBuffer::Create(config_.staged_bytes(), Commit::kNow);
      bias_ = *HostBuffer::Create(config_.bias_bytes(), Commit::kNow);
    }
    const auto blend = [decay](const std::byte* from, kernels::DataType from_type, std::byte* to,
                               kernels::DataType to_type, int64_t count) {
      std::vector<float> a(static_cast<size_t>(count));
      std::vector<float> b(a.size());
      kernels::Convert(to_type, to, kernels::DataType::kFloat32, a.data(), count);
      kernels::Convert(from_type, from, kernels::DataType::kFloat32, b.data(), count);
      const auto kept = static_cast<float>(decay);
      for (size_t i = 0; i < a.size(); ++i) a[i] = kept * a[i] + (1 - kept) * b[i];
      kernels::Convert(kernels::DataType::kFloat32, a.data(), to_type, to, count);
    };
    blend(source.weights_.data(), source.config_.master_type(), weights_.data(), config_.master_type(),
          config_.elements());
    constexpr kernels::DataType kFloat = kernels::DataType::kFloat32;
    if (config_.bias) blend(source.bias_.data(), kFloat, bias_.data(), kFloat, config_.vocab_size);
    return absl::OkStatus();
  }
  absl::Status CopyOptimizer(const HeadBackend& source) override {
    moment_ = static_cast<const FakeBackend&>(source).moment_;
    return absl::OkStatus();
  }
  absl::Status PrepareTeacher(const HeadBackend& /*teacher*/) override {
    if (options_.room_for_teachers) return absl::OkStatus();
    return MakeError(absl::StatusCode::kInvalidArgument, RejectReason::kShape, "options.distillation.teacher",
                     "there is no room for a teacher");
  }
  absl::Status Logits(const LogitRows& wanted) override {
    if (gate_->failing()) return absl::InternalError("nothing can be computed any more");
    gate_->ComputesLogits();
    const kernels::LogitOutputs& out = wanted.outputs;
    std::vector<float> x(static_cast<size_t>(wanted.rows * config_.hidden_size));
    kernels::Convert(config_.weight_type, wanted.hidden_states, kernels::DataType::kFloat32, x.data(),
                     wanted.rows * config_.hidden_size);
    for (int64_t row = 0; row < wanted.rows; ++row) {
      const auto begin = x.begin() + row * config_.hidden_size;
      const float sum = std::accumulate(begin, begin + config_.hidden_size, 0.0f);
      const auto logit = [&](int64_t token) {
        return wanted.logit_scale * (sum + static_cast<float>(token)) + (wanted.bias == Bias::kUse ? 100 : 0);
      };
      for (int64_t token = 0; out.logits != nullptr && token < config_.vocab_size; ++token) {
        const float value = logit(token);
        kernels::Convert(
            kernels::DataType::kFloat32, &value, out.type,
            static_cast<char*>(out.logits) + (row * config_.vocab_size + token) * kernels::SizeOf(out.type),
            1);
      }
      for (int32_t i = 0; i < out.top_k; ++i) {
        const int64_t token = config_.vocab_size - 1 - i;
        out.top_tokens[row * out.top_k + i] = static_cast<int32_t>(token);
        out.top_logits[row * out.top_k + i] = logit(token);
      }
      if (out.top_k > 0) out.log_sum_exp[row] = wanted.softcap;
    }
    return absl::OkStatus();
  }
  int64_t RowsOfLogits() const override { return options_.rows_of_logits; }
  bool HasRoomForList(int64_t tokens) const override { return tokens <= options_.longest_list; }
  int64_t RowsPerBatch(const BatchKey& /*kind*/) const override { return options_.rows_per_batch; }
  void StartBatch(const BatchKey& kind, std::span<const ChunkRows> chunks,
                  BatchCallbacks callbacks) override {
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

  absl::Status Fold(Gradient* from, Gradient* to) override {
    if (gate_->failing()) return absl::InternalError("nothing can be added any more");
    Find(to).sum += std::exchange(Find(from).sum, 0.0f);
    return absl::OkStatus();
  }
  absl::StatusOr<GradientTallies> Summarize(const Gradient* gradient, double scale) override {
    if (gate_->failing()) return absl::InternalError("nothing can be read any more");
    const float sum = gradient == nullptr ? own_.sum : static_cast<const FakeGradient*>(gradient)->sum;
    return TalliesOf(static_cast<float>(scale) * sum);
  }
  absl::StatusOr<GradientTallies> ApplyStep(const Gradient* gradient,
                                            const StepArguments& arguments) override {
    absl::StatusOr<GradientTallies> tallies = Summarize(gradient, arguments.gradient_scale);
    if (!tallies.ok()) return tallies;
    const float sum = gradient == nullptr ? own_.sum : static_cast<const FakeGradient*>(gradient)->sum;
    const float scaled = static_cast<float>(arguments.gradient_scale) * sum;
    const auto rate = static_cast<float>(arguments.learning_rate);
    const float kept = 1 - rate * static_cast<float>(arguments.optimizer.weight_decay);
    std::vector<float> weights(static_cast<size_t>(config_.elements()));
    kernels::Convert(config_.master_type(), weights_.data(), kernels::DataType::kFloat32, weights.data(),
                     config_.elements());
    for (size_t i = 0; i < weights.size(); ++i) {
      weights[i] = kept * weights[i] - rate * (scaled + (moment_.empty() ? 0 : moment_[i]));
    }
    for (float& moment : moment_) moment += scaled;
    kernels::Convert(kernels::DataType::kFloat32, weights.data(), config_.master_type(), weights_.data(),
                     config_.elements());
    auto* bias = reinterpret_cast<float*>(bias_.data());
    for (int64_t i = 0; config_.bias && i < config_.vocab_size; ++i) bias[i] -= rate * 2 * scaled;
    return tallies;
  }

  std::vector<StateTensor> StateTensors() const override {
    std::vector<StateTensor> tensors = {{config_.master_weights ? "master_weight" : "weight",
                                         config_.master_type(), config_.vocab_size, config_.hidden_size}};
    if (config_.bias) tensors.push_back({"bias", kernels::DataType::kFloat32, config_.vocab_size, 1});
    if (!moment_.empty()) {
      tensors.push_back({"exp_avg", kernels::DataType::kFloat32, config_.vocab_size, config_.hidden_size});
    }
    return tensors;
  }
  absl::Status ReadState(const std::string& tensor, int64_t first_row, int64_t rows, void* out) override {
    const auto [data, row_bytes] = Find(tensor);
    if (gate_->failing() || data == nullptr) return absl::InternalError("nothing can be read");
    std::memcpy(out, data + first_row * row_bytes, static_cast<size_t>(rows * row_bytes));
    return absl::OkStatus();
  }
  // There when it is waited for, and not before.
  absl::StatusOr<CopyDone> CopyState(std::span<const StateCopy> copies) override {
    std::vector<std::pair<std::string, void*>> all;
    for (const auto& [tensor, out] : copies) {
      const auto [data, row_bytes] = Find(tensor.name);
      if (gate_->failing() || data == nullptr) return absl::InternalError("nothing can be copied");
      const auto bytes = static_cast<size_t>(tensor.rows * row_bytes);
      all.emplace_back(std::string(reinterpret_cast<const char*>(data), bytes), out);
    }
    return CopyDone([gate = gate_, all = std::move(all)] {
      if (gate->failing_copies()) return absl::InternalError("nothing was copied");
      for (const auto& [bytes, out] : all) std::memcpy(out, bytes.data(), bytes.size());
      return absl::OkStatus();
    });
  }
  absl::Status WriteState(const std::string& tensor, int64_t first_row, int64_t rows,
                          const void* in) override {
    gate_->WritesState();
    if (weights_.size() == 0) {
      weights_ = *HostBuffer::Create(config_.staged_bytes(), Commit::kNow);
      bias_ = *HostBuffer::Create(config_.bias_bytes(), Commit::kNow);
    }
    const auto [data, row_bytes] = Find(tensor);
    if (gate_->failing() || data == nullptr) return absl::InternalError("nothing can be written");
    std::memcpy(data + first_row * row_bytes, in, static_cast<size_t>(rows * row_bytes));
    return absl::OkStatus();
  }
  absl::Status WriteGradient(Gradient* gradient, int64_t /*first_row*/, int64_t /*rows*/, const float* dw,
                             const float* /*bias*/) override {
    if (gate_->failing()) return absl::InternalError("nothing can be written");
    Find(gradient).sum = dw[0];
    return absl::OkStatus();
  }
  MemoryPlan MemoryReport() const override { return {}; }

 private:
  // Its bytes and those of a row; null if there is no such tensor.
  std::pair<std::byte*, int64_t> Find(const std::string& tensor) {
    const int64_t columns = config_.hidden_size;
    if (tensor == (config_.master_weights ? "master_weight" : "weight")) {
      return {reinterpret_cast<std::byte*>(weights_.data()),
              columns * kernels::SizeOf(config_.master_type())};
    }
    if (tensor == "bias" && config_.bias) return {reinterpret_cast<std::byte*>(bias_.data()), 4};
    if (tensor == "exp_avg" && !moment_.empty()) {
      return {reinterpret_cast<std::byte*>(moment_.data()), columns * 4};
    }
    return {nullptr, 0};
  }

  // Those of a gradient all of whose elements are this, and twice this those of the bias's.
  GradientTallies TalliesOf(float value) const {
    GradientTallies tallies;
    tallies.dw.front() = TallyOf(value, config_.elements());
    if (config_.bias) tallies.db.front() = TallyOf(2 * value, config_.vocab_size);
    return tallies;
  }
  static kernels::GradientTally TallyOf(float value, int64_t count) {
    const bool finite = std::isfinite(value);
    return {.squares = static_cast<double>(value) * value * static_cast<double>(count),
            .largest = finite ? std::abs(value) : 0,
            .non_finite = finite ? 0 : count};
  }

  const HeadConfig config_;
  FakeGate* const gate_;
  const FakeOptions options_;
  Ring* const ring_;
  FakeGradient& Find(Gradient* gradient) {
    return gradient == nullptr ? own_ : *static_cast<FakeGradient*>(gradient);
  }

  HostBuffer weights_;
  HostBuffer bias_;
  std::vector<float> moment_;  // empty if the optimizer has none
  FakeGradient own_;
};

void Fill(const BatchKey& kind, const ChunkRows& rows) {
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
  FakeDevice(FakeGate* gate, FakeOptions options) : gate_(gate), options_(std::move(options)) {}

  std::string name() const override { return "fake"; }
  std::string description() const override { return "fake"; }
  int64_t AvailableMemory() const override { return int64_t{1} << 40; }
  absl::StatusOr<MemoryPlan> PlanMemory(const HeadConfig& config) const override {
    return MemoryPlan{{"weights", config.weight_bytes()},
                      {"gradient", (config.double_buffer ? 2 : 1) * config.gradient_bytes()}};
  }
  absl::StatusOr<std::unique_ptr<HeadBackend>> CreateHead(const HeadConfig& config) override {
    return std::make_unique<FakeBackend>(config, gate_, options_, &ring_);
  }
  absl::StatusOr<std::unique_ptr<Gradient>> CreateGradient(const HeadConfig& /*config*/) override {
    return std::make_unique<FakeGradient>();
  }
  bool HasFixedSegments(const HeadConfig& /*config*/) const override { return options_.fixed_segments; }
  bool TakesTokenLists() const override { return options_.group.ranks.empty(); }
  GroupReport Group() const override { return options_.group; }
  MemoryPlan SharedMemory() const override { return {{"workspace", 0}}; }
  std::optional<ResultBytes> RegisteredBytes(int64_t bytes) override { return gate_->Register(bytes); }

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
  return std::make_unique<FakeDevice>(gate, std::move(options));
}

}  // namespace lossd::engine
