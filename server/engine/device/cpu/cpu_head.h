// One head on the CPU: weights, gradient and optimizer's state in host memory, kernels/cpu for the
// arithmetic.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_CPU_CPU_HEAD_H_
#define LOSSD_SERVER_ENGINE_DEVICE_CPU_CPU_HEAD_H_

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/linear_cross_entropy.h"
#include "kernels/optimizer.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/device/optimizer_state.h"
#include "server/engine/memory/host_buffer.h"

namespace lossd::engine {

// What sizes follow from, of so many rows of the head.
inline HeadConfig WithRows(HeadConfig config, int64_t rows) {
  config.vocab_size = rows;
  return config;
}

struct CpuGradient : Gradient {
  HostBuffer dw;  // fp32 [V, H]
  HostBuffer db;  // fp32 [V]; empty without a bias
  bool empty = true;

  static absl::StatusOr<CpuGradient> Create(const HeadConfig& config);
  // With so many rows.
  static absl::StatusOr<CpuGradient> Create(const HeadConfig& config, int64_t rows);
};

class CpuBackend : public HeadBackend {
 public:
  // `config` is of the rows that `shard` has. `workspace` is of all heads of the device, and outlives them.
  CpuBackend(HeadConfig config, const HeadShard& shard, HostBuffer* workspace);

  // What one row takes of the workspace in batches of any kind, with soft targets of `teacher` if that is not
  // null.
  static int64_t LeastWorkspaceBytes(const HeadConfig& config, const HeadShard& shard,
                                     const kernels::TeacherSize* teacher);

  // Takes the memory; before anything else. Weights that are written come with their own, but not where this
  // is a part: they come row by row, and one rank alone could have no memory for them.
  absl::Status Allocate();

  absl::Status PublishWeights(WeightBuffers staged) override;
  absl::Status ReadWeightRows(int64_t first_row, int64_t rows, kernels::DataType type, void* out) override;
  absl::Status ReadBias(int64_t first_row, int64_t rows, float* out) override;
  absl::Status BlendWeights(const HeadBackend& source, double decay) override;
  absl::Status CopyOptimizer(const HeadBackend& source) override;
  absl::Status Logits(const LogitRows& rows) override;
  bool HasRoomForList(int64_t tokens) const override;
  absl::Status PrepareTeacher(const HeadBackend& backend) override;
  // Chunks are not gathered: the products gain little by it, and with one client the order of dW's sums stays
  // that of its sequences.
  int64_t RowsPerBatch(const BatchKey& /*kind*/) const override { return 1; }
  void StartBatch(const BatchKey& kind, std::span<const ChunkRows> chunks, BatchCallbacks callbacks) override;
  absl::Status ReadGradient(const Gradient* of, int64_t first_row, int64_t rows, float* out) override;
  absl::Status ReadBiasGradient(const Gradient* of, int64_t first_row, int64_t rows, float* out) override;
  void Reset(Gradient* gradient) override { Find(gradient).empty = true; }

  absl::Status Fold(Gradient* from, Gradient* to) override;
  absl::StatusOr<GradientTallies> Summarize(const Gradient* gradient, double scale) override;
  absl::StatusOr<GradientTallies> ApplyStep(const Gradient* gradient,
                                            const StepArguments& arguments) override;

  absl::Status SumSlices(Gradient* gradient, const ReplicaCommunicators& replicas) override;
  absl::Status AddToSum(Gradient* gradient, int32_t replica, const ReplicaCommunicators& replicas) override;
  absl::StatusOr<GradientTallies> TallySum(double scale, const ReplicaCommunicators& replicas) override;
  absl::Status StepSlices(const StepArguments& arguments) override;
  absl::Status GatherSlices(const ReplicaCommunicators& replicas) override;
  absl::Status ReadSum(int64_t first_row, int64_t rows, float* out) override;
  absl::Status ReadBiasSum(int64_t first_row, int64_t rows, float* out) override;

  std::vector<StateTensor> StateTensors() const override { return StateTensorsOf(config_); }
  absl::Status ReadState(const std::string& tensor, int64_t first_row, int64_t rows, void* out) override;
  absl::Status WriteState(const std::string& tensor, int64_t first_row, int64_t rows,
                          const void* in) override;
  absl::Status RestoreState() override;
  absl::Status WriteGradient(Gradient* gradient, int64_t first_row, int64_t rows, const float* dw,
                             const float* bias) override;

  MemoryPlan MemoryReport() const override;

  // Memory of a head over replicas for the sum of their gradients.
  static int64_t SumBytes(const HeadConfig& config, const HeadShard& shard);

