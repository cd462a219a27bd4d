#include "tests/gpu/cuda_runner.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>

#include "kernels/cuda/memory/owners.h"
#include "kernels/cuda/rows/bias.h"

namespace lossd::kernels::testing {
namespace {

using cuda::BatchRows;
using cuda::CublasLt;
using cuda::LinearCrossEntropy;
using cuda::Path;
using cuda::Result;

constexpr int64_t kGuard = 4096;
constexpr unsigned char kPattern = 0xA5;

// Device memory with a guard area at both ends.
class GuardedBuffer {
 public:
  Result Create(const char* name, int64_t bytes, const void* from = nullptr) {
    name_ = name;
    bytes_ = bytes;
    LOSSD_CUDA_PASS_ON(cuda::DeviceBuffer::Create(Rounded() + 2 * kGuard, &buffer_));
    LOSSD_CUDA_TRY(cudaMemset(buffer_.data(), kPattern, static_cast<size_t>(Rounded() + 2 * kGuard)));
    if (from != nullptr) {
      LOSSD_CUDA_TRY(cudaMemcpy(data(), from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice));
    }
    return {};
  }

  char* data() const { return static_cast<char*>(buffer_.data()) + kGuard; }

  template <class T>
  Result Read(std::vector<T>* to) const {
    to->resize(static_cast<size_t>(bytes_) / sizeof(T));
    LOSSD_CUDA_TRY(cudaMemcpy(to->data(), data(), static_cast<size_t>(bytes_), cudaMemcpyDeviceToHost));
    return {};
  }

  // Sets *touched to the name if a guard area is not as it was made.
  Result Check(std::string* touched) const {
    std::vector<unsigned char> bytes(static_cast<size_t>(Rounded() + 2 * kGuard));
    LOSSD_CUDA_TRY(cudaMemcpy(bytes.data(), buffer_.data(), bytes.size(), cudaMemcpyDeviceToHost));
    const auto intact = [](unsigned char byte) { return byte == kPattern; };
    const auto end = bytes.begin() + kGuard + bytes_;
    if (!std::all_of(bytes.begin(), bytes.begin() + kGuard, intact) ||
        !std::all_of(end, bytes.end(), intact)) {
      *touched = name_;
    }
    return {};
  }

 private:
  // The end of what the step may touch is the start of the guard, to the byte; only the allocation is
  // rounded.
  int64_t Rounded() const { return (bytes_ + 255) / 256 * 256; }

  const char* name_ = "";
  int64_t bytes_ = 0;
  cuda::DeviceBuffer buffer_;
};

std::vector<unsigned char> PadRows(const std::vector<unsigned char>& rows, int64_t count, int64_t row_bytes,
                                   int64_t padded_bytes) {
  std::vector<unsigned char> padded(static_cast<size_t>(count * padded_bytes), 0);
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(&padded[static_cast<size_t>(i * padded_bytes)], &rows[static_cast<size_t>(i * row_bytes)],
                static_cast<size_t>(row_bytes));
  }
  return padded;
}

BatchRows SelectRows(const Problem& problem, const CudaOptions& options, const LinearCrossEntropy& step,
                     const cuda::TeacherShape* teacher, bool unweighted = true) {
  const auto array = [](const std::vector<float>& values) {
    return values.empty() ? nullptr : values.data();
  };
  const cuda::LabelledRows all{.labels = problem.labels.data(),
                               .tokens = problem.shape.tokens,
                               .ignore_index = kIgnoreIndex,
                               .gradient_scale = problem.gradient_scale,
                               .share = 1.0f,
                               .z_gradient_scale = problem.z_gradient_scale,
                               .token_weights = array(problem.token_weights),
                               .lse_gradients = array(problem.lse_gradients),
                               .entropy_gradients = array(problem.entropy_gradients),
                               .kept_tokens = problem.Params().kept_tokens,
                               .wants_unweighted = unweighted};
  BatchRows rows = options.shard == nullptr ? step.Arrange({&all, 1}, teacher)
                                            : step.Arrange({&all, 1}, *options.shard, teacher);
  if (options.shares.empty()) return rows;
  for (const int32_t row : rows.batch_rows) rows.shares.push_back(options.shares[static_cast<size_t>(row)]);
  return rows;
}

// One run, and the memory it takes.
class Runner {
 public:
  Runner(const Problem& problem, const CudaOptions& options)
      : problem_(problem),
        options_(options),
        tokens_(problem.shape.tokens),
        vocab_(problem.shape.vocab),
        hidden_(problem.shape.hidden),
        padded_(cuda::PaddedHidden(hidden_)),
        over_ranks_(options.shard != nullptr && options.shard->ranks() > 1) {}

