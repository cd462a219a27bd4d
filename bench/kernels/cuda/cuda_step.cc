#include "bench/kernels/cuda/cuda_step.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <random>
#include <utility>

#include "bench/kernels/cuda/cuda_random.h"
#include "kernels/cuda/sharded_step.h"

namespace lossd::bench {
namespace {

using kernels::DataType;
using kernels::SizeOf;
using kernels::WeightGradient;
using kernels::cuda::CublasLt;
using kernels::cuda::DeviceBuffer;
using kernels::cuda::LinearCrossEntropy;
using kernels::cuda::PaddedHidden;
using kernels::cuda::Path;
using kernels::cuda::Result;

constexpr int64_t kIgnoreIndex = -100;
constexpr double kLogitDeviation = 1.5;
constexpr int64_t kTopK = 8;

Result CreateNan(int64_t bytes, DeviceBuffer* buffer) {
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(bytes, buffer));
  LOSSD_CUDA_TRY(cudaMemset(buffer->data(), 0xFF, static_cast<size_t>(bytes)));
  return {};
}

Result Copy(const void* from, int64_t bytes, DeviceBuffer* to) {
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(bytes, to));
  LOSSD_CUDA_TRY(cudaMemcpy(to->data(), from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice));
  return {};
}

Result Copy(const std::vector<int32_t>& from, DeviceBuffer* to) {
  return Copy(from.data(), static_cast<int64_t>(from.size() * sizeof(int32_t)), to);
}

// Rows of `bytes` bytes into rows that are `stride` bytes apart. False, and an error, if the file is short.
Result ReadRows(const std::string& path, int64_t rows, int64_t bytes, void* to, int64_t stride,
                std::string* error) {
  constexpr int64_t kPiece = int64_t{64} << 20;
  std::ifstream file(path, std::ios::binary);
  const int64_t at_once = std::max<int64_t>(1, kPiece / bytes);
  std::vector<char> piece(static_cast<size_t>(std::min(rows, at_once) * bytes));
  for (int64_t row = 0; row < rows; row += at_once) {
    const int64_t count = std::min(at_once, rows - row);
    if (!file.read(piece.data(), count * bytes)) {
      *error = path + " is not there or too short";
      return {};
    }
    LOSSD_CUDA_TRY(cudaMemcpy2D(static_cast<char*>(to) + row * stride, static_cast<size_t>(stride),
                                piece.data(), static_cast<size_t>(bytes), static_cast<size_t>(bytes),
                                static_cast<size_t>(count), cudaMemcpyHostToDevice));
  }
  return {};
}

}  // namespace

CudaStep::CudaStep(const KernelCase& kernel_case)
    : case_(kernel_case),
      layout_(case_.vocab, 1),
      shard_(layout_.ShardOf(0, case_.segments, nullptr)),
      padded_(PaddedHidden(case_.hidden)),
      shape_{case_.vocab, case_.hidden, case_.dtype} {}

Result CudaStep::Create() {
  cudaDeviceProp properties{};
  LOSSD_CUDA_TRY(cudaSetDevice(case_.cuda_index));
  LOSSD_CUDA_TRY(cudaGetDeviceProperties(&properties, case_.cuda_index));
  hardware_ = properties.name;
  LOSSD_CUDA_PASS_ON(kernels::cuda::BestPath(case_.dtype, &path_));
  if (case_.portable) path_ = Path::kPortable;
  // Hopper's own path needs none of it.
  if (const Result opened = CublasLt::Open(&library_); !opened.ok() && path_ == Path::kPortable) {
    return opened;
  }
  const int64_t element = SizeOf(case_.dtype);
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(case_.vocab * padded_ * element, &weight_));
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(case_.tokens * case_.hidden * element, &x_));
  LOSSD_CUDA_PASS_ON(CreateNan(case_.tokens * case_.hidden * element, &dx_));
  LOSSD_CUDA_PASS_ON(CreateNan(case_.vocab * padded_ * 4, &dw_));
  LOSSD_CUDA_PASS_ON(CreateNan(case_.tokens * 4, &losses_));
  LOSSD_CUDA_PASS_ON(CreateNan(case_.tokens * 4, &log_sum_exps_));
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(shard_.segments() * padded_ * 4, &vocabulary_sum_));
  LOSSD_CUDA_PASS_ON(CreateNan(padded_ * 4, &smoothing_gradient_));
  LOSSD_CUDA_PASS_ON(CreateReturns());
  if (case_.teacher_hidden > 0) LOSSD_CUDA_PASS_ON(CreateTeacher());
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(4, &largest_));
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(4, &redone_));
  LOSSD_CUDA_TRY(cudaMemset(redone_.data(), 0, 4));
  return {};
}

