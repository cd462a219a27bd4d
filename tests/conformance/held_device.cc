#include "tests/conformance/held_device.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "kernels/data_type.h"

namespace lossd::engine::testing {
namespace {

// What all heads of a device share.
struct Holding {
  std::shared_ptr<RankChannel> channel;
  std::function<RankPayloads&(int32_t rank)> payloads;
  std::function<int32_t(uint64_t batch)> holder;
  uint64_t batches = 0;
};

Payload CopyOf(const HiddenRows& rows, int64_t bytes) {
  std::string copy(static_cast<size_t>(bytes), '\0');
  if (rows.data != nullptr) {
    std::memcpy(copy.data(), rows.data, copy.size());
  } else {
    Gather(rows.parts, reinterpret_cast<std::byte*>(copy.data()));
  }
  return Payload::Of(std::move(copy));
}

// A batch that a rank holds.
class HeldBatch {
 public:
  HeldBatch(Holding& holding, const BatchKey& kind, int64_t hidden, std::span<const ChunkRows> chunks)
      : wanted_(chunks.begin(), chunks.end()), dx_row_bytes_(hidden * kernels::SizeOf(kind.dx_type)) {
    const TeacherKind& teacher = kind.teacher;
    const int64_t teacher_row =
        teacher.backend == nullptr ? 0 : teacher.hidden_size * kernels::SizeOf(teacher.hidden_type);
    for (const ChunkRows& chunk : chunks) {
      const int64_t bytes = chunk.tokens * hidden * kernels::SizeOf(kind.hidden_type);
      payloads_.push_back(std::make_shared<RankPayload>(
          CopyOf(chunk.hidden_states, bytes), CopyOf(chunk.teacher_hidden, chunk.tokens * teacher_row)));
      const uint64_t number = holding.payloads(kind.holder).Add(payloads_.back());
      holds_.push_back(HoldAtRank(holding.channel, kind.holder, number));
      ChunkRows& row = rows_.emplace_back(chunk);
      row.hidden_states = RowsIn(Payload::At({kind.holder, number}, bytes, holds_.back()));
      row.teacher_hidden = {};
      if (chunk.dx != nullptr) row.dx_place = MemoryPlace::kRank;
      row.dx = nullptr;
    }
  }

  std::span<const ChunkRows> rows() const { return rows_; }
  void BringBack(size_t chunk) const {
    const ResultBytes dx = payloads_[chunk]->dx();
    const ChunkRows& wanted = wanted_[chunk];
    if (wanted.dx == nullptr) return;
    if (dx.size() == wanted.tokens * dx_row_bytes_) {
      std::memcpy(wanted.dx, dx.data(), static_cast<size_t>(dx.size()));
    }
  }

 private:
  const std::vector<ChunkRows> wanted_;
  const int64_t dx_row_bytes_;
  std::vector<std::shared_ptr<RankPayload>> payloads_;
  std::vector<std::shared_ptr<const void>> holds_;
  std::vector<ChunkRows> rows_;
};

class HeldHead : public HeadBackend {
 public:
  HeldHead(std::unique_ptr<HeadBackend> head, int64_t hidden, std::shared_ptr<Holding> holding)
      : head_(std::move(head)), hidden_(hidden), holding_(std::move(holding)) {}

  void StartBatch(const BatchKey& kind, std::span<const ChunkRows> chunks,
                  BatchCallbacks callbacks) override {
    BatchKey own = Own(kind);
    own.holder = holding_->holder(holding_->batches++);
    if (own.holder == 0) return head_->StartBatch(own, chunks, std::move(callbacks));
    const auto batch = std::make_shared<HeldBatch>(*holding_, own, hidden_, chunks);
    callbacks.on_input_gradients = [batch, tell = std::move(callbacks.on_input_gradients)](size_t chunk) {
      batch->BringBack(chunk);
      tell(chunk);
    };
    callbacks.on_done = [batch, done = std::move(callbacks.on_done)](absl::StatusOr<BatchReport> report) {
      done(std::move(report));
    };
    head_->StartBatch(own, batch->rows(), std::move(callbacks));
  }
  int64_t RowsPerBatch(const BatchKey& kind) const override { return head_->RowsPerBatch(Own(kind)); }
  absl::Status PrepareTeacher(const HeadBackend& teacher) override {
    return head_->PrepareTeacher(*static_cast<const HeldHead&>(teacher).head_);
  }