  Result Run(CudaOutcome* outcome) {
    const int64_t tile_rows = options_.tile_rows == 0 ? tokens_ : options_.tile_rows;
    const LinearCrossEntropy::Shape shape{vocab_, hidden_, problem_.weight_type};
    std::optional<cuda::TeacherShape> teacher;
    // With a teacher the workspace is given by its bytes.
    int64_t plain_rows = tile_rows;
    int64_t bytes = LinearCrossEntropy::WorkspaceBytes(shape, options_.path, tile_rows);
    if (problem_.teacher.has_value()) {
      LOSSD_CUDA_PASS_ON(FillTeacher());
      teacher = teacher_.shape();
      plain_rows = 1;
      bytes = std::max(LinearCrossEntropy::WorkspaceBytes(shape, options_.path, *teacher, tile_rows),
                       LinearCrossEntropy::WorkspaceBytes(shape, options_.path, 1));
    }
    const cuda::TeacherShape* teacher_shape = teacher.has_value() ? &*teacher : nullptr;
    if (options_.shard != nullptr) {
      plain_rows = 1;
      bytes = LinearCrossEntropy::WorkspaceBytes(shape, *options_.shard, tile_rows, teacher_shape);
    }
    LOSSD_CUDA_PASS_ON(Make("workspace", bytes));
    if (over_ranks_) LOSSD_CUDA_PASS_ON(ConnectWorkspace(bytes));
    if (options_.path == Path::kPortable || teacher_.path == Path::kPortable) {
      LOSSD_CUDA_PASS_ON(CublasLt::Open(&library_));
    }
    teacher_.library = library_.get();
    LinearCrossEntropy step(shape, options_.path, plain_rows, buffers_.back()->data(), library_.get(), bytes);
    LinearCrossEntropy::Batch batch;
    batch.shard = options_.shard;
    batch.shard_streams = &streams_;
    LOSSD_CUDA_PASS_ON(FillInputs(&batch));
    LOSSD_CUDA_PASS_ON(FillBias(&batch));
    LOSSD_CUDA_PASS_ON(FillSums(&batch.classes, batch));
    const BatchRows rows = SelectRows(problem_, options_, step, teacher_shape, !options_.skips_zeros);
    LOSSD_CUDA_PASS_ON(FillRows(rows, &batch));
    LOSSD_CUDA_PASS_ON(FillOutputs(&batch));
    LOSSD_CUDA_PASS_ON(FillReturns(&batch.returns));
    if (options_.held) LOSSD_CUDA_PASS_ON(Hold(step, rows, &batch));
    if (teacher.has_value()) {
      batch.teacher = &teacher_;
      batch.distillation = problem_.teacher->distillation;
      // dW keeps what it has.
      LOSSD_CUDA_PASS_ON(step.LoadTeacherProducts(batch.weight, batch.dw, teacher_, nullptr));
    }
    LOSSD_CUDA_PASS_ON(step.Run(batch, nullptr, nullptr));
    LOSSD_CUDA_TRY(cudaDeviceSynchronize());
    for (const auto& buffer : buffers_) LOSSD_CUDA_PASS_ON(buffer->Check(&outcome->touched));
    LOSSD_CUDA_PASS_ON(ReadReturns(outcome));
    LOSSD_CUDA_PASS_ON(ReadGradients(batch, outcome));
    return over_ranks_ && options_.shared ? LeaveWorkspaces() : Result();
  }

 private:
  Result ConnectWorkspace(int64_t bytes) {
    LOSSD_CUDA_PASS_ON(cuda::ShardStreams::Create(&streams_));
    if (!options_.shared) return {};
    return streams_.Share(options_.shard->communicator, buffers_.back()->data(), bytes);
  }
  // Before they are freed.
  Result LeaveWorkspaces() {
    streams_ = {};
    return {options_.shard->communicator->Barrier(nullptr).ok() ? cudaSuccess : cudaErrorExternalDevice,
            "waiting for other ranks"};
  }

