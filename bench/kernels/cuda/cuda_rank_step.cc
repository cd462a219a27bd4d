// A rank on a GPU; NCCL, and copy engines, move what goes between ranks.
#include <algorithm>
#include <array>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench/kernels/cuda/cuda_step.h"
#include "bench/kernels/cuda/cuda_timing.h"
#include "bench/kernels/measure.h"
#include "bench/kernels/ranks/rank_step.h"
#include "kernels/collectives/nccl_communicator.h"
#include "kernels/cuda/memory/shared_rows.h"
#include "kernels/cuda/sharded_step.h"

namespace lossd::bench {
namespace {

using kernels::DataType;
using kernels::Shard;
using kernels::WeightGradient;
using kernels::collectives::Communicator;
using kernels::collectives::Rendezvous;
using kernels::cuda::DeviceBuffer;
using kernels::cuda::Event;
using kernels::cuda::LinearCrossEntropy;
using kernels::cuda::Result;
using kernels::cuda::ShardStreams;
using kernels::cuda::SharedRows;
using kernels::cuda::Stream;

// Thread blocks of NCCL, which run beside products.
constexpr int kCommunicationBlocks = 4;

std::string Problem(const Result& result) { return result.ok() ? "" : result.message(); }

Result FromCollectives(const kernels::collectives::Result& result) {
  if (result.ok()) return {};
  std::fprintf(stderr, "%s\n", result.message().c_str());
  return {cudaErrorExternalDevice, "a collective operation"};
}

Result Upload(const void* from, int64_t bytes, DeviceBuffer* to) {
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(bytes, to));
  LOSSD_CUDA_TRY(cudaMemcpy(to->data(), from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice));
  return {};
}

class CudaRankStep final : public RankStep {
 public:
  CudaRankStep(const KernelCase& kernel_case, const DevicesOptions& options, Communicator& communicator)
      : case_(kernel_case),
        options_(options),
        communicator_(communicator),
        layout_(case_.vocab, options.ranks()),
        shard_(layout_.ShardOf(communicator.rank(), kernel_case.segments, &communicator)),
        whole_(kernel_case),
        shape_{layout_.rows(communicator.rank()), case_.hidden, case_.dtype} {}

  std::string Create() override {
    std::string error;
    const std::string problem = Problem(TryCreate(&error));
    return problem.empty() ? error : problem;
  }
  std::string Connect() override { return Problem(ShareMemory()); }
  void Disconnect() override {
    streams_ = {};
    shared_rows_ = {};
  }
  std::string Compare(RelativeErrors* difference) override { return Problem(TryCompare(difference)); }
  std::string TimeWhole(double* milliseconds) override {
    return Problem(TimeSteps([this] { return RunWholeSteps(); }, 1, milliseconds));
  }
  std::string TimeShard(double* milliseconds) override {
    return Problem(TimeSteps([this] { return RunSteps(nullptr); }, communicator_.size(), milliseconds));
  }
  std::string TimeStages(StageTimes* stages) override { return Problem(TryTimeStages(stages)); }

  int64_t whole_tile_rows() const override { return whole_.tile_rows(); }
  int64_t tile_rows() const override { return tile_rows_; }
  bool uses_copy_engines() const override { return copies_; }
  std::string hardware() const override { return whole_.hardware(); }

 private:
  // Hidden states on their way, or a step's: in as many places as the server has.
  static constexpr int64_t kArriving = 3;
  struct Arriving {
    DeviceBuffer x;
    Event arrived;
    Event computed;
  };

  int64_t padded() const { return whole_.padded_hidden(); }

  Result TryCreate(std::string* error) {
    LOSSD_CUDA_PASS_ON(whole_.Create());
    LOSSD_CUDA_PASS_ON(whole_.FillInputs());
    LOSSD_CUDA_PASS_ON(whole_.Prepare(error));
    return error->empty() ? Prepare(error) : Result();
  }