Result CudaStep::CreateReturns() {
  returns_.log_sum_exp = static_cast<float*>(log_sum_exps_.data());
  if (case_.entropy_gradient != 0) {
    LOSSD_CUDA_PASS_ON(CreateNan(case_.tokens * 4, &returns_memory_));
    returns_.entropy = static_cast<float*>(returns_memory_.data());
    const std::vector<float> gradients(static_cast<size_t>(case_.tokens),
                                       static_cast<float>(case_.entropy_gradient));
    return Copy(gradients.data(), case_.tokens * 4, &entropy_gradients_);
  }
  if (!case_.returns) return {};
  const int64_t n = case_.tokens;
  const int64_t k = std::min(kTopK, case_.vocab);
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create((5 * n + 2 * k * n) * 4, &returns_memory_));
  auto* floats = static_cast<float*>(returns_memory_.data());
  auto* integers = reinterpret_cast<int32_t*>(floats + (3 + k) * n);
  returns_.z_loss = floats;
  returns_.log_probability = floats + n;
  returns_.entropy = floats + 2 * n;
  returns_.top_log_probabilities = floats + 3 * n;
  returns_.prediction = integers;
  returns_.target_rank = integers + n;
  returns_.top_tokens = integers + 2 * n;
  returns_.top_k = static_cast<int32_t>(k);
  return {};
}

Result CudaStep::CreateTeacher() {
  const int64_t element = SizeOf(case_.dtype);
  const int64_t hidden = case_.teacher_hidden;
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(case_.vocab * PaddedHidden(hidden) * element, &teacher_weight_));
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(case_.tokens * hidden * element, &teacher_x_));
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(4, &teacher_largest_));
  LOSSD_CUDA_PASS_ON(CreateNan(case_.tokens * 4, &divergences_));
  returns_.divergence = static_cast<float*>(divergences_.data());
  teacher_.head.hidden = hidden;
  teacher_.head.weight_type = case_.dtype;
  teacher_.head.weight = teacher_weight_.data();
  teacher_.head.hidden_type = case_.dtype;
  teacher_.head.hidden_states = teacher_x_.data();
  teacher_.weight_largest = static_cast<const float*>(teacher_largest_.data());
  teacher_.path = path_;
  teacher_.library = library_.get();
  return {};
}

Result CudaStep::FillTeacher() {
  const double deviation = kLogitDeviation / std::sqrt(static_cast<double>(case_.teacher_hidden));
  const int64_t elements = case_.vocab * PaddedHidden(case_.teacher_hidden);
  LOSSD_CUDA_PASS_ON(
      FillNormal(case_.dtype, teacher_weight_.data(), elements, static_cast<float>(deviation), 5));
  LOSSD_CUDA_PASS_ON(
      FillNormal(case_.dtype, teacher_x_.data(), case_.tokens * case_.teacher_hidden, 1.0f, 6));
  return kernels::cuda::LargestMagnitude(case_.dtype, teacher_weight_.data(), elements,
                                         static_cast<float*>(teacher_largest_.data()), nullptr);
}