  // Phase one of all rows, and where `rows` are among them.
  Result Hold(LinearCrossEntropy& step, const BatchRows& rows, LinearCrossEntropy::Batch* batch) {
    constexpr int64_t kFirst = 3;
    const cuda::HeadShape shape{vocab_, hidden_, problem_.weight_type};
    const BatchRows all = SelectRows(problem_, options_, step, nullptr);
    const int64_t bytes = 8 * (tokens_ + kFirst + 1) * (vocab_ + 64) + 65536;
    LOSSD_CUDA_PASS_ON(Make("hold", bytes));
    space_ = cuda::HoldSpace::In(shape, bytes, buffers_.back()->data());
    LinearCrossEntropy::Batch first = *batch;
    LOSSD_CUDA_PASS_ON(FillRows(all, &first));
    first.dx = nullptr;
    first.weight_gradient = WeightGradient::kNone;
    first.returns = {};
    if (!problem_.entropy_gradients.empty()) {
      LOSSD_CUDA_PASS_ON(MakeFilled("held entropies", tokens_, 0.0f, &first.returns.entropy));
    }
    first.hold_use = LinearCrossEntropy::HoldUse::kKeep;
    first.hold = &space_;
    first.first_held = kFirst;
    LOSSD_CUDA_PASS_ON(step.Run(first, nullptr, nullptr));
    LOSSD_CUDA_TRY(cudaMemset(first.rows_redone, 0, sizeof(int32_t)));
    std::vector<int32_t> places;
    size_t next = 0;
    for (const int32_t row : rows.batch_rows) {
      while (all.batch_rows[next] != row) ++next;
      places.push_back(static_cast<int32_t>(kFirst + static_cast<int64_t>(next)));
    }
    batch->hold_use = LinearCrossEntropy::HoldUse::kTake;
    batch->hold = &space_;
    batch->first_held = kFirst;
    if (rows.rows != all.rows) LOSSD_CUDA_PASS_ON(MakeArray("held rows", places, &batch->held_rows));
    if (!options_.changes_hidden_states) return {};
    // The sign of every value of the first row.
    std::vector<unsigned char> changed = problem_.hidden_states;
    const auto element = static_cast<size_t>(SizeOf(problem_.hidden_type));
    for (size_t i = element - 1; i < static_cast<size_t>(hidden_) * element; i += element) changed[i] ^= 0x80;
    return MakeArray("other hidden states", changed, &batch->hidden_states);
  }

  // A buffer of this name, with what `from` holds.
  Result Make(const char* name, int64_t bytes, const void* from = nullptr) {
    buffers_.push_back(std::make_unique<GuardedBuffer>());
    return buffers_.back()->Create(name, bytes, from);
  }
  template <class Pointer, class T>
  Result MakeArray(const char* name, const std::vector<T>& values, Pointer* pointer) {
    LOSSD_CUDA_PASS_ON(Make(name, static_cast<int64_t>(values.size() * sizeof(T)),
                            values.empty() ? nullptr : values.data()));
    *pointer = reinterpret_cast<Pointer>(buffers_.back()->data());
    return {};
  }
  template <class T, class Pointer>
  Result MakeFilled(const char* name, int64_t count, T value, Pointer* pointer) {
    return MakeArray(name, std::vector<T>(static_cast<size_t>(count), value), pointer);
  }

  Result FillInputs(LinearCrossEntropy::Batch* batch) {
    const int64_t element = SizeOf(problem_.weight_type);
    LOSSD_CUDA_PASS_ON(MakeArray(
        "weight", PadRows(problem_.weight, vocab_, hidden_ * element, padded_ * element), &batch->weight));
    LOSSD_CUDA_PASS_ON(MakeArray("hidden_states", problem_.hidden_states, &batch->hidden_states));
    batch->hidden_type = problem_.hidden_type;
    float* largest = nullptr;
    LOSSD_CUDA_PASS_ON(MakeFilled("largest", 1, 0.0f, &largest));
    LOSSD_CUDA_PASS_ON(
        cuda::LargestMagnitude(problem_.weight_type, batch->weight, vocab_ * padded_, largest, nullptr));
    batch->weight_largest = largest;
    batch->options = problem_.options;
    batch->exponent_bias = options_.exponent_bias;
    if (!problem_.class_weights.empty()) {
      const std::vector<float>& weights = problem_.class_weights;
      LOSSD_CUDA_PASS_ON(MakeArray("class_weights", weights, &batch->classes.weights));
      for (const float weight : weights) batch->classes.sum += static_cast<double>(weight);
      batch->classes.largest = *std::max_element(weights.begin(), weights.end());
    }
    return {};
  }

  int64_t FirstEntry() const { return options_.shard == nullptr ? 0 : options_.shard->first(); }