  absl::Status PublishWeights(WeightBuffers staged) override {
    return head_->PublishWeights(std::move(staged));
  }
  absl::Status ReadWeightRows(int64_t first_row, int64_t rows, kernels::DataType type, void* out) override {
    return head_->ReadWeightRows(first_row, rows, type, out);
  }
  absl::Status ReadBias(int64_t first_row, int64_t rows, float* out) override {
    return head_->ReadBias(first_row, rows, out);
  }
  absl::Status BlendWeights(const HeadBackend& source, double decay) override {
    return head_->BlendWeights(*static_cast<const HeldHead&>(source).head_, decay);
  }
  absl::Status CopyOptimizer(const HeadBackend& source) override {
    return head_->CopyOptimizer(*static_cast<const HeldHead&>(source).head_);
  }
  absl::Status Logits(const LogitRows& rows) override { return head_->Logits(rows); }
  int64_t RowsOfLogits() const override { return head_->RowsOfLogits(); }
  absl::Status ReadGradient(const Gradient* gradient, int64_t first_row, int64_t rows, float* out) override {
    return head_->ReadGradient(gradient, first_row, rows, out);
  }
  absl::Status ReadBiasGradient(const Gradient* gradient, int64_t first_row, int64_t rows,
                                float* out) override {
    return head_->ReadBiasGradient(gradient, first_row, rows, out);
  }
  void Reset(Gradient* gradient) override { head_->Reset(gradient); }
  absl::Status Fold(Gradient* from, Gradient* to) override { return head_->Fold(from, to); }
  absl::StatusOr<GradientTallies> Summarize(const Gradient* gradient, double scale) override {
    return head_->Summarize(gradient, scale);
  }
  absl::StatusOr<GradientTallies> ApplyStep(const Gradient* gradient,
                                            const StepArguments& arguments) override {
    return head_->ApplyStep(gradient, arguments);
  }
  std::vector<StateTensor> StateTensors() const override { return head_->StateTensors(); }
  absl::Status ReadState(const std::string& tensor, int64_t first_row, int64_t rows, void* out) override {
    return head_->ReadState(tensor, first_row, rows, out);
  }
  absl::Status WriteState(const std::string& tensor, int64_t first_row, int64_t rows,
                          const void* in) override {
    return head_->WriteState(tensor, first_row, rows, in);
  }
  absl::Status RestoreState() override { return head_->RestoreState(); }
  absl::Status WriteGradient(Gradient* gradient, int64_t first_row, int64_t rows, const float* dw,
                             const float* bias) override {
    return head_->WriteGradient(gradient, first_row, rows, dw, bias);
  }
  MemoryPlan MemoryReport() const override { return head_->MemoryReport(); }

 private:
  static BatchKey Own(BatchKey kind) {
    if (kind.teacher.backend != nullptr) {
      kind.teacher.backend = static_cast<const HeldHead*>(kind.teacher.backend)->head_.get();
    }
    return kind;
  }

  const std::unique_ptr<HeadBackend> head_;
  const int64_t hidden_;
  const std::shared_ptr<Holding> holding_;
};

class HeldDevice : public Device {
 public:
  HeldDevice(std::unique_ptr<Device> sharded, std::shared_ptr<Holding> holding)
      : holding_(std::move(holding)), sharded_(std::move(sharded)) {}

  std::string name() const override { return sharded_->name(); }
  bool IsHost() const override { return sharded_->IsHost(); }
  std::string description() const override { return sharded_->description(); }
  int64_t AvailableMemory() const override { return sharded_->AvailableMemory(); }
  absl::StatusOr<MemoryPlan> PlanMemory(const HeadConfig& config) const override {
    return sharded_->PlanMemory(config);
  }
  absl::StatusOr<std::unique_ptr<HeadBackend>> CreateHead(const HeadConfig& config) override {
    absl::StatusOr<std::unique_ptr<HeadBackend>> head = sharded_->CreateHead(config);
    if (!head.ok()) return head.status();
    return std::make_unique<HeldHead>(*std::move(head), config.hidden_size, holding_);
  }
  MemoryPlan PlanGradient(const HeadConfig& config) const override { return sharded_->PlanGradient(config); }
  absl::StatusOr<std::unique_ptr<Gradient>> CreateGradient(const HeadConfig& config) override {
    return sharded_->CreateGradient(config);
  }
  bool HasFixedSegments(const HeadConfig& config) const override {
    return sharded_->HasFixedSegments(config);
  }
  bool TakesTokenLists() const override { return sharded_->TakesTokenLists(); }
  MemoryPlan SharedMemory() const override { return sharded_->SharedMemory(); }
  int64_t MostBatches() const override { return sharded_->MostBatches(); }
  int64_t BatchesUnderWay() const override { return sharded_->BatchesUnderWay(); }
  void Poll() override { sharded_->Poll(); }

 private:
  const std::shared_ptr<Holding> holding_;
  const std::unique_ptr<Device> sharded_;
};

}  // namespace

std::unique_ptr<Device> CreateHeldDevice(std::unique_ptr<Device> sharded,
                                         std::shared_ptr<RankChannel> channel,
                                         std::function<RankPayloads&(int32_t rank)> payloads,
                                         std::function<int32_t(uint64_t batch)> holder) {
  auto holding =
      std::make_shared<Holding>(Holding{std::move(channel), std::move(payloads), std::move(holder)});
  return std::make_unique<HeldDevice>(std::move(sharded), std::move(holding));
}

}  // namespace lossd::engine::testing