Result CudaStep::TeacherLogSumExps(std::vector<float>* log_sum_exps) {
  const LinearCrossEntropy::Shape shape{case_.vocab, case_.teacher_hidden, case_.dtype};
  const int64_t rows = LinearCrossEntropy::RowsWithin(shape, path_, workspace_.bytes());
  LinearCrossEntropy step(shape, path_, rows, workspace_.data(), library_.get());
  DeviceBuffer losses;
  DeviceBuffer told;
  LOSSD_CUDA_PASS_ON(CreateNan(case_.tokens * 4, &losses));
  LOSSD_CUDA_PASS_ON(CreateNan(case_.tokens * 4, &told));
  LinearCrossEntropy::Batch batch = Batch();
  batch.teacher = nullptr;
  batch.weight = teacher_.head.weight;
  batch.weight_largest = teacher_.weight_largest;
  batch.hidden_states = teacher_.head.hidden_states;
  batch.options = {};
  batch.losses = static_cast<float*>(losses.data());
  batch.returns = {.log_sum_exp = static_cast<float*>(told.data())};
  LOSSD_CUDA_PASS_ON(step.Run(batch, nullptr, nullptr));
  LOSSD_CUDA_TRY(cudaDeviceSynchronize());
  return ReadWide(told.data(), DataType::kFloat32, 0, case_.tokens, log_sum_exps);
}

Result CudaStep::FillInputs() {
  const double deviation = kLogitDeviation / std::sqrt(static_cast<double>(case_.hidden));
  LOSSD_CUDA_PASS_ON(
      FillNormal(case_.dtype, weight_.data(), case_.vocab * padded_, static_cast<float>(deviation), 1));
  LOSSD_CUDA_PASS_ON(FillNormal(case_.dtype, x_.data(), case_.tokens * case_.hidden, 1.0f, 2));
  if (case_.teacher_hidden > 0) LOSSD_CUDA_PASS_ON(FillTeacher());
  if (case_.lse_spread > 0) LOSSD_CUDA_PASS_ON(SpreadLogSumExps());
  std::mt19937_64 generator(3);
  std::uniform_int_distribution<int64_t> label(0, case_.vocab - 1);
  std::uniform_real_distribution<double> share(0, 1);
  token_labels_.resize(static_cast<size_t>(case_.tokens));
  for (int64_t& y : token_labels_) {
    y = label(generator);
    if (share(generator) < case_.ignored) y = kIgnoreIndex;
  }
  forward_labels_ = token_labels_;
  for (int64_t& y : token_labels_) {
    if (case_.zeros > 0 && share(generator) < case_.zeros) y = kIgnoreIndex;
  }
  // The mean's; but fp16 has no room for it, as trainers know who scale their losses.
  gradient_scale_ = case_.dtype == DataType::kFloat16 ? 1.0f : 1.0f / static_cast<float>(case_.tokens);
  return {};
}

// The label and other tokens, none twice.
void CudaStep::FillLists() {
  const int64_t all = std::max(case_.kept, case_.targets);
  if (all == 0) return;
  int64_t longest = case_.longest;  // of the next row that is valid
  std::mt19937_64 generator(7);
  std::uniform_int_distribution<int64_t> token(0, case_.vocab - 1);
  std::vector<bool> taken(static_cast<size_t>(case_.vocab));
  kept_offsets_ = {0};
  for (const int64_t label : token_labels_) {
    const auto first = static_cast<std::ptrdiff_t>(kept_tokens_.size());
    const bool is_longest = longest > 0 && label != kIgnoreIndex;
    const int64_t size = is_longest ? std::exchange(longest, 0) : all;
    for (int64_t next = label == kIgnoreIndex ? 0 : label; std::ssize(kept_tokens_) - first < size;) {
      if (!taken[static_cast<size_t>(next)]) kept_tokens_.push_back(static_cast<int32_t>(next));
      taken[static_cast<size_t>(next)] = true;
      next = token(generator);
    }
    if (case_.targets > 0) std::sort(kept_tokens_.begin() + first, kept_tokens_.end());
    for (auto at = kept_tokens_.begin() + first; at != kept_tokens_.end(); ++at) {
      taken[static_cast<size_t>(*at)] = false;
    }
    kept_offsets_.push_back(std::ssize(kept_tokens_));
  }
  constexpr float kMass = 0.8f;
  probabilities_.assign(kept_tokens_.size(), kMass / static_cast<float>(all));
}