  // What label smoothing needs of each segment.
  Result FillSums(cuda::ClassWeightTerms* classes, const LinearCrossEntropy::Batch& batch) {
    const ShardLayout layout(vocab_, 1);
    const Shard whole = layout.ShardOf(0, Segments::kOfRanks, nullptr);
    const Shard& shard = options_.shard == nullptr ? whole : *options_.shard;
    const int32_t segments = shard.first_segment(shard.rank + 1) - shard.first_segment(shard.rank);
    float* vocabulary_sums = nullptr;
    LOSSD_CUDA_PASS_ON(MakeFilled("vocabulary_sums", segments * padded_,
                                  std::numeric_limits<float>::quiet_NaN(), &vocabulary_sums));
    double* bias_sums = nullptr;
    LOSSD_CUDA_PASS_ON(
        MakeFilled("bias_sums", segments, std::numeric_limits<double>::quiet_NaN(), &bias_sums));
    classes->vocabulary_sum = vocabulary_sums;
    if (batch.bias != nullptr) classes->bias_sum = bias_sums;
    return cuda::SumSegments({vocab_, hidden_, problem_.weight_type}, shard, batch.weight, batch.bias,
                             classes->weights, vocabulary_sums, bias_sums, nullptr);
  }

  // Ends where the vocabulary does, to the byte: nothing may be read behind it that counts.
  Result FillBias(LinearCrossEntropy::Batch* batch) {
    if (problem_.bias.empty()) return {};
    LOSSD_CUDA_PASS_ON(MakeBias("bias", problem_.bias, &batch->bias, &batch->bias_largest));
    std::vector<float> initial = options_.initial_db;
    initial.resize(static_cast<size_t>(vocab_), std::numeric_limits<float>::quiet_NaN());
    LOSSD_CUDA_PASS_ON(MakeArray("db", initial, &batch->db));
    db_ = buffers_.back().get();
    return {};
  }

  Result MakeBias(const char* name, const std::vector<float>& values, const float** bias,
                  const float** bias_largest) {
    LOSSD_CUDA_PASS_ON(MakeArray(name, values, bias));
    float* largest = nullptr;
    LOSSD_CUDA_PASS_ON(MakeFilled("bias_largest", 1, 0.0f, &largest));
    LOSSD_CUDA_PASS_ON(cuda::LargestShift(*bias, vocab_, largest, nullptr));
    *bias_largest = largest;
    return {};
  }

  Result FillTeacher() {
    const TeacherProblem& own = *problem_.teacher;
    Teacher& head = teacher_.head;
    head = own.Params();
    LOSSD_CUDA_PASS_ON(cuda::BestPath(own.type, &teacher_.path));
    if (options_.path == Path::kPortable) teacher_.path = Path::kPortable;
    teacher_.path = options_.teacher_path.value_or(teacher_.path);
    const int64_t element = SizeOf(own.type);
    const int64_t padded = cuda::PaddedHidden(own.hidden);
    LOSSD_CUDA_PASS_ON(MakeArray("teacher's weight",
                                 PadRows(own.weight, vocab_, own.hidden * element, padded * element),
                                 &head.weight));
    LOSSD_CUDA_PASS_ON(MakeArray("teacher's hidden states", own.hidden_states, &head.hidden_states));
    if (!own.bias.empty()) {
      LOSSD_CUDA_PASS_ON(MakeBias("teacher's bias", own.bias, &head.bias, &teacher_.bias_largest));
    }
    float* largest = nullptr;
    LOSSD_CUDA_PASS_ON(MakeFilled("teacher's largest", 1, 0.0f, &largest));
    teacher_.weight_largest = largest;
    return cuda::LargestMagnitude(own.type, head.weight, vocab_ * padded, largest, nullptr);
  }