 private:
  bool Accumulates(const ChunkRows& rows) const {
    return rows.accumulate == ChunkRows::Accumulate::kYes &&
           config_.weight_gradients == WeightGradients::kAccumulated;
  }
  CpuGradient& Find(Gradient* gradient) {
    return gradient == nullptr ? own_ : *static_cast<CpuGradient*>(gradient);
  }
  const CpuGradient& Find(const Gradient* gradient) const {
    return gradient == nullptr ? own_ : *static_cast<const CpuGradient*>(gradient);
  }
  // Zeros where an empty gradient has whatever was there. It stays empty.
  void Settle(CpuGradient& gradient) const;
  static constexpr auto kFloat = static_cast<int64_t>(sizeof(float));
  static const float* Floats(const HostBuffer& buffer) {
    return reinterpret_cast<const float*>(buffer.data());
  }
  static float* Floats(HostBuffer& buffer) { return reinterpret_cast<float*>(buffer.data()); }

  absl::Status Process(const BatchKey& kind, const ChunkRows& rows, size_t number,
                       const BatchCallbacks& callbacks, BatchReport* report);
  absl::StatusOr<kernels::Teacher> TeacherOf(const BatchKey& kind, const ChunkRows& rows);
  // Without hidden states.
  kernels::LinearCrossEntropyParams ToParams(const BatchKey& kind, const ChunkRows& rows);
  // Hidden states of rank `holder` in one piece, aligned, at every rank.
  absl::StatusOr<const void*> Spread(int32_t holder, const HiddenRows& rows, int64_t elements,
                                     kernels::DataType type, ResultBytes* gathered) const;
  absl::Status KernelError(absl::string_view what, kernels::Status status) const;
  // How a batch's sums over the vocabulary are made: null where this is all of it, in one piece.
  const kernels::Shard* ShardFor(kernels::Segments segments, int32_t holder);
  float* UnusedLosses(int64_t tokens);

  void NarrowMaster();
  // The weights' bits of `source`, and its master, or its weights widened.
  void CopyWeights(const CpuBackend& source);
  // Where weights are that nobody has written yet, there is no memory.
  absl::Status TakeWeights();
  HostBuffer& BufferOf(const StateEntry& entry);
  // Weights and state of rows that are stepped here, as a step takes them. Their gradient is null for zeros.
  kernels::OptimizerTensor MatrixOf(const float* dw, const kernels::RowSpan& rows);
  kernels::OptimizerTensor BiasOf(const float* db, const kernels::RowSpan& rows);
  // Calls work(segment, rows) for what there is of these rows in each fixed segment of the vocabulary.
  void ForEachSegment(const kernels::RowSpan& of,
                      absl::FunctionRef<void(size_t segment, kernels::RowSpan rows)> work) const;
  int64_t WeightRowBytes() const { return config_.hidden_size * kernels::SizeOf(config_.weight_type); }
  kernels::RowSpan AllRows() const { return {0, config_.vocab_size}; }

  bool over_replicas() const { return shard_.replicas > 1; }
  absl::Status AllocateSlices();
  // Copies rows of what is kept only of those that are stepped here; INTERNAL if one is not.
  absl::Status ReadStepped(const HostBuffer& from, int64_t row_bytes, const kernels::RowSpan& rows,
                           void* out) const;
  absl::Status WriteStepped(const void* in, int64_t row_bytes, const kernels::RowSpan& rows, HostBuffer* to);
  // Those of `rows` that are stepped here.
  void CopyStepped(const void* in, int64_t row_bytes, const kernels::RowSpan& rows, HostBuffer* to) const;
  void WriteMaster(const void* in, const kernels::RowSpan& rows);
  // What of it is for rows on their way.
  static int64_t ScratchBytes(const HeadConfig& config, const HeadShard& shard);
  absl::Status CheckSummed() const;
  // The tally of a gradient that has these rows alone.
  GradientTallies Tally(const CpuGradient& gradient, const kernels::RowSpan& of, float scale) const;

  const HeadConfig config_;
  const HeadShard shard_;
  kernels::Shard batch_shard_;  // of the batch under way
  HostBuffer* const workspace_;
  HostBuffer weights_;
  HostBuffer master_;  // fp32 [stepped rows, H]; empty without one
  HostBuffer bias_;
  std::array<HostBuffer, 2> moments_;  // fp32 [stepped rows, H], those that the optimizer has
  std::array<HostBuffer, 2> bias_moments_;
  CpuGradient own_;
  // Masters and moments are of these rows, as is the sum of the replicas' gradients.
  const kernels::RowSpan stepped_;
  CpuGradient sum_;
  HostBuffer sum_scratch_;
  ResultBytes gathered_;  // hidden states of one chunk
  ResultBytes teacher_gathered_;
  std::vector<float> unused_losses_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_CPU_CPU_HEAD_H_