Result CudaStep::CopyLists() {
  if (case_.targets > 0) {
    LOSSD_CUDA_PASS_ON(Copy(rows_.targets.offsets, &kept_offsets_there_));
    LOSSD_CUDA_PASS_ON(Copy(rows_.targets.tokens, &kept_tokens_there_));
    const auto bytes = static_cast<int64_t>(rows_.targets.probabilities.size() * sizeof(float));
    LOSSD_CUDA_PASS_ON(Copy(rows_.targets.probabilities.data(), bytes, &probabilities_there_));
    return DeviceBuffer::Create(bytes, &target_logits_);
  }
  if (case_.kept == 0) return {};
  LOSSD_CUDA_PASS_ON(Copy(rows_.kept.offsets, &kept_offsets_there_));
  LOSSD_CUDA_PASS_ON(Copy(rows_.kept.tokens, &kept_tokens_there_));
  LOSSD_CUDA_PASS_ON(Copy(rows_.kept.by_token, &by_token_));
  return Copy(rows_.kept.token_starts, &token_starts_);
}

bool CudaStep::Keeps(int64_t row, int64_t v) const {
  if (case_.kept == 0) return true;
  const auto begin = rows_.kept.tokens.begin();
  const auto end = begin + rows_.kept.offsets[static_cast<size_t>(row + 1)];
  return std::find(begin + rows_.kept.offsets[static_cast<size_t>(row)], end, v) != end;
}

std::span<const int32_t> CudaStep::TargetsOf(int64_t row) const {
  const auto first = static_cast<size_t>(rows_.targets.offsets[static_cast<size_t>(row)]);
  const auto end = static_cast<size_t>(rows_.targets.offsets[static_cast<size_t>(row + 1)]);
  return std::span(rows_.targets.tokens).subspan(first, end - first);
}

std::span<const float> CudaStep::ProbabilitiesOf(int64_t row) const {
  const auto first = static_cast<size_t>(rows_.targets.offsets[static_cast<size_t>(row)]);
  return std::span(rows_.targets.probabilities).subspan(first, TargetsOf(row).size());
}

Result CudaStep::ReadInputs(const std::string& folder, std::string* error) {
  const int64_t element = SizeOf(case_.dtype);
  const int64_t row = case_.hidden * element;
  LOSSD_CUDA_TRY(cudaMemset(weight_.data(), 0, static_cast<size_t>(weight_.bytes())));
  LOSSD_CUDA_PASS_ON(
      ReadRows(folder + "/weight.bin", case_.vocab, row, weight_.data(), padded_ * element, error));
  LOSSD_CUDA_PASS_ON(ReadRows(folder + "/hidden_states.bin", case_.tokens, row, x_.data(), row, error));
  token_labels_.resize(static_cast<size_t>(case_.tokens));
  std::ifstream labels(folder + "/labels.bin", std::ios::binary);
  if (!labels.read(reinterpret_cast<char*>(token_labels_.data()), case_.tokens * 8)) {
    *error = folder + "/labels.bin is not there or too short";
  }
  // The step leaves ignored rows alone.
  int64_t valid = 0;
  for (int64_t i = 0; i < case_.tokens; ++i) {
    if (token_labels_[static_cast<size_t>(i)] != kIgnoreIndex) {
      ++valid;
      continue;
    }
    LOSSD_CUDA_TRY(cudaMemset(static_cast<char*>(dx_.data()) + i * row, 0, static_cast<size_t>(row)));
    LOSSD_CUDA_TRY(cudaMemset(static_cast<float*>(losses_.data()) + i, 0, sizeof(float)));
  }
  gradient_scale_ = 1.0f / static_cast<float>(std::max<int64_t>(1, valid));
  return {};
}