  Result FillRows(const BatchRows& rows, LinearCrossEntropy::Batch* batch) {
    batch->rows = rows.rows;
    LOSSD_CUDA_PASS_ON(MakeArray("batch_rows", rows.batch_rows, &batch->batch_rows));
    LOSSD_CUDA_PASS_ON(MakeArray("labels", rows.labels, &batch->labels));
    LOSSD_CUDA_PASS_ON(MakeArray("by_label", rows.by_label, &batch->by_label));
    LOSSD_CUDA_PASS_ON(MakeArray("gradient_scales", rows.gradient_scales, &batch->gradient_scales));
    if (!rows.kept.offsets.empty()) {
      LOSSD_CUDA_PASS_ON(MakeArray("kept offsets", rows.kept.offsets, &batch->kept.offsets));
      LOSSD_CUDA_PASS_ON(MakeArray("kept tokens", rows.kept.tokens, &batch->kept.tokens));
      LOSSD_CUDA_PASS_ON(MakeArray("kept by token", rows.kept.by_token, &batch->kept.by_token));
      LOSSD_CUDA_PASS_ON(MakeArray("kept starts", rows.kept.token_starts, &batch->kept.token_starts));
      batch->kept.tiles = rows.kept.tiles;
    }
    const auto optional = [this](const char* name, const std::vector<float>& values, const float** pointer) {
      return values.empty() ? Result() : MakeArray(name, values, pointer);
    };
    LOSSD_CUDA_PASS_ON(optional("z_gradient_scales", rows.z_gradient_scales, &batch->z_gradient_scales));
    LOSSD_CUDA_PASS_ON(optional("token_weights", rows.token_weights, &batch->token_weights));
    LOSSD_CUDA_PASS_ON(optional("lse_gradients", rows.lse_gradients, &batch->lse_gradients));
    LOSSD_CUDA_PASS_ON(optional("entropy_gradients", rows.entropy_gradients, &batch->entropy_gradients));
    return optional("shares", rows.shares, &batch->shares);
  }

  Result FillOutputs(LinearCrossEntropy::Batch* batch) {
    LOSSD_CUDA_PASS_ON(MakeFilled("losses", tokens_, 0.0f, &batch->losses));
    void* dx = nullptr;
    LOSSD_CUDA_PASS_ON(MakeFilled("dx", tokens_ * hidden_ * SizeOf(options_.dx_type), '\0', &dx));
    if (options_.dx_wanted) batch->dx = dx;
    batch->dx_type = options_.dx_type;
    dx_ = buffers_.back().get();
    batch->weight_gradient = options_.weight_gradient;
    LOSSD_CUDA_PASS_ON(MakeArray("dw", InitialGradient(), &batch->dw));
    dw_ = buffers_.back().get();
    // What is overwritten must not be read.
    batch->smoothing_store = options_.weight_gradient;
    const bool adds = options_.weight_gradient == WeightGradient::kAccumulate;
    LOSSD_CUDA_PASS_ON(MakeFilled("smoothing_gradient", padded_,
                                  adds ? 0.0f : std::numeric_limits<float>::quiet_NaN(),
                                  &batch->smoothing_gradient));
    smoothing_ = buffers_.back().get();
    LOSSD_CUDA_PASS_ON(MakeFilled("rows_redone", 1, int32_t{0}, &batch->rows_redone));
    redone_ = buffers_.back().get();
    return {};
  }

  Result FillReturns(RowReturns* returns) {
    returned_ = buffers_.size();
    LOSSD_CUDA_PASS_ON(MakeFilled("log_sum_exps", tokens_, 0.0f, &returns->log_sum_exp));
    LOSSD_CUDA_PASS_ON(MakeFilled("z_losses", tokens_, 0.0f, &returns->z_loss));
    LOSSD_CUDA_PASS_ON(MakeFilled("log_probabilities", tokens_, 0.0f, &returns->log_probability));
    if (problem_.teacher.has_value()) {
      LOSSD_CUDA_PASS_ON(MakeFilled("divergences", tokens_, 0.0f, &returns->divergence));
    }
    if (!options_.whole_rows) return {};
    LOSSD_CUDA_PASS_ON(MakeFilled("entropies", tokens_, 0.0f, &returns->entropy));
    LOSSD_CUDA_PASS_ON(MakeFilled("predictions", tokens_, int32_t{-1}, &returns->prediction));
    LOSSD_CUDA_PASS_ON(MakeFilled("ranks", tokens_, int32_t{-1}, &returns->target_rank));
    if (!options_.ranks_wanted) returns->target_rank = nullptr;
    returns->top_k = options_.top_k;
    const int64_t top = tokens_ * options_.top_k;
    LOSSD_CUDA_PASS_ON(MakeFilled("top_tokens", top, int32_t{-1}, &returns->top_tokens));
    return MakeFilled("top_log_probabilities", top, 0.0f, &returns->top_log_probabilities);
  }

