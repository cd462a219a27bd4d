// One head on the CPU: weights, gradient and optimizer's state in host memory, kernels/cpu for the
// arithmetic.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_CPU_CPU_HEAD_H_
#define LOSSD_SERVER_ENGINE_DEVICE_CPU_CPU_HEAD_H_

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/linear_cross_entropy.h"
#include "kernels/optimizer.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/device/optimizer_state.h"
#include "server/engine/memory/host_buffer.h"

namespace lossd::engine {

struct CpuGradient : Gradient {
  HostBuffer dw;  // fp32 [V, H]
  HostBuffer db;  // fp32 [V]; empty without a bias
  bool empty = true;

  static absl::StatusOr<CpuGradient> Create(const HeadConfig& config);
};

class CpuBackend : public HeadBackend {
 public:
  // `workspace` is of all heads of the device, and outlives them.
  CpuBackend(HeadConfig config, HostBuffer* workspace);

  // Takes the memory; before anything else. Weights that are written come with their own.
  absl::Status Allocate();

  absl::Status PublishWeights(WeightBuffers staged) override;
  absl::Status ReadWeightRows(int64_t first_row, int64_t rows, kernels::DataType type, void* out) override;
  absl::Status ReadBias(int64_t first_row, int64_t rows, float* out) override;
  absl::Status Logits(const LogitRows& rows) override;
  absl::Status PrepareTeacher(const HeadBackend& backend) override;
  // Chunks are not gathered: the products gain little by it, and with one client the order of dW's sums stays
  // that of its sequences.
  int64_t RowsPerBatch(const BatchKey& /*kind*/) const override { return 1; }
  void StartBatch(const BatchKey& kind, std::span<const ChunkRows> chunks, BatchCallbacks callbacks) override;
  absl::Status ReadGradient(const Gradient* of, int64_t first_row, int64_t rows, float* out) override;
  absl::Status ReadBiasGradient(const Gradient* of, int64_t first_row, int64_t rows, float* out) override;
  void Reset(Gradient* gradient) override { Find(gradient).empty = true; }

  absl::Status Fold(Gradient* from, Gradient* to) override;
  absl::StatusOr<GradientStats> Summarize(const Gradient* gradient, double scale) override;
  absl::StatusOr<GradientStats> ApplyStep(const Gradient* gradient, const StepArguments& arguments) override;
  std::vector<StateTensor> StateTensors() const override { return StateTensorsOf(config_); }
  absl::Status ReadState(const std::string& tensor, int64_t first_row, int64_t rows, void* out) override;
  absl::Status WriteState(const std::string& tensor, int64_t first_row, int64_t rows,
                          const void* in) override;
  absl::Status RestoreState() override;
  absl::Status WriteGradient(Gradient* gradient, int64_t first_row, int64_t rows, const float* dw,
                             const float* bias) override;

  MemoryPlan MemoryReport() const override;

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
  static const float* Floats(const HostBuffer& buffer) {
    return reinterpret_cast<const float*>(buffer.data());
  }
  static float* Floats(HostBuffer& buffer) { return reinterpret_cast<float*>(buffer.data()); }

  kernels::Status Process(const BatchKey& kind, const ChunkRows& rows, size_t number,
                          const BatchCallbacks& callbacks, BatchReport* report);
  kernels::Teacher TeacherOf(const TeacherKind& kind, const ChunkRows& rows);
  kernels::LinearCrossEntropyParams ToParams(const BatchKey& kind, const ChunkRows& rows);
  float* UnusedLosses(int64_t tokens);

  void NarrowMaster();
  // Where weights are that nobody has written yet, there is no memory.
  absl::Status TakeWeights();
  HostBuffer& BufferOf(const StateEntry& entry);
  kernels::OptimizerTensor MatrixOf(const CpuGradient& gradient);
  kernels::OptimizerTensor BiasOf(const CpuGradient& gradient);

  const HeadConfig config_;
  HostBuffer* const workspace_;
  HostBuffer weights_;
  HostBuffer master_;  // fp32 [V, H]; empty without one
  HostBuffer bias_;
  std::array<HostBuffer, 2> moments_;  // fp32 [V, H], those that the optimizer has
  std::array<HostBuffer, 2> bias_moments_;
  CpuGradient own_;
  ResultBytes gathered_;  // hidden states of one chunk
  ResultBytes teacher_gathered_;
  std::vector<float> unused_losses_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_CPU_CPU_HEAD_H_