// All weights get 1 in their first column, so that the first element of a hidden state moves all of its
// logits.
Result CudaStep::SpreadLogSumExps() {
  const int64_t element = SizeOf(case_.dtype);
  const auto size = static_cast<size_t>(element);
  std::vector<float> ones(static_cast<size_t>(case_.vocab), 1.0f);
  std::vector<float> offsets(static_cast<size_t>(case_.tokens));
  std::mt19937_64 generator(4);
  std::uniform_real_distribution<float> offset(static_cast<float>(-case_.lse_spread),
                                               static_cast<float>(case_.lse_spread));
  for (float& value : offsets) value = offset(generator);
  std::vector<char> narrow(std::max(ones.size(), offsets.size()) * size);
  kernels::Convert(DataType::kFloat32, ones.data(), case_.dtype, narrow.data(), case_.vocab);
  LOSSD_CUDA_TRY(cudaMemcpy2D(weight_.data(), static_cast<size_t>(padded_ * element), narrow.data(), size,
                              size, ones.size(), cudaMemcpyHostToDevice));
  kernels::Convert(DataType::kFloat32, offsets.data(), case_.dtype, narrow.data(), case_.tokens);
  LOSSD_CUDA_TRY(cudaMemcpy2D(x_.data(), static_cast<size_t>(case_.hidden * element), narrow.data(), size,
                              size, offsets.size(), cudaMemcpyHostToDevice));
  return {};
}

Result CudaStep::Prepare(std::string* error) {
  LOSSD_CUDA_PASS_ON(kernels::cuda::LargestMagnitude(case_.dtype, weight_.data(), case_.vocab * padded_,
                                                     static_cast<float*>(largest_.data()), nullptr));
  LOSSD_CUDA_PASS_ON(kernels::cuda::SumSegments(shape_, shard_, weight_.data(), nullptr, nullptr,
                                                static_cast<float*>(vocabulary_sum_.data()), nullptr,
                                                nullptr));
  LOSSD_CUDA_TRY(cudaDeviceSynchronize());
  size_t total = 0;
  LOSSD_CUDA_TRY(cudaMemGetInfo(&free_before_, &total));
  const kernels::cuda::TeacherShape teacher_shape = teacher_.shape();
  const bool soft = case_.teacher_hidden > 0;
  const kernels::cuda::TeacherShape* teacher = soft ? &teacher_shape : nullptr;
  const bool fixed = case_.segments == kernels::Segments::kFixed;
  const int64_t bytes = case_.workspace_bytes;
  tile_rows_ =
      std::min(case_.tokens, soft    ? LinearCrossEntropy::RowsWithin(shape_, path_, teacher_shape, bytes)
                             : fixed ? LinearCrossEntropy::RowsWithin(shape_, shard_, bytes)
                                     : LinearCrossEntropy::RowsWithin(shape_, path_, bytes));
  if (tile_rows_ < 1) {
    *error = "not one row fits a workspace of " + std::to_string(case_.workspace_bytes) + " bytes";
    return {};
  }
  const int64_t workspace_bytes =
      soft    ? LinearCrossEntropy::WorkspaceBytes(shape_, path_, teacher_shape, tile_rows_)
      : fixed ? LinearCrossEntropy::WorkspaceBytes(shape_, shard_, tile_rows_)
              : LinearCrossEntropy::WorkspaceBytes(shape_, path_, tile_rows_);
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(workspace_bytes, &workspace_));
  const int64_t plain_rows =
      soft || fixed ? LinearCrossEntropy::RowsWithin(shape_, path_, workspace_bytes) : tile_rows_;
  step_ = std::make_unique<LinearCrossEntropy>(shape_, path_, plain_rows, workspace_.data(), library_.get(),
                                               workspace_bytes);
  FillLists();
  kernels::cuda::LabelledRows all{token_labels_.data(), case_.tokens, kIgnoreIndex, gradient_scale_};
  if (case_.kept > 0) all.kept_tokens = {kept_offsets_.data(), kept_tokens_.data()};
  if (case_.targets > 0) {
    all.target_lists = {{kept_offsets_.data(), kept_tokens_.data()}, probabilities_.data()};
  }
  rows_ = fixed ? step_->Arrange({&all, 1}, shard_) : step_->Arrange({&all, 1}, teacher);
  tile_rows_ = fixed ? step_->RowsPerTile(rows_.rows, shard_) : step_->RowsPerTile(rows_.rows, teacher);
  LOSSD_CUDA_PASS_ON(Copy(rows_.batch_rows, &batch_rows_));
  LOSSD_CUDA_PASS_ON(Copy(rows_.labels, &labels_));
  LOSSD_CUDA_PASS_ON(Copy(rows_.by_label, &by_label_));
  LOSSD_CUDA_PASS_ON(CopyLists());
  LOSSD_CUDA_PASS_ON(Copy(rows_.gradient_scales.data(), rows_.rows * 4, &scales_));
  return case_.zeros > 0 || case_.held ? PrepareForward() : Result();
}