  Result ReadReturns(CudaOutcome* outcome) const {
    size_t next = returned_;
    for (std::vector<float>* values :
         {&outcome->log_sum_exps, &outcome->z_losses, &outcome->log_probabilities}) {
      LOSSD_CUDA_PASS_ON(buffers_[next++]->Read(values));
    }
    if (problem_.teacher.has_value()) LOSSD_CUDA_PASS_ON(buffers_[next++]->Read(&outcome->divergences));
    if (!options_.whole_rows) return {};
    LOSSD_CUDA_PASS_ON(buffers_[next++]->Read(&outcome->entropies));
    for (std::vector<int32_t>* values : {&outcome->predictions, &outcome->ranks, &outcome->top_tokens}) {
      LOSSD_CUDA_PASS_ON(buffers_[next++]->Read(values));
    }
    return buffers_[next]->Read(&outcome->top_log_probabilities);
  }

  Result ReadGradients(const LinearCrossEntropy::Batch& batch, CudaOutcome* outcome) const {
    std::vector<int32_t> count;
    LOSSD_CUDA_PASS_ON(redone_->Read(&count));
    outcome->rows_redone = count[0];
    outcome->losses.resize(static_cast<size_t>(tokens_));
    LOSSD_CUDA_TRY(cudaMemcpy(outcome->losses.data(), batch.losses, outcome->losses.size() * sizeof(float),
                              cudaMemcpyDeviceToHost));
    std::vector<unsigned char> narrow;
    LOSSD_CUDA_PASS_ON(dx_->Read(&narrow));
    outcome->dx.resize(static_cast<size_t>(tokens_ * hidden_));
    Convert(options_.dx_type, narrow.data(), DataType::kFloat32, outcome->dx.data(), tokens_ * hidden_);
    if (db_ != nullptr) LOSSD_CUDA_PASS_ON(db_->Read(&outcome->db));
    std::vector<float> wide;
    std::vector<float> smoothing;
    LOSSD_CUDA_PASS_ON(dw_->Read(&wide));
    LOSSD_CUDA_PASS_ON(smoothing_->Read(&smoothing));
    const bool smoothed = cuda::SmoothingOf(problem_.options) == cuda::Smoothing::kRankOne &&
                          options_.weight_gradient != WeightGradient::kNone &&
                          !problem_.teacher.has_value() && problem_.entropy_gradients.empty();
    for (int64_t v = 0; v < vocab_; ++v) {
      const float weight = problem_.class_weights.empty()
                               ? 1.0f
                               : problem_.class_weights[static_cast<size_t>(FirstEntry() + v)];
      for (int64_t h = 0; h < hidden_; ++h) {
        const float term = smoothed ? weight * smoothing[static_cast<size_t>(h)] : 0.0f;
        outcome->dw.push_back(wide[static_cast<size_t>(v * padded_ + h)] - term);
      }
    }
    return {};
  }

  std::vector<float> InitialGradient() const {
    std::vector<float> initial(static_cast<size_t>(vocab_ * padded_),
                               std::numeric_limits<float>::quiet_NaN());
    if (options_.initial_dw.empty()) return initial;
    for (int64_t v = 0; v < vocab_; ++v) {
      std::copy_n(&options_.initial_dw[static_cast<size_t>(v * hidden_)], hidden_,
                  &initial[static_cast<size_t>(v * padded_)]);
    }
    return initial;
  }

  const Problem& problem_;
  const CudaOptions& options_;
  const int64_t tokens_;
  const int64_t vocab_;
  const int64_t hidden_;
  const int64_t padded_;
  const bool over_ranks_;
  std::unique_ptr<CublasLt> library_;
  cuda::ShardStreams streams_;
  cuda::TeacherHead teacher_{.head = {}, .path = Path::kHopper};
  cuda::HoldSpace space_;
  std::vector<std::unique_ptr<GuardedBuffer>> buffers_;
  size_t returned_ = 0;  // the first buffer of the returns
  const GuardedBuffer* dx_ = nullptr;
  const GuardedBuffer* dw_ = nullptr;
  const GuardedBuffer* db_ = nullptr;  // with a bias only
  const GuardedBuffer* smoothing_ = nullptr;
  const GuardedBuffer* redone_ = nullptr;
};

}  // namespace

bool CanRun(Path path, DataType weight_type) {
  Path best = Path::kPortable;
  if (!cuda::BestPath(weight_type, &best).ok()) return false;
  return path == Path::kPortable || best == Path::kHopper;
}

CudaOutcome RunCudaStep(const Problem& problem, const CudaOptions& options) {
  CudaOutcome outcome;
  if (const Result result = Runner(problem, options).Run(&outcome); !result.ok()) {
    outcome.error = result.message();
  }
  return outcome;
}

}  // namespace lossd::kernels::testing