  Result Prepare(std::string* error) {
    const int64_t rows = LinearCrossEntropy::RowsWithin(shape_, shard_, case_.workspace_bytes);
    if (rows == 0) {
      *error = "not one row fits the workspace";
      return {};
    }
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(case_.workspace_bytes, &workspace_));
    step_ = std::make_unique<LinearCrossEntropy>(shape_, whole_.path(), 1, workspace_.data(), nullptr,
                                                 case_.workspace_bytes);
    const kernels::cuda::LabelledRows all{whole_.token_labels().data(), case_.tokens, -100,
                                          whole_.gradient_scale()};
    const kernels::cuda::BatchRows arranged = step_->Arrange({&all, 1}, shard_);
    tile_rows_ = step_->RowsPerTile(arranged.rows, shard_);
    LOSSD_CUDA_PASS_ON(Upload(arranged.by_label.data(), arranged.rows * 4, &by_label_));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(shape_.vocab * padded() * 4, &dw_));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(case_.tokens * case_.hidden * SizeOf(case_.dtype), &dx_));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(case_.tokens * 4, &losses_));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(case_.tokens * 4, &log_sum_exps_));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(4, &largest_));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(shard_.segments() * padded() * 4, &vocabulary_sum_));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(padded() * 4, &smoothing_gradient_));
    LOSSD_CUDA_PASS_ON(PrepareRows());
    LOSSD_CUDA_PASS_ON(kernels::cuda::LargestMagnitude(case_.dtype, weight(), shape_.vocab * padded(),
                                                       static_cast<float*>(largest_.data()), nullptr));
    LOSSD_CUDA_PASS_ON(kernels::cuda::SumSegments(shape_, shard_, weight(), nullptr, nullptr,
                                                  static_cast<float*>(vocabulary_sum_.data()), nullptr,
                                                  nullptr));
    return ShardStreams::Create(&streams_);
  }

  Result PrepareRows() {
    LOSSD_CUDA_PASS_ON(Stream::Create(&copying_));
    for (Arriving& rows : arriving_) {
      LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(whole_.x_bytes(), &rows.x));
      LOSSD_CUDA_TRY(cudaMemcpy(rows.x.data(), whole_.hidden_states(), static_cast<size_t>(whole_.x_bytes()),
                                cudaMemcpyDeviceToDevice));
      LOSSD_CUDA_PASS_ON(Event::Create(&rows.arrived));
      LOSSD_CUDA_PASS_ON(Event::Create(&rows.computed));
    }
    return {};
  }

  Result ShareMemory() {
    if (!options_.copies) return {};
    LOSSD_CUDA_PASS_ON(streams_.Share(&communicator_, workspace_.data(), workspace_.bytes()));
    LOSSD_CUDA_PASS_ON(shared_rows_.Create(&communicator_));
    for (const Arriving& rows : arriving_) {
      LOSSD_CUDA_PASS_ON(shared_rows_.Add(rows.x.data(), rows.x.bytes(), nullptr));
    }
    copies_ = streams_.Shares(workspace_.data());
    return {};
  }

  const void* weight() const {
    return static_cast<const char*>(whole_.weight()) + shard_.first() * padded() * SizeOf(case_.dtype);
  }

  LinearCrossEntropy::Batch Batch(WeightGradient weight_gradient) const {
    LinearCrossEntropy::Batch batch = whole_.Batch();
    batch.shard = &shard_;
    batch.shard_streams = &streams_;
    batch.by_label = static_cast<const int32_t*>(by_label_.data());
    batch.weight = weight();
    batch.weight_largest = static_cast<const float*>(largest_.data());
    batch.classes.vocabulary_sum = static_cast<const float*>(vocabulary_sum_.data());
    batch.losses = static_cast<float*>(losses_.data());
    batch.returns = {.log_sum_exp = static_cast<float*>(log_sum_exps_.data())};
    batch.dx = dx_.data();
    batch.dw = static_cast<float*>(dw_.data());
    batch.smoothing_gradient = static_cast<float*>(smoothing_gradient_.data());
    batch.weight_gradient = weight_gradient;
    batch.smoothing_store = weight_gradient;
    return batch;
  }

  // Some of two arrays of the device, rows of `columns` elements.
  static Result CompareRows(const void* actual, const void* expected, DataType type, int64_t rows,
                            int64_t columns, double* error) {
    constexpr int64_t kPieces = 64;
    const int64_t pieces = std::min(kPieces, rows);
    ErrorNorm norm;
    std::vector<float> a;
    std::vector<float> b;
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t first = piece * (rows - 1) / pieces * columns;
      LOSSD_CUDA_PASS_ON(CudaStep::ReadWide(actual, type, first, columns, &a));
      LOSSD_CUDA_PASS_ON(CudaStep::ReadWide(expected, type, first, columns, &b));
      for (size_t i = 0; i < a.size(); ++i) norm.Add(static_cast<double>(a[i]), static_cast<double>(b[i]));
    }
    *error = norm.Relative();
    return {};
  }

  Result TryCompare(RelativeErrors* difference) {
    LOSSD_CUDA_PASS_ON(whole_.Run(WeightGradient::kOverwrite));
    for (const DeviceBuffer* buffer : {&dx_, &dw_, &losses_}) {
      LOSSD_CUDA_TRY(cudaMemset(buffer->data(), 0xFF, static_cast<size_t>(buffer->bytes())));
    }
    LOSSD_CUDA_PASS_ON(step_->Run(Batch(WeightGradient::kOverwrite), nullptr, nullptr));
    LOSSD_CUDA_PASS_ON(FromCollectives(communicator_.Wait(nullptr)));
    const int64_t stride = padded();
    *difference = {};
    LOSSD_CUDA_PASS_ON(CompareRows(dw_.data(), whole_.dw() + shard_.first() * stride, DataType::kFloat32,
                                   shape_.vocab, stride, &difference->dw));
    if (!shard_.answers()) return {};
    LOSSD_CUDA_PASS_ON(
        CompareRows(losses_.data(), whole_.losses(), DataType::kFloat32, 1, case_.tokens, &difference->loss));
    return CompareRows(dx_.data(), whole_.dx(), case_.dtype, case_.tokens, case_.hidden, &difference->dx);
  }

  Result RunWholeSteps() {
    for (int64_t i = 0; i < options_.steps; ++i) {
      LOSSD_CUDA_PASS_ON(whole_.Run(WeightGradient::kAccumulate));
    }
    return {};
  }

  // `warm_ups` times as many steps come before those that are timed. A GPU that was idle is fast, until it
  // finds that it takes too much power: then it is slow for some 200 ms. Shards, whose steps are short, take
  // more steps to get over that.
  Result TimeSteps(const std::function<Result()>& steps, int warm_ups, double* milliseconds) const {
    for (int i = 0; i < warm_ups; ++i) LOSSD_CUDA_PASS_ON(steps());
    LOSSD_CUDA_PASS_ON(TimeOnDevice(steps, milliseconds));
    *milliseconds /= static_cast<double>(options_.steps);
    return {};
  }

  // Each step's rows come while the one before is computed. `marks` may be null.
  Result RunSteps(Marks* marks) {
    for (int64_t i = 0; i < options_.steps; ++i) {
      LinearCrossEntropy::Batch batch = Batch(WeightGradient::kAccumulate);
      if (!options_.rows_arrive) {
        LOSSD_CUDA_PASS_ON(RunStep(batch, marks));
        continue;
      }
      const Arriving& rows = arriving_[static_cast<size_t>(arrivals_++ % kArriving)];
      LOSSD_CUDA_PASS_ON(LetArrive(rows));
      if (marks != nullptr) marks->Add("wait for rows");
      batch.hidden_states = rows.x.data();
      LOSSD_CUDA_PASS_ON(RunStep(batch, marks));
      LOSSD_CUDA_TRY(cudaEventRecord(rows.computed.get(), nullptr));
    }
    return {};
  }

  Result RunStep(const LinearCrossEntropy::Batch& batch, Marks* marks) {
    if (marks == nullptr) return step_->Run(batch, nullptr, nullptr);
    return step_->Run(batch, nullptr, nullptr, &Marks::AddTo, marks);
  }

  // When this rank is done with the last but one step, all are with the one before that, whose memory this
  // is: they have told it their statistics since.
  Result LetArrive(const Arriving& rows) {
    const Arriving& last_but_one = arriving_[static_cast<size_t>(arrivals_ % kArriving)];
    LOSSD_CUDA_TRY(cudaStreamWaitEvent(copying_.get(), last_but_one.computed.get(), 0));
    if (copies_) {
      LOSSD_CUDA_PASS_ON(shared_rows_.Share(0, rows.x.data(), whole_.x_bytes(), copying_.get()));
    } else {
      std::vector<int64_t> counts(static_cast<size_t>(communicator_.size()));
      counts.front() = whole_.x_bytes();
      LOSSD_CUDA_PASS_ON(
          FromCollectives(communicator_.AllGatherV(rows.x.data(), counts, rows.x.data(), copying_.get())));
    }
    LOSSD_CUDA_TRY(cudaEventRecord(rows.arrived.get(), copying_.get()));
    LOSSD_CUDA_TRY(cudaStreamWaitEvent(nullptr, rows.arrived.get(), 0));
    return {};
  }

  Result TryTimeStages(StageTimes* stages) {
    for (int i = 0; i < communicator_.size(); ++i) LOSSD_CUDA_PASS_ON(RunSteps(nullptr));
    Marks marks;
    marks.Add("begin");
    LOSSD_CUDA_PASS_ON(RunSteps(&marks));
    LOSSD_CUDA_PASS_ON(marks.Read(stages));
    for (auto& [name, milliseconds] : *stages) milliseconds /= static_cast<double>(options_.steps);
    return {};
  }

  const KernelCase& case_;
  const DevicesOptions& options_;
  Communicator& communicator_;
  const kernels::ShardLayout layout_;
  const Shard shard_;
  CudaStep whole_;
  const LinearCrossEntropy::Shape shape_;
  mutable ShardStreams streams_;
  std::unique_ptr<LinearCrossEntropy> step_;
  int64_t tile_rows_ = 0;
  DeviceBuffer workspace_, by_label_, dw_, dx_, losses_, log_sum_exps_, largest_, vocabulary_sum_,
      smoothing_gradient_;
  std::array<Arriving, kArriving> arriving_;
  int64_t arrivals_ = 0;
  Stream copying_;
  SharedRows shared_rows_;
  bool copies_ = false;
};

}  // namespace

std::string ConnectCudaRank(int cuda_index, int rank, int ranks, Rendezvous& rendezvous,
                            std::unique_ptr<Communicator>* communicator) {
  const kernels::collectives::NcclOptions nccl{
      .rank = rank, .size = ranks, .device = cuda_index, .most_blocks = kCommunicationBlocks};
  const kernels::collectives::Result connected =
      kernels::collectives::ConnectNccl(nccl, rendezvous, communicator);
  return connected.ok() ? "" : connected.message();
}

std::unique_ptr<RankStep> MakeCudaRankStep(const KernelCase& kernel_case, const DevicesOptions& options,
                                           Communicator& communicator) {
  return std::make_unique<CudaRankStep>(kernel_case, options, communicator);
}

}  // namespace lossd::bench