Result CudaStep::PrepareForward() {
  const kernels::cuda::LabelledRows all{forward_labels_.data(), case_.tokens, kIgnoreIndex, gradient_scale_};
  forward_rows_ = step_->Arrange({&all, 1});
  const kernels::cuda::BatchRows& rows = forward_rows_;
  LOSSD_CUDA_PASS_ON(Copy(rows.batch_rows, &forward_batch_rows_));
  LOSSD_CUDA_PASS_ON(Copy(rows.labels, &forward_labels_memory_));
  LOSSD_CUDA_PASS_ON(Copy(rows.by_label, &forward_by_label_));
  LOSSD_CUDA_PASS_ON(Copy(rows.gradient_scales.data(), rows.rows * 4, &forward_scales_));
  if (!case_.held) return {};
  std::vector<int32_t> places;
  size_t next = 0;
  for (const int32_t row : rows_.batch_rows) {
    while (rows.batch_rows[next] != row) ++next;
    places.push_back(static_cast<int32_t>(next));
  }
  LOSSD_CUDA_PASS_ON(Copy(places, &held_rows_));
  int64_t bytes = rows.rows * case_.vocab * SizeOf(case_.dtype);
  while (kernels::cuda::HoldSpace::In(shape_, bytes, nullptr).rows < rows.rows) bytes += bytes / 64;
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(bytes, &hold_memory_));
  hold_ = kernels::cuda::HoldSpace::In(shape_, bytes, hold_memory_.data());
  return RunForward();
}

LinearCrossEntropy::Batch CudaStep::Batch() const {
  LinearCrossEntropy::Batch batch;
  batch.shard = &shard_;
  batch.rows = rows_.rows;
  batch.batch_rows = static_cast<const int32_t*>(batch_rows_.data());
  batch.labels = static_cast<const int32_t*>(labels_.data());
  batch.gradient_scales = static_cast<const float*>(scales_.data());
  batch.by_label = static_cast<const int32_t*>(by_label_.data());
  batch.weight = weight_.data();
  batch.weight_largest = static_cast<const float*>(largest_.data());
  batch.hidden_type = case_.dtype;
  batch.hidden_states = x_.data();
  batch.losses = static_cast<float*>(losses_.data());
  batch.options = case_.options;
  batch.classes.vocabulary_sum = static_cast<const float*>(vocabulary_sum_.data());
  batch.returns = returns_;
  if (case_.teacher_hidden > 0) {
    batch.teacher = &teacher_;
    batch.distillation = {.divergence = case_.divergence, .label_weight = 1.0f};
  }
  if (case_.kept > 0) {
    batch.kept = {.offsets = static_cast<const int32_t*>(kept_offsets_there_.data()),
                  .tokens = static_cast<const int32_t*>(kept_tokens_there_.data()),
                  .by_token = static_cast<const int32_t*>(by_token_.data()),
                  .token_starts = static_cast<const int32_t*>(token_starts_.data()),
                  .tiles = rows_.kept.tiles};
  }
  if (case_.targets > 0) {
    batch.targets = {.offsets = static_cast<const int32_t*>(kept_offsets_there_.data()),
                     .tokens = static_cast<const int32_t*>(kept_tokens_there_.data()),
                     .probabilities = static_cast<const float*>(probabilities_there_.data()),
                     .logits = static_cast<float*>(target_logits_.data())};
    batch.distillation = {.label_weight = 1.0f};
  }
  batch.dx_type = case_.dtype;
  batch.dw = dw();
  batch.smoothing_gradient = static_cast<float*>(smoothing_gradient_.data());
  batch.rows_redone = static_cast<int32_t*>(redone_.data());
  return batch;
}

