#include "tests/conformance/head_under_test.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <limits>
#include <string_view>
#include <thread>
#include <utility>

#include "kernels/shard.h"
#include "tests/support/wait.h"
#include "tests/unit/kernels/cpu_results.h"

namespace lossd::engine::testing {
namespace {

using kernels::SizeOf;

std::vector<float> Widened(DataType type, const void* values, int64_t count) {
  std::vector<float> wide(static_cast<size_t>(count));
  kernels::Convert(type, values, DataType::kFloat32, wide.data(), count);
  return wide;
}

void PollUntil(Device* device, std::string_view what, const std::function<bool()>& ready) {
  const auto polled = [&] {
    device->Poll();
    std::this_thread::yield();
    return ready();
  };
  lossd::testing::Await(what, polled, std::chrono::microseconds(0));
}

// A part of an array that has all rows, or none.
std::vector<float> Slice(const std::vector<float>& values, int64_t first, int64_t count) {
  if (values.empty()) return {};
  return {values.begin() + first, values.begin() + first + count};
}

kernels::TokenLists ListsOf(const ChunkInput& chunk) {
  if (chunk.kept_offsets.empty()) return {};
  static const int32_t none = 0;
  return {chunk.kept_offsets.data(), chunk.kept_tokens.empty() ? &none : chunk.kept_tokens.data()};
}

// As the engine says it: no smaller than the mean of the lists, a power of two.
ListKind ListKindOf(const Problem& problem) {
  ListKind kind;
  int64_t tokens = 0;
  if (problem.targets.has_value()) {
    kind.use = ChunkLists::Use::kTargets;
    kind.targets = problem.targets->Weights();
    tokens = std::ssize(problem.targets->tokens);
  } else if (!problem.kept_offsets.empty()) {
    kind.use = ChunkLists::Use::kKept;
    tokens = std::ssize(problem.kept_tokens);
  } else {
    return kind;
  }
  kind.size_class = 1;
  while (kind.size_class * problem.shape.tokens < tokens) kind.size_class *= 2;
  return kind;
}

const float* PointerTo(const std::vector<float>& values) { return values.empty() ? nullptr : values.data(); }

}  // namespace

ChunkInput RowsOf(const Problem& problem, int64_t first, int64_t count) {
  const int64_t row_bytes = problem.shape.hidden * SizeOf(problem.hidden_type);
  ChunkInput chunk;
  chunk.hidden_states.assign(problem.hidden_states.begin() + first * row_bytes,
                             problem.hidden_states.begin() + (first + count) * row_bytes);
  if (problem.teacher.has_value()) {
    const std::vector<unsigned char>& states = problem.teacher->hidden_states;
    const int64_t teacher_bytes = problem.teacher->hidden * SizeOf(problem.teacher->type);
    chunk.teacher_hidden.assign(states.begin() + first * teacher_bytes,
                                states.begin() + (first + count) * teacher_bytes);
  }
  chunk.labels.assign(problem.labels.begin() + first, problem.labels.begin() + first + count);
  chunk.gradient_scale = problem.gradient_scale;
  chunk.z_gradient_scale = problem.z_gradient_scale;
  chunk.token_weights = Slice(problem.token_weights, first, count);
  chunk.lse_gradients = Slice(problem.lse_gradients, first, count);
  chunk.entropy_gradients = Slice(problem.entropy_gradients, first, count);
  if (problem.targets.has_value()) chunk.targets = problem.targets->Rows(first, count);
  if (problem.kept_offsets.empty()) return chunk;
  const auto begin = problem.kept_offsets.begin() + first;
  for (auto at = begin; at <= begin + count; ++at) chunk.kept_offsets.push_back(*at - *begin);
  chunk.kept_tokens.assign(problem.kept_tokens.begin() + *begin,
                           problem.kept_tokens.begin() + *(begin + count));
  return chunk;
}

BatchKey KindOf(const Problem& problem, DataType dx_type) {
  return {.hidden_type = problem.hidden_type,
          .dx_type = dx_type,
          .options = problem.options,
          .class_weights = problem.class_weights.empty() ? ClassWeights::kIgnore : ClassWeights::kUse,
          .bias = problem.bias.empty() ? Bias::kIgnore : Bias::kUse,
          .entropy_gradients = !problem.entropy_gradients.empty(),
          .lists = ListKindOf(problem)};
}

HeadConfig ConfigOf(const Problem& problem) {
  HeadConfig config{"h", problem.shape.vocab, problem.shape.hidden, problem.weight_type};
  config.bias = !problem.bias.empty();
  if (!problem.class_weights.empty()) {
    config.class_weights = std::make_shared<const std::vector<float>>(problem.class_weights);
  }
  return config;
}

HeadConfig TeacherConfigOf(const Problem& problem) {
  const kernels::testing::TeacherProblem& teacher = *problem.teacher;
  return {.name = "t",
          .vocab_size = problem.shape.vocab,
          .hidden_size = teacher.hidden,
          .weight_type = teacher.type,
          .logit_scale = teacher.logit_scale,
          .softcap = teacher.softcap,
          .weight_gradients = WeightGradients::kFrozen,
          .bias = !teacher.bias.empty()};
}

BatchUnderWay::BatchUnderWay(Device* device, HeadBackend* backend, int64_t hidden, const BatchKey& kind,
                             std::vector<ChunkInput> chunks)
    : device_(device), hidden_(hidden), kind_(kind), chunks_(std::move(chunks)), outputs_(chunks_.size()) {
  const bool loss_only = kind_.mode == ComputeMode::kLossOnly;
  const bool dw_only = kind_.mode == ComputeMode::kWeightGradientOnly;
  const bool has_dx = HasInputGradient(kind_.mode);
  std::vector<ChunkRows> rows;
  for (const ChunkInput& chunk : chunks_) {
    const auto tokens = static_cast<int64_t>(chunk.labels.size());
    // Nothing is aligned to more than its element.
    GuardedBytes& losses = losses_.emplace_back(tokens * 4, 64, 4);
    GuardedBytes& dx =
        dx_.emplace_back(has_dx ? tokens * hidden_ * SizeOf(kind_.dx_type) : 0, 64, SizeOf(kind_.dx_type));
    std::fill_n(losses.As<float>(), tokens, std::numeric_limits<float>::quiet_NaN());
    GuardedReturns& returns = returns_.emplace_back(kind_.returns, tokens);
    rows.push_back(
        {.tokens = tokens,
         .hidden_states = {.data = chunk.hidden_states.data()},
         .teacher_hidden = {.data = chunk.teacher_hidden.data()},
         .labels = chunk.labels.data(),
         .ignore_index = chunk.ignore_index,
         .gradient_scale = chunk.gradient_scale,
         .z_gradient_scale = chunk.z_gradient_scale,
         .token_weights = PointerTo(chunk.token_weights),
         .lse_gradients = PointerTo(chunk.lse_gradients),
         .entropy_gradients = PointerTo(chunk.entropy_gradients),
         .kept_tokens = ListsOf(chunk),
         .target_lists = chunk.targets.has_value() ? chunk.targets->Lists() : kernels::TargetLists(),
         .accumulate = loss_only ? ChunkRows::Accumulate::kNo : chunk.accumulate,
         .losses = dw_only ? nullptr : losses.As<float>(),
         .returns = returns.Pointers(),
         .dx = has_dx ? dx.data() : nullptr});
  }
  PollUntil(device_, "room for a batch",
            [this] { return device_->BatchesUnderWay() < device_->MostBatches(); });
  const auto take = [this](size_t number) {
    EXPECT_FALSE(done_.has_value());
    told_.push_back(number);
    const auto tokens = static_cast<int64_t>(chunks_[number].labels.size());
    const float* losses = losses_[number].As<float>();
    outputs_[number].losses.assign(losses, losses + tokens);
    outputs_[number].returns = returns_[number].Values();
    if (dx_[number].size() > 0) {
      outputs_[number].dx = Widened(kind_.dx_type, dx_[number].data(), tokens * hidden_);
    }
  };
  const auto finish = [this](absl::StatusOr<BatchReport> report) {
    EXPECT_FALSE(done_.has_value());
    done_ = report.status();
    if (report.ok()) report_ = *report;
  };
  backend->StartBatch(kind_, rows, {.on_input_gradients = take, .on_done = finish});
}

std::vector<ChunkOutput> BatchUnderWay::Await() {
  PollUntil(device_, "the batch", [this] { return done_.has_value(); });
  EXPECT_TRUE(done_->ok()) << *done_;
  EXPECT_EQ(told_.size(), chunks_.size());
  EXPECT_TRUE(std::is_sorted(told_.begin(), told_.end()));
  for (size_t i = 0; i < chunks_.size(); ++i) {
    EXPECT_TRUE(losses_[i].Intact()) << "written beside the losses of chunk " << i;
    EXPECT_TRUE(dx_[i].Intact()) << "written beside dX of chunk " << i;
    EXPECT_TRUE(returns_[i].Intact()) << "written beside what is told of the rows of chunk " << i;
    // What was told of is final.
    const std::vector<float>& losses = outputs_[i].losses;
    EXPECT_EQ(std::memcmp(losses.data(), losses_[i].data(), losses.size() * sizeof(float)), 0);
    const std::vector<float> dx =
        Widened(kind_.dx_type, dx_[i].data(), dx_[i].size() / SizeOf(kind_.dx_type));
    EXPECT_TRUE(kernels::testing::SameBits(outputs_[i].dx, dx));
    EXPECT_TRUE(SameBits(outputs_[i].returns, returns_[i].Values()));
  }
  return outputs_;
}

HeadUnderTest::HeadUnderTest(Device* device, HeadConfig config)
    : device_(device), config_(std::move(config)), backend_(*device_->CreateHead(config_)) {}

HeadUnderTest::HeadUnderTest(Device* device, HeadConfig config, const HeadShard& shard)
    : device_(device), config_(std::move(config)), backend_(*device_->CreateShard(config_, shard)) {}

HeadUnderTest::HeadUnderTest(Device* device, int64_t vocab, int64_t hidden, DataType type)
    : HeadUnderTest(device, {"h", vocab, hidden, type}) {}

HeadUnderTest::HeadUnderTest(Device* device, const Problem& problem)
    : HeadUnderTest(device, ConfigOf(problem)) {
  Publish(problem.weight, problem.bias);
}

void HeadUnderTest::Publish(const std::vector<unsigned char>& weights, const std::vector<float>& bias) {
  absl::StatusOr<HostBuffer> staged = HostBuffer::Create(config_.staged_bytes(), Commit::kNow);
  ASSERT_TRUE(staged.ok()) << staged.status();
  std::memcpy(staged->data(), weights.data(), weights.size());
  absl::StatusOr<HostBuffer> staged_bias = HostBuffer::Create(config_.bias_bytes(), Commit::kNow);
  ASSERT_TRUE(staged_bias.ok()) << staged_bias.status();
  if (!bias.empty()) std::memcpy(staged_bias->data(), bias.data(), bias.size() * sizeof(float));
  const absl::Status published = backend_->PublishWeights({*std::move(staged), *std::move(staged_bias)});
  EXPECT_TRUE(published.ok()) << published;
}

std::unique_ptr<BatchUnderWay> HeadUnderTest::Start(const BatchKey& kind, std::vector<ChunkInput> chunks) {
  return std::make_unique<BatchUnderWay>(device_, backend_.get(), config_.hidden_size, kind,
                                         std::move(chunks));
}

std::vector<ChunkOutput> HeadUnderTest::Run(const BatchKey& kind, std::vector<ChunkInput> chunks) {
  return Start(kind, std::move(chunks))->Await();
}

ChunkOutput HeadUnderTest::Run(const Problem& problem, const WantedReturns& returns) {
  BatchKey kind = KindOf(problem);
  kind.returns = returns;
  return Run(kind, {RowsOf(problem, 0, problem.shape.tokens)}).front();
}

TeacherKind HeadUnderTest::AsTeacher(const Problem& problem, HeadUnderTest& student) {
  const absl::Status prepared = student.backend().PrepareTeacher(*backend_);
  EXPECT_TRUE(prepared.ok()) << prepared;
  return {.backend = backend_.get(),
          .hidden_size = config_.hidden_size,
          .weight_type = config_.weight_type,
          .hidden_type = problem.teacher->type,
          .distillation = problem.teacher->distillation};
}

std::unique_ptr<engine::Gradient> HeadUnderTest::CreateGradient() {
  absl::StatusOr<std::unique_ptr<engine::Gradient>> gradient = device_->CreateGradient(config_);
  EXPECT_TRUE(gradient.ok()) << gradient.status();
  return *std::move(gradient);
}

std::vector<float> HeadUnderTest::Gradient(int64_t first_row, int64_t rows, const engine::Gradient* of) {
  const int64_t count = rows * config_.hidden_size;
  GuardedBytes values(count * 4, 64, 4);
  const absl::Status read = backend_->ReadGradient(of, first_row, rows, values.As<float>());
  EXPECT_TRUE(read.ok()) << read;
  EXPECT_TRUE(values.Intact()) << "written beside the rows of the gradient";
  return {values.As<float>(), values.As<float>() + count};
}

std::vector<float> HeadUnderTest::BiasGradient(int64_t first_row, int64_t rows) {
  if (!config_.bias) return {};
  GuardedBytes values(rows * 4, 64, 4);
  const absl::Status read = backend_->ReadBiasGradient(nullptr, first_row, rows, values.As<float>());
  EXPECT_TRUE(read.ok()) << read;
  EXPECT_TRUE(values.Intact()) << "written beside the rows of the bias's gradient";
  return {values.As<float>(), values.As<float>() + rows};
}

GradientStats HeadUnderTest::Stats(const engine::Gradient* of, double scale) {
  const absl::StatusOr<GradientTallies> tallies = backend_->Summarize(of, scale);
  EXPECT_TRUE(tallies.ok()) << tallies.status();
  return StatsOf(tallies.value_or(GradientTallies{}));
}

std::vector<float> HeadUnderTest::Bias(int64_t first_row, int64_t rows) {
  GuardedBytes values(rows * 4, 64, 4);
  const absl::Status read = backend_->ReadBias(first_row, rows, values.As<float>());
  EXPECT_TRUE(read.ok()) << read;
  EXPECT_TRUE(values.Intact()) << "written beside the rows of the bias";
  return {values.As<float>(), values.As<float>() + rows};
}

std::vector<unsigned char> HeadUnderTest::Weights(DataType type, int64_t first_row, int64_t rows) {
  GuardedBytes values(rows * config_.hidden_size * SizeOf(type), 64, SizeOf(type));
  const absl::Status read = backend_->ReadWeightRows(first_row, rows, type, values.data());
  EXPECT_TRUE(read.ok()) << read;
  EXPECT_TRUE(values.Intact()) << "written beside the rows of the weights";
  const auto* bytes = values.As<unsigned char>();
  return {bytes, bytes + values.size()};
}

void OnDevice::CreateDevice(const DeviceUnderTest& which, int64_t workspace_bytes) {
  absl::StatusOr<std::unique_ptr<Device>> device = which.create(workspace_bytes);
  if (device.status().code() == absl::StatusCode::kFailedPrecondition) GTEST_SKIP() << device.status();
  ASSERT_TRUE(device.ok()) << device.status();
  device_ = *std::move(device);
}

bool OnDevice::HasHeadsOf(DataType type) const {
  return !absl::IsFailedPrecondition(device_->PlanMemory({"h", kernels::kMostRanks, 1, type}).status());
}

void OnDevice::CreateDeviceFor(const DeviceUnderTest& which, DataType type) {
  CreateDevice(which);
  if (device_ == nullptr) return;
  if (!HasHeadsOf(type)) GTEST_SKIP() << which.name << " has no heads of " << kernels::Name(type);
  const absl::Status planned = device_->PlanMemory({"h", which.ranks, 1, type}).status();
  ASSERT_TRUE(planned.ok()) << planned;
}

std::vector<DeviceAndType> DevicesAndTypes() {
  std::vector<DeviceAndType> all;
  for (const DeviceUnderTest& device : DevicesUnderTest()) {
    for (const DataType type : device.types) all.push_back({device, type});
  }
  return all;
}

std::vector<DeviceAndType> DevicesAndTypesForOptions() {
  std::vector<DeviceAndType> all = DevicesAndTypes();
  for (const DeviceUnderTest& device : DevicesUnderTest()) {
    for (const DataType type : device.types_of_options) all.push_back({device, type});
  }
  return all;
}

kernels::testing::Reference HeadTest::Expected(const Problem& problem) const {
  switch (oracle()) {
    case Oracle::kReference:
      return kernels::testing::RunReference(problem);
    case Oracle::kCpu:
      return kernels::testing::CpuResults(problem);
    case Oracle::kCpuInFloat32:
      return kernels::testing::CpuResultsInFloat32(problem);
  }
  return {};
}

double HeadTest::GradientTolerance() const {
  switch (oracle()) {
    case Oracle::kReference:
      return GradientError();
    case Oracle::kCpu:
      return GradientError() + CpuGradientError(type());
    case Oracle::kCpuInFloat32:
      return GradientError() + kernels::testing::kFloat32Error;
  }
  return 0;
}

std::ostream& operator<<(std::ostream& out, const DeviceAndType& parameter) {
  return out << NameOf(parameter);
}

std::string NameOf(const DeviceAndType& parameter) {
  return parameter.device.name + "_" + kernels::Name(parameter.type);
}

}  // namespace lossd::engine::testing