LinearCrossEntropy::Batch CudaStep::GradientBatch(WeightGradient weight_gradient) const {
  LinearCrossEntropy::Batch batch = Batch();
  batch.dx = dx_.data();
  batch.weight_gradient = weight_gradient;
  batch.smoothing_store = weight_gradient;
  if (case_.entropy_gradient != 0) {
    batch.returns.entropy = nullptr;
    batch.entropy_gradients = static_cast<const float*>(entropy_gradients_.data());
  }
  if (case_.held) {
    batch.hold_use = LinearCrossEntropy::HoldUse::kTake;
    batch.hold = &hold_;
  }
  if (case_.held && case_.zeros > 0) batch.held_rows = static_cast<const int32_t*>(held_rows_.data());
  return batch;
}

LinearCrossEntropy::Batch CudaStep::ForwardBatch() const {
  LinearCrossEntropy::Batch batch = Batch();
  if (forward_rows_.rows == 0) return batch;
  batch.rows = forward_rows_.rows;
  batch.batch_rows = static_cast<const int32_t*>(forward_batch_rows_.data());
  batch.labels = static_cast<const int32_t*>(forward_labels_memory_.data());
  batch.gradient_scales = static_cast<const float*>(forward_scales_.data());
  batch.by_label = static_cast<const int32_t*>(forward_by_label_.data());
  if (case_.held) {
    batch.hold_use = LinearCrossEntropy::HoldUse::kKeep;
    batch.hold = &hold_;
  }
  return batch;
}

Result CudaStep::Run(WeightGradient weight_gradient) {
  return step_->Run(GradientBatch(weight_gradient), nullptr, nullptr);
}

Result CudaStep::RunForward() { return step_->Run(ForwardBatch(), nullptr, nullptr); }

Result CudaStep::RunStages(LinearCrossEntropy::Stage between, void* context) {
  return step_->Run(GradientBatch(WeightGradient::kAccumulate), nullptr, nullptr, between, context);
}

Result CudaStep::TakenBytes(int64_t* bytes) const {
  size_t free_now = 0;
  size_t total = 0;
  LOSSD_CUDA_TRY(cudaDeviceSynchronize());
  LOSSD_CUDA_TRY(cudaMemGetInfo(&free_now, &total));
  *bytes = static_cast<int64_t>(free_before_) - static_cast<int64_t>(free_now);
  return {};
}

Result CudaStep::RowsRedone(int64_t* rows) const {
  int32_t redone = 0;
  LOSSD_CUDA_TRY(cudaMemcpy(&redone, redone_.data(), 4, cudaMemcpyDeviceToHost));
  *rows = redone;
  return {};
}

Result CudaStep::ReadWide(const void* values, DataType type, int64_t first, int64_t count,
                          std::vector<float>* wide) {
  std::vector<char> narrow(static_cast<size_t>(count * SizeOf(type)));
  LOSSD_CUDA_TRY(cudaMemcpy(narrow.data(), static_cast<const char*>(values) + first * SizeOf(type),
                            narrow.size(), cudaMemcpyDeviceToHost));
  wide->resize(static_cast<size_t>(count));
  kernels::Convert(type, narrow.data(), DataType::kFloat32, wide->data(), count);
  return {};
}

int64_t CudaStep::batch_bytes() const {
  return x_.bytes() + dx_.bytes() + losses_.bytes() + log_sum_exps_.bytes();
}

StepShape CudaStep::Shape() const {
  const bool hopper = path_ == Path::kHopper;
  return {.rows = rows_.rows,
          .tile_rows = tile_rows_,
          .vocab = case_.vocab,
          .hidden = case_.hidden,
          .type = case_.dtype,
          .holds = hopper ? StepShape::Holds::kExponentials : StepShape::Holds::kLogits};
}

}  // namespace lossd::bench
